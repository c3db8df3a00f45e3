"""Makes an interpreter look as if only the core dependencies were installed, for processes that tests start."""

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType

EXTRAS = {
    "datasets", "huggingface_hub", "jinja2", "matplotlib", "optuna", "pandas", "pyarrow", "ray", "safetensors",
    "sklearn", "tokenizers", "transformers",
}  # fmt: skip
"""What the extras bring. pillow, pyyaml and tqdm are not among them: torchvision and Lightning need them."""

TOOLS = {"scipy", "seaborn", "timm"}
"""What the extras and the tests bring along; torchmetrics uses some of it if it is installed."""

HIDDEN = EXTRAS | TOOLS


class CoreOnly(PathFinder):
    """Finds neither the hidden modules nor the metadata of their distributions."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        context = context or DistributionFinder.Context()
        module = (context.name or "").lower().replace("-", "_").replace("scikit_learn", "sklearn")
        return [] if module in HIDDEN else super().find_distributions(context)


def hide() -> None:
    assert not HIDDEN & sys.modules.keys()
    sys.meta_path[sys.meta_path.index(PathFinder)] = CoreOnly
