"""The search: at the first difference between the models, what is assumed of the modules before it is changed."""

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mupscale.discovery.cuts import layouts_of, paired
from mupscale.discovery.found import nearest_power
from mupscale.discovery.hypothesis import Assumed, Axis, Group, Hypothesis, is_known
from mupscale.discovery.passes import Call, Outcome, Recording, compare, gradients
from mupscale.errors import UserError
from mupscale.widening.layers import starred
from mupscale.widening.layout import Layout, Piece, duplicate_, evenly
from mupscale.widening.modules import Side

MOST_PASSES = 1500
"""Forward passes of the wide model, after which the search ends."""

MOST_BRANCHES = 4
"""Of changes that help, those that are followed up."""

State = tuple[dict[str, Assumed], frozenset[Axis]]


class Change(NamedTuple):
    """One thing to try."""

    words: str
    layout: tuple[Group, Layout] | None = None
    sides: tuple[tuple[str, ...], tuple[Side, ...]] | None = None
    units: tuple[tuple[str, ...], float, float] | None = None
    """Names, a factor and an offset."""

    def names(self) -> Iterator[str]:
        """The tensors that it changes."""
        if self.layout is not None:
            yield from (name for name, _ in self.layout[0].axes)
        yield from self.sides[0] if self.sides is not None else ()
        yield from self.units[0] if self.units is not None else ()

    def apply(self, hypothesis: Hypothesis) -> None:
        if self.layout is not None:
            hypothesis.choose(*self.layout)
        if self.sides is not None:
            for name in self.sides[0]:
                hypothesis.turn(name, self.sides[1])
        if self.units is not None:
            for name in self.units[0]:
                hypothesis.scale(name, *self.units[1:])


class Search:
    """Looks for what makes the wide model agree with the narrow one, event by event."""

    def __init__(self, narrow: nn.Module, wide: nn.Module, call: Call, tolerance: float) -> None:
        self.hypothesis = Hypothesis(narrow, wide)
        self.call = call
        self.tolerance = tolerance
        with torch.no_grad():
            self.narrow = Recording(narrow, call)
            self.cuts = paired(self.narrow.cuts, Recording(wide, call).cuts)
        if not self.narrow.events:
            raise UserError("discover: call(model) does not run the model. Let it return model(inputs)")
        self._gradients: dict[str, Tensor] | None = None
        self.passes = 0
        self.tried: list[str] = []
        self.furthest: Outcome | None = None
        self._begins = self._first_events()
        begun = {event.module for event in self.narrow.events}
        self._never_begun = [
            name for name, _ in narrow.named_modules() if name not in begun and self.hypothesis.own(name)
        ]

    def run(self) -> Outcome:
        """Changes what is assumed until the models agree; UserError where no change helps."""
        first = self._pass()
        for at_once in (1, 2):  # two changes at once only if one at a time do not lead to the end
            outcome = self._solved(first, at_once)
            if outcome is not None:
                return outcome
        raise self._stuck()

    def outcome(self) -> Outcome:
        """How far the models agree as things are assumed."""
        return self._pass()

    def _pass(self, base: Outcome | None = None, since: int = 0) -> Outcome:
        """Runs the wide model; events before `since` are known to agree as in `base`."""
        self.passes += 1
        outcome = compare(self.hypothesis, self.narrow, self.call, self.tolerance, base, since)
        if outcome.reason is None:
            outcome.untrained = self._unlike_gradients(outcome)
        if self.furthest is None or outcome.score > self.furthest.score:
            self.furthest = outcome
        return outcome

    def _solved(self, outcome: Outcome, at_once: int) -> Outcome | None:
        """The outcome in which the models agree to the end, by changes from here on; None if there is none.

        Changes inside the module where the models part come first, then those in the modules around it.
        """
        if outcome.complete:
            return outcome
        seen: set[Change] = set()
        start = self.hypothesis.state()
        for scope in self._scopes(outcome):
            changes = [change for change in self._changes(outcome, scope) if change not in seen]
            seen.update(changes)
            trials = [(change,) for change in changes] if at_once == 1 else [*_pairs(changes)]
            self.hypothesis.restore(start)
            for better, state in self._improvements(outcome, trials):
                self.hypothesis.restore(state)
                answer = self._solved(better, 1)
                if answer is not None:
                    return answer
        self.hypothesis.restore(start)
        return None

    def _improvements(self, outcome: Outcome, trials: Iterable[tuple[Change, ...]]) -> list[tuple[Outcome, State]]:
        """What helps, the best first."""
        start = self.hypothesis.state()
        found: list[tuple[Outcome, State]] = []
        for trial in trials:
            if self.passes >= MOST_PASSES:
                break
            self.hypothesis.restore(start)
            for change in trial:
                change.apply(self.hypothesis)
            after = self._pass(outcome, min(self._first_event(change) for change in trial))
            self.tried.append(" with ".join(change.words for change in trial))
            if after.score > outcome.score:
                found.append((after, self.hypothesis.state()))
            if after.complete or (len(trial) > 1 and found):
                break
        self.hypothesis.restore(start)
        return sorted(found, key=lambda each: each[0].score, reverse=True)[:MOST_BRANCHES]

    def _first_event(self, change: Change) -> int:
        """The first event that a change can alter."""
        return min((self._begins.get(name, 0) for name in change.names()), default=0)

    def _scopes(self, outcome: Outcome) -> Iterator[str]:
        """The module in whose code the models part, and those that contain it, up to the model."""
        if outcome.untrained:
            scope = outcome.untrained[0].rpartition(".")[0]
        else:
            event = self.narrow.events[outcome.agreed]
            scope = event.module.rpartition(".")[0] if event.kind == "begins" else event.module
        yield scope
        while scope:
            scope = scope.rpartition(".")[0]
            yield scope

    def _first_events(self) -> dict[str, int]:
        """The first event of a module that holds each tensor, or that contains one; other modules may read it too."""
        first: dict[str, int] = {}
        for index, event in enumerate(self.narrow.events):
            first.setdefault(event.module, index)
        answer = {}
        for name, use in self.hypothesis.uses.items():
            answer[name] = min(first.get(owner.rpartition(".")[0], 0) for owner, _, _, _ in use.owners)
        for name in self.hypothesis.buffers:
            answer[name] = first.get(name.rpartition(".")[0].rpartition(".")[0], 0)
        return answer

    def _changes(self, outcome: Outcome, scope: str) -> Iterator[Change]:
        ran = self._modules_run(outcome, scope)
        yield from self._carrier_changes(outcome)
        yield from self._unit_changes(ran, self._ratios(outcome))
        yield from self._layout_changes(ran)
        yield from self._side_changes(ran)
        yield from self._unit_changes(ran, self._usual_ratios())

    def _modules_run(self, outcome: Outcome, scope: str) -> list[str]:
        """The modules with parameters of their own in a scope that have begun, the last first.

        Then those whose parameters the code of another module uses, so that they never begin.
        """
        inside = f"{scope}." if scope else ""
        seen: dict[str, None] = {}
        for event in reversed(self.narrow.events[: outcome.agreed + 1]):
            if (event.module == scope or event.module.startswith(inside)) and self.hypothesis.own(event.module):
                seen.setdefault(event.module)
        for module in self._never_begun:
            if module.startswith(inside):
                seen.setdefault(module)
        return list(seen)

    def _carrier_changes(self, outcome: Outcome) -> Iterator[Change]:
        """The last norm before a readout that is tied to an embedding carries the factor of the readout."""
        running = {event.module for event in self.narrow.events[: outcome.agreed + 1]}
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
                    factor = self.hypothesis.assumed[use.name].copies
                    yield Change(f"{module} carries the factor of {use.name}", units=(tuple(own), 1 / factor, 0.0))
                    return

    def _layout_changes(self, ran: list[str]) -> Iterator[Change]:
        for module in ran:
            own = set(self.hypothesis.own(module))
            for group in self.hypothesis.groups:
                if not any(name in own for name, _ in group.axes):
                    continue
                if any(group.key == starred(earlier) for earlier in ran[: ran.index(module)]):
                    continue
                name, axis = next(each for each in group.axes if each[0] in own)
                for layout in self._layouts(group):
                    if layout != self.hypothesis.assumed[name].layouts[axis]:
                        yield Change(f"{group.key} in {_layout_words(layout)}", layout=(group, layout))

    def _layouts(self, group: Group) -> Iterator[Layout]:
        n, w = group.narrow, group.wide
        if w % n == 0:
            # a few sections, or entry by entry: these say the same at other sizes
            yield from (evenly(n, w, n // count) for count in (1, 2, 3, 4, n) if n % count == 0)
            yield from layouts_of(self.cuts, n, w)
            yield from (evenly(n, w, n // count) for count in range(5, n) if n % count == 0)
            return
        yield from layouts_of(self.cuts, n, w)
        yield evenly(n, w)
        for factor in self._factors():
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
                if is_known(use) or not use.growing or starred(name) in seen:
                    continue
                seen.add(starred(name))
                alike = tuple(other for other in self.hypothesis.uses if starred(other) == starred(name))
                for sides in _other_sides(self.hypothesis.assumed[name].sides):
                    yield Change(f"{starred(name)} as {sides}", sides=(alike, sides))

    def _unit_changes(self, ran: list[str], ratios: list[float]) -> Iterator[Change]:
        seen = set()
        for module in ran:
            own = tuple(self.hypothesis.own(module))
            weights = tuple(name for name in own if "bias" not in name.rpartition(".")[2])
            for names in dict.fromkeys((own, weights)):
                alike = {starred(name) for name in names}
                every = tuple(name for name in self.hypothesis.uses if starred(name) in alike)
                for ratio in ratios:
                    for offset in (0.0, 1.0) if self._may_be_shifted(names) else (0.0,):
                        words = f"{starred(module)} times {1 / ratio:.4g}" + " of 1 + weight" * bool(offset)
                        for chosen in dict.fromkeys((every, names)):
                            if (chosen, ratio, offset) not in seen:
                                seen.add((chosen, ratio, offset))
                                yield Change(words, units=(chosen, 1 / ratio, offset))

    def _may_be_shifted(self, names: tuple[str, ...]) -> bool:
        """Whether parameters may be gains of the form 1 + w: those of a norm of an unknown type."""
        uses = [self.hypothesis.uses[name] for name in names]
        fresh = all(not self.hypothesis.assumed[name].offset for name in names)
        return fresh and all(len(use.narrow_shape) == 1 and use.growing and not is_known(use) for use in uses)

    def _ratios(self, outcome: Outcome) -> list[float]:
        """The ratios that agreeing tensors had, the last first."""
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

    def _usual_ratios(self) -> list[float]:
        powers = (0.5, -0.5, 0.25, 1, -1)
        return [factor**power for factor in self._factors() for power in powers]

    def _factors(self) -> list[int]:
        """The whole factors by which axes grow."""
        pairs = {
            (n, w)
            for use in self.hypothesis.uses.values()
            for n, w in zip(use.narrow_shape, use.wide_shape, strict=True)
        }
        return sorted({w // n for n, w in pairs if n and w != n and w % n == 0})

    def _unlike_gradients(self, outcome: Outcome) -> list[str]:
        """The parameters of which copies of one entry would not train alike, that nearest to the outputs first."""
        if self._gradients is None:
            self._gradients = gradients(self.hypothesis.narrow, self.call)
        before = self._gradients
        after = gradients(self.hypothesis.wide, self.call, outcome.matches[-1])
        largest = max((float(gradient.abs().max()) for gradient in before.values() if gradient.numel()), default=0.0)
        answer = []
        for name in reversed([*before]):
            assumed = self.hypothesis.assumed[name]
            wanted = before[name].new_empty(self.hypothesis.uses[name].wide_shape)
            scales = [
                [1.0 if side == "in" else 1 / piece.factor for piece in layout]
                for layout, side in zip(assumed.layouts, assumed.sides, strict=True)
            ]
            duplicate_(wanted, before[name], assumed.layouts, scales, 1 / assumed.unit)
            found = after.get(name)
            if found is None:
                answer.append(name)
            elif wanted.numel():
                size = max(float(wanted.abs().max()), 1e-4 * largest)
                if not float((found - wanted).abs().max()) <= 100 * self.tolerance * size:
                    answer.append(name)
        return answer

    def has_fractions(self) -> bool:
        """Whether an axis grows by a factor that is not whole."""
        shapes = [zip(use.narrow_shape, use.wide_shape, strict=True) for use in self.hypothesis.uses.values()]
        return any(n and w % n for pairs in shapes for n, w in pairs)

    def untested(self) -> tuple[str, ...]:
        """Growing parameters without a gradient, here and in other layers: of these, everything may be wrong."""
        assert self._gradients is not None
        tested = {starred(name) for name, gradient in self._gradients.items() if bool(gradient.any())}
        uses = self.hypothesis.uses
        return tuple(name for name, use in uses.items() if use.growing and starred(name) not in tested)

    def _stuck(self) -> UserError:
        tried = ", ".join(dict.fromkeys(self.tried[:4]))
        tried = f"{len(self.tried)} changes were tried" + f": {tried}, ..." * bool(tried)
        outcome = self.furthest
        assert outcome is not None
        if outcome.untrained:
            return UserError(
                "discover: the models compute the same, but copies of one entry of "
                f"{outcome.untrained[0]!r} do not get the same gradient. {tried}"
            )
        name = self.narrow.events[outcome.agreed].module
        module = self.hypothesis.narrow.get_submodule(name)
        where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        return UserError(
            f"discover: stuck at {where}: {outcome.reason}, whatever is assumed of the modules before it. {tried}"
        )


_MOST = 24


def _pairs(changes: list[Change]) -> Iterator[tuple[Change, Change]]:
    """Two changes at once: of two layouts, or of a layout and units."""
    layouts = [change for change in changes if change.layout is not None][:_MOST]
    others = [change for change in changes if change.units is not None]
    for one, other in combinations(layouts, 2):
        if one.layout and other.layout and one.layout[0] != other.layout[0]:
            yield one, other
    for one in layouts:
        for other in others:
            if one.layout and other.units and any(name in other.units[0] for name, _ in one.layout[0].axes):
                yield one, other


def _layout_words(layout: Layout) -> str:
    if len(layout) == 1:
        return f"blocks of {layout[0].block}"
    return "pieces " + " + ".join(f"{piece.length}·{piece.factor}" for piece in layout)


def _other_sides(sides: tuple[Side, ...]) -> Iterator[tuple[Side, ...]]:
    """The other sides that the growing axes may have."""
    growing = [axis for axis, side in enumerate(sides) if side]
    for number in range(2 ** len(growing)):
        answer = list(sides)
        for place, axis in enumerate(growing):
            answer[axis] = "in" if number >> place & 1 else "out"
        if tuple(answer) != sides:
            yield tuple(answer)
