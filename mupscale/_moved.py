"""Modules under their names of version 0.1, so that old configurations, checkpoints and imports still work."""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # which takes a while to import

MOVED = {
    "algorithm": "growing.upscale",
    "clip": "widening.clip",
    "coord": "checks.coordinate_check",
    "equivalence": "checks.verify",
    "figures": "commands.figures",
    "layout": "widening.layout",
    "limits": "checks.limits",
    "modules": "widening.modules",
    "noise": "widening.noise",
    "optim": "mup_optimizers",
    "readout": "widening.readout",
    "rules": "widening.rules",
    "schedule": "widening.schedule",
    "sharding": "widening.sharding",
    "spectral": "widening.spectral",
    "survey": "widening.survey",
    "tables": "widening.width_table",
    "widen": "widening.weights",
    "widths": "widening.plan",
}

RENAMED = {"tables": {"Width": "WidthFactors"}, "limits": {"Run": "Training"}}
"""Classes of these modules that have another name now."""


class _Moved:
    """An import finder for old names, and a loader that answers with the module of the new one."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = name.rpartition(".")
        return ModuleSpec(name, cast("Loader", cls())) if package == "mupscale" and old in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = spec.name.rpartition(".")[2]
        module = importlib.import_module(f"mupscale.{MOVED[old]}")
        for name, new in RENAMED.get(old, {}).items():
            setattr(module, name, getattr(module, new))
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has put the old name's there


if not any(finder is _Moved for finder in sys.meta_path):
    sys.meta_path.append(_Moved)
