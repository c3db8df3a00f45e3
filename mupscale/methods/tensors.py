"""The one writer of grown tensors: what is read and where it is written is the caller's."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from mupscale.errors import UserError
from mupscale.methods.base import GrowthMethod
from mupscale.methods.noise import Constants, Noise, add_noise_, may_overflow
from mupscale.sharding import gathered
from mupscale.widening.growth import Growth, source_index
from mupscale.widening.write import widen_

Read = Callable[[Growth, slice | None], Tensor]
"""Returns the narrow tensor of a growth; with a slice, these rows of it."""

Write = Callable[[Growth, bool], Iterable[tuple[Tensor, slice | None]]]
"""Yields what is to be filled: the wide tensor and None; or, if the flag allows it, parts of it and their rows."""


@torch.no_grad()
def grow_tensors(
    entries: Iterable[Growth], method: GrowthMethod, noise: Noise | None, read: Read, write: Write, seed: int = 0
) -> Constants:
    """Fills the wide tensors of parameters and buffers, wherever they are; returns σ̄ of the noise on each.

    The only place where grown tensors are made: in memory, in shards, in checkpoints and in model folders.
    """
    constants: Constants = {}
    for entry in entries:
        added = noise if is_noisy(noise, entry) else None
        is_plain = method.widens_by_rows or entry.kind == "buffer"
        by_rows = is_plain and (added is None or not added.reads_widened(entry))
        constants[entry.name] = 0.0
        for target, rows in () if entry.kept else write(entry, by_rows):
            if entry.fill is not None:
                target.fill_(entry.fill)
                continue
            # the constants of noise may depend on all of the narrow tensor
            part = None if rows is None or added is not None else _narrow_rows(entry, rows)
            source = read(entry, part)
            if is_plain:
                widen_(target, source, entry, rows, 0 if part is None else part.start)
            else:
                method.widen_(target, source, entry)
            if added is not None:
                constants[entry.name] = add_noise_(target, entry, added, source, seed, rows)
                _refuse_overflow(target, entry, added)
            del source  # `write` may free it
    return constants


def is_noisy(noise: Noise | None, entry: Growth) -> bool:
    """Whether a parameter gets noise."""
    return noise is not None and entry.kind != "buffer" and entry.is_copied and noise.applies(entry)


def _narrow_rows(entry: Growth, rows: slice) -> slice:
    """The narrow rows that some wide rows are copies of."""
    index = source_index(entry.layouts[0])[rows]
    return slice(int(index.min()), int(index.max()) + 1) if len(index) else slice(0, 0)


def _refuse_overflow(target: Tensor, entry: Growth, noise: Noise) -> None:
    if may_overflow(noise.level(), target.dtype) and not bool(torch.isfinite(target).all()):
        raise UserError(
            f"noise: on parameter {entry.name!r} {entry.wide_shape} it is too large for {target.dtype}, whose largest "
            f"number is {torch.finfo(target.dtype).max:g}. Give a lower level"
        )


def read_from(model: nn.Module) -> Read:
    """Reads the parameters and buffers of a model; one that is sharded whole."""
    sources = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def read(entry: Growth, rows: slice | None) -> Tensor:
        source = gathered(sources[entry.name])
        return source if rows is None else source[rows]

    return read
