"""The tensors of a folder beside the parameters of its model: names of one are not always names of the other.

The transformers library renames tensors when it loads a folder (prefixes, names of earlier versions), and puts some
together (the experts of a layer into one parameter). A wide folder keeps the names of the narrow one; in a deep one,
the numbers of layers follow.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mupscale.errors import UserError
from mupscale.hf.folder import StoredTensor
from mupscale.widening.growth import Growth, Layout, Piece
from mupscale.widening.hints import some_names
from mupscale.widening.layers import source_of
from mupscale.widening.plan_text import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GrowingTensor:
    """A tensor of a folder, and how it grows."""

    name: str
    """Its name in the new folder, which differs from that of its source by the number of its layer at most."""
    source: StoredTensor
    entry: Growth
    parameter: str | None
    """The parameter of the model that it is, or is a part of; None for a buffer."""


@dataclass(frozen=True)
class Part:
    """The place of a folder's tensor in a parameter of the model: for each axis of the parameter, its axis or index."""

    parameter: str
    axes: tuple[int | None, ...]
    """The axis of the tensor that this axis of the parameter is; None where the tensor has one index of it."""
    starts: tuple[int, ...]
    """Where the tensor begins on each axis of the parameter."""
    is_whole: bool = False


def growing_tensors(
    tensors: Mapping[str, StoredTensor], plan: Plan, narrow: "PreTrainedModel", wide: "PreTrainedModel"
) -> tuple[list[GrowingTensor], list[str]]:
    """Every tensor of the new folder with its growth, and the names that the model does not use; else a UserError."""
    places, unused = _places(tensors, narrow)
    grown: dict[str, list[tuple[str, Growth]]] = {}
    for entry in (*plan.parameters.values(), *plan.buffers.values()):
        for target in entry.names:
            grown.setdefault(source_of(plan.layers, target), []).append((target, entry))
    buffers = {name for name, _ in narrow.named_buffers(remove_duplicate=False)}
    renamed = _Renaming(wide) if plan.layers else None
    growing = []
    for name, part in places.items():
        is_buffer = part.parameter in buffers
        if not is_buffer and not tensors[name].dtype.is_floating_point:
            raise UserError(
                f"{name!r} holds whole numbers ({tensors[name].dtype}): the model is quantised. "
                "Take it in floating point, and quantise the wide one"
            )
        for target, entry in grown[part.parameter]:
            new_name = name if renamed is None else renamed.at(name, part.parameter, target)
            own = entry if part.is_whole else _part_of(entry, part, tensors[name], new_name)
            if tensors[name].shape != own.narrow_shape:
                raise UserError(
                    f"{name!r} has shape {tensors[name].shape} in the folder, but the configuration makes "
                    f"{own.narrow_shape} of it: they do not belong together"
                )
            growing.append(GrowingTensor(new_name, tensors[name], own, None if is_buffer else target))
    _refuse_missing({part.parameter for part in places.values()}, plan, narrow)
    return growing, unused


class _Renaming:
    """By which names a model knows the tensors of its folders, as transformers would load them."""

    def __init__(self, model: "PreTrainedModel") -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self.prefix, self.wanted = model.base_model_prefix, model.state_dict()
        self.renamings = [row for row in mapping if isinstance(row, WeightRenaming)]
        self.converters = [row for row in mapping if isinstance(row, WeightConverter)]

    def __call__(self, name: str) -> tuple[str, str | None]:
        """The name in the model, and the pattern of the conversion that a tensor is a part of."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.wanted)
        return (name, None) if target not in self.wanted and name in self.wanted else (target, pattern)

    def at(self, name: str, source: str, target: str) -> str:
        """The name of a tensor whose parameter is called `target` in this model, and `source` in a shallower one."""
        if source == target:
            return name
        old, new = next(pair for pair in zip(source.split("."), target.split("."), strict=True) if pair[0] != pair[1])
        parts = name.split(".")
        for place, part in enumerate(parts):
            candidate = ".".join([*parts[:place], new, *parts[place + 1 :]])
            if part == old and self(candidate)[0] == target:
                return candidate
        raise UserError(
            f"what the folder calls {name!r} is {source!r} in the model; how the folder would call {target!r} is not "
            "found. Load the model and use mupscale.hf.upscale instead"
        )


def _places(tensors: Mapping[str, StoredTensor], narrow: "PreTrainedModel") -> tuple[dict[str, Part], list[str]]:
    """Where each tensor goes, as transformers would load it."""
    from transformers.core_model_loading import dot_natural_key

    renamed = _Renaming(narrow)
    converter_of = {pattern: row for row in renamed.converters for pattern in row.source_patterns}
    shapes = {name: tuple(tensor.shape) for name, tensor in renamed.wanted.items()}
    places: dict[str, Part] = {}
    collected: dict[str, dict[str, list[str]]] = {}
    strangers: list[str] = []
    unused: list[str] = []
    ignored = [r"rotary_emb\.inv_freq$", *(getattr(narrow, "_keys_to_ignore_on_load_unexpected", None) or ())]
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = renamed(name)
        if target not in shapes:
            is_ignored = any(re.search(pattern, target) for pattern in ignored)  # transformers drops it without a word
            (unused if is_ignored else strangers).append(name)
        elif pattern is None:
            rank = len(shapes[target])
            places[name] = Part(target, tuple(range(rank)), (0,) * rank, is_whole=True)
        else:
            collected.setdefault(target, {}).setdefault(pattern, []).append(name)
    if strangers:
        raise UserError(
            f"the folder has tensors that a {type(narrow).__name__} does not have: {some_names(strangers)}. "
            "Save it again by from_pretrained and save_pretrained"
        )
    for target, sources in collected.items():
        parts = _merged(target, sources, converter_of[next(iter(sources))], tensors)
        if sum(math.prod(tensors[name].shape) for name in parts) != math.prod(shapes[target]):
            raise UserError(f"the folder has only a part of {target!r} ({some_names(parts)}); get the files again")
        places.update(parts)
    return places, unused


def _merged(
    target: str, sources: Mapping[str, list[str]], converter: Any, tensors: Mapping[str, StoredTensor]
) -> dict[str, Part]:
    """The places of tensors that transformers puts together into one parameter."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    if len(converter.target_patterns) != 1 or steps not in _KNOWN_STEPS:
        names = " and ".join(name for name, _ in steps)
        first = next(iter(sources.values()))[0]
        raise UserError(
            f"transformers makes {target!r} of {first!r} by {names}, which cannot be streamed. "
            "Load the model and use mupscale.hf.upscale instead"
        )
    stacks, joins = steps[0][0] == "MergeModulelist", steps[-1][0] == "Concatenate"
    answer: dict[str, Part] = {}
    start = 0
    for pattern in converter.source_patterns:
        for index, name in enumerate(sources.get(pattern, ())):
            shape = tensors[name].shape
            if stacks:
                starts = (index, start if joins else 0, *(0 for _ in shape[1:]))
                answer[name] = Part(target, (None, *range(len(shape))), starts)
            else:
                answer[name] = Part(target, tuple(range(len(shape))), (start, *(0 for _ in shape[1:])))
        length = tensors[sources[pattern][0]].shape[0] if pattern in sources else 0
        start += length if joins else 0
    return answer


_KNOWN_STEPS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Concatenate", 0)])
"""Experts stacked; two projections of each joined and stacked; projections joined."""


def _part_of(entry: Growth, part: Part, tensor: StoredTensor, name: str) -> Growth:
    kept = [axis for axis, own in enumerate(part.axes) if own is not None]
    layouts: list[Layout] = []
    for axis in kept:
        length = tensor.shape[len(layouts)]
        layouts.append(_layout_between(entry.layouts[axis], part.starts[axis], length, tensor.name))
    new_axis = {axis: position for position, axis in enumerate(kept)}
    matrix_axes = None
    if entry.matrix_axes is not None and all(axis in new_axis for axis in entry.matrix_axes):
        matrix_axes = (new_axis[entry.matrix_axes[0]], new_axis[entry.matrix_axes[1]])
    return replace(
        entry,
        names=(name,),
        narrow_shape=tuple(sum(piece.length for piece in layout) for layout in layouts),
        wide_shape=tuple(sum(piece.length * piece.factor for piece in layout) for layout in layouts),
        axes=tuple(entry.axes[axis]._replace(pieces=layout) for axis, layout in zip(kept, layouts, strict=True)),
        matrix_axes=matrix_axes,
        summed_axes=tuple(new_axis[axis] for axis in entry.summed_axes if axis in new_axis),
    )


def _layout_between(layout: Layout, start: int, length: int, name: str) -> Layout:
    """The pieces of an axis from `start` on. UserError if a block crosses an end."""
    pieces = []
    at = 0
    for piece in layout:
        first, last = max(start - at, 0), min(start + length - at, piece.length)
        at += piece.length
        if first >= last:
            continue
        if piece.factor == 1:  # where blocks mean nothing
            pieces.append(Piece(last - first, last - first, 1))
            continue
        if first % piece.block or last % piece.block:
            raise UserError(
                f"{name!r} is a part of a parameter that is duplicated in blocks across its ends, so the folder "
                "cannot be streamed. Load the model and use mupscale.hf.upscale instead"
            )
        pieces.append(Piece(last - first, piece.block, piece.factor))
    return tuple(pieces)


def _refuse_missing(found: set[str], plan: Plan, narrow: "PreTrainedModel") -> None:
    persistent = narrow.state_dict().keys()
    for entry in (*plan.parameters.values(), *plan.buffers.values()):
        names = [name for each in entry.names if (name := source_of(plan.layers, each)) in persistent]
        if not names or any(name in found for name in names):
            continue
        patterns = getattr(narrow, "_keys_to_ignore_on_load_missing", None) or ()
        computed = all(any(re.search(pattern, name) for pattern in patterns) for name in names)
        if entry.grows or not (computed or entry.role == "buffer"):
            raise UserError(
                f"the folder lacks {names[0]!r}, which a {type(narrow).__name__} has. "
                "Get the files again, or correct `architectures` in config.json"
            )
