"""Compares one forward pass of both models: where they first differ, their ratio up to that point, and where they cut
their axes into sections: the lengths in calls of `split`, and the ends of slices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mupscale._torch import is_under_transform
from mupscale.checks.comparison import Match, Planned, match, named_gradients, weighted_sum
from mupscale.checks.recording import state_kept
from mupscale.checks.trace import Call, Event, EventKind, floats_of, match_all, tensors_of, watched
from mupscale.discovery.hypothesis import Hypothesis, followed_axis
from mupscale.errors import UserError
from mupscale.widening.growth import Layout, Piece, wide_length

Cut = tuple[int, ...]
"""The lengths of the sections of an axis."""

PairedCut = tuple[tuple[int, int], ...]
"""The lengths of the sections in the narrow and in the wide model."""

_SPLITS: tuple[Callable[..., Any], ...] = (
    torch.split,
    torch.chunk,
    torch.tensor_split,
    torch.split_with_sizes,
    Tensor.split,
    Tensor.chunk,
    Tensor.tensor_split,
    Tensor.split_with_sizes,
)
_MOST_LAYOUTS = 24
"""How many layouts of one axis are tried."""


def cuts_of(func: Callable[..., Any], args: Sequence[Any], result: Any) -> Iterator[Cut]:
    """The sections into which one operation cuts an axis; nothing for most operations."""
    if func in _SPLITS and args and isinstance(args[0], Tensor):
        parts = [part for part in result if isinstance(part, Tensor)]
        for axis, size in enumerate(args[0].shape):
            lengths = tuple(part.shape[axis] for part in parts if part.shape[axis])
            if len(lengths) > 1 and sum(lengths) == size:
                yield lengths
                return
    elif func is Tensor.__getitem__:
        yield from _ends(args[0], args[1])


def _ends(tensor: Tensor, index: Any) -> Iterator[Cut]:
    rows = index if isinstance(index, tuple) else (index,)
    if any(isinstance(row, Tensor) or row is None for row in rows):
        return
    if Ellipsis in rows:
        place = rows.index(Ellipsis)
        rest = tensor.ndim - len(rows) + 1
        rows = (*rows[:place], *[slice(None)] * rest, *rows[place + 1 :])
    for size, row in zip(tensor.shape, rows, strict=False):
        if isinstance(row, slice):
            start, stop, step = row.indices(size)
            lengths = tuple(length for length in (start, stop - start, size - stop) if length > 0)
            if step == 1 and len(lengths) > 1 and sum(lengths) == size:
                yield lengths


def paired(narrow: Sequence[Cut], wide: Sequence[Cut]) -> list[PairedCut]:
    """The cuts of two models side by side, each once; none if the models do not cut alike."""
    if [len(cut) for cut in narrow] != [len(cut) for cut in wide]:
        return []
    return list(dict.fromkeys(tuple(zip(a, b, strict=True)) for a, b in zip(narrow, wide, strict=True)))


def layouts_of(cuts: Sequence[PairedCut], narrow: int, wide: int, depth: int = 2) -> list[Layout]:
    """The layouts of an axis that is cut in one of these ways, its sections perhaps cut again, up to `depth` times."""
    whole = (cut for cut in _cut_again(cuts, narrow, wide, depth) if all(w % n == 0 for n, w in cut))
    found = (tuple(Piece(n, n, w // n) for n, w in cut) for cut in whole)
    return list(islice(dict.fromkeys(found), _MOST_LAYOUTS))


def _cut_again(cuts: Sequence[PairedCut], narrow: int, wide: int, depth: int) -> Iterator[PairedCut]:
    for cut in cuts:
        if (sum(n for n, _ in cut), sum(w for _, w in cut)) != (narrow, wide):
            continue
        yield cut
        for place, (n, w) in enumerate(cut) if depth else ():
            for inner in _cut_again(cuts, n, w, depth - 1):
                yield (*cut[:place], *inner, *cut[place + 1 :])


@dataclass
class Outcome:
    """How far the wide model agrees with the narrow one."""

    agreed: int = 0
    """Events that agree."""
    matches: list[list[Match]] = field(default_factory=list)
    """How the tensors of each event that agrees are made of the narrow ones."""
    reason: str | None = None
    """What differs in the first event that does not agree; None if all do."""
    operations: int = 0
    """Operations that agree after the last event that does."""
    untrained: list[str] = field(default_factory=list)
    """Parameters of which copies of one entry would not train alike."""

    @property
    def complete(self) -> bool:
        return self.reason is None and not self.untrained

    @property
    def score(self) -> tuple[int, bool, int, int]:
        return self.agreed, self.reason is None, self.operations, -len(self.untrained)


class _Stop(Exception):
    """Ends a pass at its first difference."""


class Recording:
    """The events of a forward pass."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.events: list[Event] = []
        self.made: list[list[Tensor]] = [[]]
        """What operations have made before each event."""
        self.cuts: list[Cut] = []
        """The sections into which the model cuts axes."""
        with state_kept(model.modules()):
            outputs = _run(model, call, self._note, self._ran)
            self._note("", "returns", outputs)

    @property
    def outputs(self) -> list[Tensor]:
        return self.events[-1].tensors

    def _note(self, name: str, kind: EventKind, values: Any) -> None:
        self.events.append(Event(name, kind, _copies(values)))
        self.made.append([])

    def _ran(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.made[-1] += _floats_made(result)
        self.cuts += cuts_of(func, args, result)


def _floats_made(result: Any) -> list[Tensor]:
    """What an operation has made, if this is a floating-point tensor that can be looked at."""
    is_float = isinstance(result, Tensor) and result.is_floating_point() and not is_under_transform(result)
    return [result.detach()] if is_float else []


def _copies(values: Any) -> list[Tensor]:
    """Copies of them in float64, which a later in-place operation cannot change."""
    return [x.detach().to(torch.float64, copy=True) for x in floats_of(values)]


def compare(
    hypothesis: Hypothesis,
    narrow: Recording,
    call: Call,
    tolerance: float,
    base: Outcome | None = None,
    since: int = 0,
    with_graph: bool = False,
) -> Outcome:
    """Runs the wide model as it is assumed to be, up to the first difference.

    Events before `since` are known to agree as in `base`. A model that takes gradients in its forward pass must run
    `with_graph`.
    """
    hypothesis.write()
    planned = hypothesis.planned()
    outcome = Outcome()
    made: list[Tensor] = []

    def differs(reason: str) -> NoReturn:
        outcome.reason = reason
        if outcome.agreed < len(narrow.events):
            outcome.operations = _operations(narrow.made[outcome.agreed], made, tolerance, planned)
        raise _Stop

    def note(name: str, kind: EventKind, values: Any) -> None:
        index = outcome.agreed
        if index >= len(narrow.events) or (narrow.events[index].name, narrow.events[index].kind) != (name, kind):
            differs("the two models call different modules")
        if base is not None and index < min(since, base.agreed):
            outcome.matches.append(base.matches[index])
            outcome.agreed += 1
            made.clear()
            return
        matches = match_all(narrow.events[index].tensors, _copies(values), tolerance, planned)
        if matches is None:
            differs(f"what {_shown(name, kind)} {'reads' if kind == 'begins' else 'returns'} differs")
        if kind == "begins":
            _follow(hypothesis, name, narrow.events[index].tensors, matches)
        if not name and kind != "begins" and not _in_full(matches):
            outcome.matches.append(matches)
            differs(f"what {_shown(name, kind)} returns is multiplied by a number")
        outcome.matches.append(matches)
        outcome.agreed += 1
        made.clear()

    try:
        with torch.set_grad_enabled(with_graph), state_kept(hypothesis.wide.modules()):
            note("", "returns", _run(hypothesis.wide, call, note, lambda *ran: made.extend(_floats_made(ran[-1]))))
    except _Stop:
        pass
    else:
        if outcome.agreed < len(narrow.events):
            outcome.reason = "the two models call different modules"
    hypothesis.write_again(hypothesis.buffers)  # what a buffer follows may have been found in this pass
    return outcome


def _operations(narrow: list[Tensor], wide: list[Tensor], tolerance: float, planned: Planned) -> int:
    """How many operations agree until the first that does not."""
    for count, (before, after) in enumerate(zip(narrow, wide, strict=False)):
        if match(before, after, tolerance, planned) is None:
            return count
    return min(len(narrow), len(wide))


def _shown(name: str, kind: EventKind) -> str:
    if kind == "returns":
        return "call(model)"
    return repr(name) if name else "the model"


def _in_full(matches: list[Match]) -> bool:
    """Whether outputs that do not grow are equal; hidden states may be in other units, unless there is nothing else."""
    fixed = [found for found in matches if all(piece.factor == 1 for layout in found.layouts for piece in layout)]
    return all(found.ratio == 1 for found in fixed or matches)


def _follow(hypothesis: Hypothesis, name: str, inputs: list[Tensor], matches: list[Match]) -> None:
    """Parameters that read, or act on, the units of an input are duplicated as it is."""
    module = hypothesis.narrow.get_submodule(name)
    first_names = hypothesis.pairing.parameter_names
    changed = []
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for attribute, tensor in tensors:
        full = f"{name}.{attribute}".removeprefix(".")
        full = first_names.get(full, full)
        if full not in hypothesis.assumed:
            continue
        wide_shape = hypothesis.assumed[full].wide_shape
        axis = followed_axis(module, attribute, tensor)
        if axis is None or tensor.shape[axis] == wide_shape[axis]:
            continue
        layout = _layout_of_units(inputs, matches, tensor.shape[axis], wide_shape[axis])
        if layout is not None:
            hypothesis.follow(full, axis, layout)
            changed.append(full)
    hypothesis.write(changed)


def _layout_of_units(inputs: list[Tensor], matches: list[Match], narrow: int, wide: int) -> Layout | None:
    """The layout of the only axis of the inputs that grows like this one."""
    found = {
        layout
        for tensor, each in zip(inputs, matches, strict=True)
        for axis, layout in enumerate(each.layouts)
        if tensor.shape[axis] == narrow and wide_length(layout) == wide
    }
    return found.pop() if len(found) == 1 else None


def returned(model: nn.Module, call: Call) -> list[Tensor]:
    """The outputs of one forward pass, with their graph. It may change buffers: see `state_kept`."""
    return floats_of(_run(model, call))


def gradients(model: nn.Module, call: Call, matches: list[Match] | None = None) -> dict[str, Tensor]:
    """The gradients of a weighted sum of all outputs, by the names of parameters."""
    with state_kept(model.modules()):
        total = weighted_sum(returned(model, call), matches)
        try:
            return named_gradients(model, total)
        except RuntimeError as error:  # some models change in place what their own gradients need
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"discover: the gradients of this model cannot be computed: {reason}") from error


def _run(model: nn.Module, call: Call, *watchers: Any) -> list[Tensor]:
    """The outputs: what the model's own forward pass returned last, and what else `call` returns."""
    outputs, result = watched(model, call, *watchers)
    further = [tensor for tensor in tensors_of(result) if not any(tensor is output for output in outputs)]
    return [*outputs, *further]
