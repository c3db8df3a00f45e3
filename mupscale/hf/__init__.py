"""Models of the transformers library: released checkpoints made wider or deeper, in memory or from folder to folder."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mupscale.hf.config import wide_config
    from mupscale.hf.continuing import freeze_old_parameters, parameter_groups
    from mupscale.hf.in_memory import upscale
    from mupscale.hf.widened_folder import FolderReport, upscale_folder

_HOME = {
    "FolderReport": "mupscale.hf.widened_folder",
    "freeze_old_parameters": "mupscale.hf.continuing",
    "parameter_groups": "mupscale.hf.continuing",
    "upscale": "mupscale.hf.in_memory",
    "upscale_folder": "mupscale.hf.widened_folder",
    "wide_config": "mupscale.hf.config",
}

__all__ = ["FolderReport", "freeze_old_parameters", "parameter_groups", "upscale", "upscale_folder", "wide_config"]


def __getattr__(name: str) -> Any:
    """Loads torch and transformers only when something is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'mupscale.hf' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
