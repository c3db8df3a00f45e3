"""Compiled steps of a stack against eager ones; what happens without a compiler."""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mupscale.errors import UserError
from mupscale.stacking.compiled import Compiled
from mupscale.stacking.dropout import mixed
from mupscale.stacking.stack import Stack

has_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.slow
@has_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps_are_eager_ones() -> None:
    def built(compiled: bool) -> Stack:
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            models.append(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double())
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + seed)) for seed, model in enumerate(models)]
        return Stack(models, optimizers, loss_of, compiled=compiled)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    stacks = built(True), built(False)
    for step in range(3):
        batch = torch.randn(8, 6, dtype=torch.float64)
        for stack in stacks:
            stack.seeds.copy_(mixed(torch.arange(2), step))
        losses, expected = (stack.step(batch, max_norm=0.5) for stack in stacks)
        assert torch.allclose(losses, expected, rtol=1e-13)
    for tensor, other in zip(stacks[0].parameters.values(), stacks[1].parameters.values(), strict=True):
        assert torch.allclose(tensor, other, rtol=1e-12)


def failing(error: Exception, *_: Any) -> Any:
    raise error


def test_without_a_compiler_functions_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **_: Any) -> Any:
        return partial(failing, RuntimeError("no compiler\nthat is all"))

    monkeypatch.setattr(torch, "compile", broken)
    double = Compiled(lambda x: 2 * x, "doubling")
    with pytest.warns(
        UserWarning, match="^doubling runs without torch.compile, which failed: RuntimeError: no compiler$"
    ):
        assert double(2) == 4
    assert double(3) == 6  # without a second warning
    fails = Compiled(partial(failing, KeyError("its own")), "failing")
    with pytest.raises(KeyError, match="its own"):
        fails()
    for error in (UserError("a mistake"), torch.OutOfMemoryError("full")):
        monkeypatch.setattr(torch, "compile", lambda function, error=error, **_: partial(failing, error))
        with pytest.raises(type(error)):
            Compiled(lambda: 1, "one")()
