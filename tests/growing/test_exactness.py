"""`upscale` with `call`: an architecture trains on exactly, or is refused before anything is written."""

from typing import Any

import pytest
import torch
from bad_input import snapshot
from exactness import CASES, Heads, batch
from nets import take_steps
from tiers import slow_except
from torch import Tensor, nn

import mupscale
from mupscale.checks.recording import float64_copy
from mupscale.checks.trace import floats_of
from mupscale.errors import UserError

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001, weight_decay=0.01),
}

WARM_UP, STEPS, TOLERANCE = 5, 20, 1e-9


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    made = model(inputs.clone())
    outputs = floats_of(made) if isinstance(made, Heads) else floats_of(made)[:1]
    return sum((output - 1).square().mean() for output in outputs)


def outcome(name: str, factor: float, optimizer: str, **settings: Any) -> tuple[str, float, Any]:
    """`exact` or `refused`, the largest drift of the loss over 20 steps, and the plan or the reason."""
    case = CASES[name]
    torch.manual_seed(0)
    narrow, wide = (float64_copy(case.build(n)) for n in (case.n, round(factor * case.n)))
    batches = [batch(case.data) for _ in range(WARM_UP + STEPS)]
    narrow_opt = OPTIMIZERS[optimizer](narrow.parameters())
    take_steps(narrow, narrow_opt, batches[:WARM_UP], loss_of)
    before = snapshot(narrow, wide)
    sample = batch(case.data)
    try:
        report = mupscale.upscale(narrow, wide, narrow_opt, call=lambda model: model(sample), **settings)
    except UserError as error:
        assert snapshot(narrow, wide) == before
        return "refused", 0.0, str(error)
    assert report.exact is True
    pairs = (narrow, narrow_opt), (wide, report.optimizer)
    losses = [take_steps(*pair, batches[WARM_UP:], loss_of) for pair in pairs]
    drift = max(abs(b - a) / max(abs(a), 1e-30) for a, b in zip(*losses, strict=True))
    return "exact", drift, report.plan


@pytest.mark.parametrize("name", slow_except(CASES, *list(CASES)[::3]))
def test_it_is_exact_over_twenty_steps_or_refused(name: str) -> None:
    optimizer = list(OPTIMIZERS)[len(name) % 3]
    verdict, drift, found = outcome(name, 2, optimizer)
    assert (verdict == "exact") is CASES[name].exact, found
    assert drift <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [2, 3, 1.5])
@pytest.mark.parametrize("name", CASES)
def test_every_architecture_with_every_optimizer(name: str, factor: float, record_property: Any) -> None:
    settings: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        verdict, drift, found = outcome(name, factor, optimizer, **settings)
        record_property(optimizer, f"{verdict} {drift:.0e}")
        assert drift <= TOLERANCE, (optimizer, drift)
        if verdict == "refused":  # which depends on no optimizer
            break
        settings = {"hints": found}
