"""Causal language models of the transformers library: configurations and weights from files, and back into files.

Nothing in a file is executed: weights are safetensors, and `trust_remote_code` is never set.
"""

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mupscale.errors import UserError, prefix_errors
from mupscale.hf.folder import read_folder, read_json, without_implementations
from mupscale.hf.forward_pass import quiet


def config_of(fields: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration with these fields, `model_type` among them; all others have the defaults of that type.

    >>> config_of({"model_type": "llama", "hidden_size": 64}).hidden_size
    64
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(f"model_type = {kind!r} is no model of the transformers library, such as llama or gpt2")
    config_class = CONFIG_MAPPING[kind]
    _refuse_other_models(config_class)
    if "quantization_config" in fields:
        raise UserError("the configuration is of quantised weights; take the model as it was before")
    fields = _without_code(fields)
    if "transformers_version" not in fields:  # written by hand: a field that is not known would be without effect
        known = {*config_class().to_dict(), *config_class.attribute_map}
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise UserError(f"a {kind} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    # transformers and huggingface_hub raise many kinds
    with prefix_errors(f"these fields do not make a {kind}", Exception):
        config = config_class.from_dict({name: value for name, value in fields.items() if name != "model_type"})
    return without_implementations("the configuration", config)


def _without_code(fields: Any) -> Any:
    """Fields without those that name code, which could be fetched from elsewhere and executed."""
    if isinstance(fields, list):
        return [_without_code(value) for value in fields]
    if not isinstance(fields, Mapping):
        return fields
    named = {name for name in fields if name == "auto_map" or str(name).endswith("_implementation")}
    return {name: _without_code(value) for name, value in fields.items() if name not in named}


def config_in(path: Path) -> PretrainedConfig:
    """The configuration of a folder with weights, or in a file such as config.json."""
    if path.suffix.lower() == ".json":
        return config_of(read_json(path))
    config = read_folder(path).config
    _refuse_other_models(type(config))
    return config


def _refuse_other_models(kind: type[PretrainedConfig]) -> None:
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model_type = {kind.model_type!r} has no causal language model; choose llama or gpt2, say")


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A freshly initialised model, in the precision that is torch's default."""
    return AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False)


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, one safetensors file or many, by the names that a model of its configuration has."""
    config = config_in(folder)
    # transformers and safetensors raise many kinds
    with prefix_errors(f"{folder}: its weights cannot be loaded", Exception), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            dtype="auto",
        )
    model, notes = loaded
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, notes.get(what) or ()))
        if names:
            raise UserError(f"{folder}: its weights are not those of its configuration: {what} {', '.join(names[:4])}")
    return model.state_dict()


def save(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Writes a folder that `from_pretrained` reads, beside an old one first, so that one is always whole."""
    new = folder.with_name(f".{folder.name}.{platform.node()}.{os.getpid()}")
    old = folder.with_name(f"{new.name}.old")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with quiet():
            model.save_pretrained(new, state_dict=weights)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
