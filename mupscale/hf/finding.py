"""How the tensors of a model of the transformers library grow: roles, layouts and units."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from mupscale.hf.outputs import Call
from mupscale.widening.layout import LayoutSpec
from mupscale.widening.roles import Role

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from mupscale.hf.growth import Growth


@dataclass(frozen=True)
class Found:
    """What `plan` takes, by the full names of parameters."""

    roles: dict[str, Role] = field(default_factory=dict)
    blocks: dict[str, dict[int, LayoutSpec]] = field(default_factory=dict)
    units: dict[str, Any] = field(default_factory=dict)

    def resolved(self, narrow: nn.Module, wide: nn.Module) -> "Found":
        """The same for two other models of the family: every growing axis is tiled."""
        sizes = {name: tensor.shape for name, tensor in (*wide.named_parameters(), *wide.named_buffers())}
        blocks: dict[str, dict[int, LayoutSpec]] = {}
        for name, tensor in (*narrow.named_parameters(), *narrow.named_buffers()):
            for axis, (before, after) in enumerate(zip(tensor.shape, sizes[name], strict=True)):
                if after > before and after % before == 0:
                    blocks.setdefault(name, {})[axis] = before
        return Found(self.roles, blocks, self.units)


def find(
    config: "PretrainedConfig",
    model_class: "type[PreTrainedModel]",
    growth: "Growth",
    call: Call | None = None,
) -> Found:
    """Roles, layouts and units of a family, found on a shrunken configuration of it."""
    return Found()


def given(found: Found) -> dict[str, Any]:
    """What `plan` and `upscale` take of a finding."""
    given: dict[str, Any] = {"roles": found.roles or None, "blocks": found.blocks or None}
    if found.units:
        given["units"] = found.units
    return given
