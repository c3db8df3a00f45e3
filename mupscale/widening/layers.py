"""Depth: which layer of a deep model comes from which layer of the shallow one.

A stand-in takes the place of the shallow model: it has as many layers as the deep model, under the same names, and its
parameters share the memory of those they come from. So whatever pairs two models of one depth pairs two of different
depths, and growth in depth and in width is one growth.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from mupscale._torch import parts_of, with_parts
from mupscale.errors import UserError, shown
from mupscale.widening.records import Record, Records, records_of

How = Literal["identity", "interleave", "stack", "random"]
Depth = How | Mapping[str, Sequence[int] | Sequence["Layer"]]
"""How a model becomes deeper.

`identity`: inserted layers add nothing at first, so the function stays. `interleave`: each layer k times in place.
`stack`: the whole stack again. `random`: inserted layers keep the initial values of the deep model. Or, by the name of
a layer list, the index of the shallow layer that each deep layer copies, or a `Layer` for each."""
NewLayer = Literal["copy", "identity", "random"]

BRANCH_MULTIPLIER = "branch_multiplier"
"""Attribute of a layer: what its residual branches are multiplied by."""


class Layer(NamedTuple):
    """One layer of a deep model."""

    key: str
    """The name of the layer in its list."""
    source: str
    """The name of the shallow layer it comes from."""
    how: Literal["kept"] | NewLayer
    """The first layer that comes from a shallow one is `kept`; the others are new."""

    @property
    def is_new(self) -> bool:
        return self.how != "kept"

    @property
    def has_state(self) -> bool:
        """Whether it continues with the optimizer state of its source."""
        return self.how in ("kept", "copy")


Layers = dict[str, tuple[Layer, ...]]
"""The layers of a deep model, by the name of their list."""


def refuse_unknown_depth(depth: Any) -> None:
    if depth is not None and not isinstance(depth, Mapping) and depth not in get_args(How):
        raise UserError(
            f"depth must be {', '.join(get_args(How))}, or the source of each layer by the name of its list, "
            f'{{"layers": [0, 0, 1, 1]}}; got {shown(depth)}'
        )


def layers_of(shallow: nn.Module, deep: nn.Module, depth: Depth | None) -> Layers:
    """Which layer of each list that is longer in the deep model comes from where; none where all are equally long."""
    refuse_unknown_depth(depth)
    lists = {found.name: found for found in unequal_lists(shallow, deep)}
    if isinstance(depth, Mapping):
        depth = {_full_name(name, lists): rows for name, rows in depth.items()}
    unknown = [name for name in depth if name not in lists] if isinstance(depth, Mapping) else []
    if unknown or (depth is not None and not lists):
        there = ", ".join(map(str, lists.values())) or "none"
        what = f"no list of layers {unknown[0]!r}" if unknown else "no list of layers"
        raise UserError(
            f"depth: {what} is longer in the deep model; there is {there}. A list is an nn.ModuleList or nn.Sequential "
            "of the same name in both models"
        )
    answer = {}
    for name, found in lists.items():
        if found.new < found.old:
            raise UserError(f"{found}: the deep model has fewer layers. Give the smaller model first")
        rows = depth.get(name) if isinstance(depth, Mapping) else depth
        if rows is None:
            raise UserError(
                f"{found}: say how it becomes deeper, with depth. identity keeps the function; interleave, stack and "
                "random do not. For width alone, build both models with the same number of layers"
            )
        answer[name] = found.rows(rows)
    return answer


def _full_name(name: str, lists: Collection[str]) -> str:
    """The name of a list of layers; that inside of the network is enough, "blocks" for "net.blocks"."""
    ending = [each for each in lists if each.endswith(f".{name}")]
    return ending[0] if name not in lists and len(ending) == 1 else name


def spread(shallow: nn.Module, deep: nn.Module) -> Layers:
    """The layers of a muP base model of any depth beside those of a model, evenly; without lists of unlike layers."""
    lists = [found for found in unequal_lists(shallow, deep) if found.is_uniform]
    return {found.name: found.named(found.evenly(), "copy") for found in lists}


def unequal_lists(shallow: nn.Module, deep: nn.Module) -> Iterator["_List"]:
    """The outermost lists of layers whose lengths differ."""
    others, outer = dict(deep.named_modules()), list[str]()
    for name, before in shallow.named_modules():
        after = others.get(name)
        if not isinstance(before, nn.ModuleList | nn.Sequential) or not isinstance(after, type(before)):
            continue
        if len(before) and len(before) != len(after) and not any(_is_inside(name, list_name) for list_name in outer):
            outer.append(name)
            yield _List(name, dict(before.named_children()), dict(after.named_children()))


class _List(NamedTuple):
    """A list of layers that is longer in the deep model, by the names of its layers in both models."""

    name: str
    before: dict[str, nn.Module]
    after: dict[str, nn.Module]

    @property
    def old(self) -> int:
        return len(self.before)

    @property
    def new(self) -> int:
        return len(self.after)

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.old} → {self.new} layers)"

    @property
    def is_uniform(self) -> bool:
        return all(len(_runs(layers.values())) == 1 for layers in (self.before, self.after))

    def rows(self, how: How | Sequence[int] | Sequence[Layer]) -> tuple[Layer, ...]:
        if not isinstance(how, str):
            given = tuple(row for row in how if isinstance(row, Layer))
            if given:
                return given
            if not all(isinstance(source, int) and 0 <= source < self.old for source in how) or len(how) != self.new:
                raise UserError(
                    f"depth: {self} needs {self.new} numbers from 0 to {self.old - 1}, the source of each layer; got "
                    f"{shown(how)}"
                )
            return self.named([source for source in how if isinstance(source, int)], "copy")
        inserted: NewLayer = "copy" if how in ("interleave", "stack") else "random" if how == "random" else "identity"
        candidates = [self.named(sources, inserted) for sources in self._candidates(how)]
        if not candidates:
            raise UserError(
                f"depth: {self}: {how} needs a multiple of the number of layers. Use identity, or give the source of "
                f'each layer: depth={{"{self.name}": [...]}}'
            )
        return next((rows for rows in candidates if self._fits(rows)), candidates[0])

    def named(self, sources: Sequence[int], how: NewLayer) -> tuple[Layer, ...]:
        keys, seen, answer = list(self.before), set[int](), []
        for key, source in zip(self.after, sources, strict=True):
            answer.append(Layer(key, keys[source], how if source in seen else "kept"))
            seen.add(source)
        return tuple(answer)

    def evenly(self) -> list[int]:
        return [number * self.old // self.new for number in range(self.new)]

    def _candidates(self, how: How) -> Iterator[list[int]]:
        """Sources to try: of the whole list; of runs of like layers; and all others."""
        whole = _segment(0, self.old, self.new, how)
        if whole is not None:
            yield whole
        before, after = _runs(self.before.values()), _runs(self.after.values())
        if len(before) == len(after) > 1:
            starts = accumulate([0, *before[:-1]])
            segments = [_segment(*run, how) for run in zip(starts, before, after, strict=True)]
            if None not in segments:
                yield [source for segment in segments if segment is not None for source in segment]
        yield from orders(self.old, self.new, how)

    def _fits(self, rows: Sequence[Layer]) -> bool:
        """Whether kept layers have the parts of their sources, and new ones are like the kept one of their source."""
        kept = {row.source: row.key for row in rows if not row.is_new}
        for row in rows:
            layer = self.after[row.key]
            if row.is_new and not set(_parts(layer).items()) <= set(_parts(self.after[kept[row.source]]).items()):
                return False
            if not row.is_new and _parts(layer).keys() != _parts(self.before[row.source]).keys():
                return False
        return True


def orders(old: int, new: int, how: How) -> Iterator[list[int]]:
    """The sources of `new` layers to try: spread evenly, or the stack again; new ones in whole periods, at an end."""
    whole = _segment(0, old, new, how)
    if whole is not None:
        yield whole
    if how in ("identity", "random") and new >= old:
        for period in range(2, old + 1):
            if old % period == 0 and new % period == 0:
                groups = _segment(0, old // period, new // period, how) or []
                yield [group * period + offset for group in groups for offset in range(period)]
        yield [min(number, old - 1) for number in range(new)]
        yield [max(number - new + old, 0) for number in range(new)]


def _segment(start: int, old: int, new: int, how: How) -> list[int] | None:
    """The sources of `new` layers that come from `old` ones; None where the choice does not reach that number."""
    if new < old or (how in ("interleave", "stack") and new % old):
        return None
    return [start + (number % old if how == "stack" else number * old // new) for number in range(new)]


def _runs(layers: Iterable[nn.Module]) -> list[int]:
    return [len(list(run)) for _, run in groupby(layers, key=_parts)]


def _parts(layer: nn.Module) -> dict[str, object]:
    """The types of the modules of a layer, the shapes of its parameters, and its buffers, by name."""
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in layer.named_buffers()}
    return shapes | {f"{name} ": type(module).__qualname__ for name, module in layer.named_modules()}


def _is_inside(name: str, list_name: str) -> bool:
    return name.startswith(f"{list_name}.") if list_name else True


def _place(list_name: str, name: str) -> tuple[str, str]:
    """The key of the layer of a list in which something is, and the rest of its name."""
    key, _, rest = (name.removeprefix(f"{list_name}.") if list_name else name).partition(".")
    return key, rest


def layer_at(layers: Layers, name: str) -> tuple[str, Layer, str] | None:
    """The list, the layer and the rest of the name of a part of the deep model; None outside of lists."""
    for prefix, rows in layers.items():
        if _is_inside(name, prefix):
            key, rest = _place(prefix, name)
            row = next((row for row in rows if row.key == key), None)
            if row is not None:
                return prefix, row, rest
    return None


def source_of(layers: Layers, name: str) -> str:
    """The name in the shallow model of what a parameter, buffer or module of the deep model comes from."""
    found = layer_at(layers, name)
    if found is None:
        return name
    prefix, row, rest = found
    return joined(prefix, row.source, rest)


def joined(*parts: str) -> str:
    """The name of a part of a part of a module."""
    return ".".join(part for part in parts if part)


def without_new(deep: nn.Module, shallow: nn.Module, layers: Layers) -> nn.Module:
    """The deep model without its new layers, under the names of the shallow one."""
    kept = {}
    for name, rows in layers.items():
        keys = {row.source: row.key for row in rows if not row.is_new}
        sources = [key for key, _ in shallow.get_submodule(name).named_children()]
        kept[name] = tuple(Layer(source, keys[source], "kept") for source in sources if source in keys)
    return at_depth(deep, shallow, kept)


def at_depth(shallow: nn.Module, deep: nn.Module, layers: Layers) -> nn.Module:
    """The shallow model with the layers of the deep one; kept parts have the shallow model's own parameters."""
    if not layers:
        return shallow
    _refuse_shared(shallow, layers)
    records, mup = records_of(shallow), bool(records_of(shallow, mup_only=True))
    twin = _cloned(shallow, deep, layers, "", {}, is_new=False)
    names = [name for name, _ in twin.named_parameters(remove_duplicate=False)]
    known = {name: _own_record(layers, name, records.get(source_of(layers, name))) for name in names}
    held = {name: record for name, record in known.items() if record is not None}
    if held:
        twin.__dict__[Records.ATTRIBUTE] = Records(mup, held)
    return twin


def _own_record(layers: Layers, name: str, record: Record | None) -> Record | None:
    """What of the record of its source is true of a parameter; new copies have no age, random layers no history."""
    found = layer_at(layers, name)
    if record is None or found is None or found[1].has_state:
        return record
    fresh = replace(record, births=(), rewarm=())
    return replace(fresh, entries=(), shift=0.0) if found[1].how == "random" else fresh


def _refuse_shared(shallow: nn.Module, layers: Layers) -> None:
    holders: dict[int, set[str]] = {}
    for name, parameter in shallow.named_parameters(remove_duplicate=False):
        prefix = next((prefix for prefix in layers if _is_inside(name, prefix)), None)
        place = "" if prefix is None else _place(prefix, name)[0]
        holders.setdefault(id(parameter), set()).add(f"{prefix} {place}")
        if len(holders[id(parameter)]) > 1:
            raise UserError(
                f"depth: parameter {name!r} is shared between layers, so more of them are not more parameters. Give "
                "the layers their own, or change the number of passes in the model itself"
            )


def _cloned(
    module: nn.Module, deep: nn.Module | None, layers: Layers, name: str, made: dict[int, Any], *, is_new: bool
) -> nn.Module:
    """The tree of modules again, with the layers of the deep one.

    With `is_new`, a layer again: with new parameters, which share their memory, and without what the deep one lacks.
    `made` has what was made of each module and tensor.
    """
    if id(module) in made:
        return made[id(module)]
    parts, others = parts_of(module), None if deep is None else parts_of(deep)
    if is_new and others is not None:
        for kind, held in others.items():
            parts[kind] = {key: part for key, part in parts[kind].items() if held.get(key) is not None}
    for kind in ("parameters", "buffers") if is_new else ():
        parts[kind] = {key: _shared(tensor, made) for key, tensor in parts[kind].items()}
    rows = [(key, child, False) for key, child in parts["modules"].items()]
    if name in layers:
        rows = [(row.key, parts_of(module)["modules"][row.source], row.is_new) for row in layers[name]]
    children: dict[str, nn.Module | None] = {}
    twin = made[id(module)] = with_parts(module, parts | {"modules": children})
    for key, child, begins_new in rows:
        of_deep = None if others is None else others["modules"].get(key)
        place = of_deep, layers, joined(name, key), {} if begins_new else made
        # an empty Sequential is a module, but false
        children[key] = None if child is None else _cloned(child, *place, is_new=is_new or begins_new)
    twin.__dict__.pop(Records.ATTRIBUTE, None)
    return twin


def _shared(tensor: Tensor | None, made: dict[int, Any]) -> Tensor | None:
    """Another tensor with the same memory; for None, None."""
    if tensor is not None and id(tensor) not in made:
        same = tensor.detach()
        if isinstance(tensor, nn.Parameter):
            same = nn.Parameter(same, requires_grad=tensor.requires_grad)
            same.__dict__.update(tensor.__dict__)  # such as mup's infshape
            same.grad = tensor.grad
        made[id(tensor)] = same
    return made.get(id(tensor))
