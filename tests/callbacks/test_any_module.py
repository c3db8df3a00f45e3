"""LightningModules that do not know mupscale grow in the middle of a run, by one added callback."""

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

from mupscale import AdditiveNoise
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.methods import LiGO

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
    losses = fit(module, example.kind, tmp_path, UpscaleCallback(at_step=GROWS_AT, **example.growth))
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


@pytest.mark.parametrize("kind", [CarriedInBuffer, KeptToLookAt])
def test_tensors_from_step_to_step_grow_in_a_buffer_and_others_do_not_matter(kind: type, tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    wanted = fit(kind(), "points", tmp_path)
    seed_everything(0, verbose=False)
    losses = fit(kind(), "points", tmp_path, UpscaleCallback(GROWS_AT, **HIDDEN))
    assert losses == pytest.approx(wanted, rel=1e-9, abs=1e-12)


class LeastRate(Autoencoder):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [schedules.CosineAnnealingLR(optimizer, 30, eta_min=1e-5)]


def compiled() -> Any:
    return torch.compile(Autoencoder())


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "a width": (Autoencoder, {"width": 16}, {}, r"width needs a Growable module.*hparams=\{\.\.\.\}"),
    "a sum of units": (SumOfUnits, HIDDEN, {}, "does not compute and train as the narrow one.*call="),
    "not saved": (Unsaved, HIDDEN, {}, r"'hidden' is not among the hyperparameters of Unsaved \(none\).*make="),
    "another name": (Autoencoder, {"hparams": {"width": 16}}, {}, r"'width' is not among .* \(hidden, lr\)"),
    "no growth": (Autoencoder, {"hparams": {"lr": 0.1, "hidden": 8}}, {}, "no parameter of Autoencoder becomes larger"),
    "another class": (Autoencoder, {"make": lambda: UNet()}, {}, "make returned a UNet.*same class"),
    "a failing make": (Autoencoder, {"make": lambda: 1 // 0}, {}, r"cannot be made \(ZeroDivisionError"),
    "backward by hand": (BackwardByHand, {"hparams": {"sizes": (16, 16)}}, {}, "manual_backward.*or give call="),
    "tensors from step to step": (Carried, HIDDEN, {}, r"keeps tensors in 'units'.*register_buffer"),
    "one least rate": (LeastRate, HIDDEN, {}, "eta_min = 1e-05.*relative"),
    "clipping entries": (Autoencoder, HIDDEN, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, '"norm"'),
    "a compiled module": (compiled, HIDDEN, {}, r"self.net.compile\(\)"),
    "a schedule that restarts": (Autoencoder, {**HIDDEN, "restart_schedule": True}, {}, "restart_schedule needs"),
    "a method that learns": (Autoencoder, {**HIDDEN, "method": LiGO()}, {}, "LiGO learns from batches"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_grow_is_refused_before_the_first_step_with_the_remedy(case: str, tmp_path: Path) -> None:
    make, growth, settings, message = REFUSED[case]
    module = make()
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(UserError, match=message):
        fit(module, "points", tmp_path, UpscaleCallback(GROWS_AT, **growth), **settings)
    assert all(map(torch.equal, weights, (parameter.detach().float() for parameter in module.parameters())))


@pytest.mark.slow
def test_processes_that_hand_their_weights_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=r'ddp_fork and ddp_notebook: .* Use strategy="ddp"'):
        fit(Autoencoder(), "points", tmp_path, UpscaleCallback(GROWS_AT, **HIDDEN), strategy="ddp_fork", devices=2)


@pytest.mark.usefixtures("double")
def test_two_growths_an_average_accumulation_and_clipping(tmp_path: Path) -> None:
    example, averages = EXAMPLES["groups without decay"], []
    for swaps in ([], [UpscaleCallback(2, hparams={"width": 16}), UpscaleCallback(4, hparams={"width": 48})]):
        module, ema = new(example), EMAWeightAveraging(decay=0.8)
        settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 3}
        losses = fit(module, example.kind, tmp_path, ema, *swaps, **settings)
        averages.append((losses, module.net(rows("points", 5)[0]).flatten().tolist()))
    (wanted, before), (losses, after) = averages
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert after == pytest.approx(before, rel=1e-9)
    assert module.net[0].out_features == 48


def test_a_wide_checkpoint_loads_into_a_narrow_module_for_a_test_and_by_its_class(tmp_path: Path) -> None:
    example, keep = EXAMPLES["autoencoder"], Keep(tmp_path)
    module, swap = new(example), partial(UpscaleCallback, GROWS_AT, **HIDDEN)
    fit(module, example.kind, tmp_path, swap(), keep, enable_checkpointing=True)
    wide = keep.paths[max(keep.paths)]
    loaded = Autoencoder.load_from_checkpoint(wide, weights_only=False)
    assert torch.equal(loaded.encoder[0].weight, module.encoder[0].weight.float())
    narrow = Autoencoder()
    data = DataLoader(TensorDataset(*rows("points", 4)), batch_size=4)
    trainer = quiet_trainer(callbacks=[swap()], precision="64-true")
    trainer.predict(narrow, data, ckpt_path=wide, weights_only=False)
    assert torch.equal(narrow.encoder[0].weight, module.encoder[0].weight)


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
    swap, keep = partial(UpscaleCallback, GROWS_AT, hparams=changes), Keep(tmp_path)
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
