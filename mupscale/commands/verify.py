"""verify: check whether a configured model can be widened exactly, and name the layer that cannot.

Trains float64 copies of both widths side by side on the model's data, and compares them. Of another growth method than
the paper's, checks whether it keeps what it claims.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.checks.claims import check_claim
from mupscale.checks.verify import verify
from mupscale.commands.configured import configured, first_batches, growths
from mupscale.commands.status import Status
from mupscale.commands.terminal import columns, paint
from mupscale.mup_optimizers import apply_mup
from mupscale.widening.methods import Duplication

STEPS = 50
BATCHES = 8


def main(command: str, arguments: list[str]) -> int:
    module, data, trainer = configured(command, arguments, __doc__)
    scheduled = growths(module, trainer)
    batches = first_batches(module, data, BATCHES)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        module.net = net
        return module.loss(batch)

    def optimizer(params: list[nn.Parameter]) -> Optimizer:
        return apply_mup(module.optimizer_callable(params))

    passed = True
    for before, after, method, _ in scheduled:
        narrow, wide = module.network(before), module.network(after, meta=True)
        if isinstance(method, Duplication):
            clip = trainer.gradient_clip_val
            with Status() as status:
                verdict = verify(
                    narrow, wide, optimizer=optimizer, batches=batches, loss=loss, steps=STEPS, clip=clip, watch=status
                )
            print(verdict.text(columns(), paint, title=f"width {before} → {after}: "), flush=True)
            passed &= verdict.passed
        else:
            check = check_claim(narrow, wide, method, optimizer=optimizer, batches=batches, loss=loss)
            print(check.text(columns(), paint, title=f"width {before} → {after}: "), flush=True)
            passed &= check.holds
    return int(not passed)
