"""The search: at the first difference between the models, changes the assumptions about the modules before it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mupscale.discovery.changes import Change, Proposals, pairs
from mupscale.discovery.cuts import paired
from mupscale.discovery.hypothesis import Assumed, Axis, Hypothesis
from mupscale.discovery.passes import Call, Outcome, Recording, compare, gradients
from mupscale.errors import UserError
from mupscale.watching import Watch, unwatched
from mupscale.widening.layers import starred
from mupscale.widening.layout import duplicate_

MOST_PASSES = 1500
"""Forward passes of the wide model, after which the search ends."""

MOST_BRANCHES = 4
"""How many of the changes that help are followed up."""

State = tuple[dict[str, Assumed], frozenset[Axis]]


class Search:
    """Looks for what makes the wide model agree with the narrow one, event by event."""

    def __init__(
        self, narrow: nn.Module, wide: nn.Module, call: Call, tolerance: float, watch: Watch = unwatched
    ) -> None:
        self._watch = watch
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
        self._proposals = Proposals(self.hypothesis, self.narrow.events, self.cuts)

    def run(self) -> None:
        """Changes what is assumed until the models agree; raises a UserError where no change helps."""
        first = self.outcome()
        for at_once in (1, 2):  # two changes at once only if one at a time do not lead to the end
            if self._solved(first, at_once) is not None and self.outcome().complete:
                return
        raise self._stuck()

    def outcome(self, base: Outcome | None = None, since: int = 0) -> Outcome:
        """How far the models agree as things are assumed; events before `since` are known to agree as in `base`."""
        self.passes += 1
        outcome = compare(self.hypothesis, self.narrow, self.call, self.tolerance, base, since)
        if outcome.reason is None:
            outcome.untrained = self._unlike_gradients(outcome)
        if self.furthest is None or outcome.score > self.furthest.score:
            self.furthest = outcome
        self._watch("calls of modules that agree", self.furthest.agreed, len(self.narrow.events))
        return outcome

    def _solved(self, outcome: Outcome, at_once: int) -> Outcome | None:
        """The outcome in which the models agree to the end, by changes from here on; None if there is none.

        Changes inside the module where the models part come first, then those in the modules around it.
        """
        if outcome.complete:
            return outcome
        seen: set[Change] = set()
        start = self.hypothesis.state()
        for scope in self._proposals.scopes(outcome):
            changes = [change for change in self._proposals.changes(outcome, scope) if change not in seen]
            seen.update(changes)
            trials = [(change,) for change in changes] if at_once == 1 else [*pairs(changes)]
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
            f"discover: stuck at {where}: {outcome.reason}, and no change to the modules before it helps. "
            f"If you know how it grows, give roles, blocks and units by hand. {tried}"
        )
