"""UpscaleCallback inside `Trainer.fit`: without noise a run that widens in the middle has the loss curve of one that
does not.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from paths import SUPPORT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

import mupscale
from mupscale.callbacks import upscale as swap
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import WidthScalable
from mupscale.models.checkpoint import optimizer_names
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

BATCHES = 10
"""Batches of an epoch."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",  # Lightning itself
    "ignore:You're using the WeightAveraging callback with a model that overrides:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-1)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}


def mlp(width: Any = 8, **kwargs: Any) -> MLP:
    kwargs = {
        "base_width": [4] * 3 if isinstance(width, list) else 4,
        "inputs": 6,
        "outputs": 3,
        "optimizer": ADAMW,
    } | kwargs
    return MLP(width, **kwargs)


def resnet(width: int = 2, **kwargs: Any) -> ResNet18:
    return ResNet18(width, base_width=2, outputs=3, **kwargs)


def gpt2(width: int = 8, **kwargs: Any) -> GPT2:
    return GPT2(width, base_width=4, layers=2, heads=2, vocabulary=11, context=8, **kwargs)


MODELS: dict[str, tuple[Callable[..., WidthScalable], Any]] = {
    "mlp": (mlp, 24),
    "mlp of unequal widths": (partial(mlp, [8, 4, 12]), [16, 12, 24]),
    "resnet18": (resnet, 4),
    "gpt2": (gpt2, 24),
}


def rows(module: LightningModule, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    if isinstance(module, GPT2):
        return ((torch.randint(11, (count, 1), generator=generator) + torch.arange(9)) % 11,)
    shape = (3, 8, 8) if type(module) in (ResNet18, Digits) else (6,)
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs.flatten(1)[:, :3].argmax(1)


class Record(Callback):
    """The loss of every batch and the step after it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(pl_module.train_loss))
        self.steps.append(trainer.global_step)


def fit(
    module: WidthScalable,
    folder: Path,
    *callbacks: Callback,
    ckpt: Path | None = None,
    steps: int = 50,
    **settings: Any,
) -> Any:
    """A run of so many steps on the CPU; what it left behind."""
    seed_everything(1, verbose=False)
    settings = {"precision": "64-true", "logger": False, "enable_checkpointing": False, "max_steps": steps} | settings
    dtype = torch.float64 if settings["precision"] == "64-true" else torch.float32
    record = Record()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=[*callbacks, record],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **settings,
    )
    train, val = rows(module, 8 * BATCHES, dtype), rows(module, 16, dtype)
    validation = ResidentLoader(val, 8, shuffle=False) if is_overridden("validation_step", module) else None
    trainer.fit(module, ResidentLoader(train, 8, shuffle=True, drop_last=True), validation, ckpt_path=ckpt)
    return SimpleNamespace(
        trainer=trainer, module=module, losses=torch.tensor(record.losses, dtype=torch.float64), steps=record.steps
    )


def state(run: Any) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, by name."""
    answer = {name: tensor.clone() for name, tensor in run.module.state_dict().items()}
    for optimizer in run.trainer.optimizers:
        names = optimizer_names(run.module, optimizer)
        for index, tensors in optimizer.state_dict()["state"].items():
            answer |= {f"{names[index]} {key}": torch.as_tensor(value).clone() for key, value in tensors.items()}
    return answer


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def gap(one: Any, other: Any) -> float:
    assert one.steps == other.steps
    return float((one.losses - other.losses).abs().max())


# --- the loss curve


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_curve_goes_on_as_if_nothing_had_happened(model: str, optimizer: str, tmp_path: Path) -> None:
    make, target = MODELS[model]
    for precision, steps, at_step, tolerance in (("64-true", 50, 20, 1e-9), ("32-true", 20, 10, 1e-4)):
        settings: Any = {"precision": precision, "steps": steps}
        narrow = fit(make(optimizer=OPTIMIZERS[optimizer]), tmp_path, **settings)
        wide = fit(make(optimizer=OPTIMIZERS[optimizer]), tmp_path, UpscaleCallback(at_step, target), **settings)
        assert wide.module.width == target
        assert wide.steps == list(range(1, steps + 1))
        assert narrow.losses.std() > 0.01, "something must happen"
        assert gap(narrow, wide) < tolerance


class NudgeAt(Callback):
    """Moves every weight by about one bfloat16 ulp, up or down, at a step: what rounding may do to a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            for parameter in pl_module.net.parameters():
                parameter.mul_(
                    1 + 2.0**-8 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).sign()
                )


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_in_bfloat16_the_curves_differ_by_rounding(model: str, optimizer: str, precision: str, tmp_path: Path) -> None:
    make, target = MODELS[model]
    settings: Any = {"precision": precision, "steps": 20}
    narrow, nudged, wide = (
        fit(make(optimizer=OPTIMIZERS[optimizer]), tmp_path, *extra, **settings)
        for extra in ([], [NudgeAt(10)], [UpscaleCallback(10, target)])
    )
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in wide.module.net.parameters()} == {dtype}
    assert wide.module.train_loss.dtype == (
        torch.float32 if model == "gpt2" else dtype
    )  # GPT-2 makes its loss in float32
    # two curves that rounding moved may lie on either side; a loss in bfloat16 is itself rounded
    assert gap(narrow, wide) <= 2 * gap(narrow, nudged) + float(narrow.losses.max()) * torch.finfo(dtype).eps


SCHEDULES = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10)),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 60),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=27), schedules.CosineAnnealingLR(optimizer, 40)],
        [27],
    ),
    "ReduceLROnPlateau": lambda optimizer: schedules.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.5
    ),
}


def rates(run: Any) -> dict[str, float]:
    """The learning rate of every parameter."""
    (optimizer,) = run.trainer.optimizers
    return {
        optimizer_names(run.module, optimizer)[i]: r
        for i, r in enumerate(g["lr"] for g in optimizer.param_groups for _ in g["params"])
    }


@pytest.mark.parametrize("at_step", [15, 20])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_on(schedule: str, optimizer: str, at_step: int, tmp_path: Path) -> None:
    make = partial(mlp, optimizer=OPTIMIZERS[optimizer], lr_scheduler=SCHEDULES[schedule])
    narrow, wide = fit(make(), tmp_path), fit(make(), tmp_path, UpscaleCallback(at_step, 24))
    assert gap(narrow, wide) < 1e-9
    # what the run would have if it had been wide from the start
    constant = rates(fit(mlp(24, optimizer=OPTIMIZERS[optimizer]), tmp_path, steps=1))
    passed = (
        rates(narrow)["net.layers.1.weight"]
        / rates(fit(mlp(optimizer=OPTIMIZERS[optimizer]), tmp_path, steps=1))["net.layers.1.weight"]
    )
    assert passed < 0.9
    assert rates(wide) == pytest.approx({name: rate * passed for name, rate in constant.items()}, rel=1e-12)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({}, {"accumulate_grad_batches": 2}),
    "accumulation over a ragged epoch": ({}, {"accumulate_grad_batches": 3}),
    "clipping": ({}, {"gradient_clip_val": 0.05}),
    "validation": ({}, {"val_check_interval": 5}),
    "all": (
        {"lr_scheduler": SCHEDULES["SequentialLR"]},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "val_check_interval": 5},
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trainer_does_what_it_does(variant: str, optimizer: str, tmp_path: Path) -> None:
    arguments, settings = VARIANTS[variant]
    make = partial(mlp, optimizer=OPTIMIZERS[optimizer], **arguments)
    narrow, wide = fit(make(), tmp_path, **settings), fit(make(), tmp_path, UpscaleCallback(21, 24), **settings)
    assert gap(narrow, wide) < 1e-9
    assert wide.trainer.global_step == 50
    if "gradient_clip_val" in settings:
        assert gap(narrow, fit(make(), tmp_path, **settings | {"gradient_clip_val": None})) > 1e-3, "it must clip"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which dynamo reads
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # which dynamo does
@pytest.mark.parametrize("model", ["mlp", "resnet18", "gpt2"])
def test_compiled(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    monkeypatch.setattr(
        nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)
    )  # inductor takes half a minute
    make, target = MODELS[model]
    narrow = fit(make(optimizer=ADAMW), tmp_path, steps=10, limit_val_batches=0)
    wide = fit(make(optimizer=ADAMW, compile=True), tmp_path, UpscaleCallback(5, target), steps=10, limit_val_batches=0)
    assert gap(narrow, wide) < 1e-9
    parts = 2 if model == "gpt2" else 1  # a block, for all of them, and the head
    assert len(compiled) == 2 * parts, "once narrow, once wide"


@pytest.fixture
def double() -> Iterator[None]:
    """WeightAveraging builds the network before the trainer's precision is set; float32 would round averages."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("noise", [None, mupscale.AdditiveNoise(0.1), mupscale.SignalNoise(0.5)])
def test_the_average_is_widened_too(noise: Any, tmp_path: Path) -> None:
    make = partial(resnet, optimizer=SGD)
    ema, growing = EMAWeightAveraging(decay=0.8), EMAWeightAveraging(decay=0.8)
    seen: dict[str, Any] = {}

    class Look(Callback):
        """The average and the model just before and just after the swap."""

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 12:
                seen.update(
                    before=copy.deepcopy(growing._average_model.module.net), narrow=copy.deepcopy(pl_module.net)
                )

        def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 12:
                seen.update(after=copy.deepcopy(growing._average_model.module.net), wide=copy.deepcopy(pl_module.net))

    # the callback stands before the others: it must not matter
    wide = fit(make(), tmp_path, UpscaleCallback(12, 4, noise=noise), Look(), growing, steps=25)
    assert isinstance(growing._average_model, AveragedModel)
    assert int(growing._average_model.n_averaged) == 25
    expected = {}
    for name in ("before", "narrow"):
        expected[name] = wide.module.network(4).double()
        mupscale.upscale(seen[name], expected[name])
    averages, models = (dict(net.named_parameters()) for net in (seen["after"], seen["wide"]))
    for (name, average), model in zip(
        expected["before"].named_parameters(), expected["narrow"].parameters(), strict=True
    ):
        assert (averages[name] - average).allclose(models[name] - model, rtol=0, atol=1e-12), (
            f"{name}: the noise is another"
        )
    if noise is None:
        narrow = fit(make(), tmp_path, ema, steps=25)
        assert gap(narrow, wide) < 1e-9
        assert float(
            wide.trainer.callback_metrics["val/loss"] / narrow.trainer.callback_metrics["val/loss"]
        ) == pytest.approx(1, abs=1e-6)
        final = wide.module.network(4).double()
        mupscale.upscale(narrow.module.net, final)  # at the end of a run the module holds the average
        for (name, ours), theirs in zip(final.state_dict().items(), wide.module.net.state_dict().values(), strict=True):
            assert ours.allclose(theirs, rtol=0, atol=1e-10), name


def test_early_stopping_stops_where_it_did(tmp_path: Path) -> None:
    first = fit(gpt2(optimizer=ADAMW), tmp_path, val_check_interval=5)
    threshold = 1.8
    stop = partial(EarlyStopping, "val/loss", stopping_threshold=threshold, patience=100)
    narrow = fit(gpt2(optimizer=ADAMW), tmp_path, stop(), val_check_interval=5)
    wide = fit(gpt2(optimizer=ADAMW), tmp_path, UpscaleCallback(7, 24), stop(), val_check_interval=5)
    assert 10 < wide.trainer.global_step == narrow.trainer.global_step < 50
    assert torch.equal(first.losses[: len(narrow.losses)], narrow.losses)
    assert gap(narrow, wide) < 1e-9


def test_every_logger_is_told(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, "tb"), CSVLogger(tmp_path, "csv")]
    monitor, growth = (
        LearningRateMonitor(logging_interval="step"),
        UpscaleCallback(12, 24, noise=mupscale.AdditiveNoise(0.1)),
    )
    run = fit(mlp(lr_scheduler=SCHEDULES["LambdaLR"]), tmp_path, monitor, growth, steps=25, logger=loggers)
    events = EventAccumulator(loggers[0].log_dir).Reload()
    told = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    parameters = sum(p.numel() for p in run.module.parameters())
    assert growth.summary["parameters"] == parameters
    for name in ("loss_before", "loss_after"):
        assert [(e.step, e.value) for e in told[f"upscale/{name}"]] == [(12, pytest.approx(growth.summary[name]))]
    assert growth.summary["loss_before"] == pytest.approx(float(run.losses[12]), abs=0.2)
    assert [e.value for e in told["upscale/parameters"]] == [parameters]
    assert [e.value for e in told["upscale/width"]] == [24]
    assert 0 < told["upscale/pause_seconds"][0].value < 5
    assert [e.step for e in told["lr-AdamW/pg1"]] == list(range(25))
    (text,) = events.Tensors("upscale/plan/text_summary")
    assert b"layers.1.weight" in text.tensor_proto.string_val[0]
    lines = Path(loggers[1].log_dir, "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("upscale/loss_after")
    assert [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]] == [
        growth.summary["loss_after"]
    ]


# --- options


def test_at_step_0_upscales_before_the_first_step(tmp_path: Path) -> None:
    narrow, wide = fit(mlp(), tmp_path), fit(mlp(), tmp_path, UpscaleCallback(0, 24))
    assert gap(narrow, wide) < 1e-9
    assert torch.load(tmp_path / "pre-upscale-0.ckpt", weights_only=True)["hyper_parameters"]["width"] == 8


def test_a_network_of_the_target_width_is_left_alone(tmp_path: Path) -> None:
    plain, wide = (
        fit(mlp(24), tmp_path),
        fit(mlp(24), tmp_path, UpscaleCallback(20, 24, noise=mupscale.AdditiveNoise(1.0))),
    )
    assert torch.equal(plain.losses, wide.losses)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("widths", [(16, 48), ([16, 16, 24], 48), (16, [48, 32, 64])])
def test_two_upscales(widths: tuple[Any, Any], tmp_path: Path) -> None:
    growth = [UpscaleCallback(30, widths[1]), UpscaleCallback(12, widths[0])]  # in any order
    narrow, wide = fit(mlp(base_width=4), tmp_path), fit(mlp(base_width=4), tmp_path, *growth)
    assert [c.summary["after"] for c in growth] == [widths[1], widths[0]]
    assert gap(narrow, wide) < 1e-9


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    class Freeze(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            pl_module.net.layers[0].requires_grad_(False)

    narrow, wide = fit(mlp(), tmp_path, Freeze()), fit(mlp(), tmp_path, Freeze(), UpscaleCallback(20, 24))
    assert gap(narrow, wide) < 1e-9
    assert gap(narrow, fit(mlp(), tmp_path)) > 1e-3


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_lr_is_a_new_base_constant(schedule: str | None, tmp_path: Path) -> None:
    """As if the run had had it from the start, state aside; also for a later swap, and after a resume."""
    constants = [4e-2, 1e-2, 3e-2]
    make = [
        partial(mlp, optimizer=partial(ADAMW, lr=lr), lr_scheduler=schedule and SCHEDULES[schedule]) for lr in constants
    ]
    growth = [partial(UpscaleCallback, 12, 16, lr=constants[1]), partial(UpscaleCallback, 30, 48, lr=constants[2])]
    once = fit(make[0](), tmp_path, growth[0](), steps=50)
    assert rates(once) == pytest.approx(rates(fit(make[1](16), tmp_path)), rel=1e-12)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    twice = fit(make[0](), tmp_path, growth[0](), growth[1](), saver, ExactResume(), enable_checkpointing=True)
    assert rates(twice) == pytest.approx(rates(fit(make[2](48), tmp_path)), rel=1e-12)
    resumed = fit(make[0](), tmp_path, growth[0](), growth[1](), ExactResume(), ckpt=tmp_path / "step=20.ckpt")
    assert rates(resumed) == rates(twice)
    assert torch.equal(resumed.losses, twice.losses[20:])
    kept = fit(
        make[0](), tmp_path, growth[0](), UpscaleCallback(30, 48)
    )  # a swap without lr keeps that of the one before
    assert rates(kept) == pytest.approx(rates(fit(make[1](48), tmp_path)), rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_restart_schedule(schedule: str, tmp_path: Path) -> None:
    make = partial(mlp, optimizer=ADAMW, lr_scheduler=SCHEDULES[schedule])
    for lr in (None, 3e-2):
        restarted = fit(make(), tmp_path, UpscaleCallback(20, 24, restart_schedule=True, lr=lr), steps=45)
        expected = rates(fit(make(24, optimizer=partial(ADAMW, lr=lr or 1e-2)), tmp_path, steps=25))
        assert rates(restarted) == pytest.approx(expected, rel=1e-12)


def test_without_transfer_of_state_the_optimizer_starts_anew(tmp_path: Path) -> None:
    for optimizer in OPTIMIZERS.values():
        narrow = fit(mlp(optimizer=optimizer), tmp_path, steps=40)
        wide = fit(mlp(optimizer=optimizer), tmp_path, UpscaleCallback(20, 24, transfer_state=False), steps=40)
        assert torch.equal(narrow.losses[:20], wide.losses[:20])
        assert float((narrow.losses - wide.losses)[20].abs()) < 1e-12
        assert gap(narrow, wide) > 1e-3
        steps = {int(state["step"]) for state in wide.trainer.optimizers[0].state.values() if "step" in state}
        assert steps <= {20}


# --- checkpoints


class Checkpoints(ModelCheckpoint):
    """One of every step, `step=N.ckpt`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "{step}", every_n_train_steps=1, save_top_k=-1)


RESUMABLE: dict[str, tuple[Callable[..., WidthScalable], dict[str, Any], list[Callable[[], Callback]]]] = {
    "mlp": (partial(mlp, optimizer=ADAMW), {}, []),
    "resnet18": (partial(resnet, optimizer=SGD, lr_scheduler=SCHEDULES["SequentialLR"]), {}, []),
    "gpt2": (partial(gpt2, optimizer=ADAMW, lr_scheduler=SCHEDULES["LambdaLR"]), {"gradient_clip_val": 0.05}, []),
    "ema": (partial(resnet, optimizer=SGD), {}, [partial(EMAWeightAveraging, decay=0.8)]),
    "accumulation": (mlp, {"accumulate_grad_batches": 2}, []),
    "bf16-true": (mlp, {"precision": "bf16-true"}, []),
    "plateau": (partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"]), {"precision": "64-true"}, [ExactResume]),
}


@pytest.mark.parametrize("case", RESUMABLE)
def test_every_checkpoint_resumes_into_the_run_that_was_interrupted(case: str, tmp_path: Path) -> None:
    make, settings, callbacks = RESUMABLE[case]
    settings = {"precision": "32-true", "steps": 20} | settings
    width = make().width
    growth = partial(UpscaleCallback, 12, width * 3 if case != "resnet18" else 4, noise=mupscale.AdditiveNoise(0.1))
    whole = fit(
        make(),
        tmp_path,
        growth(),
        *(c() for c in callbacks),
        Checkpoints(tmp_path),
        enable_checkpointing=True,
        **settings,
    )
    per_step = settings.get("accumulate_grad_batches", 1)
    assert len(whole.losses) == 20 * per_step
    for name, width_there in (
        ("step=7", width),
        ("step=12", width),
        ("pre-upscale-12", width),
        ("step=13", growth().width),
        ("step=17", growth().width),
    ):
        path = tmp_path / f"{name}.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["hyper_parameters"]["width"] == width_there
        for start in {width, width_there}:  # the configured width, and what LightningCLI makes of it
            resumed = fit(make(start), tmp_path / "again", growth(), *(c() for c in callbacks), ckpt=path, **settings)
            assert resumed.trainer.global_step == 20
            assert torch.equal(resumed.losses, whole.losses[checkpoint["global_step"] * per_step :])
            assert_identical(state(resumed), state(whole))
            assert rates(resumed) == rates(whole)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("at_step", [0, 5, 10, 15, 17])
def test_the_checkpoint_before_a_swap_resumes_exactly(at_step: int, tmp_path: Path) -> None:
    """Also where validation, the end of an epoch, a plateau scheduler or early stopping come between the step and the
    swap.
    """
    make = partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"])
    settings: Any = {"steps": 30, "val_check_interval": 5}
    growth = partial(UpscaleCallback, at_step, 24, noise=mupscale.AdditiveNoise(0.1))

    def others() -> list[Callback]:
        return [ExactResume(), EMAWeightAveraging(decay=0.8), EarlyStopping("val/loss", patience=3, min_delta=-10)]

    whole = fit(make(), tmp_path, growth(), *others(), **settings)
    path = tmp_path / f"pre-upscale-{at_step}.ckpt"
    resumed = fit(make(), tmp_path, growth(), *others(), ckpt=path, **settings)
    assert torch.equal(resumed.losses, whole.losses[at_step:])
    assert_identical(state(resumed), state(whole))
    assert rates(resumed) == rates(whole)
    assert rates(whole)["net.layers.0.bias"] < 1e-2


def test_two_upscales_then_resume_validate_load_and_predict(tmp_path: Path) -> None:
    def growth() -> list[Callback]:
        return [UpscaleCallback(step, width, noise=mupscale.AdditiveNoise(0.1)) for step, width in ((12, 16), (20, 48))]

    settings: Any = {"precision": "32-true", "steps": 30, "val_check_interval": 5}
    whole = fit(mlp(), tmp_path, *growth(), Checkpoints(tmp_path), enable_checkpointing=True, **settings)
    assert whole.steps == list(range(1, 31))
    parts = []
    for step, width in ((8, 8), (12, 8), (14, 16), (20, 16), (21, 48), (26, 48)):
        resumed = fit(mlp(), tmp_path, *growth(), ckpt=tmp_path / f"step={step}.ckpt", **settings)
        assert torch.equal(resumed.losses, whole.losses[step:])
        assert_identical(state(resumed), state(whole))
        parts.append(torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["hyper_parameters"]["width"])
        assert parts[-1] == width
    trainer, last = whole.trainer, tmp_path / "step=30.ckpt"
    inputs, labels = rows(whole.module, 16, torch.float32)
    loader = ResidentLoader((inputs, labels), 8, shuffle=False)
    for path, width in ((last, 48), (tmp_path / "step=14.ckpt", 16), (tmp_path / "pre-upscale-12.ckpt", 8)):
        module = MLP.load_from_checkpoint(path)
        assert module.width == width
        assert {p.shape[0] for p in module.net.layers[1].parameters()} == {width}
        module.requires_grad_(False)
        expected = float(F.cross_entropy(module(inputs), labels))
        validator = Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        for run in (validator.validate, validator.test):
            other = mlp()
            (metrics,) = run(other, loader, ckpt_path=path, verbose=False)
            assert other.width == width
            assert next(value for name, value in metrics.items() if name.endswith("loss")) == pytest.approx(
                expected, rel=1e-5
            )
        predicted = validator.predict(mlp(), loader, ckpt_path=path)
        assert torch.cat(predicted).allclose(module(inputs).softmax(-1), atol=1e-6)
    assert trainer.global_step == 30


def test_a_failure_inside_the_swap_names_the_checkpoint_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = partial(UpscaleCallback, 12, 24, noise=mupscale.AdditiveNoise(0.1))
    whole = fit(mlp(), tmp_path / "whole", growth(), steps=25)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    path = tmp_path / "pre-upscale-12.ckpt"
    for place in ("transfer_state", "upscale", "plan", "_loss"):
        with monkeypatch.context() as patch:
            plans = iter([swap.plan])  # the first is of the check before training
            patch.setattr(swap, place, fail if place != "plan" else lambda *a, plans=plans: next(plans, fail)(*a))
            with pytest.raises(RuntimeError, match="out of memory") as caught:
                fit(mlp(), tmp_path, growth(), steps=25)
        assert str(path) in str(caught.value)
        resumed = fit(mlp(), tmp_path / "again", growth(), steps=25, ckpt=path)
        assert torch.equal(resumed.losses, whole.losses[12:])
        assert_identical(state(resumed), state(whole))
        path.unlink()


# --- several processes


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two processes reports of its runs."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "distributed_run.py",
        str(folder),
    ]
    run = subprocess.run(
        command,
        cwd=SUPPORT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", ["mlp", "resnet18", "gpt2"])
def test_on_two_processes(model: str, kind: str, distributed: list[dict[Any, Any]]) -> None:
    mine, other = distributed
    narrow, wide = mine[kind, model, "narrow"], mine[kind, model, "wide"]
    assert wide["steps"] == list(range(1, 17))
    assert wide["width"] > narrow["width"]
    assert float((narrow["losses"] - wide["losses"]).abs().max()) < 1e-4
    for part in ("weights", "state"):
        assert_identical(wide[part], other[kind, model, "wide"][part])


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_on_two_processes_with_noise(model: str, distributed: list[dict[Any, Any]]) -> None:
    for kind in ("ddp", "fsdp"):
        mine, other = (rank[kind, model, "noisy"] for rank in distributed)
        assert float((mine["losses"] - distributed[0][kind, model, "narrow"]["losses"]).abs().max()) > 1e-4, (
            "noise must do something"
        )
        for part in ("weights", "state"):
            assert_identical(mine[part], other[part])
    for part in ("weights", "state"):
        assert (
            largest_difference(
                distributed[0]["ddp", model, "noisy"][part], distributed[0]["fsdp", model, "noisy"][part]
            )
            < 1e-6
        )


def test_on_two_processes_checkpoints_resume_exactly(distributed: list[dict[Any, Any]]) -> None:
    for rank in distributed:
        for kind in ("ddp", "fsdp", "fsdp, whole checkpoints"):
            whole = rank[kind, "mlp", "noisy"]
            for name, steps in (("pre-upscale-6", 10), ("step=11", 5)):
                resumed = rank[kind, "mlp", name]
                assert torch.equal(resumed["losses"], whole["losses"][-steps:])
                for part in ("weights", "state"):
                    assert_identical(resumed[part], whole[part])


def test_on_two_processes_from_a_base(distributed: list[dict[Any, Any]]) -> None:
    base, ddp, fsdp = (
        distributed[0][key]
        for key in (("ddp", "mlp", "narrow"), ("ddp", "mlp", "from base"), ("fsdp", "mlp", "from base"))
    )
    assert float(ddp["losses"][:3].mean()) < float(base["losses"][:3].mean()) - 0.01
    for part in ("weights", "state"):
        assert largest_difference(ddp[part], fsdp[part]) < 1e-6


# --- a finished base model


def test_init_from_a_finished_base(tmp_path: Path) -> None:
    base_path = tmp_path / "base.ckpt"
    schedule = SCHEDULES["CosineAnnealingLR"]
    make = partial(resnet, 4, optimizer=ADAMW, lr_scheduler=schedule)
    base = fit(make(), tmp_path, steps=15)
    base.trainer.save_checkpoint(base_path)

    def without_decay_of_vectors(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        vectors, others = [], []
        for parameter in parameters:
            (vectors if parameter.ndim == 1 else others).append(parameter)
        return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": others}], lr=2e-2)

    other = partial(resnet, 4, optimizer=without_decay_of_vectors, lr_scheduler=schedule, init_from=str(base_path))
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            seen.update(state(SimpleNamespace(trainer=trainer, module=pl_module)))
            seen.update(
                step=trainer.global_step, epoch=trainer.current_epoch, lr=trainer.optimizers[0].param_groups[0]["lr"]
            )

    narrow = fit(other(), tmp_path, Look(), steps=20)
    assert optimizer_names(narrow.module, narrow.trainer.optimizers[0]) != optimizer_names(
        base.module, base.trainer.optimizers[0]
    )
    assert (seen.pop("step"), seen.pop("epoch"), seen.pop("lr")) == (0, 0, 2e-2)
    assert_identical(seen, state(base))
    wide = fit(other(), tmp_path, UpscaleCallback(0, 8), steps=20)
    assert gap(narrow, wide) < 1e-9
    assert narrow.steps == list(range(1, 21))

    # resuming overrides it, and does not need it
    whole = fit(other(), tmp_path, UpscaleCallback(8, 8), Checkpoints(tmp_path), steps=20, enable_checkpointing=True)
    pre = torch.load(tmp_path / "pre-upscale-8.ckpt", weights_only=True)
    assert pre["hyper_parameters"]["init_from"] is None
    base_path.unlink()
    for step in (6, 8, 12):
        resumed = fit(other(), tmp_path, UpscaleCallback(8, 8), ckpt=tmp_path / f"step={step}.ckpt", steps=20)
        assert torch.equal(resumed.losses, whole.losses[step:])
        assert_identical(state(resumed), state(whole))
    assert ResNet18.load_from_checkpoint(tmp_path / "step=12.ckpt").width == 8


def test_init_from_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "base.ckpt"
    fit(mlp(), tmp_path, steps=2).trainer.save_checkpoint(path)
    cases: dict[str, Callable[[], WidthScalable]] = {
        "model.init_from = .*no checkpoint": lambda: mlp(init_from=str(tmp_path / "nowhere.ckpt")),
        "model.init_from = .*width is 8, but model.width is 16": lambda: mlp(16, init_from=str(path)),
        "model.init_from = .*is of a MLP, the configured model is a ResNet18": lambda: resnet(init_from=str(path)),
        "model.init_from = .*model.hidden_layers is 3 there and 2 here": lambda: mlp(
            hidden_layers=2, init_from=str(path)
        ),
        "model.init_from = .*model.base_width is 4 there and 8 here": lambda: mlp(base_width=8, init_from=str(path)),
        "model.init_from = .*AdamW.*model.optimizer makes .*SGD": lambda: mlp(optimizer=SGD, init_from=str(path)),
    }
    for message, make in cases.items():
        with pytest.raises(ValueError, match=message):
            fit(make(), tmp_path)


# --- bad input


class StaleOptimizer(MLP):
    """Hands out its first optimizer for ever."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = super().configure_optimizers()
        return self.kept


def refused(message: str, module: WidthScalable, folder: Path, *callbacks: Callback, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message):
        fit(module, folder, *callbacks, **settings)
    assert module._trainer is None or module.trainer.global_step == 0, "it was found out too late"


def test_bad_growth_is_refused_before_training(tmp_path: Path) -> None:
    refused(
        "UpscaleCallback.at_step = 50 is never reached: trainer.max_steps = 50",
        mlp(),
        tmp_path,
        UpscaleCallback(50, 24),
    )
    epochs: Any = {"steps": -1, "max_epochs": 3}
    refused(
        "UpscaleCallback.at_step = 30 is never reached: the run has 30 steps",
        mlp(),
        tmp_path,
        UpscaleCallback(30, 24),
        **epochs,
    )
    both: Any = {"steps": 100, "max_epochs": 3}
    refused(
        "UpscaleCallback.at_step = 40 is never reached: the run has 30 steps",
        mlp(),
        tmp_path,
        UpscaleCallback(40, 24),
        **both,
    )
    accumulating: Any = epochs | {"accumulate_grad_batches": 2}
    refused("UpscaleCallback.at_step = 15 is never reached", mlp(), tmp_path, UpscaleCallback(15, 24), **accumulating)
    refused(
        "UpscaleCallback.width = 20 does not fit the width before it, 8: .*multiple",
        mlp(),
        tmp_path,
        UpscaleCallback(20, 20),
    )
    refused(
        "UpscaleCallback.width = 4 is not wider than the width before it, 8", mlp(), tmp_path, UpscaleCallback(20, 4)
    )
    refused("UpscaleCallback.width = 15 does not fit .*divisible by 2 heads", gpt2(), tmp_path, UpscaleCallback(20, 15))
    refused(
        r"UpscaleCallback.width = \[16, 6\] does not fit",
        mlp([8, 4], base_width=[4, 4]),
        tmp_path,
        UpscaleCallback(20, [16, 6]),
    )
    refused(r"UpscaleCallback.width = \[16, 16\] does not fit", mlp([8, 8, 8]), tmp_path, UpscaleCallback(20, [16, 16]))
    second = [UpscaleCallback(10, 16), UpscaleCallback(20, 24)]
    refused("UpscaleCallback.width = 24 does not fit the width before it, 16", mlp(), tmp_path, *second)
    second = [UpscaleCallback(10, 16), UpscaleCallback(20, 8)]
    refused("UpscaleCallback.width = 8 is not wider than the width before it, 16", mlp(), tmp_path, *second)
    with pytest.raises(ValueError, match=r"UpscaleCallback.at_step must be at least 0"):
        UpscaleCallback(-1, 24)
    with pytest.raises(ValueError, match=r"UpscaleCallback.lr must be positive"):
        UpscaleCallback(1, 24, lr=0.0)
    with pytest.raises(ValueError, match=r"UpscaleCallback.noise must be"):
        UpscaleCallback(1, 24, noise=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model.width = 9 is not divisible by model.heads = 2"):
        gpt2(9)


def test_bad_noise_is_refused_before_training(tmp_path: Path) -> None:
    narrow, wide = gpt2(), gpt2(16)
    for module in (narrow, wide):
        module.configure_model()
    mupscale.upscale(narrow.net, wide.net, noise=mupscale.SignalNoise(0.5)).save_noise(tmp_path / "gpt2.json")
    noise = mupscale.RecordedNoise(tmp_path / "gpt2.json")
    refused(
        "UpscaleCallback.noise: RecordedNoise: .*another architecture",
        mlp(),
        tmp_path,
        UpscaleCallback(20, 24, noise=noise),
    )
    refused(
        "UpscaleCallback.noise: AdditiveNoise: std",
        mlp(),
        tmp_path,
        UpscaleCallback(20, 24, noise=mupscale.AdditiveNoise(-1)),
    )
    run = fit(gpt2(), tmp_path, UpscaleCallback(5, 16, noise=noise), steps=10)
    assert run.module.width == 16


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (lambda o: schedules.CosineAnnealingLR(o, 50, eta_min=1e-4), "eta_min"),
        (lambda o: schedules.ReduceLROnPlateau(o, min_lr=1e-5), "min_lr"),
        (lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=50), "max_lr"),
        (lambda o: schedules.CyclicLR(o, 1e-3, 1e-2, cycle_momentum=False), "max_lr"),
        (
            lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.CosineAnnealingLR(o, 50, 1e-4)], [5]),
            "eta_min",
        ),
        (lambda o: torch.optim.swa_utils.SWALR(o, 0.05), "swa_lr"),
    ],
)
def test_absolute_rates_are_refused(schedule: Any, name: str, tmp_path: Path) -> None:
    refused(f"model.lr_scheduler: .*{name}", mlp(lr_scheduler=schedule), tmp_path)


def test_a_stale_optimizer_is_found_out_at_the_swap(tmp_path: Path) -> None:
    module = StaleOptimizer(8, base_width=4, inputs=6, outputs=3)
    with pytest.raises(
        RuntimeError,
        match=r"StaleOptimizer.configure_optimizers returned an optimizer over the old parameters.*pre-upscale-20",
    ):
        fit(module, tmp_path, UpscaleCallback(20, 24))


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mlp.ckpt"
    fit(mlp(), tmp_path, steps=2).trainer.save_checkpoint(path)
    refused("is of a MLP, the configured model is a GPT2", gpt2(), tmp_path, ckpt=path)
    refused("model.hidden_layers is 3 there and 2 here", mlp(hidden_layers=2), tmp_path, ckpt=path)
    refused("model.base_width is 4 there and 8 here", mlp(base_width=8), tmp_path, ckpt=path)
    with pytest.raises(ValueError, match=r"another architecture: it differs in .'net.readout.weight'"):
        MLP.load_from_checkpoint(path, outputs=5)
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0", "epoch": 0, "global_step": 0}, path)
    refused("not saved by a width-scalable module", mlp(), tmp_path, ckpt=path)


# --- a module of somebody else


class Digits(WidthScalable):
    """A convolutional network with a plain linear readout: `build` and `loss`, nothing more."""

    def build(self, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 3), nn.GroupNorm(2, width), nn.GELU(), nn.Conv2d(width, 2 * width, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 3),
        )  # fmt: skip

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Recurrent(WidthScalable):
    def build(self, width: int) -> nn.Module:
        return nn.ModuleDict({"lstm": nn.LSTM(6, width, num_layers=2), "readout": nn.Linear(width, 3)})

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden, _ = self.net["lstm"](batch[0].unflatten(1, (1, 6)).transpose(0, 1))
        return F.cross_entropy(self.net["readout"](hidden[-1]), batch[1])


class SkipNet(nn.Module):
    """Its second layer reads width and the 6 input features, which do not grow."""

    width_blocks = {"b.weight": {1: [(4, 1, 3), (6, 1, 1)]}}  # noqa: RUF012

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.readout = nn.Linear(6, width), nn.Linear(width + 6, width), mupscale.Readout(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(F.relu(self.b(torch.cat([F.relu(self.a(x)), x], dim=1))))


class Skip(Digits):
    def build(self, width: int) -> nn.Module:
        return SkipNet(width)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Digits, Recurrent, Skip])
def test_a_module_of_somebody_else(kind: type[WidthScalable], optimizer: str, tmp_path: Path) -> None:
    make = partial(kind, 4, base_width=4, optimizer=OPTIMIZERS[optimizer])
    narrow, wide = fit(make(), tmp_path), fit(make(), tmp_path, UpscaleCallback(20, 12))
    assert gap(narrow, wide) < 1e-9
    saver = Checkpoints(tmp_path)
    whole = fit(
        make(), tmp_path, UpscaleCallback(20, 12, noise=mupscale.AdditiveNoise(0.1)), saver, enable_checkpointing=True
    )
    resumed = fit(make(), tmp_path, UpscaleCallback(20, 12), ckpt=tmp_path / "step=33.ckpt")
    assert_identical(state(resumed), state(whole))
    assert kind.load_from_checkpoint(tmp_path / "step=33.ckpt").width == 12
