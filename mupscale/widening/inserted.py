"""What becomes of the parameters of a deeper model's layers: which are copied, which make a new layer the identity."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from mupscale.errors import UserError
from mupscale.widening.growth import Growth
from mupscale.widening.hints import matches
from mupscale.widening.layers import Layer, Layers, joined, layer_at
from mupscale.widening.plan_text import Plan

BRANCH_MULTIPLIER = "branch_multiplier"
"""Attribute of a layer: what its residual branches are multiplied by."""

RESIDUAL_OUTPUTS = "residual_outputs"
"""Attribute of a layer: the names of its parameters that make it the identity where they are zero."""


def neutral_value(shallow: nn.Module, prefix: str, row: Layer, rest: str, given: Mapping[str, float]) -> float | None:
    """The value with which a parameter of a layer helps to make it the identity; None if it may have any."""
    name = joined(prefix, row.source, rest)
    hinted = [value for pattern, value in given.items() if matches(name, pattern)]
    if hinted:
        return float(hinted[-1])
    layer = shallow.get_submodule(joined(prefix, row.source))
    return 0.0 if rest in getattr(layer, RESIDUAL_OUTPUTS, ()) else None


def lists_without_residual(shallow: nn.Module, layers: Layers, given: Mapping[str, float]) -> list[str]:
    """The lists with new layers of which it is not known what makes them the identity."""
    answer = []
    for prefix, rows in layers.items():
        for row in rows:
            names = (name for name, _ in shallow.get_submodule(joined(prefix, row.source)).named_parameters())
            if row.is_new and all(neutral_value(shallow, prefix, row, name, given) is None for name in names):
                answer.append(prefix)
                break
    return answer


def as_identity(plan: Plan, shallow: nn.Module, deep: nn.Module, given: Mapping[str, float]) -> Plan:
    """The same plan with new layers that add nothing: what can be compared with the shallow model."""
    layers = {
        name: tuple(row._replace(how="identity") if row.is_new else row for row in rows)
        for name, rows in plan.layers.items()
    }
    parameters = {}
    for name, growth in plan.parameters.items():
        found = layer_at(plan.layers, name)
        if found is not None and (_all_copied(plan.layers[found[0]]) or found[1].how == "random"):
            plain = replace(growth, inserted=None, branch=1.0, layers=1.0, kept=False)
            growth = deepened(plain, layers, shallow, deep, given)
        parameters[name] = growth
    return replace(plan, parameters=parameters, layers=layers)


def _all_copied(rows: tuple[Layer, ...]) -> bool:
    """Whether all layers of a list share in what a shallow one does; otherwise the kept ones go on alone."""
    return all(row.has_state for row in rows)


def branch_ratio(shallow: nn.Module, deep: nn.Module, place: tuple[str, Layer, str]) -> float:
    """What the residual branches of a layer are multiplied by, deep over shallow; `place` is what `layer_at` found."""
    prefix, row, _ = place
    layers = deep.get_submodule(joined(prefix, row.key)), shallow.get_submodule(joined(prefix, row.source))
    after, before = (float(getattr(layer, BRANCH_MULTIPLIER, 1.0)) for layer in layers)
    return after / before


def deepened(growth: Growth, layers: Layers, shallow: nn.Module, deep: nn.Module, given: Mapping[str, float]) -> Growth:
    """The growth of a parameter, with what its layer adds. `given` are neutral values by name pattern."""
    found = layer_at(layers, growth.name)
    if found is None:
        return growth
    prefix, row, rest = found
    rows = layers[prefix]
    branch = branch_ratio(shallow, deep, found)
    made = replace(growth, source=joined(prefix, row.source, rest))
    if _all_copied(rows):
        of_source = sum(each.source == row.source for each in rows)
        return replace(made, inserted="copy" if row.is_new else None, branch=branch, layers=of_source)
    neutral = neutral_value(shallow, prefix, row, rest, given)
    match row.how:
        case "random":
            return replace(made, inserted="random", branch=branch, kept=True)
        case "identity":
            if lists_without_residual(shallow, {prefix: (row,)}, given):
                kind = type(shallow.get_submodule(joined(prefix, row.source))).__name__
                raise UserError(
                    f"depth: it is not known which parameters of {joined(prefix, row.source)!r} ({kind}) "
                    "make it add nothing. Declare residual_outputs in its class; or give upscale a call, so that it "
                    'looks for them, or hints=Hints(residual={"' + prefix + '.*.<output projection>": 0.0}); or use '
                    'depth="interleave"'
                )
            return replace(made, inserted="identity", branch=branch, fill=neutral)
    # what a branch loses by its multiplier, its output gets back
    return made if neutral is None or branch == 1 else replace(made, rescale=made.rescale / branch)
