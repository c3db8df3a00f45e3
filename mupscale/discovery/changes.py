"""What to try where two models first differ: other layouts, sides and units of the modules before that point."""

import math
from collections.abc import Callable, Collection, Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

from torch import nn

from mupscale.checks.trace import Event
from mupscale.discovery.found import nearest_power
from mupscale.discovery.hypothesis import AxisGroup, Hypothesis, entries_grow_by, is_known
from mupscale.discovery.passes import Outcome, PairedCut, layouts_of
from mupscale.text_tables import starred
from mupscale.widening.growth import Layout, Piece, evenly
from mupscale.widening.hints import Use
from mupscale.widening.table import Side

_MOST_PAIRED = 24
"""How many changes of layouts are tried together with another change."""


class Change(NamedTuple):
    """One thing to try."""

    words: str
    method: Callable[..., None]
    """A method of `Hypothesis`: `choose`, `turn` or `scale`."""
    arguments: tuple[Any, ...]
    """The arguments of the method; the first has the names of the tensors that it changes."""

    def names(self) -> Collection[str]:
        """The tensors that it changes."""
        first = self.arguments[0]
        return [name for name, _ in first.axes] if isinstance(first, AxisGroup) else first

    def apply(self, hypothesis: Hypothesis) -> None:
        self.method(hypothesis, *self.arguments)


class Proposals:
    """The changes that may help, from the likely ones to the others."""

    def __init__(self, hypothesis: Hypothesis, events: list[Event], cuts: list[PairedCut]) -> None:
        self.hypothesis, self.events, self.cuts = hypothesis, events, cuts
        self._begins = self._first_events()
        begun = {event.name for event in events}
        names = [name for name, _ in hypothesis.narrow.named_modules()]
        self._never_begun = [name for name in names if name not in begun and hypothesis.own(name)]

    def first_event(self, change: Change) -> int:
        """The first event that a change can alter."""
        return min((self._begins.get(name, 0) for name in change.names()), default=0)

    def scopes(self, outcome: Outcome) -> Iterator[str]:
        """The module in whose code the models part, and those that contain it, up to the model."""
        if outcome.untrained:
            scope = outcome.untrained[0].rpartition(".")[0]
        else:
            event = self.events[outcome.agreed]
            scope = event.name.rpartition(".")[0] if event.kind == "begins" else event.name
        yield scope
        while scope:
            scope = scope.rpartition(".")[0]
            yield scope

    def changes(self, outcome: Outcome, scope: str) -> Iterator[Change]:
        ran = self._modules_run(outcome, scope)
        yield from self._carrier_changes(outcome)
        yield from self._unit_changes(ran, self._ratios(outcome))
        yield from self._layout_changes(ran)
        yield from self._side_changes(ran)
        yield from self._unit_changes(ran, [f**power for f in self._factors() for power in (0.5, -0.5, 0.25, 1, -1)])

    def _modules_run(self, outcome: Outcome, scope: str) -> list[str]:
        """Modules with parameters in a scope that have begun, the last first; then those which other modules read."""
        inside = f"{scope}." if scope else ""
        seen: dict[str, None] = {}
        for event in reversed(self.events[: outcome.agreed + 1]):
            if (event.name == scope or event.name.startswith(inside)) and self.hypothesis.own(event.name):
                seen.setdefault(event.name)
        for module in self._never_begun:
            if module.startswith(inside):
                seen.setdefault(module)
        return list(seen)

    def _carrier_changes(self, outcome: Outcome) -> Iterator[Change]:
        """The last norm before a readout that is tied to an embedding carries the factor of the readout."""
        running = {event.name for event in self.events[: outcome.agreed + 1]}
        for use in self.hypothesis.uses.values():
            sides = self.hypothesis.assumed[use.name].sides
            if use.narrow.ndim < 2 or len(use.owners) < 2 or "out" not in sides:
                continue
            if not any(owner in running and not isinstance(module, nn.Embedding) for owner, module, _, _ in use.owners):
                continue
            for module in self._modules_run(outcome, ""):
                own = self.hypothesis.own(module)
                uses = [self.hypothesis.uses[name] for name in own]
                if all(each.narrow.ndim == 1 and each.growing for each in uses):
                    factor = entries_grow_by(self.hypothesis.assumed[use.name])
                    words = f"{module} carries the factor of {use.name}"
                    yield Change(words, Hypothesis.scale, (tuple(own), 1 / factor, 0.0))
                    return

    def _layout_changes(self, ran: list[str]) -> Iterator[Change]:
        seen: set[AxisGroup] = set()
        for module in ran:
            own = set(self.hypothesis.own(module))
            for group in self.hypothesis.groups:
                if group in seen or not any(name in own for name, _ in group.axes):
                    continue
                seen.add(group)
                name, axis = next(each for each in group.axes if each[0] in own)
                for layout in self._layouts(group):
                    if layout != self.hypothesis.assumed[name].layouts[axis]:
                        yield Change(f"{group.key} in {_layout_words(layout)}", Hypothesis.choose, (group, layout))

    def _layouts(self, group: AxisGroup) -> Iterator[Layout]:
        n, w = group.narrow, group.wide
        if w % n == 0:
            # a few sections, or entry by entry: these say the same at other sizes
            yield from (evenly(n, w, n // count) for count in (1, 2, 3, 4, n) if n % count == 0)
            yield from layouts_of(self.cuts, n, w)
            yield from (evenly(n, w, n // count) for count in range(5, n) if n % count == 0)
            return
        yield from layouts_of(self.cuts, n, w)
        shared = math.gcd(n, w)
        # single units, or whole heads and groups, of which there is a fraction more
        yield from dict.fromkeys(evenly(n, w, block) for block in (1, *range(shared, 1, -1)) if shared % block == 0)
        for factor in (int(factor) for factor in self._factors() if factor == int(factor)):
            grown = (w - n) / (factor - 1)
            if grown == int(grown) and 0 < grown < n:
                x = int(grown)
                yield (Piece(x, x, factor), Piece(n - x, n - x, 1))
                yield (Piece(n - x, n - x, 1), Piece(x, x, factor))

    def _side_changes(self, ran: list[str]) -> Iterator[Change]:
        seen = set()
        for module in ran:
            for name in self.hypothesis.own(module):
                use = self.hypothesis.uses[name]
                if is_known(use) or not use.growing or _kind(use) in seen:
                    continue
                seen.add(_kind(use))
                alike = tuple(key for key, other in self.hypothesis.uses.items() if _kind(other) == _kind(use))
                for sides in _other_sides(self.hypothesis.assumed[name].sides):
                    yield Change(f"{starred(name)} as {sides}", Hypothesis.turn, (alike, sides))

    def _unit_changes(self, ran: list[str], ratios: list[float]) -> Iterator[Change]:
        seen = set()
        for module in ran:
            own = tuple(self.hypothesis.own(module))
            weights = tuple(name for name in own if "bias" not in name.rpartition(".")[2])
            matrices = tuple(name for name in own if self.hypothesis.uses[name].narrow.ndim > 1)
            for names in dict.fromkeys(names for names in (own, weights, matrices) if names):
                alike = {starred(name) for name in names}
                every = tuple(name for name in self.hypothesis.uses if starred(name) in alike)
                for ratio in ratios:
                    for offset in (0.0, 1.0) if self._may_be_shifted(names) else (0.0,):
                        words = f"{starred(module)} times {1 / ratio:.4g}" + " of 1 + weight" * bool(offset)
                        for chosen in dict.fromkeys((every, names)):
                            if (chosen, ratio, offset) not in seen:
                                seen.add((chosen, ratio, offset))
                                yield Change(words, Hypothesis.scale, (chosen, 1 / ratio, offset))

    def _may_be_shifted(self, names: tuple[str, ...]) -> bool:
        """Whether parameters may be gains of the form 1 + w: those of a norm of an unknown type."""
        uses = [self.hypothesis.uses[name] for name in names]
        fresh = all(not self.hypothesis.assumed[name].offset for name in names)
        return fresh and all(len(use.narrow_shape) == 1 and use.growing and not is_known(use) for use in uses)

    def _ratios(self, outcome: Outcome) -> list[float]:
        seen: dict[float, None] = {}
        for matches in reversed(outcome.matches):
            for found in matches:
                ratio = self._as_power(found.ratio)
                if ratio != 1 and not any(math.isclose(ratio, other, rel_tol=1e-6) for other in seen):
                    seen.setdefault(ratio)
        return list(seen)[:4]

    def _as_power(self, ratio: float) -> float:
        """A ratio without its rounding errors, where it is a power of a growth factor."""
        for factor in self._factors():
            power = nearest_power(ratio, factor)
            if math.isclose(ratio, power, rel_tol=1e-12):
                return power
        return ratio

    def _factors(self) -> list[float]:
        pairs = {sizes for use in self.hypothesis.uses.values() for sizes in use.sizes}
        return sorted({w / n for n, w in pairs if 0 < n < w})

    def _first_events(self) -> dict[str, int]:
        """The first event of a module that holds each tensor, or that contains one; other modules may read it too."""
        first: dict[str, int] = {}
        for index, event in enumerate(self.events):
            first.setdefault(event.name, index)
        answer = {}
        for name, use in self.hypothesis.uses.items():
            answer[name] = min(first.get(owner.rpartition(".")[0], 0) for owner, _, _, _ in use.owners)
        for name in self.hypothesis.buffers:
            answer[name] = first.get(name.rpartition(".")[0].rpartition(".")[0], 0)
        return answer


def pairs(changes: list[Change]) -> Iterator[tuple[Change, Change]]:
    """Two changes at once: of two axes cut into the same sections, of any two layouts, or of a layout and units."""
    layouts = [(change, *change.arguments) for change in changes if change.method is Hypothesis.choose]
    in_sections = [row for row in layouts if len(row[2]) > 1]
    for (one, group, layout), (other, other_group, other_layout) in combinations(in_sections, 2):
        if group != other_group and layout == other_layout:
            yield one, other
    layouts = layouts[:_MOST_PAIRED]
    for (one, group, _), (other, other_group, _) in combinations(layouts, 2):
        if group != other_group:
            yield one, other
    of_units = [change for change in changes if change.method is Hypothesis.scale]
    for (one, _, _), other in product(layouts, of_units):
        if not set(one.names()).isdisjoint(other.names()):
            yield one, other


def _kind(use: Use) -> tuple[str, int, tuple[int, ...]]:
    """What parameters that grow alike have in common; a list may hold unlike ones."""
    return starred(use.name), use.narrow.ndim, use.growing


def _layout_words(layout: Layout) -> str:
    if len(layout) == 1:
        return f"blocks of {layout[0].block}"
    return "pieces " + " + ".join(f"{piece.length}·{piece.factor}" for piece in layout)


def _other_sides(sides: tuple[Side, ...]) -> Iterator[tuple[Side, ...]]:
    growing = [axis for axis, side in enumerate(sides) if side]
    for number in range(2 ** len(growing)):
        answer = list(sides)
        for place, axis in enumerate(growing):
            answer[axis] = "in" if number >> place & 1 else "out"
        if tuple(answer) != sides:
            yield tuple(answer)
