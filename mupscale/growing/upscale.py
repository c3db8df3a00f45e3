"""`upscale`: grows a trained model, after a check that the new one computes and trains as the old one."""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.checks.check_step import Agreement, change_of_outputs, check_step
from mupscale.checks.trace import Call
from mupscale.checks.weights import Weights, as_they_are, perturb_
from mupscale.errors import UncheckedWarning, UserError, one_line
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import HOW_TO_CHECK, Optimizers, UpscaleReport, as_list, grow
from mupscale.methods.noise import Noise, NoiseOrAuto
from mupscale.widening.hints import NO_HINTS, Hints, checked_hints, some_names
from mupscale.widening.layers import Depth, Layers, at_depth, layers_of, without_new
from mupscale.widening.plan import as_identity, lists_without_residual
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import settings_of
from mupscale.widening.write import parameters_on_meta

OnMismatch = Literal["discover", "error", "note"]


MOST_PARAMETERS = 20_000_000
"""The largest wide model for which `discover` is tried: it runs the model up to 1500 times."""

_has_warned = False


def upscale(
    narrow: nn.Module,
    wide: nn.Module | Callable[[], nn.Module],
    narrow_opt: Optimizers = None,
    wide_opt: Optimizers = None,
    *,
    call: Call | None = None,
    hints: Hints | None = None,
    plan: Plan | None = None,
    noise: NoiseOrAuto = None,
    seed: int = 0,
    method: GrowthMethod | None = None,
    depth: Depth | None = None,
    consume: bool = False,
    on_mismatch: OnMismatch = "discover",
) -> UpscaleReport:
    """Makes a trained model wider, deeper or both: writes its weights, buffers and optimizer state into `wide`.

    Without noise, the wide model computes and trains exactly as the narrow one would have. What is frozen in `narrow`
    (`requires_grad`), or in evaluation mode (`eval()`), is so in `wide`. Gradients of `narrow` (`grad`), such as those
    of an accumulation window that is not complete, are carried too, unless `consume` frees them. All checks run before
    anything is written: after a UserError both models are unchanged.

    How a model grows is guessed from its modules, so give `call`: then growing after a training step is compared with a
    training step after growing, before anything is written (`check_step`). Where the guess is wrong, `discover` looks
    for a better one; where there is none, a UserError names the first module that differs.

    Args:
        narrow: The trained model.
        wide: The same architecture at a larger width, whose values are overwritten; or a function that builds it: then
            its parameters get memory one by one, where those of `narrow` are, and it is `report.wide`. A model on the
            meta device gets memory in the same way.
        narrow_opt: The optimizer of `narrow`, or a list of them.
        wide_opt: The optimizer of `wide`, or a list in the same order. It receives the state and keeps its own
            hyperparameters (under muP, those of `apply_mup`). With None, `report.optimizer` is a new optimizer of the
            same class, its hyperparameters rescaled from those of `narrow_opt`.
        call: One forward pass of a model, `lambda model: model(batch)`. Without it nothing is compared.
        hints: How parameters grow, where neither module types nor model classes tell: `Hints`, or what `discover`
            found.
        plan: In the place of `hints` and `depth`: the result of `mupscale.plan` for the same models.
        noise: Noise that makes the copies of a unit different, without which the new width is not used. "auto" is
            centred noise of 0.3 of each weight's spectral norm, where that keeps the function; elsewhere none.
        seed: The seed of the noise.
        method: The growth method (`mupscale.methods`); by default the paper's duplication. It also says what happens
            to the optimizer state: `Duplication(state="reset_new_copies", rewarm_steps=100)`.
        depth: How the model becomes deeper, where `wide` has longer lists of layers. "identity": inserted layers add
            nothing at first, so the function stays, and learn from the next step on. "interleave": each layer k times
            in place; "stack": the whole stack again; "random": inserted layers keep their initial values. Or the
            source of each layer, `{"layers": [0, 0, 1, 1]}`.
        consume: Free `narrow` and its optimizer state tensor by tensor. Peak memory is then that of the wide model,
            its state and one tensor.
        on_mismatch: What happens where the models differ: `discover` looks for a plan with which they agree, up to 20
            million wide parameters; `error` does not look; `note` writes the wide model all the same.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.01)
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(narrow, wide, optimizer, call=lambda model: model(x))
        >>> report.exact
        True
        >>> sorted({group["lr"] for group in report.optimizer.param_groups})  # the rates that continue the run
        [0.005, 0.01]
    """
    if on_mismatch not in get_args(OnMismatch):
        raise UserError(f"on_mismatch must be discover, error or note; got {on_mismatch!r}")
    build, target = (
        (None, wide) if isinstance(wide, nn.Module) or not callable(wide) else (wide, _built(wide, meta=True))
    )
    settings: dict[str, Any] = {"noise": noise, "seed": seed, "consume": consume, "method": method}
    hints = checked_hints(hints)
    if plan is not None and (hints != NO_HINTS or depth is not None):
        raise UserError("upscale: a plan says how the model grows: give hints and depth to mupscale.plan instead")
    if depth is not None:
        hints = replace(hints, depth=depth)
    if call is None:
        report = grow(narrow, target, narrow_opt, wide_opt, hints=hints, plan=plan, **settings)
        _warn_once()
        return report
    real = target if build is None else _built(build)
    optimizers = _that_can_step(as_list(narrow_opt), given=wide_opt is not None)
    checked = find_plan(narrow, real, call, hints, on_mismatch, optimizers, plan=plan)
    notes, exact = checked.notes, checked.agreement.exact
    if method is None or type(method) is Duplication:
        plan = checked.plan
        if noise == "auto":
            own = method or Duplication()
            nonlinear = weights_read_nonlinearly(narrow, real, call, checked, own)
            settings["noise"], about_noise = own.choose_noise("auto", plan, narrow, nonlinear)
            notes = (*notes, *about_noise)
        elif noise is not None and noise.centred and checked.plan.keeps_function:
            by, unlike = _change_by_noise(narrow, real, call, checked, noise, seed)
            if unlike:
                text = f"centred noise changes what call returns by {100 * by:.3g} %, because the model does not read "
                remedy = "linearly. Leave such weights out with `where` of the noise"
                notes = (*notes, f"{text}{some_names(unlike)} {remedy}")
    else:
        plan = plan or method.plan(narrow, real, checked.hints)
        if exact and not _continues(method, plan, narrow, real, call, optimizers):
            exact = False
            notes = (*notes, f"{type(method).__name__} does not continue the training; the check was by duplication")
    report = grow(narrow, target, narrow_opt, wide_opt, plan=plan, **settings)
    applying = [note for note in report.notes if note not in checked.agreement.settled]
    return replace(report, exact=exact, check=checked.text, notes=(*notes, *applying))


def _that_can_step(optimizers: list[Optimizer], *, given: bool) -> list[Optimizer]:
    """The optimizers that the check steps with; none if a wide one is `given` and the class cannot be built anew."""
    for optimizer in optimizers if given else ():
        try:
            inspect.signature(type(optimizer)).bind([], **settings_of(optimizer))
        except TypeError:
            return []
    return optimizers


def _continues(
    method: GrowthMethod, plan: Plan, narrow: nn.Module, wide: nn.Module, call: Call, optimizers: list[Optimizer]
) -> bool:
    """Whether a method continues the training: a step shows it, but for new layers, which learn in the step."""
    if plan.layers:
        return method.claim(plan, narrow, optimizers).function
    return check_step(narrow, wide, optimizers, call, plan, method=method).exact is True


LARGEST_ROUNDING = {"float64": 1e-9, "float32": 1e-4}
"""The change of outputs that is rounding."""


def weights_read_nonlinearly(
    narrow: nn.Module, wide: nn.Module, call: Call, checked: "CheckedPlan", method: GrowthMethod
) -> list[str]:
    """The weights on which the noise of noise="auto" would change the function.

    That is tried with other weights: initial zeros would hide what a weight does.
    """
    noise, _ = method.choose_noise("auto", checked.plan, narrow)
    if noise is None or not checked.plan.keeps_function:
        return []
    tried = partial(_change_by_noise, narrow, wide, call, checked, prepare=perturb_)
    found = tried(noise)[1]
    if found:
        rest, _ = method.choose_noise("auto", checked.plan, narrow, found)
        if rest is not None and tried(rest)[1]:
            return [name for name, entry in checked.plan.parameters.items() if noise.applies(entry)]
    return found


def _change_by_noise(
    narrow: nn.Module,
    wide: nn.Module,
    call: Call,
    checked: "CheckedPlan",
    noise: Noise,
    seed: int = 0,
    prepare: Weights = as_they_are,
) -> tuple[float, list[str]]:
    """By how much centred noise changes what the model computes, and the weights whose noise does; 0 and none."""
    plan, precision = checked.plan, checked.agreement.precision
    if checked.agreement.exact is False or (checked.agreement.exact is None and not checked.agreement.untested):
        return 0.0, []

    def change(of_noise: Noise) -> float:
        return change_of_outputs(narrow, wide, plan, call, precision, noise=of_noise, seed=seed, prepare=prepare)

    by = change(noise)
    if by <= LARGEST_ROUNDING[precision]:
        return 0.0, []
    noisy = [name for name, entry in plan.parameters.items() if noise.applies(entry) and entry.is_copied]
    alone = []
    for name in noisy[:_MOST_TRIED]:
        of_one = copy.copy(noise)
        of_one.where = dict.fromkeys(noisy, False) | {name: True}
        if change(of_one) > LARGEST_ROUNDING[precision]:
            alone.append(name)
    return by, alone or noisy


_MOST_TRIED = 64
"""Parameters that get noise alone, to see which of them changes the function."""


def _built(build: Callable[[], nn.Module], *, meta: bool = False) -> nn.Module:
    """The wide model; on the meta device, its parameters have no memory."""
    with parameters_on_meta() if meta else nullcontext(), torch.random.fork_rng(devices=[]):
        return build()


class CheckedPlan(NamedTuple):
    """A plan, and what the check of it gave."""

    plan: Plan
    hints: Hints
    agreement: Agreement
    notes: tuple[str, ...]
    text: str


def find_plan(
    narrow: nn.Module,
    wide: nn.Module,
    call: Call,
    hints: Hints | None,
    on_mismatch: OnMismatch,
    optimizers: Sequence[Optimizer] = (),
    compare: Callable[[Plan], Agreement] | None = None,
    plan: Plan | None = None,
) -> CheckedPlan:
    """The plan with which the models agree: the guessed or given one, or that of `discover`; else a UserError.

    A deeper model is compared with new layers that add nothing. `compare` says whether a plan makes them agree; by
    default, it is the step of `optimizers`, with `call` for the forward pass.
    """
    compare = compare or (lambda plan: check_step(narrow, wide, optimizers, call, plan))
    hints = checked_hints(hints)
    residual: dict[str, float] = {}
    why_unknown: UserError | None = None
    layers = plan.layers if plan is not None else layers_of(narrow, wide, hints.depth) if hints.depth else {}
    if layers:
        residual, why_unknown = _residual(narrow, layers, hints.residual, call)
        hints = replace(hints, residual=residual)

    def check(plan: Plan) -> Agreement:
        if why_unknown is not None:
            return Agreement(None, reason=str(why_unknown))
        return compare(as_identity(plan, narrow, wide, residual))

    try:
        planned = make_plan(narrow, wide, hints=hints) if plan is None else plan
    except UserError as error:
        if on_mismatch != "discover":
            raise
        refusal, reason = error, "the plan is refused"
    else:
        agreement = check(planned)
        without = "with new layers that add nothing, " if layers else ""
        words = f"{without}the wide model does not compute and train as the narrow one"
        refusal, reason = UserError(f"upscale: {words}: {agreement.reason}"), agreement.reason
        if agreement.exact is False and on_mismatch == "error":
            raise UserError(f"{refusal}. {_BY_HAND}. Nothing was written")
        if agreement.exact is not False or on_mismatch == "note":
            return _with_notes(narrow, wide, call, CheckedPlan(planned, hints, agreement, (), str(agreement)))
    _refuse_long_search(wide, refusal)
    from mupscale.discovery.discover import discover

    try:
        found = discover(narrow, without_new(wide, narrow, layers) if layers else wide, call)
        if layers:
            found = replace(found.resolved(at_depth(narrow, wide, layers), wide), depth=layers, residual=residual)
        planned = make_plan(narrow, wide, hints=found)
        agreement = check(planned)
    except Exception as error:  # whatever a model does when it runs
        failed = one_line(error, 400)
        if failed in str(refusal):
            raise refusal from None
        said = str(refusal).rstrip(".")
        raise UserError(f"{said}. A search for another plan failed: {failed}") from error
    if agreement.exact is False or (agreement.exact is None and not layers and not agreement.untested):
        raise UserError(f"{refusal}. The best plan of a search differs too: {agreement.reason}") from refusal
    text = f"{agreement}, with a plan that discover found in {found.passes} passes (as guessed, {reason})"
    return _with_notes(narrow, wide, call, CheckedPlan(planned, found, agreement, (), text))


def _with_notes(narrow: nn.Module, wide: nn.Module, call: Call, checked: CheckedPlan) -> CheckedPlan:
    """The same with notes, and with what new layers add."""
    agreement, plan = checked.agreement, checked.plan
    notes = agreement.notes
    if agreement.untested:
        notes = (*notes, f"without a gradient in the check, so untested: {some_names(agreement.untested)}")
    if agreement.exact is False:
        notes = (*notes, f"the wide model differs: {agreement.reason}")
    if plan.layers and plan.keeps_function and (agreement.exact is not None or agreement.untested):
        notes = (*notes, "new layers add nothing yet; they learn from the next step on, which no narrow run does")
    elif plan.layers:
        change = 100 * change_of_outputs(narrow, wide, plan, call, agreement.precision)
        text = f"the new layers change what call returns by {change:.3g} %; if they added nothing, {checked.text}"
        return checked._replace(agreement=replace(agreement, exact=False), notes=notes, text=text)
    return checked._replace(notes=notes)


def _residual(
    narrow: nn.Module, layers: Layers, given: Mapping[str, float], call: Call
) -> tuple[dict[str, float], UserError | None]:
    """What makes new layers the identity, where a layer class does not say it; or why that is not known."""
    unknown = lists_without_residual(narrow, layers, given)
    if not unknown:
        return dict(given), None
    from mupscale.discovery.depth import find_residual

    try:
        return {**find_residual(narrow, unknown, call), **given}, None
    except UserError as error:
        if any(row.how == "identity" for rows in layers.values() for row in rows):
            raise
        return dict(given), error


_BY_HAND = 'Leave on_mismatch="discover", or give Hints by hand (mupscale.plan shows the guess)'


def _refuse_long_search(wide: nn.Module, refusal: UserError) -> None:
    parameters = sum(parameter.numel() for parameter in wide.parameters())
    if parameters > MOST_PARAMETERS:
        raise UserError(
            f"{refusal}. The wide model has {parameters:,} parameters, too many for a search: call mupscale.discover "
            "with smaller models of the same family, and give upscale hints=found.resolved(narrow, wide)"
        ) from refusal


def _warn_once() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        text = f"upscale was called without `call`, so nothing was compared. To check, {HOW_TO_CHECK}"
        warnings.warn(text, UncheckedWarning, stacklevel=3)
