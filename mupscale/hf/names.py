"""The tensors of a folder beside the parameters of its model: names of one are not always names of the other.

The transformers library renames tensors when it loads a folder (prefixes, names of earlier versions), and puts some
together (the experts of a layer into one parameter). A wide folder keeps the names of the narrow one; in a deep one,
the numbers of layers follow.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mupscale.errors import UserError
from mupscale.hf.folder import StoredTensor
from mupscale.hf.recipes import EntryRun, Runs, named_tensors, resolve
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
    """The name in the new folder, which differs from that of its source by the number of its layer at most."""
    source: StoredTensor
    entry: Growth
    parameter: str | None
    """The parameter of the model that it is, or is a part of; None for a buffer."""

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the new tensor."""
        return self.entry.wide_shape


@dataclass(frozen=True)
class MadeTensor:
    """A tensor of a new folder, made of runs of stored ones."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: tuple[EntryRun, ...]


@dataclass(frozen=True)
class Part:
    """The place of a folder's tensor in a parameter of the model: for each axis of the parameter, its axis or index."""

    parameter: str
    axes: tuple[int | None, ...]
    """The axis of the tensor that this axis of the parameter is; None where the tensor has one index of it."""
    starts: tuple[int, ...]
    """Where the tensor begins on each axis of the parameter."""
    is_whole: bool = False

    def first(self, shape: Sequence[int]) -> int:
        """The first entry of the tensor in a parameter of this shape; its entries follow each other."""
        return sum(start * math.prod(shape[axis + 1 :]) for axis, start in enumerate(self.starts))


def growing_tensors(
    tensors: Mapping[str, StoredTensor], plan: Plan, narrow: "PreTrainedModel", wide: "PreTrainedModel"
) -> tuple[list[GrowingTensor], list[str]]:
    """Every tensor of the new folder with its growth, and the names that the model does not use; else a UserError."""
    places, unused = _places(tensors, narrow)
    grown: dict[str, list[tuple[str, Growth]]] = {}
    for entry in (*plan.parameters.values(), *plan.buffers.values()):
        for target in entry.names:
            grown.setdefault(source_of(plan.layers, target), []).append((target, entry))
    _refuse_missing(places, narrow, {name for name, rows in grown.items() if any(entry.grows for _, entry in rows)})
    buffers = {name for name, _ in narrow.named_buffers(remove_duplicate=False)}
    renamed = _Renaming(wide) if plan.layers else None
    growing = []
    for name, part in places.items():
        for target, entry in grown[part.parameter]:
            new_name = name if renamed is None else renamed.at(name, part.parameter, target)
            own = entry if part.is_whole else _part_of(entry, part, tensors[name], new_name)
            growing.append(GrowingTensor(new_name, tensors[name], own, None if part.parameter in buffers else target))
    return growing, unused


def stored_runs(
    tensors: Mapping[str, StoredTensor], narrow: "PreTrainedModel"
) -> tuple[dict[str, tuple[EntryRun, ...]], list[str]]:
    """Where the entries of each parameter and saved buffer are stored, and the names that the model does not use."""
    places, unused = _places(tensors, narrow)
    _refuse_missing(places, narrow, ())
    found: dict[str, list[tuple[int, str]]] = {}
    shapes = {name: each.shape for name, each in _all_tensors(narrow).items()}
    for name, part in places.items():
        found.setdefault(part.parameter, []).append((part.first(shapes[part.parameter]), name))
    runs = {}
    for parameter, rows in found.items():
        ends = [first + math.prod(tensors[name].shape) for first, name in sorted(rows)]
        if [first for first, _ in sorted(rows)] != [0, *ends[:-1]]:
            raise UserError(f"{parameter!r} is in several tensors of the folder, in another order; load the model")
        runs[parameter] = tuple(EntryRun(tensors[name], math.prod(tensors[name].shape)) for _, name in sorted(rows))
    return with_aliases(runs, narrow), unused


def with_aliases(runs: Runs, model: "PreTrainedModel") -> dict[str, tuple[EntryRun, ...]]:
    """The same, by every name of a tied parameter."""
    known = {id(tensor): name for name, tensor in _all_tensors(model).items() if name in runs}
    return {name: runs[known[id(each)]] for name, each in _all_tensors(model).items() if id(each) in known}


def made_tensors(runs: Runs, dtypes: Mapping[str, torch.dtype], wide: "PreTrainedModel") -> dict[str, MadeTensor]:
    """The tensors of a new folder, under the names by which transformers saves them; `runs` are of stored ones.

    A tensor without a stored run has the dtype in `dtypes`, by the parameter that it is, or is a part of.
    """
    from transformers.core_model_loading import revert_weight_conversion

    wanted = {name: tensor for name, tensor in named_tensors(wide).items() if name in runs}
    saved = revert_weight_conversion(wide, wanted)
    unplaced = {name: StoredTensor(name, Path(), 0, each.dtype, tuple(each.shape)) for name, each in saved.items()}
    answer = {}
    for name, part in _places(unplaced, wide)[0].items():
        shape = unplaced[name].shape
        first = part.first(wanted[part.parameter].shape)
        own = tuple(resolve([EntryRun(part.parameter, math.prod(shape), first)], runs))
        stored = (run.source.dtype for run in own if run.source is not None)
        dtype = next(stored, None) or dtypes[part.parameter]
        answer[name] = MadeTensor(name, dtype, shape, own)
    return answer


def _all_tensors(model: "PreTrainedModel") -> dict[str, Any]:
    """Parameters and buffers by each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


class _Renaming:
    """The names in a model of the tensors of its folders, as transformers would load them."""

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
    parameters = {name for name, _ in narrow.named_parameters(remove_duplicate=False)}
    places: dict[str, Part] = {}
    collected: dict[str, dict[str, list[str]]] = {}
    unused: list[str] = []
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = renamed(name)
        if target not in shapes:
            unused.append(name)  # from_pretrained leaves it behind too: a head of another task, an old buffer
            continue
        if target in parameters and not tensors[name].dtype.is_floating_point:
            raise UserError(
                f"{name!r} holds whole numbers ({tensors[name].dtype}): the model is quantised. "
                "Take it in floating point, and quantise the wide one"
            )
        if pattern is None:
            if tensors[name].shape != shapes[target]:
                raise UserError(
                    f"{name!r} has shape {tensors[name].shape} in the folder, but the configuration makes "
                    f"{shapes[target]} of it: they do not belong together"
                )
            rank = len(shapes[target])
            places[name] = Part(target, tuple(range(rank)), (0,) * rank, is_whole=True)
        else:
            collected.setdefault(target, {}).setdefault(pattern, []).append(name)
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


def _refuse_missing(places: Mapping[str, Part], narrow: "PreTrainedModel", growing: Collection[str]) -> None:
    """Raises a UserError if the folder lacks a parameter, or a saved buffer that grows."""
    found, names = {part.parameter for part in places.values()}, _all_tensors(narrow)
    there = {id(names[name]) for name in found}
    patterns = getattr(narrow, "_keys_to_ignore_on_load_missing", None) or ()
    parameters = dict(narrow.named_parameters())
    for name in narrow.state_dict():
        is_computed = name not in parameters or any(re.search(pattern, name) for pattern in patterns)
        if id(names[name]) not in there and (name in growing or not is_computed):
            raise UserError(
                f"the folder lacks {name!r}, which a {type(narrow).__name__} has. "
                "Get the files again, or correct `architectures` in config.json"
            )
