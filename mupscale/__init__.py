"""mupscale: grow a trained network so that it computes and trains exactly as before, then let it use its new width."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mupscale import _imports as _imports

if TYPE_CHECKING:
    from mupscale import hf as hf
    from mupscale import methods as methods
    from mupscale import schedules as schedules
    from mupscale.base_shapes import apply_mup as apply_mup
    from mupscale.base_shapes import clip_grad_norm_ as clip_grad_norm_
    from mupscale.base_shapes import set_base_shapes as set_base_shapes
    from mupscale.callbacks.run_defaults import run_settings as run_settings
    from mupscale.callbacks.upscale import UpscaleCallback as UpscaleCallback
    from mupscale.checks.verify import Verdict as Verdict
    from mupscale.checks.verify import check_claim as check_claim
    from mupscale.checks.verify import verify as verify
    from mupscale.discovery.discover import discover as discover
    from mupscale.errors import UserError as UserError
    from mupscale.growing.upscale import upscale as upscale
    from mupscale.methods.grow import UpscaleReport as UpscaleReport
    from mupscale.methods.noise import AdditiveNoise as AdditiveNoise
    from mupscale.methods.noise import RecordedNoise as RecordedNoise
    from mupscale.methods.noise import SignalNoise as SignalNoise
    from mupscale.readout import Readout as Readout
    from mupscale.widening.hints import Hints as Hints
    from mupscale.widening.optimizers import register_optimizer as register_optimizer
    from mupscale.widening.plan import plan as plan
    from mupscale.widening.plan_text import Plan as Plan
    from mupscale.widening.records import attach as attach

    __version__: str

_HOME = {
    "AdditiveNoise": "methods.noise",
    "Hints": "widening.hints",
    "Plan": "widening.plan_text",
    "Readout": "readout",
    "RecordedNoise": "methods.noise",
    "SignalNoise": "methods.noise",
    "UpscaleReport": "methods.grow",
    "UserError": "errors",
    "Verdict": "checks.verify",
    "apply_mup": "base_shapes",
    "attach": "widening.records",
    "check_claim": "checks.verify",
    "clip_grad_norm_": "base_shapes",
    "discover": "discovery.discover",
    "plan": "widening.plan",
    "register_optimizer": "widening.optimizers",
    "set_base_shapes": "base_shapes",
    "upscale": "growing.upscale",
    "verify": "checks.verify",
}

_IN_LIGHTNING = {"UpscaleCallback": "callbacks.upscale", "run_settings": "callbacks.run_defaults"}
"""Names that load Lightning too."""

_ROOMS = ("hf", "methods", "schedules")
"""Modules with names of their own, loaded when they are used."""

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Loads torch only when something is used, so that `python -m mupscale --help` answers at once."""
    if name == "__version__":
        return import_module("importlib.metadata").version("mupscale")
    if name in _ROOMS:
        return import_module(f"mupscale.{name}")
    home = _HOME.get(name) or _IN_LIGHTNING.get(name)
    if home is None:
        raise AttributeError(f"module 'mupscale' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(f"mupscale.{home}"), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_IN_LIGHTNING, *_ROOMS})
