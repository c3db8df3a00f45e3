"""The first loss that is not finite: its step and width, in every loop, and at what cost."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_modules import mlp
from torch import Tensor
from training_runs import fit

from mupscale.callbacks import fast_loop
from mupscale.callbacks.curves import Curves, NonFiniteLoss, first_bad
from mupscale.callbacks.fast_loop import FastLoop
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.cuda_graph import step_kind


def test_the_first_bad_loss_is_found_with_its_place() -> None:
    assert first_bad([]) is None
    losses = [torch.tensor(loss) for loss in (1.0, 2.0, math.inf, math.nan)]
    assert first_bad([(step, 8 if step < 2 else 16, loss) for step, loss in enumerate(losses)]) == (2, 16, math.inf)
    assert first_bad([(0, None, losses[0])]) is None


class Replayed:
    """A captured step whose fifth replay has a loss that is not finite."""

    replays = 0

    def __init__(self, gradients: Any, optimizer: Any, batch: Any) -> None:
        self.kind = step_kind(batch, optimizer)

    def __call__(self, batch: Any) -> Tensor:
        Replayed.replays += 1
        return torch.tensor(math.nan if Replayed.replays == 5 else 1.0)


def test_it_is_found_in_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_loop, "CapturedStep", Replayed)
    monkeypatch.setattr(Replayed, "replays", 0)
    setup = FastLoop.setup

    def on_gpu(self: FastLoop, trainer: Any, pl_module: Any, stage: str) -> None:
        setup(self, trainer, pl_module, stage)
        trainer.fit_loop.epoch_loop.cuda_graph = True

    monkeypatch.setattr(FastLoop, "setup", on_gpu)
    callbacks = FastLoop(cuda_graph=True), Curves(stop_on_nan=True)
    with pytest.raises(NonFiniteLoss, match=r"nan at step 7 \(the first step is 0\), width 8"):
        fit(mlp(), tmp_path, *callbacks, steps=20, precision="32-true")
    assert Replayed.replays == 5  # three steps are not captured


class Poisoned(type(mlp())):  # type: ignore[misc]
    """A module whose loss at step 6 is infinite."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        is_bad = self._trainer is not None and self.trainer.global_step == 6 and loss.device.type != "meta"
        return loss * math.inf if is_bad else loss


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulating"])
@pytest.mark.parametrize(("swap", "width"), [(3, 16), (6, 16), (7, 8)])
def test_the_width_is_that_of_the_step(settings: dict[str, Any], swap: int, width: int, tmp_path: Path) -> None:
    module = Poisoned(8, base_width=4, inputs=6, outputs=3)
    with pytest.raises(NonFiniteLoss, match=rf"inf at step 6 \(the first step is 0\), width {width}"):
        fit(module, tmp_path, Curves(stop_on_nan=True), UpscaleCallback(swap, 16), steps=20, **settings)


def test_a_run_that_does_not_log_looks_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.callbacks.curves._MOST_RECENT", 4)
    monkeypatch.setattr("mupscale.callbacks.curves.log_interval", lambda trainer: 0)
    module, curves = Poisoned(8, base_width=4, inputs=6, outputs=3), Curves()
    with pytest.warns(UserWarning, match="the training loss is inf at step 6") as caught:
        fit(module, tmp_path, curves, steps=20)
    assert len([each for each in caught if "training loss" in str(each.message)]) == 1
    assert len(curves._recent) < 4
