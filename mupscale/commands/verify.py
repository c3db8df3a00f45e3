"""verify: check whether a configured model can be widened exactly, and name the layer that cannot.

Trains float64 copies of both widths side by side on the model's data, and compares them.
"""

from typing import Any

from torch import Tensor, nn

from mupscale.checks.verify import verify
from mupscale.commands.configured import configured, first_batches, growths
from mupscale.mup_optimizers import apply_mup

STEPS = 50
BATCHES = 8


def main(command: str, arguments: list[str]) -> int:
    module, data, trainer = configured(command, arguments, __doc__)
    scheduled = growths(module, trainer)
    batches = first_batches(module, data, BATCHES)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        module.net = net
        return module.loss(batch)

    passed = True
    for before, after, _ in scheduled:
        verdict = verify(
            module.network(before),
            module.network(after, meta=True),
            optimizer=lambda params: apply_mup(module.optimizer_callable(params)),
            batches=batches,
            loss=loss,
            steps=STEPS,
            clip=trainer.gradient_clip_val,
        )
        print(f"width {before} → {after}: {verdict}", flush=True)
        passed &= verdict.passed
    return int(not passed)
