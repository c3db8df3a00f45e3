"""Which models `--stack auto` trains together."""

import pytest
import torch
from stacks import made

from mupscale.commands.lab.stack_loop import why_slow


@pytest.mark.parametrize(
    ("model", "device", "slow"), [("mlp", "cuda", False), ("gpt2", "cuda", True), ("resnet", "cpu", False)]
)
def test_on_a_gpu_only_models_with_losses_for_many(model: str, device: str, slow: bool) -> None:
    module, _ = made(model, "adamw", 0)
    reason = why_slow(module, torch.device(device))
    assert (reason is not None) == slow
    assert reason is None or "torch.vmap of GPT2 is slower on a GPU" in reason
