"""One of the fits of a stack: what it keeps for itself, what follows an error, and whom signals are for."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny_modules import mlp
from training_runs import fit_outside

from mupscale.callbacks.fast_loop import FastLoop
from mupscale.commands.lab.stack_loop import ProcessState, StackLoop
from mupscale.commands.process import Terminated, end_now, on_sigterm


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


def test_random_numbers_the_seed_and_the_streams_are_each_states_own(capsys: pytest.CaptureFixture[str]) -> None:
    expected = []
    for seed in (1, 2):
        seeded(seed)
        expected.append([drawn(), drawn(), str(seed)])
    seeded(0)
    outer, found, states = ProcessState(), [], []
    for seed in (1, 2):
        seeded(seed)
        found.append([drawn()])
        sys.stdout = sys.stderr
        states.append(ProcessState())
        outer.enter()
    for state, answer in zip(states, found, strict=True):
        state.enter()
        print("a line of a fit")
        answer += [drawn(), os.environ["PL_GLOBAL_SEED"]]
        outer.enter()
    assert found == expected
    assert os.environ["PL_GLOBAL_SEED"] == "0"
    after = drawn()
    seeded(0)
    assert after == drawn()
    print("a line of the loop")
    assert capsys.readouterr() == ("a line of the loop\n", "a line of a fit\n" * 2)


class Watching(Callback):
    """Draws a random number, notes how the fit ended, and at a step does what a test wants."""

    def __init__(self, at: int = -1, act: Any = None) -> None:
        self.at, self.act = at, act
        self.drawn: list[float] = []
        self.error: BaseException | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.drawn.append(float(torch.rand(())))
        if trainer.global_step == self.at:
            self.act()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.error = exception


class Broken(Exception):
    """What a callback raises in these tests."""


def broken() -> None:
    raise Broken("at this step")


@contextmanager
def opened(folder: Path, callback: Callback, ended: list[Any], **settings: Any) -> Iterator[Any]:
    """A fit of six steps; in the end, `ended` has the exception that ended it, or None."""
    try:
        with fit_outside(mlp(), folder, FastLoop(), callback, steps=6, **settings) as (trainer, arguments, _):
            yield trainer, arguments
    except BaseException as error:
        ended.append(error)
        raise
    ended.append(None)


def run(folder: Path, *callbacks: Watching, ended: list[Any], **settings: Any) -> None:
    StackLoop([opened(folder, callback, ended, **settings) for callback in callbacks]).run()


def test_their_random_numbers_are_those_of_separate_fits(tmp_path: Path) -> None:
    alone, one, other = Watching(), Watching(), Watching()
    with fit_outside(mlp(), tmp_path, FastLoop(), alone, steps=6) as (trainer, arguments, _):
        trainer.fit(**arguments)
    ended: list[Any] = []
    run(tmp_path, one, other, ended=ended)
    assert ended == [None, None]
    assert len(alone.drawn) == 6
    assert one.drawn == other.drawn == alone.drawn


def test_an_error_of_one_ends_the_others_as_sigterm_does(tmp_path: Path) -> None:
    first, second, third = Watching(), Watching(3, broken), Watching()
    ended: list[Any] = []
    with pytest.raises(Broken, match="at this step"):
        run(tmp_path, first, second, third, ended=ended)
    assert isinstance(second.error, Broken)
    assert isinstance(first.error, SIGTERMException)
    assert isinstance(third.error, SIGTERMException)
    assert [type(error) for error in ended] == [Broken, SIGTERMException, SIGTERMException]
    assert (len(first.drawn), len(second.drawn), len(third.drawn)) == (4, 4, 3)


def test_a_signal_inside_a_fit_ends_all(tmp_path: Path) -> None:
    first, second = Watching(), Watching(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first, second, ended=[])
    assert signal.getsignal(signal.SIGINT) is handler
    assert isinstance(first.error, SIGTERMException)
    assert isinstance(second.error, SIGTERMException)


def test_sigterm_before_the_first_step_ends_all(tmp_path: Path) -> None:
    """While Lightning sets a fit up, it handles signals itself, and passes them on."""

    class Signalled(Watching):
        def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    first, second = Watching(), Signalled()
    with on_sigterm(end_now), pytest.raises(Terminated):
        run(tmp_path, first, second, ended=[], num_sanity_val_steps=1)
    assert isinstance(first.error, SIGTERMException)
    assert isinstance(second.error, Terminated)
