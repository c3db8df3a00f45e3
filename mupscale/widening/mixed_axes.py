"""Parameters that an optimizer must step in other units: their pieces grew by different factors, or an affine unit
shifted them."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.widening.step_hooks import around_step, leave_alone
from mupscale.widening.width_table import merged_table

REFERENCE_UNITS = "reference_units"
"""Key of the hooks."""


def keep_reference_units(model: nn.Module, optimizer: Optimizer) -> None:
    """Makes `optimizer` exact for parameters that need other units than their own, with hooks around its step.

    A layer that reads width concatenated with fixed features would need a learning rate per column. Instead the step
    sees every piece in the units of the fastest-growing one: weights · k_in / k_in(reference), gradients · k_out /
    k_out(reference); by Table 1 one learning rate, weight decay and eps are then right for all. Its update is scaled
    back after the step.

    A gain 1 + w that an affine unit has multiplied holds a multiple of the narrow w, and a shift. Decay would pull it
    towards 0, where the narrow run pulls towards w = 0. So the step sees the weights without their shift.

    `upscale` calls this. Hooks are not part of an optimizer's state: after loading one into a new process, call it
    again.
    """
    leave_alone(optimizer, REFERENCE_UNITS)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    table = merged_table(model)
    mixed = [
        (p, table[name])
        for name, p in model.named_parameters()
        if id(p) in held and name in table and table[name].needs_hooks
    ]
    if not mixed:
        return
    originals: list[tuple[Tensor, Tensor, Tensor | None]] = []

    @torch.no_grad()
    def enter() -> None:
        for parameter, width in mixed:
            weights, gradient = parameter.clone(), parameter.grad
            if width.shift:
                parameter.sub_(width.shift)
            if width.relative:
                parameter.mul_(width.relative_scale("in", parameter))
            originals.append((weights, parameter.clone(), gradient))
            if gradient is not None and width.relative:
                parameter.grad = gradient * width.relative_scale("out", gradient)

    @torch.no_grad()
    def leave() -> None:
        for (parameter, width), (weights, converted, gradient) in zip(mixed, originals, strict=True):
            # only the update is scaled, so that rounding never touches a weight that did not move
            parameter.sub_(converted)
            if width.relative:
                parameter.div_(width.relative_scale("in", parameter))
            parameter.add_(weights)
            parameter.grad = gradient
        originals.clear()

    around_step(optimizer, REFERENCE_UNITS, enter, leave)
