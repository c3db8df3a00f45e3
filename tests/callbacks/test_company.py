"""Jobs that take turns: what is kept apart, answers, errors, and interruptions."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mupscale.callbacks.company import Member, current_member


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    os.environ["PL_GLOBAL_SEED"] = str(seed)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


def alternating(seed: int) -> list[Any]:
    """Draws random numbers, with a pause between them."""
    seeded(seed)
    answer: list[Any] = [drawn()]
    member = current_member()
    assert member is not None
    member.wait("a turn")
    return [*answer, drawn(), os.environ["PL_GLOBAL_SEED"]]


def test_random_numbers_and_the_seed_are_each_members_own() -> None:
    expected = []
    for seed in (1, 2):
        seeded(seed)
        expected.append([drawn(), drawn(), str(seed)])
    seeded(0)
    members = [Member(lambda seed=seed: alternating(seed)) for seed in (1, 2)]
    for _ in range(2):
        for member in members:
            member.turn()
    assert all(member.is_over for member in members)
    assert [member.result for member in members] == expected
    assert os.environ["PL_GLOBAL_SEED"] == "0"
    after = drawn()
    seeded(0)
    assert after == drawn()
    assert current_member() is None


def test_an_answer_an_error_and_the_streams() -> None:
    def job() -> Any:
        member = current_member()
        assert member is not None
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            return member.wait("first"), member.wait("second")
        finally:
            sys.stdout.close()

    stream = sys.stdout
    member = Member(job)
    assert not member.is_over
    member.turn()
    assert (member.request, sys.stdout) == ("first", stream)
    member.turn(answer=7)
    assert (member.request, member.is_over) == ("second", False)
    member.turn(error=KeyError("no"))
    assert member.is_over
    assert isinstance(member.error, KeyError)
    assert sys.stdout is stream


def test_an_interruption_waits_until_the_member_waits() -> None:
    done = []

    def job() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the signal")
        member = current_member()
        assert member is not None
        member.wait("a turn")

    member = Member(job)
    with pytest.raises(KeyboardInterrupt):
        member.turn()
    assert done
    assert member.request == "a turn"
    member.turn()
    assert member.is_over
