"""Decides which of two axes is summed over, where weights and gradients are the same either way.

If both axes of a weight grow by the same factor, (out, in) and (in, out) give the same wide weight and the same
gradient, so outputs and gradients do not show which one it is. Noise does: noise that sums to zero over the copies of
an input unit leaves the outputs unchanged, noise that sums to zero over the copies of an output unit does not.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations, islice

from mupscale.discovery.hypothesis import Assumed, Hypothesis, is_known
from mupscale.layer_names import starred
from mupscale.widening.axes import is_mixed
from mupscale.widening.table import Side

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
    for turned in islice(_combinations(either), _MOST_COMBINATIONS):
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


def _is_symmetric(assumed: Assumed, axes: Sequence[int]) -> bool:
    layouts = [assumed.layouts[axis] for axis in axes]
    factors = {layout[0].factor for layout in layouts}
    one_of_each = {assumed.sides[axis] for axis in axes} == {"in", "out"}
    return one_of_each and len(factors) == 1 and not any(is_mixed(layout) for layout in layouts)


def _turn(hypothesis: Hypothesis, names: Names) -> None:
    swapped: dict[Side, Side] = {"in": "out", "out": "in", None: None}
    for name in names:
        hypothesis.turn(name, tuple(swapped[side] for side in hypothesis.assumed[name].sides))


def _combinations(groups: Sequence[Names]) -> Iterator[tuple[Names, ...]]:
    for count in range(1, len(groups) + 1):
        yield from combinations(groups, count)


def _flat(groups: Sequence[Names]) -> Names:
    return tuple(name for names in groups for name in names)
