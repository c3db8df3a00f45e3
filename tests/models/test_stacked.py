"""Modules that train as one: their losses, weights, validations and checkpoints are those of separate fits."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from tiers import slow_except
from tiny_modules import gpt2, mlp, resnet, rows
from torch.optim.lr_scheduler import CosineAnnealingLR

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.joint import JointData
from mupscale.datamodules.resident import ResidentLoader
from mupscale.errors import UserError
from mupscale.methods import Duplication, Net2Net
from mupscale.methods.noise import AdditiveNoise, SignalNoise
from mupscale.models.base import Growable
from mupscale.models.stacked import StackedModule, TrialGrowth, trial_checkpoint

Point = dict[str, Any]

STEPS, EVERY = 24, 8


class Rows(LightningDataModule):
    """Rows for a module, in an order that follows the seed of the run."""

    _kept: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, build: Callable[..., Growable]) -> None:
        super().__init__()
        self.tensors = Rows._kept.setdefault(id(build), rows(build(), 32, torch.float64))

    def setup(self, stage: str) -> None:
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))

    def train_dataloader(self) -> ResidentLoader:
        return ResidentLoader(self.tensors, 8, shuffle=True, seed=self.seed, drop_last=True)

    def val_dataloader(self) -> ResidentLoader:
        return ResidentLoader(self.tensors, 12, shuffle=False)


@dataclass
class Case:
    """What trials have in common: the module, its growth, the trainer."""

    build: Callable[..., Growable]
    optimizer: Callable[[Point], Any]
    points: list[Point]
    grows: dict[str, Any]
    schedule: bool = True
    clip: float | None = 0.5

    def module(self, point: Point) -> Growable:
        schedule = (lambda optimizer: CosineAnnealingLR(optimizer, STEPS)) if self.schedule else None
        return self.build(optimizer=self.optimizer(point), lr_scheduler=schedule)

    def growth(self, point: Point) -> dict[str, Any]:
        own = {key: point[key] for key in ("noise", "lr_after", "method") if key in point}
        return {"at_step": STEPS // 2, **self.grows, **{key.removesuffix("_after"): own[key] for key in own}}


def points(count: int, **levels: list[Any]) -> list[Point]:
    return [{name: values[index % len(values)] for name, values in levels.items()} for index in range(count)]


def adamw(p: Point) -> Any:
    return lambda w: torch.optim.AdamW(w, lr=p["lr"], weight_decay=p["decay"], eps=p["eps"], betas=(p["beta"], 0.99))


def sgd(p: Point) -> Any:
    return lambda w: torch.optim.SGD(w, lr=p["lr"], weight_decay=p["decay"], momentum=p["momentum"])


NOISE = [AdditiveNoise(0.05), AdditiveNoise(0.3, centred=True), SignalNoise(0.1), None]
ADAMW = {"lr": [1e-3, 3e-3, 1e-2], "decay": [0.0, 0.1], "eps": [1e-8, 1e-6], "beta": [0.9, 0.8], "noise": NOISE}
MOMENTUM = {"lr": [0.02, 0.05, 0.1], "decay": [5e-4, 0.0], "momentum": [0.9, 0.5], "noise": NOISE}
WIDER = {"width": 24}
METHODS = [Duplication(), Duplication(state="reset_new_copies"), Net2Net()]

CASES: dict[str, Callable[[], Case]] = {
    "mlp, AdamW": lambda: Case(mlp, adamw, points(5, **ADAMW, seed=[0, 1, 2]), WIDER),
    "mlp, one seed, a rate after the growth": lambda: Case(
        mlp, adamw, points(3, **ADAMW, seed=[3], lr_after=[2e-3, 5e-3]), WIDER
    ),
    "mlp, SGD, no schedule, no clipping": lambda: Case(
        mlp, sgd, points(4, **MOMENTUM, seed=[0, 1]), WIDER, schedule=False, clip=None
    ),
    "mlp, methods": lambda: Case(
        mlp, adamw, points(3, **{**ADAMW, "noise": [None]}, seed=[0, 1], method=METHODS), WIDER
    ),
    "mlp, the schedule again": lambda: Case(
        mlp, sgd, points(2, **MOMENTUM, seed=[0]), {"width": 24, "restart_schedule": True}
    ),
    "gpt2": lambda: Case(gpt2, adamw, points(3, **ADAMW, seed=[3, 4]), WIDER),
    "resnet with BatchNorm": lambda: Case(
        resnet, sgd, points(3, **{**MOMENTUM, "lr": [0.002, 0.005]}, seed=[5, 6]), {"width": 4}, clip=None
    ),
}


class Noted(Callback):
    """The losses of every step, and the validations."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.scores: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *rest: Any) -> None:
        is_stack = isinstance(pl_module, StackedModule)
        self.losses.append(pl_module.losses.tolist() if is_stack else float(pl_module.train_loss))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        is_stack = isinstance(pl_module, StackedModule)
        self.scores.append(
            [own.get("val/loss") for own in pl_module.scores]
            if is_stack
            else float(trainer.callback_metrics["val/loss"])
        )


def trainer_of(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    checks = {"val_check_interval": EVERY, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    common = {"accelerator": "cpu", "precision": "64-true", "max_steps": STEPS, "default_root_dir": folder}
    return Trainer(callbacks=list(callbacks), **{**quiet, **checks, **common, **options})


def separate(case: Case, point: Point, folder: Path, **fit: Any) -> tuple[Any, Noted]:
    seed_everything(point["seed"])
    noted = Noted()
    module = case.module(point)
    trainer = trainer_of(folder, UpscaleCallback(**case.growth(point)), noted, gradient_clip_val=case.clip)
    trainer.fit(module, Rows(case.build), **fit)
    return module, noted


def stacked(
    case: Case, folder: Path, *callbacks: Callback, own: list[Point] | None = None, gpu: bool | None = None, **fit: Any
) -> Any:
    """A fit of the trials as one; on a `gpu`, with a captured step or without."""
    chosen = case.points if own is None else own
    seeds, noted = [point["seed"] for point in chosen], Noted()
    growths = [[TrialGrowth(**case.growth(point))] for point in chosen]
    module = StackedModule(
        [case.module(point) for point in chosen], seeds, growths, max_norm=case.clip, cuda_graph=bool(gpu)
    )
    data = JointData([Rows(case.build) for _ in chosen], seeds)
    options = {} if gpu is None else {"accelerator": "gpu", "devices": 1}
    trainer_of(folder, *callbacks, noted, **options).fit(module, data, **fit)
    return module, noted


def distance(ours: Any, theirs: Any) -> float:
    """The largest relative difference of two modules' weights and buffers."""
    here, there, gaps = ours.state_dict(), theirs.state_dict(), [0.0]
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert value.shape == there[name].shape, name
        gap = (value.double() - there[name].double()).abs().max()
        gaps.append(float(gap / there[name].double().abs().max().clamp(min=1e-12)))
    return max(gaps)


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", slow_except(CASES, "mlp, AdamW"))
def test_a_stack_ends_as_separate_fits(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    module, noted = stacked(case, tmp_path)
    widths = [trial.width for trial in module.trials]
    assert widths == [case.grows["width"]] * len(case.points)
    for index, point in enumerate(case.points):
        single, own = separate(case, point, tmp_path)
        assert apart([row[index] for row in noted.losses], own.losses) < 1e-12
        assert apart([row[index] for row in noted.scores], own.scores) < 1e-12
        assert distance(module.trials[index], single) < (1e-12 if name.startswith("mlp") else 1e-10)
        (done,) = module.growths_done[index]
        assert (done["step"], done["before"], done["after"]) == (STEPS // 2, case.build().width, case.grows["width"])


def test_a_diverging_trial_leaves_the_others_alone(tmp_path: Path) -> None:
    """Its weights are not finite when it would grow, and it ends there; the others are, to the bit, as without it."""
    case = Case(mlp, sgd, points(3, lr=[0.05, 1e200, 0.1], decay=[0.0], momentum=[0.9], seed=[0, 1]), WIDER, clip=None)
    module, _ = stacked(case, tmp_path)
    assert (module.ended, module.running) == ({1: STEPS // 2}, [0, 2])
    rest, _ = stacked(case, tmp_path, own=[case.points[0], case.points[2]])
    for index, place in ((0, 0), (2, 1)):
        theirs = rest.trials[place].state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in module.trials[index].state_dict().items())
    assert module.trials[1].net is None
    assert distance(module.trials[2], separate(case, case.points[2], tmp_path)[0]) < 1e-12


def test_a_stack_whose_trials_all_diverge_ends(tmp_path: Path) -> None:
    case = Case(mlp, sgd, points(2, lr=[1e200, 1e250], decay=[0.0], momentum=[0.9], seed=[0]), WIDER, clip=None)
    module, noted = stacked(case, tmp_path)
    assert module.ended == {0: STEPS // 2, 1: STEPS // 2}
    assert len(noted.losses) == STEPS // 2


class Killed(BaseException):
    pass


class Dies(Callback):
    """Ends a fit before a step, at once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


class Keeps(Callback):
    """Saves every fifth step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step % 5 == 0:
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


@pytest.mark.parametrize("name", slow_except(["mlp, AdamW", "gpt2", "resnet with BatchNorm"], "mlp, AdamW"))
def test_a_killed_stack_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    """Killed and resumed in mid-epoch, before and after the growth, by Lightning's own `ckpt_path`."""
    case = CASES[name]()
    whole, noted = stacked(case, tmp_path)
    newest = None
    for dies in (9, 18, None):
        more = [] if dies is None else [Dies(dies)]
        arguments = {} if newest is None else {"ckpt_path": newest, "weights_only": True}
        try:
            module, own = stacked(case, tmp_path, Keeps(tmp_path / "kept"), *more, **arguments)
        except Killed:
            steps = sorted(int(path.stem.partition("=")[2]) for path in (tmp_path / "kept").glob("*.ckpt"))
            newest = tmp_path / "kept" / f"step={steps[-1]}.ckpt"
    assert newest is not None
    assert newest.name == "step=15.ckpt"
    assert own.losses == noted.losses[15:]
    assert module.scores == whole.scores
    theirs = whole.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in module.state_dict().items())
    assert [[{**done, "seconds": 0} for done in own] for own in module.growths_done] == [
        [{**done, "seconds": 0} for done in own] for own in whole.growths_done
    ]


@pytest.mark.parametrize("name", slow_except(["mlp, AdamW", "gpt2", "resnet with BatchNorm"], "mlp, AdamW"))
def test_a_trial_is_cut_out_as_an_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    """A plain fit goes on from it, before and after the growth, and ends as the stack does."""
    case = CASES[name]()
    module, noted = stacked(case, tmp_path, Keeps(tmp_path))
    for step in (10, 15):
        whole = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        for index, point in list(enumerate(case.points))[:2]:
            path = tmp_path / f"trial-{index}.ckpt"
            torch.save(trial_checkpoint(whole, index), path)
            torch.load(path, weights_only=True)
            type(module.trials[index]).load_from_checkpoint(path)
            single, own = separate(case, point, tmp_path, ckpt_path=path, weights_only=True)
            assert apart([row[index] for row in noted.losses[step:]], own.losses) < 1e-12
            assert distance(module.trials[index], single) < (1e-12 if name.startswith("mlp") else 1e-10)


class OwnStep(type(mlp())):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class OwnHook(type(mlp())):  # type: ignore[misc]
    def on_train_epoch_end(self) -> None:
        pass


class OwnValidation(type(mlp())):  # type: ignore[misc]
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnStep, "OwnStep overrides training_step"),
        (OwnHook, "OwnHook overrides on_train_epoch_end"),
        (OwnValidation, "OwnValidation has a validation of its own"),
    ],
)
def test_modules_with_code_of_their_own_are_refused_by_name(kind: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        StackedModule([kind(8, base_width=4)], [0])


def test_a_growth_that_is_not_exact_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Scaled(type(mlp())):  # type: ignore[misc]
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) / self.net.readout.in_features**0.5

    build = lambda **options: Scaled(8, base_width=4, inputs=6, outputs=3, **options)  # noqa: E731
    case = Case(build, sgd, points(2, **MOMENTUM, seed=[0]), WIDER)
    with pytest.raises(UserError, match="the growth at step 12: upscale: the wide model does not compute"):
        stacked(case, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp, AdamW", "gpt2", "resnet with BatchNorm"])
def test_captured_steps_are_those_of_an_uncaptured_stack(name: str, tmp_path: Path) -> None:
    """Across the growth, a validation, and a resume in mid-epoch."""
    case = CASES[name]()
    eager, noted = stacked(case, tmp_path, gpu=False)
    captured, own = stacked(case, tmp_path, Keeps(tmp_path), gpu=True)
    for index in range(len(case.points)):
        assert apart([row[index] for row in own.losses], [row[index] for row in noted.losses]) < 1e-12
        assert apart([row[index] for row in own.scores], [row[index] for row in noted.scores]) < 1e-12
        assert distance(captured.trials[index], eager.trials[index]) < (1e-12 if name.startswith("mlp") else 1e-10)
    resumed, _ = stacked(case, tmp_path, gpu=True, ckpt_path=tmp_path / "step=15.ckpt", weights_only=True)
    for index in range(len(case.points)):
        assert distance(resumed.trials[index], captured.trials[index]) < 1e-10
