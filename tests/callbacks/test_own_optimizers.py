"""Growth of modules with a `configure_optimizers` of their own: rates continue, or the growth is refused."""

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
from training_runs import fit, gap

import mupscale
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.models.mlp import MLP
from mupscale.schedules import refuse_one_rate_for_all, rescale_schedule_state
from mupscale.widening.state import Source

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
    wide = fit(own(*SCHEDULES[case]), tmp_path, *(UpscaleCallback(*growth) for growth in GROWTH))
    assert gap(narrow, wide) < 1e-9


def test_a_least_rate_of_all_groups_is_refused_before_training(tmp_path: Path) -> None:
    def least(optimizer: Optimizer) -> Any:
        return schedules.CosineAnnealingLR(optimizer, 50, eta_min=1e-3)

    def later(optimizer: Optimizer) -> Any:
        return schedules.SequentialLR(optimizer, [schedules.LinearLR(optimizer), least(optimizer)], [5])

    for schedule in (least, later):
        with pytest.raises(UserError, match=r"OwnMLP.configure_optimizers: (Cosine|Seq)\w+LR .*eta_min = 0.001.*Use a"):
            fit(own(scaled, schedule), tmp_path, UpscaleCallback(20, 24))
    assert list(tmp_path.iterdir()) == []
    fit(own(scaled, least), tmp_path, steps=5)
    same = mupscale.methods.HyperCloning()
    fit(own(scaled, least), tmp_path, UpscaleCallback(2, 16, method=same), steps=5)


def test_a_least_rate_inside_of_other_schedules_grows_with_the_rate_of_all_groups() -> None:
    optimizer = ADAMW([torch.nn.Parameter(torch.zeros(2))])
    parts = [schedules.LinearLR(optimizer), schedules.CosineAnnealingLR(optimizer, 50, eta_min=1e-3)]
    for schedule in (schedules.SequentialLR(optimizer, parts, [5]), schedules.ChainedScheduler(parts)):
        refuse_one_rate_for_all(schedule.state_dict(), [0.25, 0.25], "it", "")
        state = schedule.state_dict()
        rescale_schedule_state(state, optimizer.param_groups, [Source(0, 0.25)])
        assert state["_schedulers"][1]["eta_min"] == 0.25e-3


def test_a_group_with_different_rates_is_refused_at_the_swap(tmp_path: Path) -> None:
    message = (
        r"OwnMLP.configure_optimizers: layers.0.weight and layers.1.weight are in one group .* different values of lr "
        r"\(0.01 and 0.003333\).*Call mupscale.apply_mup.*The run before.*pre-upscale-20.ckpt"
    )
    with pytest.raises(UserError, match=message):
        fit(own(unscaled), tmp_path, UpscaleCallback(20, 24))
    fit(own(unscaled), tmp_path, UpscaleCallback(2, 16, method=mupscale.methods.HyperCloning()), steps=5)


def test_one_rate_for_two_optimizers_is_refused_before_training(tmp_path: Path) -> None:
    module = TwoOptimizersMLP(8, base_width=4, inputs=6, outputs=3)
    module.automatic_optimization = False
    with pytest.raises(UserError, match=r"UpscaleCallback.lr = 0.02: TwoOptimizersMLP has 2 optimizers"):
        fit(module, tmp_path, UpscaleCallback(5, 24, lr=0.02), steps=-1, max_epochs=1)
    assert module.trainer.global_step == 0


def test_an_optimizer_of_a_parameter_outside_of_the_network_is_refused_at_the_start(tmp_path: Path) -> None:
    module = own(scaled)
    module.temperature = torch.nn.Parameter(torch.ones(()))
    module.optimizer_of = lambda net: torch.optim.AdamW([*net.parameters(), module.temperature])
    with pytest.raises(UserError, match=r"OwnMLP\.configure_optimizers trains 'temperature', which is not in the net"):
        fit(module, tmp_path, UpscaleCallback(4, 16), steps=6)
    assert fit(module, tmp_path, steps=1).steps == [1]
