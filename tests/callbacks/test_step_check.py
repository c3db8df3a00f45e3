"""The check of a module in a Trainer takes its real step, and leaves no trace of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning_modules import EXAMPLES, Autoencoder, Example, ManualAccumulation, WithoutDecay, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training_runs import Losses, quiet_trainer

from mupscale.callbacks.step_check import StepCheck
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.checks.check_step import Agreement
from mupscale.errors import UserError

WIDER = {"hparams": {"width": 16}}


class Net(WithoutDecay):
    """The base of the cases: an MLP under AdamW."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.width, self.steps_taken = width, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps_taken += 1
        return F.cross_entropy(self.scores(batch[0]), batch[1])

    def scores(self, x: Tensor) -> Tensor:
        return self.net(x)


class ClampsWeights(Net):
    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-0.2, 0.2)


class LimitsNorms(Net):
    """Of weights that are larger than they are at first."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for part in (part for part in self.net if isinstance(part, nn.Linear)):
            part.weight.mul_((1.2 / part.weight.norm(dim=1, keepdim=True)).clamp(max=1))


class DecaysGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(0.1 * parameter.detach())


class ClipsByHand(Net):
    """By a norm that no gradient has at first."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 50.0)


class SetsDecay(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.1


class MasksGradients(Net):
    def on_train_start(self) -> None:
        self.net[3].weight.register_hook(lambda gradient: gradient * (torch.arange(8) % 2)[:, None])


class ReplacesOptimizer(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), lr=1e-3)]


class Sharpness(Net):
    """Steps by the gradients at weights beside its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, parameters = self.optimizers(), list(self.parameters())
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [0.5 * parameter.grad / norm for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        optimizer.step()


class FactorOfWidth(Net):
    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x) * (1.1 if self.training and self.width > 8 else 1.0)


class CountsUnits(Net):
    """Into a number, which changes nothing yet."""

    total = 0.0

    def scores(self, x: Tensor) -> Tensor:
        self.total += float(self.net[0](x).square().sum())
        return super().scores(x)


class DividesByNorm(Net):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.register_buffer("size", torch.ones(()))

    def scores(self, x: Tensor) -> Tensor:
        hidden = self.net[0](x)
        self.size.lerp_(hidden.detach().norm(dim=-1).mean().to(self.size), 0.1)
        return self.net[1:](hidden / self.size.clone())


class Drops(Net):
    def scores(self, x: Tensor) -> Tensor:
        return self.net[1:](F.dropout(self.net[0](x), 0.3, self.training))


class OwnStep(Net):
    """Makes a step of the optimizer every other batch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        elif optimizer_closure is not None:
            optimizer_closure()


class StepsByRAdam(Net):
    """Its first five steps are of another kind."""

    def configure_optimizers(self) -> Any:
        return torch.optim.RAdam(self.parameters(), lr=0.01)


class DecaysInAHook(Net):
    """A hook of the optimizer, which is the same one after the growth."""

    factor: float | None = 0.95

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(self.change_weights)
        return optimizer

    @torch.no_grad()
    def change_weights(self, *_: Any) -> None:
        for parameter in self.parameters():
            _ = parameter.clamp_(-0.2, 0.2) if self.factor is None else parameter.mul_(self.factor)


class ClampsInAHook(DecaysInAHook):
    factor = None


class SetsDecayLater(Net):
    """Of all groups, after the growth."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups if self.trainer.global_step > 3 else ():
            group["weight_decay"] = 0.1


CASES: dict[str, tuple[type[LightningModule], str | None]] = {
    "clamped weights": (ClampsWeights, r"the update of .* differs by .* ClampsWeights.on_train_batch_end does with"),
    "norms of weights": (
        LimitsNorms,
        r"with larger weights, the update of .* differs .*LimitsNorms.on_train_batch_end",
    ),
    "decay of gradients": (DecaysGradients, r"DecaysGradients.on_before_optimizer_step does with weights, gradients"),
    "an inactive clip": (ClipsByHand, r"with larger weights, .*clip by self.clip_gradients"),
    "decay by hand": (SetsDecay, r"SetsDecay.on_train_batch_start does with"),
    "a hook on a gradient": (MasksGradients, r"does not have the hook on the gradient of 'net.3.weight'.*in __init__"),
    "another optimizer": (ReplacesOptimizer, "ReplacesOptimizer replaces optimizers of its trainer"),
    "sharpness": (Sharpness, r"Sharpness.training_step does with weights"),
    "a factor of the width": (FactorOfWidth, "differs"),
    "a number": (CountsUnits, "the attribute 'total' becomes"),
    "steps that RAdam begins otherwise": (StepsByRAdam, None),
    "a norm in a buffer": (DividesByNorm, "does not compute and train as the narrow one: the update of .* differs"),
    "random numbers of units": (Drops, None),
    "a step every other batch": (OwnStep, None),
    "decay in a hook of the optimizer": (DecaysInAHook, None),
    "a clamp in a hook of the optimizer": (ClampsInAHook, r"the optimizer of ClampsInAHook does with weights"),
}
"""Modules, and why they are refused before the first step; None if they grow exactly."""


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def fit(module: LightningModule, kind: str, folder: Path, *callbacks: Callback, **settings: Any) -> dict[str, Any]:
    """What a run leaves: losses, weights, state, metrics, random numbers and the lines of its log."""
    seed_everything(1, verbose=False)
    losses, logger = Losses(), CSVLogger(folder)
    settings = {"max_epochs": 2, "precision": "32-true", "log_every_n_steps": 1, **settings}
    trainer = quiet_trainer(logger=logger, default_root_dir=folder, callbacks=[losses, *callbacks], **settings)
    data = [x.float() if x.is_floating_point() else x for x in rows(kind, 64)]
    trainer.fit(module, DataLoader(TensorDataset(*data), 8, shuffle=True))
    log = Path(logger.log_dir, "metrics.csv")
    return {
        "losses": losses.values,
        "weights": list(module.state_dict().values()),
        "state": [x for o in trainer.optimizers for each in o.state.values() for x in each.values()],
        "rates": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
        "metrics": dict(trainer.callback_metrics),
        "random": torch.get_rng_state(),
        "log": log.read_text() if log.exists() else "",
        "own": {key: value for key, value in vars(module).items() if type(value) in (int, float, bool, str)},
    }


@pytest.mark.parametrize("case", CASES)
def test_a_module_grows_exactly_or_is_refused_before_its_first_step(case: str, tmp_path: Path) -> None:
    make, message = CASES[case]
    seed_everything(0, verbose=False)
    module = make()
    swap = UpscaleCallback(2, noise=None, **WIDER)
    if message is None:
        swap.at_step = 8 if make is StepsByRAdam else 2
        run = fit(module, "points", tmp_path / "grows", swap, precision="64-true")
        assert swap.summary["step"] == swap.at_step
        seed_everything(0, verbose=False)
        alone = fit(make(), "points", tmp_path / "alone", precision="64-true")
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-9) or make is Drops
        return
    weights = [value.clone() for value in module.state_dict().values()]
    with pytest.raises(UserError, match=message):
        fit(module, "points", tmp_path, swap)
    assert module.trainer.global_step == 0
    assert all(map(torch.equal, weights, module.state_dict().values()))


def test_decay_that_is_set_by_hand_after_the_growth_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the weight decay of groups of AdamW differs by a factor of .* 0.1 and 0.1"):
        fit(SetsDecayLater(), "points", tmp_path, UpscaleCallback(3, **WIDER))


class Clamps(Callback):
    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step:
            for parameter in pl_module.parameters():
                parameter.data.clamp_(-0.2, 0.2)


class MasksGradientsOutside(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        pl_module.net[0].weight.grad[0] = 0


class Looks(Callback):
    """Reads, which is no change."""

    seen = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen += all(bool(parameter.isfinite().all()) for parameter in pl_module.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (Clamps, "on_train_batch_end"),
        (MasksGradientsOutside, "on_before_optimizer_step"),
        (Looks, "on_train_batch_end"),
    ],
)
def test_a_callback_that_changes_weights_is_named_in_the_first_step(
    make: type[Callback], hook: str, accumulate: int, tmp_path: Path
) -> None:
    callback, swap = make(), UpscaleCallback(2, **WIDER)
    settings = {"accumulate_grad_batches": accumulate}
    if isinstance(callback, Looks):
        fit(Net(), "points", tmp_path, callback, swap, **settings)
        assert (callback.seen, hook in vars(callback), swap.summary["step"]) == (16, False, 2)
        return
    module = Net()
    with pytest.raises(UserError, match=rf"{make.__name__}.{hook} changes weights .*Do it in the hook of Net of this"):
        fit(module, "points", tmp_path, callback, swap, **settings)
    assert module.trainer.global_step <= 1


TRACES: dict[str, tuple[Example, dict[str, Any], Callable[[], list[Callback]]]] = {
    "torchmetrics": (EXAMPLES["frozen teacher"], {}, list),
    "accumulation by hand": (Example(ManualAccumulation, {"hparams": {"sizes": (16, 16)}}, "points"), {}, list),
    "schedules, accumulation, clipping, EMA": (
        EXAMPLES["groups without decay"],
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        lambda: [EMAWeightAveraging(decay=0.8)],
    ),
    "dropout, a schedule": (
        Example(lambda: EXAMPLES["language model"].make(dropout=0.1), EXAMPLES["language model"].growth, "tokens"),
        {},
        list,
    ),
    "bf16-mixed": (Example(Autoencoder, {"hparams": {"hidden": 16}}, "points"), {"precision": "bf16-mixed"}, list),
    "random numbers": (Example(Drops, WIDER, "points"), {}, list),
}


@pytest.mark.parametrize("case", TRACES)
def test_a_run_with_the_check_is_the_run_without_it(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, settings, others = TRACES[case]
    runs = []
    for agreement in (StepCheck.agreement, lambda *_: Agreement(True)):
        monkeypatch.setattr(StepCheck, "agreement", agreement)
        seed_everything(0, verbose=False)
        callbacks = [*others(), UpscaleCallback(4, noise=None, **example.growth), Stop(4)]
        runs.append(fit(example.make(), example.kind, tmp_path / str(len(runs)), *callbacks, **settings))
    with_check, without = runs
    assert with_check.keys() == without.keys()
    for key, value in without.items():
        if key in ("weights", "state", "random", "metrics"):
            torch.testing.assert_close(with_check[key], value, rtol=0, atol=0)
        else:
            assert with_check[key] == value, key
