"""Compiled steps of a stack against eager ones; what happens without a compiler."""

from functools import partial
from typing import Any

import pytest
import torch
from stacks import batches, made, stacked
from torch import nn

from mupscale.errors import UserError
from mupscale.stacking.compiled import Compiled
from mupscale.stacking.dropout import mixed
from mupscale.stacking.stack import Stack


@pytest.mark.slow
def test_steps_can_be_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the code generator, which takes the most time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    stacks = []
    for compiled in (True, False):
        pairs = [made("mlp", "adam", index) for index in range(2)]
        stacks.append(stacked(pairs, compiled=compiled))
    for batch in batches(pairs[0][0], 2):
        losses, expected = (stack.step(batch, max_norm=0.05) for stack in stacks)
        assert torch.allclose(losses, expected, rtol=1e-13)


@pytest.mark.slow
def test_mapped_losses_with_dropout_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(compiled: bool) -> Stack:
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            models.append(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4), nn.Unflatten(1, (2, 2))).double())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        return Stack(models, optimizers, lambda model, batch: model(batch).square().mean(), compiled=compiled)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    stacks = built(True), built(False)
    for step in range(3):
        batch = torch.randn(8, 6, dtype=torch.float64)
        for stack in stacks:
            stack.seeds.copy_(mixed(torch.arange(2), step))
        losses, expected = (stack.step(batch) for stack in stacks)
        assert torch.allclose(losses, expected, rtol=1e-13)


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
