"""The memory of a model in a stack: the estimate against a count by hand, and against a GPU's peak."""

from typing import Any

import pytest
import torch
from stacks import batches, loss_of, made
from tiny_modules import mlp
from torch import Tensor

from mupscale.errors import UserError
from mupscale.stacking.stack import Stack, bytes_per_model, saved_per_model


def test_what_autograd_saves_of_the_mlp() -> None:
    module, _ = made("mlp", "adamw", 0)
    batch = batches(module, 1)[0]
    rows, width, classes, labels = 8, 8, 3, 8
    activations, readout = 8 * rows * width, 8 * width * classes  # in float64
    probabilities = 8 * rows * classes
    entropy = 8 * labels + 16  # its own labels in the order that the loss takes, and two numbers
    # of three layers, and the last one scaled for the readout
    assert saved_per_model(module, loss_of, batch) == (4 * activations + probabilities + entropy, activations)
    by_kernel = saved_per_model(module, loss_of, batch, module.stacked_losses())
    assert by_kernel == (3 * activations + readout + probabilities, activations)  # the labels are those of the batch


@pytest.mark.parametrize(("optimizer", "states"), [(torch.optim.SGD, 1), (torch.optim.AdamW, 2)])
def test_what_a_model_of_the_mlp_takes(optimizer: Any, states: int) -> None:
    module, _ = made("mlp", "adamw", 0)
    batch = batches(module, 1)[0]
    saved, _ = saved_per_model(module, loss_of, batch)
    weights = 8 * (6 * 8 + 8 + 2 * (8 * 8 + 8) + 8 * 3 + 3)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    held = weights * (2 + states) + buffers + 8 * 6 * 8 + 8 * 8  # the batch
    update = weights + 2 * 8 * 8 * 8
    found = bytes_per_model(module, optimizer, loss_of, batch)
    assert found == int(1.01 * (held + max(saved + 2 * 8 * 8 * 8, update)))
    losses = module.stacked_losses()
    saved_by_kernel, _ = saved_per_model(module, loss_of, batch, losses)
    by_kernel = bytes_per_model(module, optimizer, loss_of, batch, losses=losses)
    assert by_kernel == int(1.01 * (held + max(saved_by_kernel + 3 * 8 * 8 * 8, update)))
    grown = bytes_per_model(module, optimizer, loss_of, batch, grown=True)
    update = weights + 5 * 8 * 8 * 8
    assert grown == int(1.01 * (held + weights // 8 + max(saved + 2 * 8 * 8 * 8, update)))
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet", "gpt2"])
def test_other_models_have_an_estimate(model: str) -> None:
    module, _ = made(model, "adamw", 0)
    data = batches(module, 2)
    small = bytes_per_model(module, torch.optim.AdamW, loss_of, data[0])
    joined = torch.cat(data) if isinstance(data[0], Tensor) else tuple(map(torch.cat, zip(*data, strict=True)))
    assert 1.3 * small < bytes_per_model(module, torch.optim.AdamW, loss_of, joined) < 2 * small


def test_an_optimizer_without_a_rule_is_refused() -> None:
    module, _ = made("mlp", "adamw", 0)
    with pytest.raises(UserError, match="RMSprop cannot step many models"):
        bytes_per_model(module, torch.optim.RMSprop, loss_of, batches(module, 1)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("width", "rows"), [(256, 1000), (512, 16), (64, 4000)])
def test_the_estimate_on_a_gpu(width: int, rows: int, kernel: bool) -> None:
    def built(count: int) -> tuple[Stack, int]:
        modules = [mlp(width) for _ in range(count)]
        for module in modules:
            module.configure_model()
            module.cuda()
        losses = modules[0].stacked_losses() if kernel else None
        estimate = bytes_per_model(modules[0], torch.optim.AdamW, loss_of, batch, losses=losses)
        return Stack(modules, [module.configure_optimizers() for module in modules], loss_of, losses), estimate

    batch = (torch.randn(rows, 6, device="cuda"), torch.zeros(rows, dtype=torch.long, device="cuda"))
    peaks = []
    for count in (2, 10, 40):  # the first one allocates workspaces of libraries
        torch.cuda.empty_cache()
        stack, estimate = built(count)
        before = torch.cuda.memory_allocated() - sum(
            tensor.untyped_storage().nbytes() for tensor in stack.changing() if tensor is not stack.optimizer.begun
        )
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            stack.step(batch, max_norm=1.0)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del stack
    real = (peaks[2] - peaks[1]) / 30
    assert real <= estimate <= 1.5 * real
