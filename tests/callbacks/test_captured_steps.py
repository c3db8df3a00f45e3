"""CapturedSteps, with a stand-in for the graph: which steps are captured, and what is refused."""

import copy
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from loop_cases import CASES, MovedBatches, Plain, Talkative
from observed_fits import Case, Hooked, assert_equal, assert_same_run, capture_on_cpu, fit, spy
from run_ends import differences, observed
from tiers import slow_except
from tiny_modules import SCHEDULES, gpt2, mlp, resnet
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from training_runs import BeforeStep, quiet_trainer

import mupscale
from mupscale.callbacks import run_defaults
from mupscale.callbacks.captured_steps import CapturedSteps, refuse_capture
from mupscale.callbacks.curves import Curves, RateMonitor
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.run_defaults import GrowthProgressBar, default_callbacks
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.cuda_graph import batch_kind, step_kind
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`:UserWarning")


class StandIn:
    """A CapturedStep that captures nothing, and counts the steps that it would have replayed."""

    made: list["StandIn"]

    def __init__(self, gradients: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.gradients, self.optimizer = gradients, optimizer
        self.kind = step_kind(batch, optimizer)
        self.calls = 0
        StandIn.made.append(self)

    def takes(self, batch: Any) -> bool:
        return batch_kind(batch) == self.kind[0]

    def __call__(self, batch: Any) -> Tensor:
        assert step_kind(batch, self.optimizer) == self.kind
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.gradients(batch)
        self.optimizer.step()
        return loss.detach().clone()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """The captured steps of fits with a CapturedSteps, which takes the CPU for a GPU."""
    StandIn.made = []
    capture_on_cpu(monkeypatch, StandIn)
    return StandIn.made


CHANGING = ("epochs", "plateau", "upscale", "a ragged batch")
CAPTURED = [name for name in CASES if CASES[name].capture]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(CAPTURED, *CHANGING, kept=["ema", "a DataLoader"]))
def test_captured_steps_count_as_steps(name: str, captures: list[StandIn], tmp_path: Path) -> None:
    runs = []
    for kind, extra in (("lightning", []), ("captured", [CapturedSteps(cuda_graph=True)])):
        saver = ModelCheckpoint(tmp_path / kind / "every", "{step}-{epoch}", every_n_train_steps=4, save_top_k=-1)
        watching = spy(inside=False)
        run = fit(CASES[name], tmp_path / kind, *extra, watching, saver)
        run.seen = watching.seen
        runs.append(run)
    theirs, ours = runs
    assert_same_run(ours, theirs)
    assert ours.seen == theirs.seen
    steps, swaps = ours.trainer.global_step, 2 if name == "upscale" else 1
    eager = 3 * swaps + (steps // 6 if name == "a ragged batch" else 0)
    assert [step.calls for step in captures] == ([steps - eager] if swaps == 1 else [13 - 3, 12 - 3])


def set_decay(trainer: Trainer, value: float) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["weight_decay"] = value


def freeze(trainer: Trainer) -> None:
    trainer.lightning_module.net.layers[1].requires_grad_(False)


def rewind(trainer: Trainer) -> None:
    trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())


def replace(trainer: Trainer) -> None:
    module = trainer.lightning_module
    module.net = copy.deepcopy(module.net)
    trainer.strategy.setup(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "eager"), [(partial(set_decay, value=0.3), 1), (freeze, 1), (rewind, 1), (replace, 3)]
)
def test_what_a_graph_cannot_follow_makes_a_new_one(
    action: Callable[[Trainer], None], eager: int, captures: list[StandIn], tmp_path: Path
) -> None:
    theirs = fit(Case(), tmp_path / "lightning", BeforeStep(12, action))
    ours = fit(Case(), tmp_path / "captured", BeforeStep(12, action), CapturedSteps(cuda_graph=True))
    assert_same_run(ours, theirs)
    assert [step.calls for step in captures] == [12 - 3, 13 - eager]


def test_nothing_is_held_after_a_fit(captures: list[StandIn], tmp_path: Path) -> None:
    run = fit(Case(), tmp_path, CapturedSteps(cuda_graph=True))
    assert len(captures) == 1
    assert run.trainer.fit_loop.epoch_loop.automatic_optimization._captured is None


def test_self_log_in_a_captured_step_is_an_error(captures: list[StandIn], tmp_path: Path) -> None:
    class LogsItsLoss(MLP):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            self.log("inside", loss)
            return loss

    with pytest.raises(Exception, match=r"self.log"):
        fit(Case(partial(LogsItsLoss, 8, 4, 6, 3)), tmp_path, CapturedSteps(cuda_graph=True))


def trainer_for(module: LightningModule, **settings: Any) -> Trainer:
    trainer = quiet_trainer(**settings)
    trainer.strategy.connect(module)
    return trainer


class HasBackward(Callback):
    """A method of its own that goes by the name of a module's hook."""

    def backward(self) -> None: ...


def test_what_can_be_captured_is_not_refused() -> None:
    settings: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    for module in (mlp(), gpt2(), resnet()):
        refuse_capture(trainer_for(module, callbacks=[spy(inside=False), HasBackward()], **settings))


class StepsItself(MLP):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


REFUSED: dict[str, tuple[str, Callable[[], LightningModule], Callable[[], dict[str, Any]]]] = {
    "another module": ("Plain has a training_step of its own, not the `loss", Plain, dict),
    "several devices": ("the run has several devices", mlp, lambda: {"strategy": "ddp", "devices": 2}),
    "accumulation": ("trainer.accumulate_grad_batches is 2, not 1", mlp, lambda: {"accumulate_grad_batches": 2}),
    "a profiler": ("trainer.profiler needs single steps", mlp, lambda: {"profiler": "simple"}),
    "64-true": (
        "trainer.precision = 64-true converts inputs; use 32-true or bf16-mixed",
        mlp,
        lambda: {"precision": "64-true"},
    ),
    "a transfer hook": ("MovedBatches overrides on_after_batch_transfer", partial(MovedBatches, 8, 4, 6, 3), dict),
    "16-mixed": (
        "trainer.precision is 16-mixed, which scales each loss; use bf16-mixed",
        mlp,
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
    ),
    "anomalies": ("trainer.detect_anomaly needs single steps; set it to false", mlp, lambda: {"detect_anomaly": True}),
    "training_step": ("Talkative has a training_step of its own, not the `loss", partial(Talkative, 8, 4, 6, 3), dict),
    "a hook of the module": (
        "StepsItself has a hook inside the step, optimizer_step",
        partial(StepsItself, 8, 4, 6, 3),
        dict,
    ),
    "a hook of a callback": (
        "LambdaCallback has a hook inside the step, on_before_backward",
        mlp,
        lambda: {"callbacks": [LambdaCallback(on_before_backward=lambda *_: None)]},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(name: str) -> None:
    message, make, settings = REFUSED[name]
    module = make()
    trainer = trainer_for(module, **settings())
    with pytest.raises(ValueError, match=r"loop\.cuda_graph") as refusal:
        refuse_capture(trainer)
    assert message in str(refusal.value)


def test_on_a_cpu_cuda_graph_is_no_mistake(tmp_path: Path) -> None:
    theirs, ours = fit(Case(), tmp_path / "lightning"), fit(Case(), tmp_path / "fast", CapturedSteps(cuda_graph=True))
    assert_same_run(ours, theirs)


# --- blocks of steps


class DecayedLater(LambdaLR):
    """Changes what a graph cannot read from memory, after the twelfth step."""

    def step(self, *arguments: Any) -> None:
        super().step(*arguments)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.3 if self.last_epoch >= 12 else 0.01


def ragged(tensors: tuple[Tensor, ...]) -> ResidentLoader:
    """The last of six batches has 10 rows, the others have 14."""
    return ResidentLoader(tensors, 14, shuffle=True)


BLOCKS: dict[str, tuple[dict[str, Any], Callable[[], list[Callback]], dict[str, Any], int]] = {
    "validations": ({}, list, {"val_check_interval": 4}, 25),
    "a schedule of the decay": ({"lr_scheduler": partial(DecayedLater, lr_lambda=lambda step: 1.0)}, list, {}, 25),
    "a trial": ({}, lambda: [TrialMetric("last_40%")], {}, 25),
    "upscales": ({}, lambda: [UpscaleCallback(9, 16, noise=None), UpscaleCallback(17, 32, noise=None)], {}, 25),
    "epochs": ({}, list, {"max_steps": -1, "max_epochs": 3}, 30),
    "epochs of a schedule": ({"lr_scheduler": SCHEDULES["CosineAnnealingLR"]}, list, {"limit_val_batches": 0}, 25),
    "epochs with a growth": ({}, lambda: [UpscaleCallback(17, 16, noise=None)], {"limit_val_batches": 0}, 25),
    "validations every other epoch": ({}, list, {"check_val_every_n_epoch": 2, "max_steps": -1, "max_epochs": 4}, 40),
    "ragged batches and a schedule": (
        {"lr_scheduler": SCHEDULES["CosineAnnealingLR"]},
        list,
        {"limit_val_batches": 0, "loader": ragged},
        25,
    ),
    "rates of epochs": ({}, lambda: [RateMonitor(logging_interval="epoch")], {"limit_val_batches": 0}, 25),
    "the end of an epoch is the end": ({}, list, {"limit_val_batches": 0, "max_steps": -1, "max_epochs": 3}, 30),
}
"""Arguments of the module, callbacks, settings of the trainer, and how many steps there are."""


def run_by_default(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *callbacks: Callback, ckpt: Path | None = None
) -> tuple[Any, Counter[str]]:
    """A run with the callbacks of the command line, a checkpoint every 7 steps and a log every 3; and which hooks of
    steps it called, how often."""
    arguments, growths, settings, _ = BLOCKS[name]
    settings = {"enable_progress_bar": True} | settings
    loader = settings.pop("loader", None)
    calls: Counter[str] = Counter()
    monkeypatch.setattr(run_defaults.time, "monotonic", lambda: 100.0)  # the bar is drawn by the clock
    with monkeypatch.context() as patch:
        for kind in (Curves, RunCheckpoint, GrowthProgressBar):

            def counted(
                self: Any, *given: Any, original: Any = kind.on_train_batch_end, key: str = kind.__name__
            ) -> None:
                calls[key] += 1
                original(self, *given)

            patch.setattr(kind, "on_train_batch_end", counted)
        saver = RunCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=7, save_top_k=-1)
        mine = [*default_callbacks([]), saver, *growths(), CapturedSteps(cuda_graph=True), *callbacks]
        case = Case(partial(mlp, **arguments), lambda: mine, settings, loader)
        return fit(case, folder, ckpt=ckpt), calls


OFTEN = ("a schedule of the decay", "epochs of a schedule", "epochs with a growth", "ragged batches and a schedule")


@pytest.mark.parametrize("name", slow_except(BLOCKS, "validations", "a trial", "upscales", "epochs", kept=OFTEN))
def test_blocks_of_steps_are_as_single_steps(
    name: str, captures: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = BLOCKS[name][3]
    single, called = run_by_default(name, tmp_path / "run", monkeypatch, Hooked())
    assert called["Curves"] == steps
    expected, replayed = observed(single.folder), [step.calls for step in captures]
    shutil.move(tmp_path / "run", tmp_path / "single")
    captures.clear()
    blocks, called = run_by_default(name, tmp_path / "run", monkeypatch)
    assert list(differences(observed(blocks.folder), expected)) == []
    assert [step.calls for step in captures] == replayed, "as many steps were captured"
    assert called["Curves"] < steps


@pytest.mark.usefixtures("captures")
def test_sigterm_ends_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_at: list[int] = []

    class Ending(Callback):
        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            ended_at.append(trainer.global_step)

    def terminated(self: StandIn, batch: Any, function: Any = StandIn.__call__) -> Tensor:
        loss = function(self, batch)
        if self.calls == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    monkeypatch.setattr(StandIn, "__call__", terminated)
    saver = RunCheckpoint(tmp_path / "checkpoints", "{step}", every_n_train_steps=100)
    settings = {"limit_val_batches": 0, "max_steps": 80}
    loader = partial(ResidentLoader, batch_size=1, shuffle=True)
    with pytest.raises(SIGTERMException):
        fit(Case(mlp, settings=settings, loader=loader), tmp_path, Ending(), saver, CapturedSteps(cuda_graph=True))
    assert ended_at == [20 + 3]
    assert (tmp_path / "checkpoints/resume/step=23.ckpt").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(("interrupted", "resumed"), [(False, True), (True, False)])
def test_checkpoints_are_resumed_with_captured_steps_and_without(
    interrupted: bool, resumed: bool, tmp_path: Path
) -> None:
    growth = partial(UpscaleCallback, 13, 24, noise=mupscale.AdditiveNoise(0.1))
    case = Case(
        partial(mlp, lr_scheduler=SCHEDULES["CosineAnnealingLR"]),
        callbacks=lambda: [growth(), ExactResume()],
        settings={"val_check_interval": 4},
    )
    whole = fit(case, tmp_path / "whole")
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(case, tmp_path / "interrupted", saver, *[CapturedSteps(cuda_graph=True)] * interrupted)
    for step in (8, 10, 13):  # at a validation, at an epoch's end, and at the swap
        extra = [CapturedSteps(cuda_graph=True)] * resumed
        again = fit(case, tmp_path / f"resumed {step}", *extra, ckpt=tmp_path / f"step={step}.ckpt")
        mine, other = (torch.load(run.folder / "end.ckpt", weights_only=True) for run in (again, whole))
        assert_equal(mine, other, str(step))


def test_tf32_is_asked_for(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, expected in ((False, before), (True, "high")):
            fit(Case(settings={"max_steps": 1}), tmp_path / str(tf32), CapturedSteps(tf32=tf32))
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
