"""Models of the transformers library: released checkpoints made wider or deeper, in memory or from folder to folder."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mupscale.hf.config import wide_config
    from mupscale.hf.continuing import freeze_old_parameters, parameter_groups, read_growth
    from mupscale.hf.experts import Mixture, add_experts
    from mupscale.hf.in_memory import upscale
    from mupscale.hf.remade_folder import RemadeFolder, remake_folder
    from mupscale.hf.vocabulary import Vocabulary, extend_vocabulary
    from mupscale.hf.widened_folder import FolderReport, upscale_folder

_HOME = {
    "FolderReport": "mupscale.hf.widened_folder",
    "Mixture": "mupscale.hf.experts",
    "RemadeFolder": "mupscale.hf.remade_folder",
    "Vocabulary": "mupscale.hf.vocabulary",
    "add_experts": "mupscale.hf.experts",
    "extend_vocabulary": "mupscale.hf.vocabulary",
    "freeze_old_parameters": "mupscale.hf.continuing",
    "parameter_groups": "mupscale.hf.continuing",
    "read_growth": "mupscale.hf.continuing",
    "remake_folder": "mupscale.hf.remade_folder",
    "upscale": "mupscale.hf.in_memory",
    "upscale_folder": "mupscale.hf.widened_folder",
    "wide_config": "mupscale.hf.config",
}

__all__ = [
    "FolderReport", "Mixture", "RemadeFolder", "Vocabulary", "add_experts", "extend_vocabulary",
    "freeze_old_parameters", "parameter_groups", "read_growth", "remake_folder", "upscale", "upscale_folder",
    "wide_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads torch and transformers only when something is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'mupscale.hf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
