"""By how much a model of the transformers library grows, and the two models of one growth without their weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from mupscale.errors import UserError, needs_extra
from mupscale.hf.config import wide_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ConfigGrowth:
    """By how much the widths of a configuration grow. `ConfigGrowth(2).wide(config)` is the wide configuration."""

    factor: float
    keep_heads: bool | None = None
    """Whether the number of heads stays, so that head_dim grows; None decides by the family."""
    only: Literal["feed_forward"] | None = None
    """`feed_forward`: only the intermediate sizes grow."""
    fields: Mapping[str, float] | None = None
    """Other factors, by the name of the field."""
    has_layers: bool = False
    """Whether the model becomes deeper too, so that its width may stay."""

    def wide(self, config: "PretrainedConfig") -> "PretrainedConfig":
        """The wide configuration. UserError where a size would not be whole, or where nothing grows."""
        wide = wide_config(config, self.factor, keep_heads=self.keep_heads, only=self.only, fields=self.fields)
        if not self.has_layers and not self.widens(config, wide):
            raise UserError(f"factor {self.factor:g} leaves every size as it is; give a larger one, or more layers")
        return wide

    def widens(self, config: "PretrainedConfig", wide: "PretrainedConfig") -> bool:
        return wide.to_dict() != config.to_dict()


def on_meta(model_class: "type[PreTrainedModel]", config: "PretrainedConfig") -> "PreTrainedModel":
    """A model without memory for its weights. UserError where the configuration makes none."""
    with needs_extra("hf"):
        from transformers.initialization import no_init_weights
    try:
        with torch.device("meta"), no_init_weights():
            model = model_class(config)
        model.tie_weights()  # which is a part of the initialisation
        return model
    except Exception as error:  # whatever it is, the configuration's values have caused it
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the configuration does not make a {model_class.__name__}: {message}") from error
