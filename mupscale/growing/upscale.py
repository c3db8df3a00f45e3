"""`upscale`: widens a trained model, after a check that the wide one computes and trains as the narrow one."""

import warnings
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from mupscale.arguments import refuse_unless_callable
from mupscale.checks.agreement import Agreement, check_agreement
from mupscale.checks.forward_pass import Call
from mupscale.discovery.discover import discover
from mupscale.errors import UncheckedWarning, UserError
from mupscale.widening.buffers import Rebuild
from mupscale.widening.grow import HOW_TO_CHECK, Optimizers, UpscaleReport, as_list, grow
from mupscale.widening.methods import Duplication, GrowthMethod
from mupscale.widening.new_copies import StateRule
from mupscale.widening.noise import Noise
from mupscale.widening.plan import Blocks, Plan
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.roles import Roles
from mupscale.widening.survey import some_names
from mupscale.widening.units import Units

OnMismatch = Literal["discover", "error", "note"]


MOST_PARAMETERS = 20_000_000
"""Of a wide model for which `discover` is tried: it runs the model up to 1500 times."""

_has_warned = False


def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    narrow_opt: Optimizers = None,
    wide_opt: Optimizers = None,
    *,
    call: Call | None = None,
    noise: Noise | None = None,
    seed: int = 0,
    roles: Roles | None = None,
    blocks: Blocks | None = None,
    units: Units | None = None,
    plan: Plan | None = None,
    consume: bool = False,
    state: StateRule | None = None,
    rewarm_steps: int = 0,
    method: GrowthMethod | None = None,
    rebuild: Rebuild | None = None,
    on_mismatch: OnMismatch = "discover",
) -> UpscaleReport:
    """Widens a trained model: writes the weights, buffers and optimizer state of `narrow` into `wide`.

    Without noise, the wide model computes and trains exactly as the narrow one would have. What is frozen in `narrow`
    (`requires_grad`), or in evaluation mode (`eval()`), is so in `wide`. Gradients of `narrow` (`grad`), such as those
    of an accumulation window that is not complete, are carried too, unless `consume` frees them. All checks run before
    anything is written: after a UserError both models are unchanged.

    How a model grows is guessed from its modules, so give `call`: then copies of both models run before anything is
    written, and outputs and gradients are compared. Where the guess is wrong, `discover` looks for a better one; where
    there is none, a UserError names the first module that differs.

    Args:
        narrow: The trained model.
        wide: The same architecture at a larger width. Its values are overwritten. It may be on the meta device; its
            parameters are then allocated on the device of `narrow`.
        narrow_opt: The optimizer of `narrow`, or a list of them.
        wide_opt: The optimizer of `wide`, or a list in the same order. It receives the state and keeps its own
            hyperparameters (under muP, those of `apply_mup`). With None, `report.optimizer` is a new optimizer of the
            same class, its hyperparameters rescaled from those of `narrow_opt`.
        call: One forward pass of a model, which returns what it computes: `lambda model: model(batch)`. A small batch
            is enough. Without it nothing is checked, and `report.exact` is None.
        noise: Noise that makes the copies of a unit different.
        seed: The seed of the noise.
        roles: Roles of parameters by name pattern, where neither module types nor model classes define them.
        blocks: Layouts of axes by name pattern, likewise.
        units: Extra factors of parameters by name pattern, likewise.
        plan: The result of `mupscale.plan` for the same models.
        consume: Free `narrow` and its optimizer state tensor by tensor. Peak memory is then that of the wide model,
            its state and one tensor.
        state: `carry` moves the optimizer state, `reset` drops it. `reset_new_copies` moves it for the first copy of
            each unit; the other copies start with zero state and a step count of zero. The default depends on `method`.
        rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
        method: The growth method (`mupscale.widening.methods`); by default the paper's duplication.
        rebuild: Builds the wide model again, on the CPU. It provides the buffers that are not saved, if `wide` is on
            the meta device. `wide` keeps its own value of any other buffer that is not saved.
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
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
        >>> sorted({group["lr"] for group in report.optimizer.param_groups})  # the rates that continue the run
        [0.005, 0.01]
    """
    if on_mismatch not in get_args(OnMismatch):
        raise UserError(f"on_mismatch must be discover, error or note; got {on_mismatch!r}")
    hints: dict[str, Any] = {"roles": roles, "blocks": blocks, "units": units}
    settings: dict[str, Any] = {
        "noise": noise,
        "seed": seed,
        "consume": consume,
        "state": state,
        "rewarm_steps": rewarm_steps,
        "method": method,
        "rebuild": rebuild,
    }
    if call is None:
        report = grow(narrow, wide, narrow_opt, wide_opt, plan=plan, **hints, **settings)
        _warn_once()
        return report
    refuse_unless_callable("upscale: call", call, "lambda model: model(batch)")
    checked = _checked(narrow, wide, call, plan, hints, on_mismatch)
    notes = checked.notes
    exact = checked.agreement.exact
    if method is None or type(method) is Duplication:
        plan = checked.plan
    else:
        plan = plan if checked.hints is hints else None
        if exact and not method.claim(checked.plan, narrow, as_list(narrow_opt)).dynamics:
            exact = False
            notes = (*notes, f"{type(method).__name__} does not continue the training; the check was by duplication")
    report = grow(narrow, wide, narrow_opt, wide_opt, plan=plan, **checked.hints, **settings)
    return replace(report, exact=exact, check=checked.text, notes=(*notes, *report.notes))


class _Checked(NamedTuple):
    """A plan, and what the check of it gave."""

    plan: Plan
    hints: dict[str, Any]
    agreement: Agreement
    notes: tuple[str, ...]
    text: str


def _checked(
    narrow: nn.Module, wide: nn.Module, call: Call, plan: Plan | None, hints: dict[str, Any], on_mismatch: OnMismatch
) -> _Checked:
    """The plan with which the models agree: the guessed one, or that of `discover`. Raises a UserError without one."""
    try:
        planned = make_plan(narrow, wide, **hints) if plan is None else plan
    except UserError as error:
        if on_mismatch != "discover":
            raise
        return _discovered(narrow, wide, call, error, "the plan is refused")
    agreement = check_agreement(narrow, wide, planned, call)
    if agreement.exact is not False:
        return _Checked(planned, hints, agreement, _notes(agreement), str(agreement))
    if on_mismatch == "note":
        return _Checked(planned, hints, agreement, (f"the wide model differs: {agreement.reason}",), str(agreement))
    differs = UserError(f"upscale: the wide model does not compute and train as the narrow one: {agreement.reason}")
    if on_mismatch == "error":
        raise UserError(f"{differs}. {_BY_HAND}. Nothing was written")
    return _discovered(narrow, wide, call, differs, agreement.reason)


_BY_HAND = 'Leave on_mismatch="discover", or give roles, blocks and units by hand (mupscale.plan shows the guess)'


def _discovered(narrow: nn.Module, wide: nn.Module, call: Call, refusal: UserError, reason: str) -> _Checked:
    """The plan of `discover`, checked; raises `refusal`, and why there is none."""
    parameters = sum(parameter.numel() for parameter in wide.parameters())
    if parameters > MOST_PARAMETERS:
        raise UserError(
            f"{refusal}. The wide model has {parameters:,} parameters, too many for a search: call mupscale.discover "
            "with smaller models of the same family, and give upscale **found.resolved(narrow, wide).hints"
        ) from refusal
    try:
        found = discover(narrow, wide, call)
        planned = make_plan(narrow, wide, **found.hints)
        agreement = check_agreement(narrow, wide, planned, call)
    except Exception as error:  # whatever a model does when it runs
        raise UserError(f"{refusal}. A search for another plan failed: {_first_line(error)}") from error
    if not agreement.exact:
        raise UserError(f"{refusal}. The best plan of a search differs too: {agreement.reason}") from refusal
    text = f"{agreement}, with a plan that discover found in {found.passes} passes (as guessed, {reason})"
    return _Checked(planned, found.hints, agreement, _notes(agreement), text)


def _notes(agreement: Agreement) -> tuple[str, ...]:
    if not agreement.untested:
        return agreement.notes
    return (*agreement.notes, f"without a gradient in the check, so untested: {some_names(agreement.untested)}")


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:400]


def _warn_once() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        text = f"upscale was called without `call`, so nothing was compared. To check, {HOW_TO_CHECK}"
        warnings.warn(text, UncheckedWarning, stacklevel=3)
