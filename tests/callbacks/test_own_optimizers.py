"""Growth of modules with a `configure_optimizers` of their own: rates continue, or the growth is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extensions import TwoOptimizersMLP
from tiers import slow_except
from tiny_modules import ADAMW, SGD
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules
from training_runs import Checkpoints, fit, gap, rates

import mupscale
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.models.mlp import MLP

GROWTH = (20, 24), (32, 40)


class OwnMLP(MLP):
    """Takes its optimizer and its schedule from functions, as a user's `configure_optimizers` makes them."""

    optimizer_of: Callable[[Any], Optimizer]
    schedule_of: Callable[[Optimizer], Any] | None

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_of(self.net)
        if self.schedule_of is None:
            return optimizer
        scheduler = {"scheduler": self.schedule_of(optimizer), "interval": "step", "monitor": "train/mse"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/mse", loss)
        return loss


def own(optimizer_of: Callable[[Any], Optimizer], schedule_of: Callable[[Optimizer], Any] | None = None) -> OwnMLP:
    module = OwnMLP(8, base_width=4, inputs=6, outputs=3)
    module.optimizer_of, module.schedule_of = optimizer_of, schedule_of
    return module


def scaled(net: Any) -> Optimizer:
    return mupscale.apply_mup(ADAMW(net.parameters()), net)


def scaled_sgd(net: Any) -> Optimizer:
    return mupscale.apply_mup(SGD(net.parameters()), net)


def unscaled(net: Any) -> Optimizer:
    return ADAMW(net.parameters())


def by_layer(net: Any) -> Optimizer:
    """A group for each parameter, without muP."""
    return ADAMW([{"params": [parameter]} for parameter in net.parameters()])


def one_cycle_of_each(optimizer: Optimizer) -> Any:
    peaks = [group["lr"] for group in optimizer.param_groups]
    return schedules.OneCycleLR(optimizer, max_lr=peaks, total_steps=100)


SCHEDULES: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Optimizer], Any] | None]] = {
    "no muP, a group for each": (by_layer, None),
    "OneCycleLR": (scaled, lambda o: schedules.OneCycleLR(o, max_lr=0.02, total_steps=60)),
    "OneCycleLR of each": (scaled, one_cycle_of_each),
    "CyclicLR": (scaled_sgd, lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=9)),
    "ReduceLROnPlateau": (
        scaled,
        lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5, min_lr=2e-3),
    ),
    "SWALR": (scaled, lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=40)),
    "CosineAnnealingWarmRestarts": (scaled, lambda o: schedules.CosineAnnealingWarmRestarts(o, 8, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_except(SCHEDULES, kept=["OneCycleLR of each", "CyclicLR", "ReduceLROnPlateau"]))
def test_absolute_rates_of_each_group_continue(case: str, tmp_path: Path) -> None:
    narrow = fit(own(*SCHEDULES[case]), tmp_path)
    wide = fit(own(*SCHEDULES[case]), tmp_path, *(UpscaleCallback(*growth, noise=None) for growth in GROWTH))
    assert gap(narrow, wide) < 1e-9


def least(optimizer: Optimizer) -> Any:
    return schedules.CosineAnnealingLR(optimizer, 40, eta_min=4e-3)


def later(optimizer: Optimizer) -> Any:
    return schedules.SequentialLR(optimizer, [schedules.LinearLR(optimizer), least(optimizer)], [5])


def restarting(optimizer: Optimizer) -> Any:
    return schedules.CosineAnnealingWarmRestarts(optimizer, 9, eta_min=4e-3)


@pytest.mark.parametrize("schedule", slow_except([least, later, restarting], later, kept=[least]))
def test_a_least_rate_of_all_groups_becomes_one_of_each(schedule: Any, tmp_path: Path) -> None:
    """The losses go on through two growths; a run that is resumed between them, or after them, is the same."""
    narrow = fit(own(scaled, schedule), tmp_path)
    growths = [UpscaleCallback(*growth, noise=None) for growth in GROWTH]
    saved, settings = Checkpoints(tmp_path), {"enable_checkpointing": True}
    wide = fit(own(scaled, schedule), tmp_path, *growths, ExactResume(), saved, **settings)
    assert gap(narrow, wide) < 1e-9
    rate, matrix = rates(narrow), "net.layers.1.weight"
    assert rates(wide)[matrix] == pytest.approx(rate[matrix] * 8 / 40, rel=1e-9)
    assert rates(wide)["net.layers.1.bias"] == pytest.approx(rate["net.layers.1.bias"], rel=1e-9)
    for step in (25, 40):
        growths = [UpscaleCallback(*growth, noise=None) for growth in GROWTH]
        again = fit(
            own(scaled, schedule), tmp_path / "again", *growths, ExactResume(), ckpt=tmp_path / f"step={step}.ckpt"
        )
        assert torch.equal(again.losses, wide.losses[step:])
        assert rates(again) == rates(wide)


def by_kind(net: Any) -> Optimizer:
    """Two groups that the user has named."""
    matrices, vectors = ([p for p in net.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    return ADAMW([{"params": matrices, "name": "matrices"}, {"params": vectors, "name": "vectors"}])


def test_a_group_whose_parameters_need_different_rates_is_split_and_the_split_is_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for optimizer, counts in ((unscaled, [1, 3]), (by_kind, [2, 4])):
        narrow = fit(own(optimizer), tmp_path)
        with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
            wide = fit(own(optimizer), tmp_path, *(UpscaleCallback(*g, noise=None) for g in GROWTH))
        assert gap(narrow, wide) < 1e-9
        assert [len(run.trainer.optimizers[0].param_groups) for run in (narrow, wide)] == counts
    hidden = "0.3333 × lr, 3 × decay, 0.3333 × eps"
    words = f"matrices: 0.3333 × eps; matrices-2: {hidden}; vectors: 0.3333 × eps; vectors-2: as before"
    assert caplog.messages.count(f"AdamW after the growth: {words}") == 1


def test_one_rate_for_two_optimizers_is_refused_before_training(tmp_path: Path) -> None:
    module = TwoOptimizersMLP(8, base_width=4, inputs=6, outputs=3)
    module.automatic_optimization = False
    with pytest.raises(UserError, match=r"UpscaleCallback.lr = 0.02: TwoOptimizersMLP has 2 optimizers"):
        fit(module, tmp_path, UpscaleCallback(5, 24, lr=0.02, noise=None), steps=-1, max_epochs=1)
    assert module.trainer.global_step == 0


def test_a_trained_parameter_beside_the_network_continues(tmp_path: Path) -> None:
    losses = []
    for swaps in ([], [UpscaleCallback(4, 16, noise=None)]):
        module = own(scaled)
        module.temperature = torch.nn.Parameter(torch.ones(()))
        module.optimizer_of = lambda net, own=module: torch.optim.AdamW([*net.parameters(), own.temperature])
        losses.append(fit(module, tmp_path, *swaps, steps=8))
    assert gap(*losses) < 1e-9
