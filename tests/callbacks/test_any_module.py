"""LightningModules that do not know mupscale grow in the middle of a run, by one added callback."""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, EMAWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_modules import EXAMPLES, Autoencoder, Example, ManualAccumulation, UNet, rows
from tiers import slow_except
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset
from training_runs import Losses, quiet_trainer

import mupscale
from mupscale import AdditiveNoise
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.growth_schedule import GrowthSchedule
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.widening.records import records_of

GROWS_AT, BATCHES = 4, 14
HIDDEN = {"hparams": {"hidden": 16}}


class Keep(Checkpoint):
    """Saves after every optimizer step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.paths: dict[int, Path] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step not in self.paths:
            self.paths[trainer.global_step] = self.folder / f"{trainer.global_step}.ckpt"
            trainer.save_checkpoint(self.paths[trainer.global_step], weights_only=False)


def fit(
    module: LightningModule, kind: str, folder: Path, *callbacks: Callback, ckpt: Path | None = None, **settings: Any
) -> list[float]:
    """Trains for two epochs; the loss of every backward pass."""
    seed_everything(1, verbose=False)
    losses = Losses()
    settings = {"max_epochs": 2, "precision": "64-true", **settings}
    trainer = quiet_trainer(
        **settings, logger=[DummyLogger()], default_root_dir=folder, callbacks=[losses, *callbacks], log_every_n_steps=1
    )
    data = TensorDataset(*rows(kind, 8 * BATCHES // 2))
    trainer.fit(module, DataLoader(data, 8, shuffle=True), ckpt_path=ckpt)
    return losses.values


FAST = ("autoencoder", "GAN", "manual optimization", "frozen teacher", "groups without decay")


def new(example: Example) -> LightningModule:
    seed_everything(0, verbose=False)
    return example.make()


@pytest.mark.parametrize("name", slow_except(EXAMPLES, *FAST))
def test_a_module_grows_exactly_by_one_added_line(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    wanted = fit(new(example), example.kind, tmp_path)
    module = new(example)
    before = sum(parameter.numel() for parameter in module.parameters())
    losses = fit(module, example.kind, tmp_path, UpscaleCallback(at_step=GROWS_AT, noise=None, **example.growth))
    assert sum(parameter.numel() for parameter in module.parameters()) > before
    assert len(losses) == len(wanted) >= BATCHES
    assert losses == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    if name == "GAN":  # what the run has changed stays
        assert module.steps_done == BATCHES
        assert dict(module.hparams) == {"latent": 4, "generator": 24, "discriminator": 12}
    if name == "language model":  # what depends on the size follows
        assert module.scale == 32**0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(EXAMPLES, "GAN", "frozen teacher", "groups without decay", kept=["U-Net"]))
def test_a_run_resumes_exactly_before_and_after_the_growth(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    swap = partial(UpscaleCallback, GROWS_AT, noise=AdditiveNoise(0.1), **example.growth)
    keep, uninterrupted = Keep(tmp_path), new(example)
    wanted = fit(uninterrupted, example.kind, tmp_path, swap(), ExactResume(), keep, enable_checkpointing=True)
    for step in (2, GROWS_AT, max(keep.paths) - 2):
        resumed = new(example)
        losses = fit(resumed, example.kind, tmp_path, swap(), ExactResume(), ckpt=keep.paths[step])
        assert 0 < len(losses) < len(wanted)
        assert losses == wanted[-len(losses) :]
        for key, value in uninterrupted.state_dict().items():
            assert torch.equal(resumed.state_dict()[key], value)


class SumOfUnits(LightningModule):
    """Adds up its units without a weight, so that no copies of them have the same sum."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(6, hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layer(batch[0]).tanh().sum(-1) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unsaved(Autoencoder):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.hparams.clear()


class BackwardByHand(ManualAccumulation):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = F.cross_entropy(self.head(self.body(batch[0])), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Carried(Autoencoder):
    """Adds what its units were at the step before: they are in an attribute, which does not grow."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.units: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        units = self.encoder[1](self.encoder[0](batch[0]))
        before = self.before(units)
        self.units = units.detach()
        return F.mse_loss(self.decoder(self.encoder[2](units + 0.1 * before)), batch[0])

    def before(self, units: Tensor) -> Tensor:
        return torch.zeros_like(units) if self.units is None else self.units[: len(units)]


class CarriedInBuffer(Carried):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        del self.units
        self.register_buffer("units", torch.zeros(8, hidden))


class KeptToLookAt(Carried):
    def before(self, units: Tensor) -> Tensor:
        return torch.zeros_like(units)


class MomentumEncoder(Autoencoder):
    """Moves its second encoder in `training_step`, both by a new tensor and in place."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (first, *others), own = self.slow.parameters(), [parameter.detach() for parameter in self.encoder.parameters()]
        first.data = 0.9 * first.data + 0.1 * own[0]
        for parameter, value in zip(others, own[1:], strict=True):
            parameter.lerp_(value, 0.1)
        return super().training_step(batch, batch_idx) + F.mse_loss(self.encoder(batch[0]), self.slow(batch[0]))


class Diffusion(Autoencoder):
    """Its buffer is not in checkpoints, and was computed before the run chose a precision."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.register_buffer("signal", (1 - torch.linspace(1e-4, 0.1, 20)).cumprod(0).sqrt(), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        signal = self.signal[torch.randint(20, (len(batch[0]), 1))]
        noise = torch.randn_like(batch[0])
        return F.mse_loss(self.decoder(self.encoder(signal * batch[0] + (1 - signal**2).sqrt() * noise)), noise)


class SeenByHooks(Autoencoder):
    """Its hooks call it `self`, one of them on a gradient."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.seen: dict[str, Tensor] = {}
        self.encoder[1].register_forward_hook(lambda part, inputs, output: self.seen.update(units=output))
        self.encoder[2].weight.register_hook(lambda gradient: 0.5 * gradient)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.seen["units"].square().mean()


class HeldElsewhere(Autoencoder):
    """Calls its layers by a list, an object and functions."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        encoder = self.encoder
        self.layers, self.held = [self.decoder[0], self.decoder[2]], Cache()
        self.held.kept = self.encoder
        self.units, self.codes = partial(nn.Module.__call__, self.encoder[0]), lambda x: encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.layers[1](self.layers[0](self.codes(batch[0])).relu())
        return F.mse_loss(out, batch[0]) + 0.1 * self.units(batch[0]).square().mean() + self.held.kept(batch[0]).mean()


@pytest.mark.parametrize("kind", [SeenByHooks, HeldElsewhere])
def test_code_that_refers_to_parts_of_the_module_refers_to_the_wide_ones(kind: type, tmp_path: Path) -> None:
    keep, runs = Keep(tmp_path), []
    growths = lambda: [UpscaleCallback(step, hparams={"hidden": n}, noise=None) for step, n in ((2, 16), (6, 48))]  # noqa: E731
    for callbacks in ([ExactResume()], [*growths(), ExactResume(), keep]):
        seed_everything(0, verbose=False)
        runs.append(fit(kind(), "points", tmp_path, *callbacks, enable_checkpointing=True))
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
    again = fit(kind(), "points", tmp_path, *growths(), ExactResume(), ckpt=keep.paths[4])
    assert again == runs[1][-len(again) :]


class AverageFromTheFirstStep(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not hasattr(self, "average"):
            self.average = Average(pl_module)


def test_weights_outside_that_the_first_step_makes_are_named_after_it(tmp_path: Path) -> None:
    module = Autoencoder()
    with pytest.raises(UserError, match="the attribute 'average' of the callback AverageFromTheFirstStep"):
        fit(module, "points", tmp_path, AverageFromTheFirstStep(), UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))
    assert module.trainer.global_step == 1


@pytest.mark.parametrize("kind", [CarriedInBuffer, KeptToLookAt, MomentumEncoder, Diffusion])
def test_tensors_from_step_to_step_grow_in_a_buffer_and_others_do_not_matter(kind: type, tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    wanted = fit(kind(), "points", tmp_path)
    seed_everything(0, verbose=False)
    losses = fit(kind(), "points", tmp_path, UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))
    assert losses == pytest.approx(wanted, rel=1e-9, abs=1e-12)


class LeastRateOfItsOwn(Autoencoder):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [Decaying(optimizer)]


class Decaying(schedules.LRScheduler):
    def get_lr(self) -> list[float]:
        return [max(1e-5, rate / (1 + self.last_epoch)) for rate in [1e-3] * len(self.base_lrs)]


class DecayingRelatively(schedules.LRScheduler):
    def get_lr(self) -> list[float]:
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


class ClipsEntries(Autoencoder):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.01, "value")


class OfOwnKind(torch.optim.AdamW):
    pass


class Optimized(Autoencoder):
    """With an optimizer and a schedule of any class."""

    def __init__(self, hidden: int = 8, lr: float = 0.01, kind: Any = torch.optim.AdamW, schedule: Any = None) -> None:
        super().__init__(hidden, lr)
        self.save_hyperparameters()
        self.kind, self.schedule = kind, schedule

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}] if self.schedule else []


class Lazy(Autoencoder):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.encoder[0] = nn.LazyLinear(hidden)


class OneRateByHand(Optimized):
    """As nanoGPT sets it."""

    since = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups if self.trainer.global_step >= self.since else ():
            group["lr"] = self.hparams.lr * (1 - self.trainer.global_step / 100)


class RatesByHand(Optimized):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.97


class Teacher(Autoencoder):
    """A slow copy of the network, in a list so that the optimizer does not get it."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.teacher = [copy.deepcopy(self.encoder).double()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        target = self.teacher[0](batch[0]).mean().detach()
        return super().training_step(batch, batch_idx) + 0.1 * target**2


class Average:
    def __init__(self, module: nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}


class Cache:
    kept: Tensor


class KeepsItsBatch(Autoencoder):
    """In an object, and of the shape of its first weight."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.cache = Cache()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch[0].shape == (8, 6)
        self.cache.kept = batch[0].clone()
        return super().training_step(batch, batch_idx)


class HandMadeAverage(Autoencoder):
    def on_fit_start(self) -> None:
        self.average = Average(self.encoder)


class AverageInCallback(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = Average(pl_module)


class AverageInClosure(Autoencoder):
    """Looked at every five steps, as Lookahead does."""

    def on_fit_start(self) -> None:
        slow = {name: value.detach().clone() for name, value in self.named_parameters()}
        self.look_ahead = lambda: [value.lerp_(slow[name], 0.5) for name, value in self.named_parameters()]


@pytest.mark.filterwarnings("ignore:RatesByHand sets the learning rate of AdamW by hand")
@pytest.mark.parametrize("make", [RatesByHand, KeepsItsBatch, lambda: Optimized(schedule=DecayingRelatively)])
def test_relative_rates_by_hand_and_what_stays_outside(make: Any, tmp_path: Path) -> None:
    runs = []
    for swaps in ([], [UpscaleCallback(GROWS_AT, noise=None, **HIDDEN)]):
        seed_everything(0, verbose=False)
        runs.append(fit(make(), "points", tmp_path, *swaps))
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


def test_one_rate_by_hand_is_noticed_at_its_first_change_and_refused_at_the_growth(tmp_path: Path) -> None:
    """If it begins after the check of the first batch, which refuses it otherwise."""
    module = OneRateByHand()
    module.since = 2
    with (
        pytest.warns(UserWarning, match=r"OneRateByHand sets the learning rate of AdamW by hand \(0.01 → 0.0098\)"),
        pytest.raises(UserError, match=r"with the weights and state of this step, the update of .* differs"),
    ):
        fit(module, "points", tmp_path, UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))
    assert module.trainer.global_step == GROWS_AT


def test_one_rate_by_hand_after_the_growth_stops_the_run(tmp_path: Path) -> None:
    module = OneRateByHand()
    module.since = 6
    with pytest.raises(
        UserError, match=r"differs by a factor of 0.5, and .* 0.0094 and 0.0094.*group\['lr'\] \*= factor"
    ):
        fit(module, "points", tmp_path, UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))
    assert module.trainer.global_step == 6


class AddsAGroup(Optimized):
    """Of its decoder, at a step."""

    since = 6

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.encoder.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.trainer.global_step == self.since:
            optimizer.add_param_group({"params": list(self.decoder.parameters())})


def test_a_group_that_is_added_after_the_growth_stops_the_run(tmp_path: Path) -> None:
    module, swap = AddsAGroup(), partial(UpscaleCallback, GROWS_AT, noise=None, **HIDDEN)
    with pytest.raises(UserError, match="AddsAGroup adds a group to AdamW after the growth, with a rate that does not"):
        fit(module, "points", tmp_path, swap())
    assert module.trainer.global_step == 6
    runs = []
    for swaps in ([], [swap()]):
        seed_everything(0, verbose=False)
        module = AddsAGroup()
        module.since = 2
        runs.append(fit(module, "points", tmp_path, *swaps))
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_module_that_has_the_size_already_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="hparams = {'hidden': 16}: Autoencoder has this size and does not grow"):
        fit(Autoencoder(16), "points", tmp_path, UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))


class StepsUncounted(BackwardByHand):
    """Steps an optimizer that Lightning does not wrap."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.head(self.body(batch[0])), batch[1]))
        optimizer.step()


def test_a_run_whose_steps_are_not_counted_is_named_at_its_end(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"at_step = 4: StepsUncounted did not grow. Lightning counts .* ended at step 0"
    ):
        fit(StepsUncounted(), "points", tmp_path, UpscaleCallback(GROWS_AT, hparams={"sizes": (16, 16)}))


def compiled() -> Any:
    return torch.compile(Autoencoder())


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "a width": (Autoencoder, {"width": 16}, {}, r"'width' is not among .* \(hidden, lr\)"),
    "a sum of units": (SumOfUnits, HIDDEN, {}, "does not compute and train as the narrow one.*call="),
    "not saved": (Unsaved, HIDDEN, {}, r"'hidden' is not among the hyperparameters of Unsaved \(none\).*make="),
    "another name": (Autoencoder, {"hparams": {"width": 16}}, {}, r"'width' is not among .* \(hidden, lr\)"),
    "no growth": (Optimized, {"hparams": {"kind": None}}, {}, "no parameter of Optimized becomes larger"),
    "another class": (Autoencoder, {"make": lambda: UNet()}, {}, "make returned a UNet.*same class"),
    "a failing make": (Autoencoder, {"make": lambda: 1 // 0}, {}, r"cannot be made \(ZeroDivisionError"),
    "backward by hand": (BackwardByHand, {"hparams": {"sizes": (16, 16)}}, {}, "manual_backward.*or give call="),
    "tensors from step to step": (Carried, HIDDEN, {}, r"fails.*keeps tensors in 'units'.*register_buffer"),
    "a teacher in a list": (Teacher, HIDDEN, {}, r"the attribute 'teacher' \(a list of Sequential\).*ModuleList"),
    "an average by hand": (HandMadeAverage, HIDDEN, {}, r"the attribute 'average' \(Average\).*EMAWeightAveraging"),
    "weights in a closure": (AverageInClosure, HIDDEN, {}, r"the attribute 'look_ahead' \(function\)"),
    "an average in a callback": (
        Autoencoder,
        HIDDEN,
        {"callbacks": [AverageInCallback()]},
        "the attribute 'average' of the callback AverageInCallback",
    ),
    "one rate by hand": (OneRateByHand, HIDDEN, {}, r"differs by .* OneRateByHand.on_train_batch_start does with"),
    "absolute rates of an own schedule": (LeastRateOfItsOwn, HIDDEN, {}, "Decaying sets absolute rates.*self.base_lrs"),
    "an optimizer without a rule": (
        lambda: Optimized(kind=torch.optim.Adadelta),
        HIDDEN,
        {},
        "Optimized.configure_optimizers: Adadelta is not hom.*Train",
    ),
    "an optimizer of an own class": (lambda: Optimized(kind=OfOwnKind), HIDDEN, {}, "OfOwnKind is not registered"),
    "a rate": (
        Autoencoder,
        {"hparams": {"hidden": 16, "lr": 0.1}},
        {},
        r"lr = 0.1 would not reach .*UpscaleCallback\.lr",
    ),
    "no units": (Autoencoder, {"hparams": {"hidden": 0}}, {}, r"'encoder.0.weight' would shrink, .* Give sizes larger"),
    "clipping entries": (Autoencoder, HIDDEN, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, '"norm"'),
    "clipping entries by itself": (ClipsEntries, HIDDEN, {}, r'ClipsEntries.clip_gradients\(…, "value"\) clips'),
    "a compiled module": (compiled, HIDDEN, {}, r"self.net.compile\(\)"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_layer_without_a_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"UpscaleCallback: Lazy: parameter 'encoder.0.weight' is a lazy one"):
        fit(Lazy(), "points", tmp_path, UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_grow_is_refused_before_the_first_step_with_the_remedy(case: str, tmp_path: Path) -> None:
    make, growth, settings, message = REFUSED[case]
    module = make()
    weights = copy.deepcopy(module.state_dict())
    settings = dict(settings)
    with pytest.raises(UserError, match=message):
        fit(
            module,
            "points",
            tmp_path,
            *settings.pop("callbacks", ()),
            UpscaleCallback(GROWS_AT, noise=None, **growth),
            **settings,
        )
    assert all(
        torch.equal(weights[name], value.float()) for name, value in module.state_dict().items() if value.numel()
    )


@pytest.mark.slow
def test_processes_that_hand_their_weights_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=r'ddp_fork and ddp_notebook: .* Use strategy="ddp"'):
        fit(
            Autoencoder(),
            "points",
            tmp_path,
            UpscaleCallback(GROWS_AT, noise=None, **HIDDEN),
            strategy="ddp_fork",
            devices=2,
        )


@pytest.mark.usefixtures("double")
def test_two_growths_an_average_accumulation_and_clipping(tmp_path: Path) -> None:
    example, averages = EXAMPLES["groups without decay"], []
    for swaps in (
        [],
        [UpscaleCallback(2, hparams={"width": 16}, noise=None), UpscaleCallback(4, hparams={"width": 48}, noise=None)],
    ):
        module, ema = new(example), EMAWeightAveraging(decay=0.8)
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 3}
        losses = fit(module, example.kind, tmp_path, ema, *swaps, **settings)
        averages.append((losses, module.net(rows("points", 5)[0]).flatten().tolist()))
    (wanted, before), (losses, after) = averages
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert after == pytest.approx(before, rel=1e-9)
    assert module.net[0].out_features == 48


class Scaled(Autoencoder):
    """Has a number that depends on its size, and would differ if it did not follow."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.scale = 1 / hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        units = self.encoder[1](self.encoder[0](batch[0]))
        loss = F.mse_loss(self.decoder(self.encoder[2](units)), batch[0])
        return loss + 0.1 * self.scale * units.square().sum(-1).mean()


def test_what_depends_on_the_size_follows_each_growth_and_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, runs = Keep(tmp_path), []
    growths = lambda: [UpscaleCallback(step, hparams={"hidden": n}, noise=None) for step, n in ((2, 16), (6, 48))]  # noqa: E731
    for callbacks in ([], [*growths(), ExactResume(), keep]):
        seed_everything(0, verbose=False)
        module = Scaled()
        runs.append(fit(module, "points", tmp_path, *callbacks, enable_checkpointing=True))
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
    assert module.scale == 1 / 48
    monkeypatch.setattr(GrowthSchedule, "_find_hints", None)
    for step in (1, 4, 8):
        again = fit(Scaled(), "points", tmp_path, *growths(), ExactResume(), ckpt=keep.paths[step])
        assert again == runs[1][-len(again) :]


class SetsAName(Scaled):
    """Sets a plain attribute once, before its growths."""

    phase = 0

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.phase = 1

    def on_train_start(self) -> None:
        self.phase = 2


def test_what_the_run_sets_before_a_growth_stays_after_the_next(tmp_path: Path) -> None:
    module = SetsAName()
    growths = [UpscaleCallback(step, hparams={"hidden": n}, noise=None) for step, n in ((2, 16), (6, 48))]
    fit(module, "points", tmp_path, *growths)
    assert (module.phase, module.scale) == (2, 1 / 48)


class WithFactory(Autoencoder):
    """Its schedule is a function in an attribute, which the constructor does not get."""

    make_schedule: Any = None

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.make_schedule = None


class UnderMuP(LightningModule):
    """A network with base shapes, inside of a module without any."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        base, delta, net = (
            nn.Sequential(nn.Linear(6, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 3))
            for n in (4, 8, hidden)
        )
        self.net = mupscale.set_base_shapes(net, base, delta)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return mupscale.apply_mup(torch.optim.AdamW(self.parameters(), lr=0.01), self)


def test_what_a_run_has_set_stays_where_the_wide_module_has_nothing(tmp_path: Path) -> None:
    module = WithFactory()
    module.make_schedule = schedules.StepLR
    fit(module, "points", tmp_path, UpscaleCallback(GROWS_AT, noise=None, **HIDDEN))
    assert module.make_schedule is schedules.StepLR


def test_widths_are_those_of_the_last_growth(tmp_path: Path) -> None:
    """Clipping reads them, and the rates of a growth after it."""
    module = UnderMuP()
    fit(
        module,
        "rows",
        tmp_path,
        *(UpscaleCallback(step, hparams={"hidden": n}, noise=None) for step, n in ((2, 12), (5, 24))),
    )
    wanted, found = records_of(UnderMuP(24)), records_of(module)
    assert {name: record.scale for name, record in found.items()} == {
        name: pytest.approx(record.scale) for name, record in wanted.items()
    }
    for group in module.trainer.optimizers[0].param_groups:
        for parameter in group["params"]:
            assert group["lr"] == pytest.approx(0.01 * (4 / 24 if parameter.shape == (24, 24) else group["lr"] / 0.01))


class BuiltInSetup(LightningModule):
    """Makes its network in `setup`, as many modules do that ask the data for a size."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.Linear(6, self.hparams["hidden"]), nn.Tanh(), nn.Linear(self.hparams["hidden"], 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@dataclass
class Sizes:
    dim: int = 8
    classes: int = 3


class NestedSizes(BuiltInSetup):
    def __init__(self, cfg: Any) -> None:
        super(BuiltInSetup, self).__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        cfg = self.hparams["cfg"]
        dim, classes = (cfg["dim"], cfg["classes"]) if isinstance(cfg, dict) else (cfg.dim, cfg.classes)
        self.net = nn.Sequential(nn.Linear(6, dim), nn.Tanh(), nn.Linear(dim, classes))


MADE: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "in setup": (BuiltInSetup, {"hidden": 16}, {"hidden": 16}),
    "an entry of a mapping": (lambda: NestedSizes(vars(Sizes())), {"cfg.dim": 16}, {"cfg": {"dim": 16, "classes": 3}}),
    "a mapping": (lambda: NestedSizes(vars(Sizes())), {"cfg": {"dim": 16}}, {"cfg": {"dim": 16, "classes": 3}}),
    "a dataclass": (lambda: NestedSizes(Sizes()), {"cfg.dim": 16}, {"cfg": Sizes(16)}),
}


@pytest.mark.parametrize("case", MADE)
def test_networks_of_setup_and_nested_arguments_grow(case: str, tmp_path: Path) -> None:
    make, changes, hparams = MADE[case]
    runs = []
    for swaps in ([], [UpscaleCallback(GROWS_AT, hparams=changes, noise=None)]):
        seed_everything(0, verbose=False)
        module = make()
        runs.append(fit(module, "rows", tmp_path, *swaps))
    assert runs[1] == pytest.approx(runs[0], rel=1e-9)
    assert module.net[0].out_features == 16
    assert dict(module.hparams) == hparams


def test_a_nested_argument_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'cfg.width' is not among the hyperparameters of NestedSizes \(cfg\)"):
        fit(
            NestedSizes(vars(Sizes())),
            "rows",
            tmp_path,
            UpscaleCallback(GROWS_AT, hparams={"cfg.width": 16}, noise=None),
        )


def test_a_wide_checkpoint_loads_into_a_narrow_module_for_a_test_and_by_its_class(tmp_path: Path) -> None:
    example, keep = EXAMPLES["autoencoder"], Keep(tmp_path)
    module, swap = new(example), partial(UpscaleCallback, GROWS_AT, noise=None, **HIDDEN)
    fit(module, example.kind, tmp_path, swap(), keep, enable_checkpointing=True)
    wide = keep.paths[max(keep.paths)]
    loaded = Autoencoder.load_from_checkpoint(wide, weights_only=False)
    assert torch.equal(loaded.encoder[0].weight, module.encoder[0].weight.float())
    narrow = Autoencoder()
    data = DataLoader(TensorDataset(*rows("points", 4)), batch_size=4)
    trainer = quiet_trainer(callbacks=[swap()], precision="64-true")
    trainer.predict(narrow, data, ckpt_path=wide, weights_only=False)
    assert torch.equal(narrow.encoder[0].weight, module.encoder[0].weight)


def test_a_narrow_checkpoint_loads_into_a_module_that_has_grown(tmp_path: Path) -> None:
    """The best one may be older than the growth; of `make` alone it is not known how the module was made."""
    keep = Keep(tmp_path)
    data = DataLoader(TensorDataset(*rows("points", 4)), batch_size=4)
    for growth in (HIDDEN, {"make": lambda: Autoencoder(16)}):
        module, swap = Autoencoder(), UpscaleCallback(GROWS_AT, noise=None, **growth)
        fit(module, "points", tmp_path, swap, keep, enable_checkpointing=True)
        assert module.encoder[0].out_features == 16
        if growth is HIDDEN:
            module.trainer.predict(module, data, ckpt_path=keep.paths[2], weights_only=False)
            saved = torch.load(keep.paths[2], weights_only=False)["state_dict"]
            assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
            continue
        with pytest.raises(UserError, match=r"make: the checkpoint was written before the growth.*a new module"):
            module.trainer.predict(module, data, ckpt_path=keep.paths[2], weights_only=False)


class Residual(LightningModule):
    """Residual blocks, and a `training_step` whose second argument has another name than Lightning's."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), *(Branch(width) for _ in range(depth)), nn.Linear(width, 3))

    def training_step(self, batch: Any, index: int) -> Tensor:
        assert isinstance(index, int)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"depth": 5}, {"depth": 4, "width": 16}], ids=str)
def test_a_module_becomes_deeper(changes: dict[str, int], tmp_path: Path) -> None:
    """The growth moves neither the random numbers of the run nor its loss; a resumed run continues to the bit."""
    alone = fit(residual(), "rows", tmp_path)
    swap, keep = partial(UpscaleCallback, GROWS_AT, hparams=changes, noise=None), Keep(tmp_path)
    grown = fit(residual(), "rows", tmp_path, swap(), ExactResume(), keep, enable_checkpointing=True)
    assert grown[: GROWS_AT + 1] == pytest.approx(alone[: GROWS_AT + 1], rel=1e-12)
    assert abs(grown[-1] - alone[-1]) > 1e-6, "new layers learn"
    for step in (2, GROWS_AT, max(keep.paths) - 2):
        again = fit(residual(), "rows", tmp_path, swap(), ExactResume(), ckpt=keep.paths[step])
        assert again == grown[-len(again) :]
        assert 0 < len(again) < len(grown)


def residual() -> Residual:
    seed_everything(0, verbose=False)
    return Residual()
