"""What happens to the optimizer state: carried as in the paper, reset, or reset for the new copies only.

`carry` moves all state by Table 1, and the run continues exactly. `reset` drops it: moments and counts start at zero.
`reset_new_copies` keeps it for the first copy of every unit and sets it to zero for the others, whose learning rate may
be warmed up again.

Entries with zero moments and a large step count T would get wrong updates: Adam divides by 1 - β^T, which is nearly 1
but should be small, so that with β₂ = 0.999 the first updates are three to six times too large. So new copies have a
separate step count n, the steps since the growth. After each step their update is multiplied by the factor that turns
the bias corrections for T into those for n (`OptimizerRule.own_count`), and by the warm-up. A new optimizer would do
the same, with two differences: eps is multiplied by sqrt((1 - β₂^T) / (1 - β₂^n)), and decoupled weight decay is part
of the update.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.widening.layout import copy_index
from mupscale.widening.plan import TensorPlan
from mupscale.widening.rules import Group, OptimizerRule, rule_of
from mupscale.widening.step_hooks import around_step, leave_alone

StateRule = Literal["carry", "reset", "reset_new_copies"]

NEW_COPIES = "new_copies"
"""Key of a parameter's optimizer state: which of its entries are new copies. Also the key of the hooks."""

GROWN_AT = "new_copies_since"
REWARM_STEPS = "rewarm_steps"
"""Keys of a parameter group: the step count at the growth, and the steps over which the new copies' rate rises."""


def check_state_rule(rule: str, rewarm_steps: int) -> None:
    """Raises a UserError for a state rule, or a warm-up, that does not exist."""
    if rule not in get_args(StateRule):
        raise UserError(f"the state rule must be one of {', '.join(get_args(StateRule))}; got {rule!r}")
    if isinstance(rewarm_steps, bool) or not isinstance(rewarm_steps, int) or rewarm_steps < 0:
        raise UserError(f"rewarm_steps must be a whole number of at least 0, got {rewarm_steps!r}")
    if rewarm_steps and rule != "reset_new_copies":
        raise UserError(
            f"rewarm_steps = {rewarm_steps} needs the state rule reset_new_copies, got {rule!r}. Use reset_new_copies, "
            "or leave rewarm_steps out"
        )


def check_own_count(optimizer: Optimizer) -> None:
    """Raises a UserError for an optimizer that does not support a separate step count of new copies."""
    if not rule_of(optimizer).own_count:
        raise UserError(
            f"reset_new_copies: it is not known how {type(optimizer).__name__} depends on its step count, so the count "
            "of new copies cannot be reset. Use carry or reset, or train with SGD, Adam, AdamW, Adamax, Adagrad or "
            "RMSprop"
        )


def new_copies(entry: TensorPlan) -> Tensor:
    """Of the wide parameter: True for every entry but the first copy of each narrow one."""
    first = torch.ones([1] * len(entry.layouts), dtype=torch.bool)
    for axis, layout in enumerate(entry.layouts):
        shape = [-1 if other == axis else 1 for other in range(len(entry.layouts))]
        first = first & (copy_index(layout) == 0).view(shape)
    return ~first


def rewarm_new_copies(optimizer: Optimizer) -> None:
    """Gives new copies their own count and their warm-up, with hooks around the step of `optimizer`.

    `upscale` and `UpscaleCallback` call this. Hooks are not part of an optimizer's state: after loading one into a new
    process, call it again. Without new copies it does nothing.
    """
    leave_alone(optimizer, NEW_COPIES)
    rows = [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if NEW_COPIES in optimizer.state.get(parameter, {})
    ]
    if not rows:
        return
    rule = rule_of(optimizer)
    originals: list[Tensor] = []

    @torch.no_grad()
    def enter() -> None:
        originals.extend(parameter.clone() for parameter, _ in rows)

    @torch.no_grad()
    def leave() -> None:
        for (parameter, group), before in zip(rows, originals, strict=True):
            state = optimizer.state[parameter]
            if not rule.counts_steps and parameter.grad is not None:
                state["step"].add_(1)
            factor = update_factor(rule, group, state["step"].double(), group[GROWN_AT], group[REWARM_STEPS])
            scaled = before.lerp(parameter, factor.to(parameter))
            parameter.copy_(torch.where(state[NEW_COPIES].bool(), scaled, parameter))
        originals.clear()

    around_step(optimizer, NEW_COPIES, enter, leave)


def update_factor(
    rule: OptimizerRule, group: Group, count: Tensor, grown_at: Tensor | float, rewarm_steps: Tensor | float
) -> Tensor:
    """What the update of new copies is multiplied by: their own count, and the warm-up.

    `count` is the step count in float64. It may have one entry for each of many models; the other numbers, and those in
    `group`, may then be tensors of its shape.
    """
    age = (count - grown_at).clamp(min=1)
    assert rule.own_count is not None
    steps = rewarm_steps.clamp(min=1) if isinstance(rewarm_steps, Tensor) else max(rewarm_steps, 1)
    return rule.own_count(group, count, age) * (age / steps).clamp(max=1)
