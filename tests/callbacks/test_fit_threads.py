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

from mupscale.callbacks.fit_threads import FitThread, current_fit_thread


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
    thread = current_fit_thread()
    assert thread is not None
    thread.wait("a turn")
    return [*answer, drawn(), os.environ["PL_GLOBAL_SEED"]]


def test_random_numbers_and_the_seed_are_each_members_own() -> None:
    expected = []
    for seed in (1, 2):
        seeded(seed)
        expected.append([drawn(), drawn(), str(seed)])
    seeded(0)
    threads = [FitThread(lambda seed=seed: alternating(seed)) for seed in (1, 2)]
    for _ in range(2):
        for thread in threads:
            thread.turn()
    assert all(thread.is_over for thread in threads)
    assert [thread.result for thread in threads] == expected
    assert os.environ["PL_GLOBAL_SEED"] == "0"
    after = drawn()
    seeded(0)
    assert after == drawn()
    assert current_fit_thread() is None


def test_an_answer_an_error_and_the_streams() -> None:
    def job() -> Any:
        thread = current_fit_thread()
        assert thread is not None
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            return thread.wait("first"), thread.wait("second")
        finally:
            sys.stdout.close()

    stream = sys.stdout
    thread = FitThread(job)
    assert not thread.is_over
    thread.turn()
    assert (thread.request, sys.stdout) == ("first", stream)
    thread.turn(answer=7)
    assert (thread.request, thread.is_over) == ("second", False)
    thread.turn(error=KeyError("no"))
    assert thread.is_over
    assert isinstance(thread.error, KeyError)
    assert sys.stdout is stream


def test_an_interruption_waits_until_the_member_waits() -> None:
    done = []

    def job() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.append("after the signal")
        thread = current_fit_thread()
        assert thread is not None
        thread.wait("a turn")

    thread = FitThread(job)
    with pytest.raises(KeyboardInterrupt):
        thread.turn()
    assert done
    assert thread.request == "a turn"
    thread.turn()
    assert thread.is_over
