"""Axes that grow by a factor that is not a whole number: what is refused, without a forward pass to measure it.

Units get unequal numbers of copies (`growth.evenly`), each read with 1 / copies, and the optimizer steps entry by entry
in the units of the axis (`records.py`). So everything that treats units separately is exact: layers, activations,
norms over samples. Operations that sum or average over units without weights would count units by their copies: a norm
over the width, the product of queries and keys inside a head.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from torch import nn

from mupscale.errors import UserError
from mupscale.widening import modules
from mupscale.widening.growth import Growth, LayoutSpec, is_fractional, is_mixed, sizes_of
from mupscale.widening.hints import Pairing


def refuse_one_sided(entries: Mapping[str, Growth], given: Mapping[str, set[int]]) -> None:
    """Raises a UserError for an axis that grows by a fraction by which no units grow that are produced and read.

    It is no width: an axis of width beside fixed features grows by a fraction of its own.
    """
    produced, read = set(), set()
    for entry in entries.values():
        for axis in entry.fractional_axes:
            if axis in entry.summed_axes:
                read.add(entry.ratio(axis))
            elif entry.sides[axis] == "out":
                produced.add(entry.ratio(axis))
    for entry in entries.values():
        for axis in sorted(set(entry.fractional_axes) - given.get(entry.name, set())):
            if entry.ratio(axis) not in read:
                raise _no_whole_factor(entry, axis, "nothing reads")
            if entry.ratio(axis) not in produced:
                raise _no_whole_factor(entry, axis, "nothing produces")


def refuse_buffer(buffer: Growth, entries: Mapping[str, Growth], given: Mapping[int, LayoutSpec]) -> None:
    """Raises a UserError for a buffer that grows by a fraction by which no units grow."""
    known = {entry.ratio(axis) for entry in entries.values() for axis in entry.fractional_axes}
    for axis in buffer.fractional_axes:
        if axis not in given and buffer.ratio(axis) not in known:
            raise _no_whole_factor(buffer, axis, "no parameter has")


def _no_whole_factor(entry: Growth, axis: int, missing: str) -> UserError:
    narrow, wide = entry.narrow_shape[axis], entry.wide_shape[axis]
    factor = -(-wide // narrow)
    fixed, rest = divmod(factor * narrow - wide, factor - 1) if factor > 1 else (0, 0)
    words, pieces = "", "(length, block, factor), ..."
    if 0 < fixed < narrow and not rest:
        words = f" (here, if the last {fixed} are fixed features)"
        pieces = f"({narrow - fixed}, 1, {factor}), ({fixed}, 1, 1)"
    return UserError(
        f"{entry.name!r} {entry.narrow_shape} → {entry.wide_shape}: axis {axis} does not grow by a whole factor "
        f"({wide} / {narrow}), and {missing} units that grow so. Choose a multiple of {narrow}, or give the pieces "
        f'of the axis{words}: hints=Hints(blocks={{"{entry.name}": {{{axis}: [{pieces}]}}}}), or an '
        "attribute width_blocks of the model"
    )


def refuse_norms(pairing: Pairing, entries: Mapping[str, Growth], given: Mapping[str, set[int]]) -> None:
    """Raises a UserError if a norm would weight units by their copies. `given` are axes whose pieces are given."""
    for name, before, after in pairing.modules:
        own = [f"{name}.{attribute}".removeprefix(".") for attribute, _ in before.named_parameters(recurse=False)]
        if any(given.get(parameter) and not parameter.endswith("bias") for parameter in own):
            continue
        if isinstance(before, nn.LayerNorm | nn.RMSNorm):
            for n, w in zip(before.normalized_shape, after.normalized_shape, strict=True):  # type: ignore[arg-type]
                if w % n:
                    raise _weighs_by_copies(name, before, n, w)
        elif isinstance(before, nn.GroupNorm):
            if modules.channels_of_a_group(after) % modules.channels_of_a_group(before):
                raise _weighs_by_copies(name, before, before.num_channels, after.num_channels)  # type: ignore[arg-type]
        elif modules.normalises_width(before):
            for parameter in own:
                for layout in entries[parameter].layouts if parameter in entries else ():
                    if is_fractional(layout) and is_mixed(layout):
                        raise _weighs_by_copies(name, before, *sizes_of(layout))


def _weighs_by_copies(name: str, module: nn.Module, narrow: int, wide: int) -> UserError:
    few = wide // narrow
    return UserError(
        f"module {name or '(the model)'!r} ({type(module).__name__}) normalises over a width that grows by "
        f"{Fraction(wide, narrow)} ({narrow} → {wide}): units with {few + 1} copies would weigh {few + 1} / {few} "
        f"times as much as units with {few}. Grow this width by a whole factor, such as to {narrow * (few + 1)}. "
        "Feed-forward units, the number of heads, and channels under BatchNorm may grow by any factor"
    )


def refuse_larger_heads(pairing: Pairing, entries: Mapping[str, Growth]) -> None:
    """Raises a UserError if the size of heads grows by a fraction: logits would weight entries by their copies."""
    for name, before, after in pairing.modules:
        heads = next((f"{old} heads" for _, old, new in modules.head_counts(before, after) if old == new), None)
        inside = [entry for entry in entries.values() if entry.name.startswith(f"{name}." if name else "")]
        for entry in inside if heads is not None else ():
            for axis in entry.fractional_axes:
                by_entries = entry.sides[axis] == "out" and entry.layouts[axis][0].block == 1
                if by_entries and _produces_queries_or_keys(entry):
                    raise UserError(
                        f"module {name or '(the model)'!r} ({type(before).__name__}) keeps its {heads}, and their size "
                        f"grows by {entry.ratio(axis)} ({entry.name!r}): the product of queries and keys would weigh "
                        "entries by their copies. Grow the number of heads, in blocks of whole heads, or their size by "
                        "a whole factor"
                    )


_QUERIES_AND_KEYS = {"q", "k", "wq", "wk", "qk", "kv", "qkv", "wqkv", "query", "key", "attn"}
"""Words in the names of layers that produce them."""


def _produces_queries_or_keys(entry: Growth) -> bool:
    layer = entry.name.rpartition(".")[0].rpartition(".")[2]
    words = re.split(r"_|(?<=[a-z])(?=[A-Z])", layer)
    return any(word.lower() in _QUERIES_AND_KEYS for word in words)
