"""Lets torchmetrics be imported in part. Does not import it.

Lightning needs one class of torchmetrics, `Metric`, and our models two metrics. But `import torchmetrics` imports all
its metrics, and with them transformers, torchvision and SciPy, if they are installed: a third of the time that a fit
takes to start. With `install`, the packages below run their own code only when a name is asked for that no imported
part has. Until then, only the modules that are imported by their full names are loaded.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HOMES = {
    "torchmetrics": {
        "Metric": "torchmetrics.metric",
        "MetricCollection": "torchmetrics.collections",
        "__version__": "torchmetrics.__about__",
    },
    "torchmetrics.functional": {},
    "torchmetrics.functional.text": {},
    "torchmetrics.text": {},
}
"""Packages, and the names that they give without running their own code, each with its module."""


class LazyPackage(ModuleType):
    """A package that runs its own code when it is asked for an attribute that it does not have."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None
        if name in HOMES[spec.name]:
            return getattr(import_module(HOMES[spec.name][name]), name)
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {spec.name!r} has no attribute {name!r}")
        assert isinstance(spec.loader, LaterLoader)
        run_package(self, spec.loader)
        for part, module in spec.loader.parts.items():
            vars(self).setdefault(part, module)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets the modules of a package when they are imported; a function of the package may have the same name
        loader = None if self.__spec__ is None else self.__spec__.loader
        if isinstance(value, ModuleType) and isinstance(loader, LaterLoader):
            loader.parts[name] = value
        else:
            super().__setattr__(name, value)


class LaterLoader(Loader):
    """Leaves the code of a package for later."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.parts: dict[str, ModuleType] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves it to `LazyPackage`. Of a release that cannot be imported in part, runs it."""
        if module.__name__ != "torchmetrics":
            return
        vars(module)["_logger"] = logging.getLogger("torchmetrics")
        try:
            import_module("torchmetrics.utilities")  # the others can be imported in any order after it
        except Exception:
            sys.meta_path.remove(LazyFinder)
            for name in [name for name in sys.modules if name.startswith("torchmetrics.")]:
                del sys.modules[name]
            run_package(module, self)


def run_package(package: ModuleType, loader: LaterLoader) -> None:
    """Makes an ordinary package of a lazy one, by its own code."""
    package.__class__ = ModuleType
    loader.real.exec_module(package)


class LazyFinder:
    """Finds the packages of torchmetrics that are loaded in part."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in HOMES:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = LaterLoader(spec.loader)
        return spec


def install() -> None:
    """From now on, until this process ends; without effect where torchmetrics is imported already."""
    if "torchmetrics" not in sys.modules and LazyFinder not in sys.meta_path:
        sys.meta_path.insert(0, LazyFinder)
