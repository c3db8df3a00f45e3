"""mupscale: widen a trained network so that it computes and trains exactly as before, then let it use its new width."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mupscale import _torchvision as _torchvision

if TYPE_CHECKING:
    from mupscale.base_shapes import set_base_shapes
    from mupscale.checks.claims import check_claim
    from mupscale.checks.verdict import Verdict
    from mupscale.checks.verify import verify
    from mupscale.discovery.discover import discover
    from mupscale.discovery.found import Found
    from mupscale.growing.upscale import upscale
    from mupscale.mup_optimizers import MuAdam, MuAdamW, MuSGD, apply_mup
    from mupscale.schedules import WarmupCosine, WarmupStableDecay
    from mupscale.widening.clip import clip_grad_norm_
    from mupscale.widening.grow import UpscaleReport
    from mupscale.widening.methods import (
        AKI,
        FPI,
        Duplication,
        HyperCloning,
        Lemon,
        LiGO,
        Net2Net,
        ShrinkAndPad,
        ZeroPadding,
    )
    from mupscale.widening.noise import AdditiveNoise, RecordedNoise, SignalNoise
    from mupscale.widening.plan import Plan, plan
    from mupscale.widening.readout import Readout
    from mupscale.widening.rules import register_optimizer

    __version__: str

_HOME = {
    "AKI": "widening.methods",
    "AdditiveNoise": "widening.noise",
    "Duplication": "widening.methods",
    "FPI": "widening.methods",
    "Found": "discovery.found",
    "HyperCloning": "widening.methods",
    "Lemon": "widening.methods",
    "LiGO": "widening.methods",
    "MuAdam": "mup_optimizers",
    "MuAdamW": "mup_optimizers",
    "MuSGD": "mup_optimizers",
    "Net2Net": "widening.methods",
    "Plan": "widening.plan",
    "Readout": "widening.readout",
    "RecordedNoise": "widening.noise",
    "ShrinkAndPad": "widening.methods",
    "SignalNoise": "widening.noise",
    "UpscaleReport": "widening.grow",
    "Verdict": "checks.verdict",
    "WarmupCosine": "schedules",
    "WarmupStableDecay": "schedules",
    "ZeroPadding": "widening.methods",
    "apply_mup": "mup_optimizers",
    "check_claim": "checks.claims",
    "clip_grad_norm_": "widening.clip",
    "discover": "discovery.discover",
    "plan": "widening.plan",
    "register_optimizer": "widening.rules",
    "set_base_shapes": "base_shapes",
    "upscale": "growing.upscale",
    "verify": "checks.verify",
}

__all__ = [
    "AKI",
    "FPI",
    "AdditiveNoise",
    "Duplication",
    "Found",
    "HyperCloning",
    "Lemon",
    "LiGO",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Net2Net",
    "Plan",
    "Readout",
    "RecordedNoise",
    "ShrinkAndPad",
    "SignalNoise",
    "UpscaleReport",
    "Verdict",
    "WarmupCosine",
    "WarmupStableDecay",
    "ZeroPadding",
    "apply_mup",
    "check_claim",
    "clip_grad_norm_",
    "discover",
    "plan",
    "register_optimizer",
    "set_base_shapes",
    "upscale",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads torch only when something is used, so that `python -m mupscale --help` answers at once."""
    if name == "__version__":
        return import_module("importlib.metadata").version("mupscale")
    if name not in _HOME:
        raise AttributeError(f"module 'mupscale' has no attribute {name!r}")
    return getattr(import_module(f"mupscale.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
