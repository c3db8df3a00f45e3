"""Models of the transformers library: released checkpoints made wider or deeper, in memory or from folder to folder."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mupscale.hf.config import wide_config as wide_config
    from mupscale.hf.continuing import freeze_old_parameters as freeze_old_parameters
    from mupscale.hf.continuing import parameter_groups as parameter_groups
    from mupscale.hf.continuing import read_growth as read_growth
    from mupscale.hf.experts import Mixture as Mixture
    from mupscale.hf.experts import add_experts as add_experts
    from mupscale.hf.in_memory import upscale as upscale
    from mupscale.hf.remade_folder import remake_folder as remake_folder
    from mupscale.hf.vocabulary import Vocabulary as Vocabulary
    from mupscale.hf.vocabulary import extend_vocabulary as extend_vocabulary
    from mupscale.hf.widened_folder import FolderReport as FolderReport
    from mupscale.hf.widened_folder import upscale_folder as upscale_folder

_HOME = {
    "config": ["wide_config"],
    "continuing": ["freeze_old_parameters", "parameter_groups", "read_growth"],
    "experts": ["Mixture", "add_experts"],
    "in_memory": ["upscale"],
    "remade_folder": ["remake_folder"],
    "vocabulary": ["Vocabulary", "extend_vocabulary"],
    "widened_folder": ["FolderReport", "upscale_folder"],
}

__all__ = [name for names in _HOME.values() for name in names]


def __getattr__(name: str) -> Any:
    """Loads torch and transformers only when something is used."""
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"mupscale.hf.{home}"), name)
    raise AttributeError(f"module 'mupscale.hf' has no attribute {name!r}")
