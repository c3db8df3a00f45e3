"""mupscale: widen a trained network so that it computes and trains exactly as before, then let it use its new width."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mupscale import _torchvision as _torchvision

if TYPE_CHECKING:
    from mupscale.algorithm import UpscaleReport, upscale
    from mupscale.base_shapes import set_base_shapes
    from mupscale.clip import clip_grad_norm_
    from mupscale.equivalence import Verdict, verify
    from mupscale.noise import AdditiveNoise, RecordedNoise, SignalNoise
    from mupscale.optim import MuAdam, MuAdamW, MuSGD, apply_mup
    from mupscale.readout import Readout
    from mupscale.rules import register_optimizer
    from mupscale.widths import Plan, plan

_HOME = {
    "AdditiveNoise": "noise",
    "MuAdam": "optim",
    "MuAdamW": "optim",
    "MuSGD": "optim",
    "Plan": "widths",
    "Readout": "readout",
    "RecordedNoise": "noise",
    "SignalNoise": "noise",
    "UpscaleReport": "algorithm",
    "Verdict": "equivalence",
    "apply_mup": "optim",
    "clip_grad_norm_": "clip",
    "plan": "widths",
    "register_optimizer": "rules",
    "set_base_shapes": "base_shapes",
    "upscale": "algorithm",
    "verify": "equivalence",
}

__all__ = [
    "AdditiveNoise",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Plan",
    "Readout",
    "RecordedNoise",
    "SignalNoise",
    "UpscaleReport",
    "Verdict",
    "apply_mup",
    "clip_grad_norm_",
    "plan",
    "register_optimizer",
    "set_base_shapes",
    "upscale",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads torch only when something is used, so that `python -m mupscale --help` answers at once."""
    if name not in _HOME:
        raise AttributeError(f"module 'mupscale' has no attribute {name!r}")
    return getattr(import_module(f"mupscale.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
