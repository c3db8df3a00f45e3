"""A fit with FastLoop is the fit without: weights, optimizer state, counters, curves, checkpoints, and the hooks in
their order.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from test_kill_and_resume import curves
from test_upscale_callback import ADAMW, SCHEDULES, SGD, gpt2, mlp, resnet, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import default_collate as collated

import mupscale
from mupscale.callbacks import fast_loop
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.fast_loop import FastLoop, LeanEpochLoop, refuse_capture
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.cuda_graph import _count_on_device, step_kind
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",  # Lightning itself
    "ignore:Found `dataloader_iter` argument in the `training_step`:UserWarning",
    "ignore:You're using the WeightAveraging callback with a model that overrides:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)

INSIDE = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}


# --- modules that do what ours do not


class Talkative(MLP):
    """Logs from every hook it can, and hands more than a loss to the end of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["twice"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


class ShortEpochs(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class MovedBatches(MLP):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]


class EpochSchedule(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedules.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        }


class NamedBatches(MLP):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])


class Plain(LightningModule):
    """Nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class TakesIterator(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Endless(IterableDataset):
    """A data set that does not know how long it is."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.tensors, strict=True)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step >= self.step


# --- two runs and what they left behind


def recorder(hook: str) -> Callable[..., None]:
    def record(self: Any, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        loop, metrics = trainer.fit_loop, trainer.callback_metrics
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        counters = (
            trainer.global_step,
            trainer.current_epoch,
            loop.batch_idx,
            loop.total_batch_idx,
            trainer.is_last_batch,
            rates,
        )
        self.seen.append(
            (hook, pl_module._current_fx_name, counters, described(metrics), [described(part) for part in arguments])
        )

    return record


def spy(*, inside: bool = True) -> Any:
    """Writes down every hook that is called: what it was told, what the counters were, and which metrics there were."""
    hooks = {hook for hook in dir(Callback) if hook.startswith("on_")} - (set() if inside else INSIDE)
    watching = type("Spy", (Callback,), {hook: recorder(hook) for hook in hooks})()
    watching.seen = []
    return watching


def described(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return tuple(thing.shape), thing.double().sum().item(), thing.flatten()[:4].tolist()
    if isinstance(thing, dict) and "loops" not in thing:  # that would be a checkpoint, which is compared by itself
        return {key: described(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [described(part) for part in thing]
    return thing if thing is None or isinstance(thing, int | float | str) else type(thing).__name__


@dataclass(frozen=True)
class Case:
    """A fit. `own` says how many of its batches go through Lightning's own loop, where that is not none."""

    module: Callable[[], LightningModule] = mlp
    callbacks: Callable[[], list[Callback]] = list
    settings: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[tuple[Tensor, ...]], Any] | None = None
    own: int = 0
    warns: str = ""
    capture: bool = True  # whether its steps could be captured on a GPU


def resident(tensors: tuple[Tensor, ...]) -> ResidentLoader:
    return ResidentLoader(tensors, 8, shuffle=True, drop_last=True)


def fit(case: Case, folder: Path, *callbacks: Callback, ckpt: Path | None = None) -> Any:
    """What a run leaves behind."""
    seed_everything(1, verbose=False)
    settings = {"precision": "32-true", "max_steps": 25} | case.settings
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=TensorBoardLogger(folder, name="", version=""),
        callbacks=[*callbacks, *case.callbacks()],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=3,
        num_sanity_val_steps=0,
        **settings,
    )
    module = case.module()
    train, val = rows(module, 80, torch.float32), rows(module, 16, torch.float32)
    loader = (case.loader or resident)(train)
    validation = ResidentLoader(val, 8, shuffle=False) if is_overridden("validation_step", module) else None
    trainer.fit(module, loader, validation, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "end.ckpt")
    return SimpleNamespace(trainer=trainer, module=module, folder=folder, loader=loader)


COMPARED = (
    "loops",
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "epoch",
    "global_step",
    "current_model_state",
    "averaging_state",
)


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    """To the bit, at any depth."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, other, f"{where}/{index}")
    else:
        assert ours == theirs, where


def assert_same_run(ours: Any, theirs: Any) -> None:
    names = sorted(path.relative_to(theirs.folder) for path in theirs.folder.rglob("*.ckpt"))
    assert names == sorted(path.relative_to(ours.folder) for path in ours.folder.rglob("*.ckpt"))
    for name in names:
        mine, other = (torch.load(run.folder / name, weights_only=True) for run in (ours, theirs))
        assert_equal({key: mine.get(key) for key in COMPARED}, {key: other.get(key) for key in COMPARED}, str(name))
    drawn, wanted = ({tag: sorted(points) for tag, points in curves(run.folder).items()} for run in (ours, theirs))
    assert drawn == wanted


@pytest.fixture
def own_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each batch that goes through Lightning's own loop."""
    counted: list[int] = []
    original = _TrainingEpochLoop.advance

    def advance(self: Any, fetcher: Any) -> None:
        counted.append(1)
        original(self, fetcher)

    monkeypatch.setattr(_TrainingEpochLoop, "advance", advance)
    return counted


CASES = {
    "steps": Case(),
    "epochs": Case(settings={"max_steps": -1, "max_epochs": 3}),
    "steps and epochs": Case(settings={"max_steps": 25, "max_epochs": 2}),
    "sgd": Case(partial(mlp, optimizer=SGD)),
    "resnet": Case(resnet, settings={"max_steps": 5}),
    "gpt2": Case(gpt2, settings={"max_steps": 8}),
    "bf16-mixed": Case(settings={"precision": "bf16-mixed"}),
    "schedule by step": Case(partial(mlp, lr_scheduler=SCHEDULES["SequentialLR"])),
    "schedule by epoch": Case(partial(EpochSchedule, 8, 4, 6, 3)),
    "plateau": Case(partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"]), settings={"max_steps": 45}),
    "clipping": Case(settings={"gradient_clip_val": 0.05}),
    "clipping by value": Case(settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "validation inside epochs": Case(settings={"val_check_interval": 3}),
    "validation across epochs": Case(settings={"val_check_interval": 7, "check_val_every_n_epoch": None}),
    "limited epochs": Case(settings={"limit_train_batches": 4}),
    "ema": Case(callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    "upscale": Case(
        callbacks=lambda: [UpscaleCallback(13, 24, noise=mupscale.AdditiveNoise(0.1)), LearningRateMonitor("step")]
    ),
    "curves": Case(callbacks=lambda: [Curves()], settings={"val_check_interval": 4}),
    "early stopping": Case(
        callbacks=lambda: [EarlyStopping("val/loss", min_delta=10, patience=1)], settings={"max_steps": 60}
    ),
    "should_stop": Case(callbacks=lambda: [StopAt(13)]),
    "self.log": Case(partial(Talkative, 8, 4, 6, 3), capture=False),
    "a callback made of functions": Case(
        callbacks=lambda: [LambdaCallback(on_train_batch_end=lambda *_: torch.rand(1))]
    ),
    "nothing of ours": Case(Plain, capture=False),
    "a DataLoader": Case(loader=lambda parts: DataLoader(TensorDataset(*parts), 8, shuffle=True)),
    "a ragged batch": Case(loader=lambda parts: ResidentLoader(parts, 14, shuffle=True)),
    "no length": Case(loader=lambda parts: DataLoader(Endless(parts), 8)),
    "named batches": Case(
        partial(NamedBatches, 8, 4, 6, 3),
        loader=lambda parts: DataLoader([{"x": x, "y": y} for x, y in zip(*parts, strict=True)], 8),
        settings={"limit_val_batches": 0},
    ),
    "a batch that is None": Case(
        Plain,
        loader=lambda parts: DataLoader(
            TensorDataset(*parts), 8, collate_fn=lambda rows: collated(rows) if rows[0][1] else None
        ),
        warns="yielded None",
        capture=False,
    ),
    # through Lightning's own loop
    "accumulation": Case(settings={"accumulate_grad_batches": 2}, own=50, capture=False),
    "accumulation from the second epoch": Case(
        callbacks=lambda: [GradientAccumulationScheduler({1: 2})], own=30, capture=False
    ),
    "a profiler": Case(settings={"profiler": "simple"}, own=25, capture=False),
    "64-true": Case(partial(mlp, optimizer=SGD), settings={"precision": "64-true"}, own=25, capture=False),
    "on_train_batch_start": Case(partial(ShortEpochs, 8, 4, 6, 3), settings={"max_steps": 15}, own=18, capture=False),
    "on_after_batch_transfer": Case(partial(MovedBatches, 8, 4, 6, 3), own=25, capture=False),
    "manual optimization": Case(ByHand, own=25, warns="ModelCheckpoint with manual optimization", capture=False),
    "dataloader_iter": Case(TakesIterator, own=25, warns="Here be dragons", capture=False),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_different(name: str, own_batches: list[int], tmp_path: Path) -> None:
    case, runs = CASES[name], []
    for kind, extra in (("lightning", []), ("fast", [FastLoop()])):
        saver = ModelCheckpoint(tmp_path / kind / "every", "{step}-{epoch}", every_n_train_steps=4, save_top_k=-1)
        watching = spy()
        own_batches.clear()
        with pytest.warns(UserWarning, match=case.warns) if case.warns else nullcontext():
            run = fit(case, tmp_path / kind, *extra, watching, saver)
        run.seen, run.own = watching.seen, len(own_batches)
        runs.append(run)
    theirs, ours = runs
    assert len(theirs.seen) > 30
    assert len(list(theirs.folder.rglob("*.ckpt"))) > 1
    assert_same_run(ours, theirs)
    assert ours.seen == theirs.seen
    assert isinstance(ours.trainer.fit_loop.epoch_loop, LeanEpochLoop)
    assert ours.own == case.own


# --- resuming


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_checkpoints_of_either_loop_are_resumed_by_either(interrupted: bool, resumed: bool, tmp_path: Path) -> None:
    growth = partial(UpscaleCallback, 13, 24, noise=mupscale.AdditiveNoise(0.1))
    case = Case(
        partial(mlp, lr_scheduler=SCHEDULES["CosineAnnealingLR"]),
        callbacks=lambda: [growth(), ExactResume()],
        settings={"val_check_interval": 4},
    )
    whole = fit(case, tmp_path / "whole")
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(case, tmp_path / "interrupted", saver, *[FastLoop()] * interrupted)
    for step in (3, 8, 10, 13, 19):  # in an epoch, at a validation, at an epoch's end, at the swap and after it
        again = fit(case, tmp_path / f"resumed {step}", *[FastLoop()] * resumed, ckpt=tmp_path / f"step={step}.ckpt")
        mine, other = (torch.load(run.folder / "end.ckpt", weights_only=True) for run in (again, whole))
        assert_equal({key: mine.get(key) for key in COMPARED}, {key: other.get(key) for key in COMPARED}, str(step))


class AtValidations(ModelCheckpoint):
    """One at the end of every validation, from which a run is resumed in the middle of a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "validated-{step}", save_top_k=-1, save_on_train_epoch_end=False)


def test_a_run_is_resumed_as_lightning_resumes_it(tmp_path: Path) -> None:
    """Without ExactResume that leaves out some of what was to come."""
    case = Case(partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"]), settings={"val_check_interval": 4})
    fit(
        case,
        tmp_path / "whole",
        ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1),
        AtValidations(tmp_path),
    )
    for name in ("step=3", "step=8", "step=10", "validated-step=8", "validated-step=18"):
        runs = []
        for kind, extra in (("lightning", []), ("fast", [FastLoop()])):
            watching = spy()
            runs.append(fit(case, tmp_path / name / kind, *extra, watching, ckpt=tmp_path / f"{name}.ckpt"))
            runs[-1].seen = watching.seen
        assert_same_run(runs[1], runs[0])
        assert runs[1].seen == runs[0].seen


def test_two_fits_of_one_trainer(own_batches: list[int], tmp_path: Path) -> None:
    runs = []
    for name, extra in (("lightning", []), ("fast", [FastLoop()])):
        run = fit(Case(settings={"max_steps": -1, "max_epochs": 2}), tmp_path / name, *extra)
        run.trainer.fit_loop.max_epochs = 4
        own_batches.clear()
        run.trainer.fit(run.module, run.loader, ResidentLoader(rows(run.module, 16, torch.float32), 8, shuffle=False))
        run.trainer.save_checkpoint(run.folder / "end.ckpt")
        runs.append(run)
    assert_same_run(runs[1], runs[0])
    assert runs[1].trainer.global_step == 40
    assert not own_batches


# --- captured steps, with a stand-in for the graph


class StandIn:
    """A CapturedStep that captures nothing, and tells the kinds of steps that were to be captured."""

    made: list["StandIn"]

    def __init__(self, gradients: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.gradients, self.optimizer = gradients, optimizer
        self.kind = step_kind(batch, optimizer)
        self.calls = 0
        StandIn.made.append(self)

    def __call__(self, batch: Any) -> Tensor:
        assert step_kind(batch, self.optimizer) == self.kind
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.gradients(batch)
        self.optimizer.step()
        return loss.detach().clone()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """The captured steps of fits with a FastLoop, which takes the CPU for a GPU."""
    StandIn.made = []
    setup = FastLoop.setup

    def on_gpu(self: FastLoop, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        setup(self, trainer, pl_module, stage)
        refuse_capture(trainer, pl_module)
        trainer.fit_loop.epoch_loop.cuda_graph = self.cuda_graph

    monkeypatch.setattr(fast_loop, "CapturedStep", StandIn)
    monkeypatch.setattr(FastLoop, "setup", on_gpu)
    return StandIn.made


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].capture])
def test_captured_steps_count_as_steps(
    name: str, captures: list[StandIn], own_batches: list[int], tmp_path: Path
) -> None:
    runs = []
    for kind, extra in (("lightning", []), ("captured", [FastLoop(cuda_graph=True)])):
        saver = ModelCheckpoint(tmp_path / kind / "every", "{step}-{epoch}", every_n_train_steps=4, save_top_k=-1)
        watching = spy(inside=False)
        own_batches.clear()
        run = fit(CASES[name], tmp_path / kind, *extra, watching, saver)
        run.seen = watching.seen
        runs.append(run)
    theirs, ours = runs
    assert_same_run(ours, theirs)
    assert ours.seen == theirs.seen
    assert not own_batches
    steps, swaps = ours.trainer.global_step, 2 if name == "upscale" else 1
    eager = 3 * swaps + (steps // 6 if name == "a ragged batch" else 0)
    assert [step.calls for step in captures] == ([steps - eager] if swaps == 1 else [13 - 3, 12 - 3])


class Watch(Callback):
    """Does something at a step; tells how many steps were captured by then."""

    def __init__(self, step: int, action: Callable[[Trainer], None]) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.action(trainer)


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


@pytest.mark.parametrize(
    ("action", "eager"), [(partial(set_decay, value=0.3), 1), (freeze, 1), (rewind, 1), (replace, 3)]
)
def test_what_a_graph_cannot_follow_makes_a_new_one(
    action: Callable[[Trainer], None], eager: int, captures: list[StandIn], tmp_path: Path
) -> None:
    theirs = fit(Case(), tmp_path / "lightning", Watch(12, action))
    ours = fit(Case(), tmp_path / "captured", Watch(12, action), FastLoop(cuda_graph=True))
    assert_same_run(ours, theirs)
    assert [step.calls for step in captures] == [12 - 3, 13 - eager]


def test_a_constant_that_changes_at_every_step_is_never_captured(captures: list[StandIn], tmp_path: Path) -> None:
    class Decay(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            set_decay(trainer, 0.1 + 0.01 * trainer.global_step)

    ours, theirs = (
        fit(Case(), tmp_path / "captured", Decay(), FastLoop(cuda_graph=True)),
        fit(Case(), tmp_path / "lightning", Decay()),
    )
    assert_same_run(ours, theirs)
    assert captures == []


def test_epochs_that_end_in_the_fourth_batch_are_captured_all_the_same(captures: list[StandIn], tmp_path: Path) -> None:
    case = Case(loader=lambda parts: ResidentLoader(parts, 24, shuffle=True))  # 24, 24, 24 and 8 rows
    assert_same_run(fit(case, tmp_path / "captured", FastLoop(cuda_graph=True)), fit(case, tmp_path / "lightning"))
    assert [step.calls for step in captures] == [
        25 - 3 - 1 - 1 - 5
    ]  # warm-up, a ragged one, one before the second in a row; five ragged


def test_steps_captured_while_a_learning_rate_is_sought_are_not_replayed_after(
    captures: list[StandIn], tmp_path: Path
) -> None:
    class Finder(LearningRateFinder):
        def lr_find(self, trainer: Trainer, pl_module: Any) -> None:
            pl_module.lr = 0.1
            super().lr_find(trainer, pl_module)

    fit(Case(callbacks=lambda: [Finder(num_training_steps=10, update_attr=True)]), tmp_path, FastLoop(cuda_graph=True))
    assert [step.calls for step in captures] == [10 - 3, 25 - 1]


def test_nothing_is_held_after_a_fit(captures: list[StandIn], tmp_path: Path) -> None:
    run = fit(Case(), tmp_path, FastLoop(cuda_graph=True))
    assert len(captures) == 1
    assert run.trainer.fit_loop.epoch_loop._captured is None


def test_self_log_in_a_captured_step_is_an_error(captures: list[StandIn], tmp_path: Path) -> None:
    class LogsItsLoss(MLP):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            self.log("inside", loss)
            return loss

    with pytest.raises(Exception, match=r"self.log"):
        fit(Case(partial(LogsItsLoss, 8, 4, 6, 3)), tmp_path, FastLoop(cuda_graph=True))


# --- the kind of a step


def test_steps_are_of_one_kind_where_one_graph_can_take_them() -> None:
    layer = nn.Linear(6, 3)
    optimizer = ADAMW(layer.parameters())
    x, y = torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)
    kind = step_kind((x, y), optimizer)
    optimizer.param_groups[0]["lr"] *= 0.5
    assert step_kind((torch.ones(6, 8).T, y + 1), optimizer) == kind  # values, strides and rates are no part of it
    for other in ((x[:4], y[:4]), (x.double(), y), (x, y, 1), [x, y], {"x": x, "y": y}, x):
        assert step_kind(other, optimizer) != kind
    assert step_kind((x, y, 1), optimizer) != step_kind((x, y, 2), optimizer)
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    assert step_kind((x, y), optimizer) != kind
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert step_kind((x, y), optimizer) == kind
    layer.bias.requires_grad_(False)
    assert step_kind((x, y), optimizer) != kind
    layer.bias.requires_grad_(True)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert step_kind((x, y), optimizer) != kind
    with pytest.raises(
        ValueError, match="batches of tensors and numbers, in tuples, lists or dicts, but this has a SimpleNamespace"
    ):
        step_kind(SimpleNamespace(x=x), optimizer)


def test_an_optimizer_that_counts_in_numbers_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SparseAdam([parameter])
    parameter.grad = torch.eye(2).to_sparse()
    optimizer.step()
    with pytest.raises(ValueError, match="SparseAdam keeps 'step' as a number, not a tensor"):
        _count_on_device(optimizer)


# --- what cannot be captured


def trainer_for(module: LightningModule, **settings: Any) -> Trainer:
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(**{"accelerator": "cpu", "devices": 1, **off, **settings})
    trainer.strategy.connect(module)
    return trainer


class HasBackward(Callback):
    """A method of its own that goes by the name of a module's hook."""

    def backward(self) -> None: ...


def test_what_can_be_captured_is_not_refused() -> None:
    settings: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    for module in (mlp(), gpt2(), resnet()):
        refuse_capture(trainer_for(module, callbacks=[spy(inside=False), HasBackward()], **settings), module)


class StepsItself(MLP):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


REFUSED: dict[str, tuple[str, Callable[[], LightningModule], Callable[[], dict[str, Any]]]] = {
    "another module": ("needs a WidthScalable module, model is a Plain", Plain, dict),
    "several devices": ("needs one device", mlp, lambda: {"strategy": "ddp", "devices": 2}),
    "accumulation": (
        "needs one device, trainer.accumulate_grad_batches = 1",
        mlp,
        lambda: {"accumulate_grad_batches": 2},
    ),
    "a profiler": ("no trainer.profiler", mlp, lambda: {"profiler": "simple"}),
    "64-true": ("a precision that leaves inputs alone", mlp, lambda: {"precision": "64-true"}),
    "a transfer hook": ("no hook that transfers batches", partial(MovedBatches, 8, 4, 6, 3), dict),
    "16-mixed": (
        "does not know the loss scaling of trainer.precision 16-mixed; use bf16-mixed",
        mlp,
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
    ),
    "anomalies": ("set trainer.detect_anomaly: false", mlp, lambda: {"detect_anomaly": True}),
    "training_step": (
        "runs `loss`, but Talkative has a training_step of its own",
        partial(Talkative, 8, 4, 6, 3),
        dict,
    ),
    "a hook of the module": (
        "has no optimizer_step inside its steps, but StepsItself has one",
        partial(StepsItself, 8, 4, 6, 3),
        dict,
    ),
    "a hook of a callback": (
        "has no on_before_backward inside its steps, but LambdaCallback has one",
        mlp,
        lambda: {"callbacks": [LambdaCallback(on_before_backward=lambda *_: None)]},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_by_name(name: str) -> None:
    message, make, settings = REFUSED[name]
    module = make()
    trainer = trainer_for(module, **settings())
    with pytest.raises(ValueError, match=r"FastLoop\.cuda_graph") as refusal:
        refuse_capture(trainer, module)
    assert message in str(refusal.value)


def test_on_a_cpu_cuda_graph_is_no_mistake(own_batches: list[int], tmp_path: Path) -> None:
    theirs, ours = fit(Case(), tmp_path / "lightning"), fit(Case(), tmp_path / "fast", FastLoop(cuda_graph=True))
    assert_same_run(ours, theirs)
    assert len(own_batches) == 25  # Lightning's


def test_tf32_is_asked_for(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, expected in ((False, before), (True, "high")):
            fit(Case(settings={"max_steps": 1}), tmp_path / str(tf32), FastLoop(tf32=tf32))
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
