"""The two maps of an axis that a growth method uses, as matrices."""

import torch
from torch import Tensor

from mupscale.methods import GrowthMethod, LiGO, ZeroPadding
from mupscale.widening.growth import Growth, copy_index, narrow_length, source_index


def maps(method: GrowthMethod, entry: Growth, axis: int) -> tuple[Tensor, Tensor]:
    """`out`, what the new units produce, and `inn`, how they are read."""
    if isinstance(method, LiGO) and axis in method._axes.get(entry.name, {}):
        group, block = method._axes[entry.name][axis]
        times = entry.narrow_shape[axis] // (group.units * block)
        out, inn = (
            torch.kron(torch.eye(times).double(), torch.kron(matrix.double().cpu(), torch.eye(block).double()))
            for matrix in (method._maps[group.name]["out"], method._maps[group.name]["in"])
        )
        return out, inn
    layout, shares = entry.layouts[axis], entry.axes[axis].shares
    out = torch.eye(narrow_length(layout), dtype=torch.float64)[source_index(layout)]
    if isinstance(method, ZeroPadding):
        out = out * (copy_index(layout) == 0)[:, None]
        return out, out
    inn = out / out.sum(0)
    return out, inn * torch.tensor(shares, dtype=torch.float64)[:, None] if shares else inn
