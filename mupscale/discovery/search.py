"""The search: at the first difference between the models, changes the assumptions about the modules before it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations, islice

import torch
from torch import Tensor, nn

from mupscale.checks.comparison import gradient_errors, relative_error, size_of
from mupscale.checks.recording import state_kept
from mupscale.checks.trace import Call
from mupscale.discovery.changes import Change, Proposals, pairs
from mupscale.discovery.hypothesis import Hypothesis, State, is_known
from mupscale.discovery.passes import Outcome, Recording, compare, gradients, paired, returned
from mupscale.errors import UserError
from mupscale.text_tables import Watch, starred, unwatched
from mupscale.widening.growth import Growth, duplicate, is_mixed
from mupscale.widening.plan_text import Plan
from mupscale.widening.table import Side

MOST_PASSES = 1500
"""Forward passes of the wide model, after which the search ends."""

MOST_BRANCHES = 4
"""How many of the changes that help are followed up."""


class Search:
    """Looks for what makes the wide model agree with the narrow one, event by event."""

    def __init__(
        self, narrow: nn.Module, wide: nn.Module, call: Call, tolerance: float, watch: Watch = unwatched
    ) -> None:
        self._watch = watch
        self.hypothesis = Hypothesis(narrow, wide)
        self.call = call
        self.tolerance = tolerance
        self.narrow, self.with_graph = _recorded(narrow, call)
        with torch.set_grad_enabled(self.with_graph):
            self.cuts = paired(self.narrow.cuts, Recording(wide, call).cuts)
        if len(self.narrow.events) == 1 and not self.narrow.outputs:
            raise UserError("discover: call(model) does not run the model. Let it return model(inputs)")
        if not self.narrow.outputs:
            raise UserError("discover: call(model) returns no tensor of floats. Let it return what the model computes")
        self._gradients: dict[str, Tensor] | None = None
        self.passes = 0
        self.tried: list[str] = []
        self.furthest = Outcome(agreed=-1)
        self._furthest_state = self.hypothesis.state()
        self._proposals = Proposals(self.hypothesis, self.narrow.events, self.cuts)

    def run(self, planned: Callable[[], Plan]) -> None:
        """Changes what is assumed until the models agree; raises a UserError where no change helps.

        `planned` makes the plan of the two models as they are, which raises a UserError where it is not known.
        """
        self._agreed = first = self.outcome()
        if first.complete:
            return
        starts = [(first, self.hypothesis.state())]
        if self._agrees_as_planned(planned, starts):
            return
        for at_once in (1, 2):  # two changes at once only if one at a time do not lead to the end
            for outcome, state in starts:
                self.hypothesis.restore(state)
                if self._is_solved(outcome, at_once):
                    return
        reached = starts[0][0]
        while self.furthest is not reached:  # and then where one at a time led furthest
            reached = self.furthest
            self.hypothesis.restore(self._furthest_state)
            if self._is_solved(reached, 2):
                return
        raise self._stuck()

    def _agrees_as_planned(self, planned: Callable[[], Plan], starts: list[tuple[Outcome, State]]) -> bool:
        """Whether no search is needed. A plan that leads further than the first guess is where the search starts."""
        (first, guess), furthest = starts[0], (self.furthest, self._furthest_state)
        try:
            self.hypothesis.assume(planned())
        except UserError:
            return False
        self._agreed = self.outcome()
        if self._agreed.complete:
            return True
        self.furthest, self._furthest_state = furthest
        self.hypothesis.restore((self.hypothesis.state()[0], guess[1]))  # where layouts may follow what modules read
        unpinned = self.outcome()
        if unpinned.score > first.score:
            starts.insert(0, (unpinned, self.hypothesis.state()))
        self._agreed = unpinned
        return unpinned.complete

    def _is_solved(self, outcome: Outcome, at_once: int) -> bool:
        if self._solved(outcome, at_once) is not None:
            self._agreed = self.outcome()
        return self._agreed.complete

    def decide_summed_axes(self) -> tuple[str, ...]:
        """Decides which axes are summed over where the models agree either way; returns where this is not decided."""
        undecided = decide(self.hypothesis, self._is_unchanged_by_noise)
        self.hypothesis.write()
        return undecided

    def _is_unchanged_by_noise(self, names: Collection[str]) -> bool:
        self.passes += 1
        self.hypothesis.write()
        self.hypothesis.add_centred_noise(names)
        with torch.set_grad_enabled(self.with_graph), state_kept(self.hypothesis.wide.modules()):
            outputs = returned(self.hypothesis.wide, self.call)
        for before, after, found in zip(self.narrow.outputs, outputs, self._agreed.matches[-1], strict=True):
            wanted = duplicate(before, found.layouts) * found.ratio
            if not relative_error(after.detach().to(wanted), wanted, size_of(wanted)) <= self.tolerance:
                return False
        return True

    def outcome(self, base: Outcome | None = None, since: int = 0) -> Outcome:
        """How far the models agree as things are assumed; events before `since` are known to agree as in `base`."""
        self.passes += 1
        outcome = compare(self.hypothesis, self.narrow, self.call, self.tolerance, base, since, self.with_graph)
        if outcome.reason is None:
            outcome.untrained = self._unlike_gradients(outcome)
        if outcome.score > self.furthest.score:
            self.furthest, self._furthest_state = outcome, self.hypothesis.state()
        self._watch("calls of modules that agree", self.furthest.agreed, len(self.narrow.events))
        return outcome

    def _solved(self, outcome: Outcome, at_once: int) -> Outcome | None:
        """The outcome in which the models agree by changes from here on, inner modules first; None if there is none."""
        if outcome.complete:
            return outcome
        seen: set[tuple[Change, ...]] = set()
        start = self.hypothesis.state()
        for scope in self._proposals.scopes(outcome):
            changes = list(self._proposals.changes(outcome, scope))
            every: list[tuple[Change, ...]] = [(change,) for change in changes] if at_once == 1 else [*pairs(changes)]
            trials = [trial for trial in every if trial not in seen]
            seen.update(trials)
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
            after = self.outcome(outcome, min(self._proposals.first_event(change) for change in trial))
            self.tried.append(" with ".join(change.words for change in trial))
            if after.score > outcome.score:
                found.append((after, self.hypothesis.state()))
            if after.complete or (len(trial) > 1 and found):
                break
        self.hypothesis.restore(start)
        return sorted(found, key=lambda each: each[0].score, reverse=True)[:MOST_BRANCHES]

    def _unlike_gradients(self, outcome: Outcome) -> list[str]:
        """The parameters of which copies of one entry would not train alike, that nearest to the outputs first."""
        if self._gradients is None:
            self._gradients = gradients(self.hypothesis.narrow, self.call)
            growing = {name for name, use in self.hypothesis.uses.items() if use.growing}
            if growing and growing <= set(self.without_gradient()):
                raise UserError(
                    "discover: what call(model) returns has no gradient with respect to a parameter that grows, so "
                    "nothing can be tested. Let it return what the model computes, with its graph"
                )
        after = gradients(self.hypothesis.wide, self.call, outcome.matches[-1])
        errors = gradient_errors(self.hypothesis.assumed, self._gradients, after, least=1e-4)
        return [name for name in reversed([*self._gradients]) if not errors[name] <= 100 * self.tolerance]

    def has_fractions(self) -> bool:
        """Whether an axis grows by a factor that is not whole."""
        return any(n and w % n for use in self.hypothesis.uses.values() for n, w in use.sizes)

    def without_gradient(self) -> tuple[str, ...]:
        """Growing parameters that have no gradient, here and in other layers."""
        assert self._gradients is not None
        tested = {starred(name) for name, gradient in self._gradients.items() if bool(gradient.any())}
        uses = self.hypothesis.uses
        return tuple(name for name, use in uses.items() if use.growing and starred(name) not in tested)

    def without_effect(self) -> tuple[str, ...]:
        """Growing parameters that neither have a gradient nor change the outputs: their growth was not tested."""
        alike: dict[str, list[str]] = {}
        for name in self.without_gradient():
            alike.setdefault(starred(name), []).append(name)
        names = [name for group in alike.values() for name in group]
        if not names or not self._have_effect(names):
            return tuple(names)
        return tuple(name for group in alike.values() if not self._have_effect(group) for name in group)

    @torch.no_grad()
    def _have_effect(self, names: Collection[str]) -> bool:
        """Whether the outputs of the narrow model depend on these parameters."""
        generator = torch.Generator().manual_seed(3)
        parameters = [self.hypothesis.uses[name].narrow for name in names]
        values = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.mul_(1 - 0.5 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
        try:
            with torch.set_grad_enabled(self.with_graph), state_kept(self.hypothesis.narrow.modules()):
                outputs = returned(self.hypothesis.narrow, self.call)
        finally:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        pairs_of_outputs = zip(self.narrow.outputs, outputs, strict=True)
        return not all(torch.equal(before, after.detach().to(before)) for before, after in pairs_of_outputs)

    def _stuck(self) -> UserError:
        tried = ", ".join(dict.fromkeys(self.tried[:4]))
        tried = f"{len(self.tried)} changes were tried" + f": {tried}, ..." * bool(tried)
        outcome = self.furthest
        if outcome.untrained:
            return UserError(
                "discover: the models compute the same, but copies of one entry of "
                f"{outcome.untrained[0]!r} do not get the same gradient. {tried}"
            )
        name = self.narrow.events[outcome.agreed].name
        module = self.hypothesis.narrow.get_submodule(name)
        where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        return UserError(
            f"discover: stuck at {where}: {outcome.reason}, and no change to the modules before it helps. "
            f"If you know how it grows, give roles, blocks and units by hand. {tried}"
        )


def _recorded(model: nn.Module, call: Call) -> tuple[Recording, bool]:
    """A forward pass, and whether it needs a graph: a model may take gradients inside it, as of an energy."""
    try:
        with torch.no_grad():
            return Recording(model, call), False
    except RuntimeError:
        with torch.enable_grad():
            return Recording(model, call), True


_MOST_COMBINATIONS = 16

Names = tuple[str, ...]
"""One parameter of every layer that has it: they are turned together."""


def decide(hypothesis: Hypothesis, is_unchanged: Callable[[Collection[str]], bool]) -> Names:
    """Turns the parameters whose other axis is summed over; returns those for which this is not decided.

    `is_unchanged(names)` is whether the outputs stay as they are under noise on these parameters that is centred along
    the axes which they are assumed to sum over. It costs a forward pass.
    """
    summing = [name for name, use in hypothesis.uses.items() if use.growing and "in" in hypothesis.assumed[name].sides]
    groups = list(_turnable(hypothesis))
    if not groups or is_unchanged(summing):
        return ()
    certain = [name for name in summing if name not in _flat(groups)]
    certain = certain if is_unchanged(certain) else []

    def is_right(names: Names) -> bool:
        return is_unchanged([*certain, *names])

    def is_right_turned(names: Names) -> bool:
        _turn(hypothesis, names)
        answer = is_right(names)
        _turn(hypothesis, names)
        return answer

    neither: list[Names] = []
    for known in (False, True):  # the type of a module is right, unless other code uses its weight
        chosen = [names for names in groups if is_known(hypothesis.uses[names[0]]) == known]
        for names in chosen:
            if is_right(names):
                continue
            if is_right_turned(names):
                _turn(hypothesis, names)
            else:
                neither.append(names)
        summing = [name for name in summing if name not in _flat(neither)]
        if chosen and is_unchanged(summing):
            return _flat(neither)
    # between two layers that are linear, either axis seems right
    either = [names for names in groups if names not in neither and is_right_turned(names)]
    several = (chosen for count in range(1, len(either) + 1) for chosen in combinations(either, count))
    for turned in islice(several, _MOST_COMBINATIONS):
        for names in turned:
            _turn(hypothesis, names)
        if is_unchanged(summing):
            return _flat(neither)
        for names in turned:
            _turn(hypothesis, names)
    return _flat([*neither, *either] or groups)


def _turnable(hypothesis: Hypothesis) -> Iterator[Names]:
    """The parameters of two growing axes that may change sides without a change of weights or gradients."""
    found: dict[str, list[str]] = {}
    for name, use in hypothesis.uses.items():
        floats = use.narrow.is_floating_point() or use.narrow.is_complex()
        if floats and len(use.growing) == 2 and _is_symmetric(hypothesis.assumed[name], use.growing):
            found.setdefault(starred(name), []).append(name)
    yield from map(tuple, found.values())


def _is_symmetric(assumed: Growth, axes: Sequence[int]) -> bool:
    layouts = [assumed.layouts[axis] for axis in axes]
    factors = {layout[0].factor for layout in layouts}
    one_of_each = {assumed.sides[axis] for axis in axes} == {"in", "out"}
    return one_of_each and len(factors) == 1 and not any(is_mixed(layout) for layout in layouts)


def _turn(hypothesis: Hypothesis, names: Names) -> None:
    swapped: dict[Side, Side] = {"in": "out", "out": "in", None: None}
    for name in names:
        hypothesis.turn([name], tuple(swapped[side] for side in hypothesis.assumed[name].sides))


def _flat(groups: Sequence[Names]) -> Names:
    return tuple(name for names in groups for name in names)
