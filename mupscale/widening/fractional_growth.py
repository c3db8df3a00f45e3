"""Axes that grow by a factor that is not a whole number: what is exact, and what is refused.

Units get unequal numbers of copies (`layout.evenly`), each read with 1 / copies, and the optimizer steps entry by entry
in the units of the axis (`mixed_axes.py`). So everything that treats units separately is exact: layers, activations,
norms over samples. Operations that sum or average over units without weights would count units by their copies: a norm
over the width, the product of queries and keys inside a head.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction

from torch import nn

from mupscale.errors import UserError
from mupscale.widening import modules
from mupscale.widening.layout import (
    LayoutSpec,
    is_fractional,
    is_mixed,
    is_unit_by_unit,
    narrow_length,
    wide_length,
)
from mupscale.widening.survey import Survey
from mupscale.widening.tensor_plan import TensorPlan


def as_text(factor: float) -> str:
    """A factor as a user writes it: 2, 5/3."""
    return str(Fraction(factor).limit_denominator(10**6))


def described(entries: Mapping[str, TensorPlan]) -> Iterator[str]:
    """One line for each factor that is not whole: which parameters grow by it, and what is exact."""
    grown: dict[Fraction, list[tuple[TensorPlan, int]]] = {}
    for entry in entries.values():
        for axis in entry.fractional_axes:
            if is_unit_by_unit(entry.layouts[axis]):  # other pieces are named in the table
                grown.setdefault(ratio(entry, axis), []).append((entry, axis))
    for factor, places in sorted(grown.items()):
        copies = {piece.factor for entry, axis in places for piece in entry.layouts[axis]}
        few, many = min(copies), max(copies)
        rates = f"{float(few / factor):.2f} to {float(many / factor):.2f}"
        yield (
            f"fractional: {len({entry.name for entry, _ in places})} parameters grow by {factor}, with {few} to {many} "
            "copies of a unit. This is exact with a rate for each entry, which the optimizer of the upscale has unless "
            f"the method leaves rates as they are. With one rate for all, rates would be {rates} times the exact ones"
        )


def ratio(entry: TensorPlan, axis: int) -> Fraction:
    return Fraction(entry.wide_shape[axis], entry.narrow_shape[axis])


def refuse_averages(survey: Survey, entries: Mapping[str, TensorPlan], given: Mapping[str, set[int]]) -> None:
    """Raises a UserError if a module would weight units by their number of copies.

    `given` are the axes whose pieces are given, by name.
    """
    if any(entry.fractional_axes for entry in entries.values()):
        _refuse_norms(survey, entries, given)
        _refuse_larger_heads(survey, entries)


def refuse_one_sided(entries: Mapping[str, TensorPlan], given: Mapping[str, set[int]]) -> None:
    """Raises a UserError for an axis that grows by a fraction by which no units grow that are produced and read.

    It is no width: an axis of width beside fixed features grows by a fraction of its own.
    """
    produced, read = set(), set()
    for entry in entries.values():
        for axis in entry.fractional_axes:
            if axis in entry.summed_axes:
                read.add(ratio(entry, axis))
            elif entry.sides[axis] == "out":
                produced.add(ratio(entry, axis))
    for entry in entries.values():
        for axis in sorted(set(entry.fractional_axes) - given.get(entry.name, set())):
            if ratio(entry, axis) not in read:
                raise _no_whole_factor(entry, axis, "nothing reads")
            if ratio(entry, axis) not in produced:
                raise _no_whole_factor(entry, axis, "nothing produces")


def refuse_buffer(buffer: TensorPlan, entries: Mapping[str, TensorPlan], given: Mapping[int, LayoutSpec]) -> None:
    """Raises a UserError for a buffer that grows by a fraction by which no units grow."""
    known = {ratio(entry, axis) for entry in entries.values() for axis in entry.fractional_axes}
    for axis in buffer.fractional_axes:
        if axis not in given and ratio(buffer, axis) not in known:
            raise _no_whole_factor(buffer, axis, "no parameter has")


def in_whole_groups(norm: nn.GroupNorm, entry: TensorPlan) -> bool:
    """Whether the groups of a GroupNorm are duplicated as wholes, so that each is normalised as before."""
    channels = norm.num_channels // norm.num_groups
    return all(piece.block == channels for piece in entry.layouts[0])


def _no_whole_factor(entry: TensorPlan, axis: int, missing: str) -> UserError:
    narrow, wide = entry.narrow_shape, entry.wide_shape
    return UserError(
        f"{entry.name!r} {narrow} → {wide}: axis {axis} does not grow by a whole factor ({wide[axis]} / "
        f"{narrow[axis]}), and {missing} units that grow so. Choose a multiple of {narrow[axis]}, "
        f'or give the pieces of the axis: blocks={{"{entry.name}": {{{axis}: [(length, block, factor), ...]}}}}'
    )


def _refuse_norms(survey: Survey, entries: Mapping[str, TensorPlan], given: Mapping[str, set[int]]) -> None:
    for name, before, after in survey.modules:
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
                        raise _weighs_by_copies(name, before, narrow_length(layout), wide_length(layout))


def _weighs_by_copies(name: str, module: nn.Module, narrow: int, wide: int) -> UserError:
    few = wide // narrow
    return UserError(
        f"module {name or '(the model)'!r} ({type(module).__name__}) normalises over a width that grows by "
        f"{Fraction(wide, narrow)} ({narrow} → {wide}): units with {few + 1} copies would weigh {few + 1} / {few} "
        f"times as much as units with {few}. Grow this width by a whole factor, such as to {narrow * (few + 1)}. "
        "Feed-forward units, the number of heads, and channels under BatchNorm may grow by any factor"
    )


def _refuse_larger_heads(survey: Survey, entries: Mapping[str, TensorPlan]) -> None:
    """Raises a UserError if the size of heads grows by a fraction: logits would weight entries by their copies."""
    for name, before, after in survey.modules:
        heads = modules.kept_heads(before, after)
        inside = [entry for entry in entries.values() if entry.name.startswith(f"{name}." if name else "")]
        for entry in inside if heads is not None else ():
            for axis in entry.fractional_axes:
                by_entries = entry.sides[axis] == "out" and entry.layouts[axis][0].block == 1
                if by_entries and _produces_queries_or_keys(entry):
                    raise UserError(
                        f"module {name or '(the model)'!r} ({type(before).__name__}) keeps its {heads}, and their size "
                        f"grows by {ratio(entry, axis)} ({entry.name!r}): the product of queries and keys would weigh "
                        "entries by their copies. Grow the number of heads, in blocks of whole heads, or their size by "
                        "a whole factor"
                    )


_QUERIES_AND_KEYS = {"q", "k", "wq", "wk", "qk", "kv", "qkv", "wqkv", "query", "key", "attn"}
"""Words in the names of layers that produce them."""


def _produces_queries_or_keys(entry: TensorPlan) -> bool:
    layer = entry.name.rpartition(".")[0].rpartition(".")[2]
    words = re.split(r"_|(?<=[a-z])(?=[A-Z])", layer)
    return any(word.lower() in _QUERIES_AND_KEYS for word in words)
