"""How torchmetrics and torchvision are imported. Imports neither, nor torch.

Lightning needs one class of torchmetrics, `Metric`, and our models two metrics. But `import torchmetrics` imports all
its metrics, and with them transformers, torchvision and SciPy, if they are installed: a third of the time that a fit
takes to start. After `install_parts`, the packages below run their own code only when a name is asked for that no
imported part has. Until then, only the modules that are imported by their full names are loaded.

A torchvision that is a CUDA build beside a CPU build of torch cannot load its C++ library and then registers fake
kernels for operators that were never defined, which aborts the import. Defining the two missing schemas just before
cures it. Where the library loads, or torch has CUDA, nothing is done.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("torchmetrics", "torchmetrics.functional", "torchmetrics.functional.text", "torchmetrics.text")

HOMES = {
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
    "__version__": "torchmetrics.__about__",
}
"""Names of torchmetrics that are given without running its own code, and their modules."""


class LazyPackage(ModuleType):
    """A package that runs its own code when it is asked for an attribute that it does not have."""

    def __getattr__(self, name: str) -> Any:
        with suppress(ImportError, KeyError):  # of a release that cannot be imported in part, or another name
            home = HOMES[name]
            import_module("torchmetrics.utilities")  # the others can be imported in any order after it
            return getattr(import_module(home), name)
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        run_package(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets the modules of a package when they are imported; a function of the package may have the same name
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def run_package(package: ModuleType) -> None:
    """Makes an ordinary package of a lazy one, by its own code."""
    assert package.__spec__ is not None
    assert package.__spec__.loader is not None
    package.__class__ = ModuleType
    package.__spec__.loader.exec_module(package)
    for name, module in list(sys.modules.items()):
        parent, _, part = name.rpartition(".")
        if parent == package.__name__:
            vars(package).setdefault(part, module)


def install_parts() -> None:
    """Lets torchmetrics be imported in part; without effect where it is imported already."""
    if "torchmetrics" in sys.modules:
        return
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[name].__class__ = LazyPackage
    vars(sys.modules["torchmetrics"])["_logger"] = logging.getLogger("torchmetrics")


class BeforeTorchvision:
    """An import finder that finds nothing: it only acts when torchvision is about to be looked for."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            define_missing_schemas()
        return None


def define_missing_schemas() -> None:
    import torch

    spec = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, BeforeTorchvision)
