"""Fits that take their steps together: the losses and states of separate fits, for every kind of model.

And one of the fits of a stack: what it keeps for itself, what follows an error, and whom signals are for.
"""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiers import slow_except
from tiny_modules import gpt2, mlp, resnet
from torch import Tensor
from training_runs import BeforeStep, Frozen, fit_outside, state

from mupscale.callbacks.fast_loop import FastLoop
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.lab import stack_loop
from mupscale.commands.lab.stack_loop import Apart, ProcessState, StackedSteps, StackLoop
from mupscale.commands.process import Terminated, end_now, on_sigterm
from mupscale.methods.noise import AdditiveNoise

BUILDERS: dict[str, tuple[Any, Any]] = {"mlp": (mlp, 24), "resnet": (resnet, 4), "gpt2": (gpt2, 24)}
RATES = (0.003, 0.006, 0.012)


@contextmanager
def opened(build: Any, width: Any, rate: float, folder: Path, **settings: Any) -> Any:
    """A fit with a growth and noise in the middle; `rate` is that of AdamW."""
    module = build(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1))
    steps = settings.setdefault("steps", 20)
    swap = UpscaleCallback(at_step=steps // 2, width=width, noise=AdditiveNoise(0.1))
    callbacks = FastLoop(), swap, *settings.pop("more", ())
    with fit_outside(module, folder, *callbacks, gradient_clip_val=0.3, **settings) as parts:
        yield parts


def fitted(*arguments: Any, **settings: Any) -> Any:
    with opened(*arguments, **settings) as (trainer, named, answer):
        trainer.fit(**named)
    return answer


@contextmanager
def noted(opening: Any, answers: list[Any]) -> Iterator[Any]:
    with opening as (trainer, arguments, answer):
        answers.append(answer)
        yield trainer, arguments


def together(openings: Iterable[Any]) -> list[Any]:
    answers: list[Any] = []
    StackLoop([noted(opening, answers) for opening in openings]).run()
    return answers


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative difference of two states, by the largest entries of their tensors."""
    assert ours.keys() == theirs.keys()
    gaps = [(ours[name].double() - theirs[name].double()).abs().max() for name in theirs]
    sizes = [theirs[name].double().abs().max().clamp(min=1e-30) for name in theirs]
    return max(float(gap / size) for gap, size in zip(gaps, sizes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(BUILDERS, "mlp", kept=["gpt2"]))
def test_they_end_as_separate_fits(name: str, tmp_path: Path) -> None:
    build, width = BUILDERS[name]
    runs = together(opened(build, width, rate, tmp_path) for rate in RATES)
    for rate, run in zip(RATES, runs, strict=True):
        alone = fitted(build, width, rate, tmp_path)
        assert run.steps == alone.steps
        assert float(((run.losses - alone.losses) / alone.losses).abs().max()) < 1e-10
        assert distance(state(run), state(alone)) < (1e-12 if name == "mlp" else 1e-10)


@pytest.mark.parametrize(
    ("first", "second"), slow_except([(None, None), (4, 4), (14, 14), (4, 14)], (4, 4), kept=[(14, 14), (4, 14)])
)
def test_frozen_layers(first: int | None, second: int | None, tmp_path: Path) -> None:
    """They stay frozen in a stack, and train from the step at which a callback says so, before or after the upscale.

    Fits that do not train the same layers are not stacked.
    """
    pairs = list(zip(RATES, (first, second), strict=False))
    openings = [opened(mlp, 24, rate, tmp_path, more=[Frozen(step)]) for rate, step in pairs]
    if first != second:
        with pytest.raises(Apart, match=r"layers\.0\.weight is .* in the first and .* frozen in number 1"):
            together(openings)
        return
    for (rate, step), result in zip(pairs, together(openings), strict=True):
        alone = fitted(mlp, 24, rate, tmp_path, more=[Frozen(step)])
        assert float(((result.losses - alone.losses) / alone.losses).abs().max()) < 1e-10
        assert distance(state(result), state(alone)) < 1e-12


def evaluating() -> BeforeStep:
    """Puts a layer into evaluation mode."""
    return BeforeStep(4, lambda trainer: trainer.lightning_module.net.layers[0].eval())


@pytest.mark.slow
@pytest.mark.parametrize(("more", "steps"), [([], [0, 10]), ([evaluating], [0, 4, 10])])
def test_a_stack_is_made_again_where_its_modes_change(
    more: list[Any], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step has the modes built in. There is one stack before the growth, and one after it."""
    made: list[int] = []
    begin = StackedSteps.__init__

    def counted(self: StackedSteps, fits: Any) -> None:
        made.append(fits[0].step)
        begin(self, fits)

    monkeypatch.setattr(StackedSteps, "__init__", counted)
    together(opened(mlp, 24, rate, tmp_path, more=[make() for make in more]) for rate in RATES)
    assert made == steps


def test_optimizers_that_get_hooks_leave_the_stack(tmp_path: Path) -> None:
    hooking = BeforeStep(4, lambda trainer: trainer.optimizers[0].register_step_post_hook(lambda *_: None))
    with pytest.raises(Apart, match="hooks"):
        together(opened(mlp, 24, rate, tmp_path, more=[hooking]) for rate in RATES)


def test_the_collector_goes_on_afterwards() -> None:
    before = gc.get_threshold()
    with stack_loop.long_lived_objects():
        assert gc.get_threshold()[2] > 1000 * before[2]
    assert gc.get_threshold() == before


def test_on_a_gpu_models_without_losses_for_many_are_trained_apart() -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")))
    first: Any = SimpleNamespace(module=gpt2(), trainer=trainer)
    with pytest.raises(Apart, match=r"torch.vmap of GPT2 is slower on a GPU; to use it anyway, give --stack N"):
        stack_loop.room_in_stack(first, "auto")


# --- one of the fits


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
    for own, answer in zip(states, found, strict=True):
        own.enter()
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
def open_watched(folder: Path, callback: Callback, ended: list[Any], **settings: Any) -> Iterator[Any]:
    """A fit of six steps; in the end, `ended` has the exception that ended it, or None."""
    try:
        with fit_outside(mlp(), folder, FastLoop(), callback, steps=6, **settings) as (trainer, arguments, _):
            yield trainer, arguments
    except BaseException as error:
        ended.append(error)
        raise
    ended.append(None)


def run_watched(folder: Path, *callbacks: Watching, ended: list[Any], **settings: Any) -> None:
    StackLoop([open_watched(folder, callback, ended, **settings) for callback in callbacks]).run()


def test_their_random_numbers_are_those_of_separate_fits(tmp_path: Path) -> None:
    alone, one, other = Watching(), Watching(), Watching()
    with fit_outside(mlp(), tmp_path, FastLoop(), alone, steps=6) as (trainer, arguments, _):
        trainer.fit(**arguments)
    ended: list[Any] = []
    run_watched(tmp_path, one, other, ended=ended)
    assert ended == [None, None]
    assert len(alone.drawn) == 6
    assert one.drawn == other.drawn == alone.drawn


def test_an_error_of_one_ends_the_others_as_sigterm_does(tmp_path: Path) -> None:
    first, second, third = Watching(), Watching(3, broken), Watching()
    ended: list[Any] = []
    with pytest.raises(Broken, match="at this step"):
        run_watched(tmp_path, first, second, third, ended=ended)
    assert isinstance(second.error, Broken)
    assert isinstance(first.error, SIGTERMException)
    assert isinstance(third.error, SIGTERMException)
    assert [type(error) for error in ended] == [Broken, SIGTERMException, SIGTERMException]
    assert (len(first.drawn), len(second.drawn), len(third.drawn)) == (4, 4, 3)


def test_a_signal_inside_a_fit_ends_all(tmp_path: Path) -> None:
    first, second = Watching(), Watching(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_watched(tmp_path, first, second, ended=[])
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
        run_watched(tmp_path, first, second, ended=[], num_sanity_val_steps=1)
    assert isinstance(first.error, SIGTERMException)
    assert isinstance(second.error, Terminated)
