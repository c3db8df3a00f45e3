"""Modules under their names of version 0.1, so that old configurations, checkpoints and imports still work."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "algorithm": "widening.upscale",
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

RENAMED = {"widening.width_table": {"Width": "WidthFactors"}}
"""Names inside modules, which pickled models hold: the old one to the new one."""


class _Moved(Loader):
    """An import finder for old names, and a loader that answers with the module of the new one."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = name.rpartition(".")
        return ModuleSpec(name, cls()) if package == "mupscale" and old in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.spec = spec
        new = MOVED[spec.name.rpartition(".")[2]]
        module = importlib.import_module(f"mupscale.{new}")
        for old_name, new_name in RENAMED.get(new, {}).items():
            setattr(module, old_name, getattr(module, new_name))
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own  # the import system has put the old name's there


if not any(finder is _Moved for finder in sys.meta_path):
    sys.meta_path.append(_Moved)
