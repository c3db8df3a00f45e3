"""verify: check whether a configured model grows exactly, and name the layer that does not.

Trains float64 copies of both widths side by side on the model's data, and compares them. A model's own
configure_optimizers is refused if it cannot continue after the growth. Of another growth method than
the paper's, checks whether it keeps what it claims.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mupscale.base_shapes import apply_mup
from mupscale.checks.verify import check_claim, verify
from mupscale.commands.configured import configured, first_batches, growths, optimizers_of_copies, refuse_own_rates
from mupscale.commands.growth_plans import LossBySize
from mupscale.commands.process import columns, paint, progress_bar
from mupscale.methods import Duplication
from mupscale.models.base import has_own_optimizers
from mupscale.widening.hints import Hints

NOT_CHECKED = "cannot be checked outside of a run: model.optimizer is checked in its place"
STEPS = 50
BATCHES = 8


def main(command: str, arguments: list[str]) -> int:
    module, data, trainer = configured(command, arguments, __doc__)
    scheduled = growths(module, trainer, data)
    batches = first_batches(module, data, BATCHES)
    module.double()  # what it has beside its network, like a teacher, computes with the copies
    loss = LossBySize(module)

    def configured_optimizer(params: list[nn.Parameter]) -> Optimizer:
        return apply_mup(module.optimizer_callable(params))

    passed = True
    for before, after, method, plan, depth, residual in scheduled:
        narrow, wide = loss.network(*before), loss.network(*after, meta=depth is None)
        optimizer: Callable[[list[nn.Parameter]], Any] = configured_optimizer
        if has_own_optimizers(module):
            refuse_own_rates(module, narrow, wide, plan, method)
            own = optimizers_of_copies(module, narrow, several=isinstance(method, Duplication))
            if own is None:
                print(f"{type(module).__name__}.configure_optimizers {NOT_CHECKED}", flush=True)
            else:
                optimizer = own
        if isinstance(method, Duplication) and depth is None:
            clip = trainer.gradient_clip_val
            with progress_bar() as status:
                verdict = verify(
                    narrow, wide, optimizer=optimizer, batches=batches, loss=loss, steps=STEPS, clip=clip, watch=status
                )
            print(verdict.text(columns(), paint, title=f"{before.to(after)}: "), flush=True)
            passed &= verdict.passed
        else:
            hints = Hints(residual=residual)
            check = check_claim(
                narrow, wide, method, optimizer=optimizer, batches=batches, loss=loss, depth=depth, hints=hints
            )
            print(check.text(columns(), paint, title=f"{before.to(after)}: "), flush=True)
            passed &= check.holds
    return int(not passed)
