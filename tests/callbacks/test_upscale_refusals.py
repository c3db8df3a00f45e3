"""What UpscaleCallback and `init_from` refuse, before the first step where that is possible."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tiny_modules import SGD, gpt2, mlp, resnet
from torch.optim import lr_scheduler as schedules
from training_runs import fit

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.models.base import Growable
from mupscale.models.mlp import MLP


def test_init_from_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "base.ckpt"
    fit(mlp(), tmp_path, steps=2).trainer.save_checkpoint(path)
    cases: dict[str, Callable[[], Growable]] = {
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


def test_init_from_refuses_what_is_not_finite(tmp_path: Path) -> None:
    path, broken = tmp_path / "base.ckpt", tmp_path / "broken.ckpt"
    fit(mlp(), tmp_path, steps=2).trainer.save_checkpoint(path)

    def refused_with(message: str, change: Callable[[dict[str, Any]], Any]) -> None:
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, broken)
        with pytest.raises(UserError, match=f"model.init_from = .*NaN or infinite entries in {message}"):
            fit(mlp(init_from=str(broken)), tmp_path, steps=2)

    refused_with("'net.layers.1.weight'", lambda saved: saved["state_dict"]["net.layers.1.weight"][0].fill_(math.nan))
    refused_with(
        "optimizer state 'exp_avg' of 'net.layers.0.bias'",
        lambda saved: state_of(saved, "net.layers.0.bias")["exp_avg"].fill_(math.inf),
    )

    def without_state(saved: dict[str, Any]) -> None:
        saved["mupscale"] |= {"optimizer_names": [], "optimizer_classes": []}
        saved["optimizer_states"] = []
        saved["state_dict"]["net.readout.bias"].fill_(math.inf)

    refused_with("'net.readout.bias'", without_state)


def state_of(checkpoint: dict[str, Any], name: str) -> dict[str, Any]:
    """The optimizer state of a parameter in a checkpoint."""
    (names,), (saved,) = checkpoint["mupscale"]["optimizer_names"], checkpoint["optimizer_states"]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    return saved["state"][dict(zip(names, indices, strict=True))[name]]


def refused(message: str, module: Growable, folder: Path, *callbacks: Callback, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        fit(module, folder, *callbacks, **settings)
    assert "\n" not in str(error.value)
    assert module._trainer is None or module.trainer.global_step == 0, "it was found out too late"


EPOCHS: dict[str, Any] = {"steps": -1, "max_epochs": 3}
BAD_GROWTHS: dict[str, tuple[Callable[[], Growable], list[UpscaleCallback], dict[str, Any]]] = {
    "at_step = 50 is never reached: trainer.max_steps = 50": (mlp, [UpscaleCallback(50, 24)], {}),
    "at_step = 30 is never reached: the run has 30 steps": (mlp, [UpscaleCallback(30, 24)], EPOCHS),
    "at_step = 40 is never reached: the run has 30 steps": (mlp, [UpscaleCallback(40, 24)], EPOCHS | {"steps": 100}),
    "at_step = 15 is never reached": (mlp, [UpscaleCallback(15, 24)], EPOCHS | {"accumulate_grad_batches": 2}),
    "width = 20: module .*grows by 5/2 .*by a whole factor": (gpt2, [UpscaleCallback(20, 20)], {}),
    "width = 15: width 15 is not divisible by 2 heads": (gpt2, [UpscaleCallback(20, 15)], {}),
    "width = 4: .* would shrink, .8, 6. → .4, 6.": (mlp, [UpscaleCallback(20, 4)], {}),
    r"width = \[16, 3\]: .* would shrink, .4, 8. → .3, 16.": (
        partial(mlp, [8, 4], base_width=[4, 4]),
        [UpscaleCallback(20, [16, 3])],
        {},
    ),
    "width = 24: .*grows by 3/2 .16 → 24": (gpt2, [UpscaleCallback(10, 16), UpscaleCallback(20, 24)], {}),
    "width = 8: .* would shrink, .16, 6. → .8, 6.": (
        mlp,
        [UpscaleCallback(10, 16), UpscaleCallback(20, 8)],
        {},
    ),
    "layers = 1: net.blocks .2 → 1 layers.: the deep model has fewer layers": (
        gpt2,
        [UpscaleCallback(5, layers=1)],
        {},
    ),
    "layers = 4: MLP has no residual blocks: give model.layers": (mlp, [UpscaleCallback(5, layers=4)], {}),
    "layers = 4: depth: no list of layers 'layers' is longer": (
        gpt2,
        [UpscaleCallback(5, layers=4, depth={"layers": [0, 0, 1, 1]})],
        {},
    ),
}


@pytest.mark.parametrize("message", BAD_GROWTHS)
def test_bad_growth_is_refused_before_training(message: str, tmp_path: Path) -> None:
    make, growths, settings = BAD_GROWTHS[message]
    refused(f"UpscaleCallback.{message}", make(), tmp_path, *growths, **settings)


WIDTH = "UpscaleCallback.width must be a whole number of at least 1, or a list of them; got "
RATE = "UpscaleCallback.lr must be positive and finite, got "
NO_TARGET = "UpscaleCallback needs one of width or layers (arguments of the module with these names), hparams (its "
AT_STEP = "UpscaleCallback.at_step must be a whole number of at least 0, got "
CHANGES = 'UpscaleCallback.hparams must be the arguments that change, with their values, such as {"hidden": 256}; got '


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[({"at_step": step, "width": 24}, f"{AT_STEP}{step!r}") for step in (-1, 2.5, "2", True, None)],
        *[({"width": 24, "lr": lr}, f"{RATE}{lr}") for lr in (0.0, math.nan, math.inf, "a", True)],
        *[({"width": width}, f"{WIDTH}{width!r}") for width in (0, 8.0, "8", [8, 0], True)],
        ({"width": 24, "noise": 0.1}, "UpscaleCallback.noise must be"),
        ({"width": 24, "transfer_state": "copied"}, "copied"),
        ({"layers": 0}, "UpscaleCallback.layers must be a whole number of at least 1"),
        ({"width": 8, "depth": "stack"}, "UpscaleCallback.depth = stack needs layers"),
        ({"layers": 8, "depth": "interleav"}, "UpscaleCallback: depth must be identity, interleave, stack, random"),
        *[({"hparams": hparams}, NO_TARGET) for hparams in (None, {})],
        *[({"hparams": hparams}, f"{CHANGES}{hparams!r}") for hparams in (["hidden"], "hidden=8")],
        *[({**size, "hparams": {"hidden": 8}}, NO_TARGET) for size in ({"width": 8}, {"layers": 4})],
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        UpscaleCallback(**{"at_step": 1, **arguments})


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.width = 9 is not divisible by model.heads = 2"):
        gpt2(9)


def test_a_width_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    for wide in (8 * 10**6, 8 * 10**12):
        refused(f"UpscaleCallback.width = {wide}: .*memory", mlp(), tmp_path, UpscaleCallback(5, wide))


class Spoilt(Callback):
    """Puts a NaN into a weight after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                pl_module.net.layers[0].weight[0, 0] = math.nan


@pytest.mark.slow
def test_a_failed_swap_says_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        fit(mlp(), tmp_path, UpscaleCallback(5, 16), Spoilt(4), steps=8)
    assert re.search(r"has NaN .*saved in .*pre-upscale-5.ckpt", str(caught.value))

    for damage, message in (
        (Path.unlink, "The run before the growth was not saved"),
        (Path.exists, "The run before the growth is saved in .*pre-upscale-5.ckpt"),
    ):
        monkeypatch.setattr("mupscale.callbacks.growth_schedule.grow", partial(fail_with, damage, tmp_path))
        with pytest.raises(RuntimeError, match=message):
            fit(mlp(), tmp_path, UpscaleCallback(5, 16), steps=8)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_that_keeps_nothing_writes_nothing_to_the_working_folder(tmp_path: Path) -> None:
    fit(mlp(), tmp_path, UpscaleCallback(2, 16), steps=4)
    assert list(tmp_path.iterdir()) == []


def fail_with(damage: Callable[[Path], Any], folder: Path, *_: Any, **__: Any) -> None:
    """Stands in for `upscale`: damages the checkpoint before the swap, and fails."""
    for path in folder.rglob("pre-upscale-5.ckpt"):
        damage(path)
    raise MemoryError("no room")


class Floored(schedules.LRScheduler):
    """Relative to the rates of groups, until it reaches the floor."""

    def get_lr(self) -> list[float]:
        return [max(1e-4, rate * 0.9**self.last_epoch) for rate in self.base_lrs]


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
        (lambda o: Floored(o), "Floored sets absolute rates"),
    ],
)
def test_absolute_rates_are_refused(schedule: Any, name: str, tmp_path: Path) -> None:
    refused(f"model.lr_scheduler: .*{name}", mlp(lr_scheduler=schedule), tmp_path)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mlp.ckpt"
    fit(mlp(), tmp_path, steps=2).trainer.save_checkpoint(path)
    refused("is of a MLP, the configured model is a GPT2", gpt2(), tmp_path, ckpt=path)
    refused("model.hidden_layers is 3 there and 2 here", mlp(hidden_layers=2), tmp_path, ckpt=path)
    refused("model.base_width is 4 there and 8 here", mlp(base_width=8), tmp_path, ckpt=path)
    with pytest.raises(ValueError, match=r"another architecture: it differs in .'net.readout.weight'"):
        MLP.load_from_checkpoint(path, outputs=5)
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0", "epoch": 0, "global_step": 0}, path)
    refused("not saved by a growable module", mlp(), tmp_path, ckpt=path)
