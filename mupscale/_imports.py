"""How torchvision is imported beside a torch without CUDA. Imports neither of them.

A torchvision that is a CUDA build beside a CPU build of torch cannot load its C++ library and then registers fake
kernels for operators that were never defined, which aborts the import. Defining the two missing schemas just before
cures it. Where the library loads, or torch has CUDA, nothing is done.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


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
