"""UpscaleCallback inside `Trainer.fit`: a run that widens without noise has the loss curve of a run that does not."""

import copy
import csv
from functools import partial, partialmethod
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tiers import slow_except
from tiny_modules import ADAMW, MODELS, OPTIMIZERS, SCHEDULES, SGD, mlp
from torch import nn
from torch.optim.swa_utils import AveragedModel
from training_runs import BeforeStep, fit, gap, rates

import mupscale
from mupscale.callbacks.upscale import UpscaleCallback


@pytest.mark.parametrize(
    ("model", "optimizer"),
    slow_except(
        list(product(MODELS, OPTIMIZERS)), ("mlp", "adamw"), kept=[("mlp of unequal widths", "sgd"), ("gpt2", "adamw")]
    ),
)
def test_the_curve_goes_on_as_if_nothing_had_happened(model: str, optimizer: str, tmp_path: Path) -> None:
    make, target = MODELS[model]
    for precision, steps, at_step, tolerance in (("64-true", 24, 10, 1e-9), ("32-true", 20, 10, 1e-4)):
        settings: Any = {"precision": precision, "steps": steps}
        narrow = fit(make(optimizer=OPTIMIZERS[optimizer]), tmp_path, **settings)
        wide = fit(
            make(optimizer=OPTIMIZERS[optimizer]), tmp_path, UpscaleCallback(at_step, target, noise=None), **settings
        )
        assert wide.module.width == target
        assert wide.steps == list(range(1, steps + 1))
        assert narrow.losses.std() > 0.01, "something must happen"
        assert gap(narrow, wide) < tolerance


@torch.no_grad()
def nudge(trainer: Trainer) -> None:
    """Moves every weight by about one bfloat16 ulp, up or down: what rounding may do to a run."""
    for parameter in trainer.lightning_module.net.parameters():
        signs = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).sign()
        parameter.mul_(1 + 2.0**-8 * signs)


BFLOAT16 = list(product(MODELS, OPTIMIZERS, ["bf16-mixed", "bf16-true"]))
BFLOAT16_KEPT = [("mlp", "adamw", "bf16-mixed"), ("mlp", "sgd", "bf16-true")]


@pytest.mark.parametrize(("model", "optimizer", "precision"), slow_except(BFLOAT16, kept=BFLOAT16_KEPT))
def test_in_bfloat16_the_curves_differ_by_rounding(model: str, optimizer: str, precision: str, tmp_path: Path) -> None:
    make, target = MODELS[model]
    settings: Any = {"precision": precision, "steps": 20}
    narrow, nudged, wide = (
        fit(make(optimizer=OPTIMIZERS[optimizer]), tmp_path, *extra, **settings)
        for extra in ([], [BeforeStep(10, nudge)], [UpscaleCallback(10, target, noise=None)])
    )
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in wide.module.net.parameters()} == {dtype}
    # GPT-2 computes its loss in float32
    assert wide.module.train_loss.dtype == (torch.float32 if model == "gpt2" else dtype)
    # two curves that rounding moved may lie on either side; a loss in bfloat16 is itself rounded
    assert gap(narrow, wide) <= 2 * gap(narrow, nudged) + float(narrow.losses.max()) * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, kept=["SequentialLR", "ReduceLROnPlateau"]))
def test_schedules_go_on(schedule: str, tmp_path: Path) -> None:
    make = partial(mlp, optimizer=ADAMW, lr_scheduler=SCHEDULES[schedule])
    narrow, wide = fit(make(), tmp_path), fit(make(), tmp_path, UpscaleCallback(15, 24, noise=None))
    assert gap(narrow, wide) < 1e-9
    # what the run would have if it had been wide from the start
    constant = rates(fit(mlp(24, optimizer=ADAMW), tmp_path, steps=1))
    at_first = rates(fit(mlp(optimizer=ADAMW), tmp_path, steps=1))
    passed = rates(narrow)["net.layers.1.weight"] / at_first["net.layers.1.weight"]
    assert passed < 0.9
    assert rates(wide) == pytest.approx({name: rate * passed for name, rate in constant.items()}, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_compiled(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    # inductor takes half a minute
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    make, target = MODELS[model]
    narrow = fit(make(optimizer=ADAMW), tmp_path, steps=10, limit_val_batches=0)
    wide = fit(
        make(optimizer=ADAMW, compile=True),
        tmp_path,
        UpscaleCallback(5, target, noise=None),
        steps=10,
        limit_val_batches=0,
    )
    assert gap(narrow, wide) < 1e-9
    parts = 2 if model == "gpt2" else 1  # a block, for all of them, and the head
    assert len(compiled) == 2 * parts, "once narrow, once wide"


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("noise", [None, mupscale.SignalNoise(0.5)])
def test_the_average_is_widened_too(noise: Any, tmp_path: Path) -> None:
    make = partial(mlp, optimizer=SGD)
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
    wide = fit(make(), tmp_path, UpscaleCallback(12, 24, noise=noise), Look(), growing, steps=25)
    assert isinstance(growing._average_model, AveragedModel)
    assert int(growing._average_model.n_averaged) == 25
    expected = {}
    for name in ("before", "narrow"):
        expected[name] = wide.module.network(24).double()
        mupscale.upscale(seen[name], expected[name])
    averages, models = (dict(net.named_parameters()) for net in (seen["after"], seen["wide"]))
    pairs = zip(expected["before"].named_parameters(), expected["narrow"].parameters(), strict=True)
    for (name, average), model in pairs:
        noise_of_average, noise_of_model = averages[name] - average, models[name] - model
        assert noise_of_average.allclose(noise_of_model, rtol=0, atol=1e-12), f"{name}: the noise differs"
    if noise is None:
        narrow = fit(make(), tmp_path, ema, steps=25)
        assert gap(narrow, wide) < 1e-9
        ours, theirs = (run.trainer.callback_metrics["val/loss"] for run in (wide, narrow))
        assert float(ours / theirs) == pytest.approx(1, abs=1e-6)
        final = wide.module.network(24).double()
        mupscale.upscale(narrow.module.net, final)  # at the end of a run the module holds the average
        for (name, ours), theirs in zip(final.state_dict().items(), wide.module.net.state_dict().values(), strict=True):
            assert ours.allclose(theirs, rtol=0, atol=1e-10), name


def test_every_logger_records_the_swap(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, "tb"), CSVLogger(tmp_path, "csv")]
    monitor = LearningRateMonitor(logging_interval="step")
    growth = UpscaleCallback(12, 24, noise=mupscale.AdditiveNoise(0.1))
    run = fit(mlp(lr_scheduler=SCHEDULES["LambdaLR"]), tmp_path, monitor, growth, steps=25, logger=loggers)
    events = EventAccumulator(loggers[0].log_dir).Reload()
    logged = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    parameters = sum(p.numel() for p in run.module.parameters())
    assert growth.summary["parameters"] == parameters
    for name in ("loss_before", "loss_after"):
        assert [(e.step, e.value) for e in logged[f"growth/{name}"]] == [(12, pytest.approx(growth.summary[name]))]
    assert growth.summary["loss_before"] == pytest.approx(float(run.losses[12]), abs=0.2)
    assert [e.value for e in logged["growth/parameters"]] == [parameters]
    assert [e.value for e in logged["growth/width"]] == [24]
    assert 0 < logged["growth/pause_seconds"][0].value < 5
    assert [e.step for e in logged["lr-AdamW/pg1"]] == list(range(25))
    (text,) = events.Tensors("growth/plan/text_summary")
    assert b"layers.1.weight" in text.tensor_proto.string_val[0]
    with Path(loggers[1].log_dir, "metrics.csv").open() as file:
        values = [row["growth/loss_after"] for row in csv.DictReader(file)]
    assert [float(value) for value in values if value] == [growth.summary["loss_after"]]
