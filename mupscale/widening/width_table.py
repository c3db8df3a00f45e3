"""The width table: the width of each parameter in units of its base width. It is stored on the module, by name.

mup stores this in an attribute of each Parameter, which deepcopy, EMA copies, `to_empty` and
`load_state_dict(assign=True)` lose. A plain attribute of the module survives all of these, and pickling.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from mup import InfDim, InfShape
from torch import Tensor, nn

from mupscale.widening.modules import Side
from mupscale.widening.sharding import is_sharded, replicated

_ATTRIBUTE = "_mupscale_table"


@dataclass(frozen=True)
class WidthFactors:
    """One parameter: its produced and its summed width, in units of the base width."""

    m_out: float = 1.0
    m_in: float = 1.0
    base: tuple[int | None, ...] = ()
    """The base size of every axis, None where it is not width (muP only)."""
    relative: tuple[tuple[int, Side, tuple[float, ...]], ...] = ()
    """(axis, side, factor of each entry in units of the axis') where pieces of one axis grew by different factors."""
    shift: float = 0.0
    """What the weights have beyond a multiple of those at the base width, from affine units: decay acts on the rest."""

    @property
    def needs_hooks(self) -> bool:
        """Whether the step of an optimizer must see the parameter in other units (`mixed_axes.py`)."""
        return bool(self.relative) or self.shift != 0

    def relative_scale(self, side: Side, like: Tensor) -> Tensor:
        """The relative factors of that side, broadcastable to the parameter."""
        made = self.__dict__.setdefault("_made", {})  # every step needs them, and a captured one cannot make them
        key = side, like.dtype, like.device, like.ndim
        if key not in made:
            scale = torch.ones([1] * like.ndim, dtype=torch.float64)
            for axis, axis_side, row in self.relative:
                if axis_side == side:
                    shape = [-1 if other == axis else 1 for other in range(like.ndim)]
                    scale = scale * torch.tensor(row, dtype=torch.float64).reshape(shape)
            made[key] = scale.to(like.device, like.dtype)
        return replicated(made[key], like) if is_sharded(like) else made[key]


@dataclass(frozen=True)
class Table:
    mup: bool
    """Whether hyperparameters follow muP from these widths; if not, they are only remembered for clipping."""
    widths: dict[str, WidthFactors] = field(default_factory=dict)


def store_table(model: nn.Module, table: Table) -> None:
    object.__setattr__(model, _ATTRIBUTE, table)
    restore_infshapes(model)


def merged_table(model: nn.Module, *, mup_only: bool = False) -> dict[str, WidthFactors]:
    """The tables of `model` and of the modules inside it (a LightningModule, DDP, EMA), by full name."""
    answer: dict[str, WidthFactors] = {}
    for prefix, module in model.named_modules():
        table = module.__dict__.get(_ATTRIBUTE)
        if table and (table.mup or not mup_only):
            for name, width in table.widths.items():
                answer.setdefault(f"{prefix}.{name}" if prefix else name, width)
    return answer


def restore_infshapes(model: nn.Module) -> None:
    """Gives parameters the `infshape` that mup's layers and initialisers read, and the width that `MuAdam` reads."""
    for name, width in merged_table(model, mup_only=True).items():
        parameter: Any = model.get_parameter(name)
        if len(width.base) != parameter.ndim:  # added after the base shapes were set: no width is known
            continue
        parameter.infshape = InfShape(
            [InfDim(base, size) for base, size in zip(width.base, parameter.shape, strict=True)]
        )
        parameter.mup_width = width
