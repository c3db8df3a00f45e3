"""`discover`: finds how an unprepared model grows."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from mupscale.checks.recording import generators_kept
from mupscale.checks.trace import Call
from mupscale.checks.weights import copy_to_compare, perturb_
from mupscale.discovery.found import Found, growth_factors, without_rounding
from mupscale.discovery.hypothesis import Hypothesis, entries_grow_by, first_sides, is_known
from mupscale.discovery.passes import PairedCut, Recording, paired
from mupscale.discovery.search import Search
from mupscale.errors import UserError, refuse_unless_model
from mupscale.methods.grow import grow
from mupscale.text_tables import Watch, unwatched
from mupscale.widening.growth import LayoutSpec, Role
from mupscale.widening.hints import Hints, Rescale, Use, refuse_lazy, refuse_scripted
from mupscale.widening.modules import fold_weight_norms_
from mupscale.widening.plan import plan
from mupscale.widening.table import Side

TOLERANCE = 1e-9


def discover(narrow: nn.Module, wide: nn.Module, call: Call, watch: Watch = unwatched) -> Found:
    """Finds how `narrow` grows to `wide`: the blocks, roles and factors of all parameters.

    `call(model)` must run one forward pass and return what it computes. `discover` runs it on float64 copies of both
    models on the CPU, with slightly perturbed parameters, because initial zeros and ones would hide differences. Where
    the outputs of the two copies first differ, it tries other blocks, roles and factors for the modules before that
    point, until all outputs and all gradients agree. The arguments are not changed. `watch(words, done, total)` is
    called after every try.

    `found = discover(narrow, wide, lambda model: model(tokens))`

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> class Scaled(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.scale, self.first, self.last = width**-0.5, nn.Linear(3, width), nn.Linear(width, 2)
        ...     def forward(self, x):
        ...         return self.last(self.scale * self.first(x))
        >>> narrow, wide = Scaled(4), Scaled(8)
        >>> found = mupscale.discover(narrow, wide, lambda model: model(torch.ones(1, 3)))
        >>> found.rescale  # compensates for the scale
        {'last.weight': 1.4142135623730951}
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(narrow, wide, hints=found, call=lambda model: model(x))
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
    """
    for name, model in (("narrow", narrow), ("wide", wide)):
        refuse_unless_model(f"discover: {name}", model)
        refuse_lazy(model)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise UserError(f"discover: {name} is on the meta device and cannot run; build it on the CPU")
        refuse_scripted(f"discover: {name}", model)
    with generators_kept(), torch.inference_mode(False), torch.enable_grad():
        before, after = _copies(narrow, wide)
        search = Search(before, after, call, TOLERANCE, watch)
        search.hypothesis.pairing.refuse_inexact_modules()
        _refuse_not_finite(search, narrow)
        planned = partial(plan, before, after, hints=Hints(roles=_unknown_roles(search.hypothesis)))
        try:
            search.run(planned)
        except UserError:
            if search.has_fractions():  # a plan may know why: a norm over a fraction
                planned()
            raise
        found = _found(search, search.decide_summed_axes())
        _refuse_unsayable(search.hypothesis, found)
    return found


def cuts_between(narrow: nn.Module, wide: nn.Module, call: Call) -> list[PairedCut]:
    """Where two models cut their axes into sections in one forward pass. They may be on the meta device."""
    with generators_kept([]), torch.no_grad():
        return paired(Recording(narrow, call).cuts, Recording(wide, call).cuts)


def confirm(narrow: nn.Module, wide: nn.Module, call: Call, found: Found) -> None:
    """Raises a UserError unless a result for other sizes of the family makes these models agree, as `discover` does."""
    with generators_kept(), torch.inference_mode(False), torch.enable_grad():
        before, after = _copies(narrow, wide)
        search = Search(before, after, call, TOLERANCE)
        _refuse_not_finite(search, narrow)
        search.hypothesis.assume(plan(before, after, hints=found))
        outcome = search.outcome()
        if not outcome.complete:
            reason = outcome.reason or f"copies of one entry of {outcome.untrained[0]!r} do not get the same gradient"
            raise UserError(f"the result for a smaller model of this family does not hold for this one: {reason}")


def _copies(narrow: nn.Module, wide: nn.Module) -> tuple[nn.Module, nn.Module]:
    return _copied(narrow, perturbed=True), _copied(wide)


def _copied(model: nn.Module, *, perturbed: bool = False) -> nn.Module:
    answer = copy_to_compare("discover: the model", model, perturbed=False).cpu()
    fold_weight_norms_(answer)
    if perturbed:
        perturb_(answer)
    return answer


def _refuse_not_finite(search: Search, narrow: nn.Module) -> None:
    perturbed = search.narrow.outputs
    if all(bool(output.isfinite().all()) for output in perturbed):
        return
    if not any(bool(output.isfinite().any()) for output in perturbed if output.numel()):
        reason = "all that the model returns is NaN or infinite"
    else:
        with torch.set_grad_enabled(search.with_graph):
            given = Recording(_copied(narrow), search.call).outputs
        shapes = [output.shape for output in given] == [output.shape for output in perturbed]
        if shapes and all(
            bool((after.isfinite() | ~before.isfinite()).all()) for before, after in zip(given, perturbed, strict=True)
        ):
            return
        reason = "what the model returns becomes NaN or infinite where its parameters are slightly perturbed"
    raise UserError(f"discover: {reason}, so that widths cannot be compared. Give Hints by hand")


def _found(search: Search, undecided: tuple[str, ...]) -> Found:
    hypothesis = search.hypothesis
    roles: dict[str, Role] = {}
    blocks: dict[str, dict[int, LayoutSpec]] = {}
    rescale: dict[str, Rescale] = {}
    tied = any(_is_tied(use) for use in hypothesis.uses.values())
    shapes = {name: (use.narrow_shape, use.wide_shape) for name, use in hypothesis.uses.items()}
    shapes |= {name: (tuple(before.shape), tuple(after.shape)) for name, before, after in hypothesis.pairing.buffers}
    for name, assumed in hypothesis.assumed.items():
        axes: dict[int, LayoutSpec] = {}
        for axis, layout in enumerate(assumed.layouts):
            if len(layout) == 1 and layout[0].factor > 1:
                axes[axis] = layout[0].block
            elif len(layout) > 1:
                axes[axis] = [tuple(piece) for piece in layout]
        if axes:
            blocks[name] = axes
        use = hypothesis.uses.get(name)
        if use is None:
            continue
        unit = assumed.rescale
        if use.growing:
            role = _role(assumed.sides)
            is_norm = all(parameter.ndim == 1 for parameter in use.owners[0][1].parameters())
            if tied and unit != 1 and is_norm:  # it carries the factor of the readout behind it
                role, unit = "readout", unit * entries_grow_by(assumed)
            if role != _default_role(use):
                roles[name] = role
        if abs(unit - 1) > 1e-9 or assumed.offset:  # of a bias that does not grow, too
            said = (unit, assumed.offset) if assumed.offset else unit
            rescale[name] = without_rounding(said, growth_factors(shapes, name), 1e-12)
    untested = search.without_effect()
    without_gradient = tuple(name for name in search.without_gradient() if name not in untested)
    notes = untested, undecided, without_gradient
    return Found(roles, blocks, rescale, search.passes, shapes, tuple(search.cuts), *notes)


def _refuse_unsayable(hypothesis: Hypothesis, found: Found) -> None:
    """Raises a UserError unless `upscale` with these findings writes the weights that agreed, with exact rates."""
    written = {name: tensor.detach().clone() for name, tensor in _saved_tensors(hypothesis.wide)}
    report = grow(hypothesis.narrow, hypothesis.wide, hints=found)
    for name, tensor in _saved_tensors(hypothesis.wide):
        size = float(written[name].abs().max()) if tensor.numel() and not tensor.is_complex() else 1.0
        if not torch.allclose(tensor, written[name], rtol=1e-9, atol=1e-9 * size):
            raise UserError(f"discover: {name!r} grows in a way that a plan cannot express. Give its blocks by hand")
    for name, entry in report.plan.parameters.items():
        assumed = hypothesis.assumed[name]
        is_decided = not entry.mixed and math.prod(entry.wide_shape) > 0  # DINOv3 may have no register tokens
        if is_decided and not math.isclose(
            entry.scale.gradient * entries_grow_by(assumed) * assumed.scale.weight, 1.0, rel_tol=1e-9
        ):
            raise UserError(f"discover: {name!r} has a role that a plan cannot express. Give its role by hand")


def _saved_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A state_dict without what else a model may save."""
    return [(name, tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)]


def _unknown_roles(hypothesis: Hypothesis) -> dict[str, Role]:
    uses = hypothesis.uses.items()
    return {name: _role(hypothesis.assumed[name].sides) for name, use in uses if use.growing and not _default_role(use)}


def _is_tied(use: Use) -> bool:
    return use.narrow.ndim > 1 and len(use.owners) > 1


def _default_role(use: Use) -> Role | None:
    """The role that a plan determines by itself; None if the caller must give it."""
    if _is_tied(use) or (not is_known(use) and use.narrow.ndim > 1):
        return None
    return _role(first_sides(use))


def _role(sides: tuple[Side, ...]) -> Role:
    if "out" in sides and "in" in sides:
        return "matrix" if sides.index("out") < sides.index("in") else "transposed_matrix"
    return "vector" if "out" in sides else "readout"
