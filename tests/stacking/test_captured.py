"""Steps of a stack as CUDA graphs: which steps one graph can take, and captured steps against eager ones."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from stacks import UNLIKE, batches, grown, loss_of, made, stacked
from torch import Tensor, nn

from mupscale.stacking.dropout import mixed
from mupscale.stacking.stack import CapturedStack, Context, Stack

of_the_compiler = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:TensorFloat32", r"ignore:\s*Online softmax is disabled"
)


# --- on a GPU


def on_gpu(optimizer: str, dtype: torch.dtype, *, compiled: bool) -> tuple[Stack, list[Any]]:
    pairs = [made("mlp", optimizer, index) for index in range(5)]
    data = [(x.to("cuda", dtype), y.cuda()) for x, y in batches(pairs[0][0], 8)]
    for module, _ in pairs:
        module.to("cuda", dtype)
    pairs = [(module, module.configure_optimizers()) for module, _ in pairs]
    return stacked(pairs, compiled=compiled), data


def grown_on_gpu(optimizer: str, *, compiled: bool) -> tuple[Stack, list[Any]]:
    stack, data = on_gpu(optimizer, torch.float64, compiled=False)
    for batch in data[:3]:
        stack.step(batch)
    pairs: list[Any] = list(zip(stack.models, stack.optimizers, strict=True))
    pairs = [grown("mlp", optimizer, index, pair, UNLIKE) for index, pair in enumerate(pairs)]
    return stacked(pairs, compiled=compiled), data


@pytest.mark.gpu
@of_the_compiler
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_of_models_that_grew_by_different_factors(optimizer: str, compiled: bool) -> None:
    stack, data = grown_on_gpu(optimizer, compiled=compiled)
    twin, _ = grown_on_gpu(optimizer, compiled=False)
    step = CapturedStack(stack, data[0], max_norm=0.05)
    for batch in data:
        losses, expected = step(batch), twin.advance(batch, max_norm=0.05)
        assert torch.allclose(losses, expected, rtol=1e-10)
    for tensor, other in zip(stack.changing(), twin.changing(), strict=True):
        assert torch.allclose(tensor.double(), other.double(), rtol=1e-8, atol=1e-12)


def set_rates(stack: Stack, step: int) -> None:
    for optimizer in stack.optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] / (1 + step)


AUTOCAST = partial(torch.autocast, "cuda", torch.bfloat16)


@pytest.mark.gpu
@of_the_compiler
@pytest.mark.parametrize("context", [nullcontext, AUTOCAST], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_are_eager_ones(context: Context, optimizer: str, compiled: bool) -> None:
    stack, data = on_gpu(optimizer, torch.float32, compiled=compiled)
    twin, _ = on_gpu(optimizer, torch.float32, compiled=compiled)
    limits = torch.full((5,), 0.05, device="cuda")
    step = CapturedStack(stack, data[0], max_norm=limits, context=context)
    for tensor, other in zip(stack.changing(), twin.changing(), strict=True):
        assert torch.equal(tensor, other)  # the capture took no step
    for index, batch in enumerate(data):
        for each in (stack, twin):
            set_rates(each, index)
            each.optimizer.read_rates()
        limits.fill_(0.05 / (1 + index))
        losses = step(batch)
        expected = twin.advance(batch, max_norm=limits, context=context)
        assert torch.allclose(losses, expected, rtol=1e-5)
    for tensor, other in zip(stack.changing(), twin.changing(), strict=True):
        assert torch.allclose(tensor.float(), other.float(), rtol=1e-4, atol=1e-6)
    for optimizer_of_one in stack.optimizers:  # each has its state
        assert all(state for state in optimizer_of_one.state.values())


@pytest.mark.gpu
@of_the_compiler
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "nesterov"])
def test_compiled_steps_are_eager_ones_on_a_gpu(optimizer: str) -> None:
    stack, data = on_gpu(optimizer, torch.float64, compiled=True)
    twin, _ = on_gpu(optimizer, torch.float64, compiled=False)
    for batch in data:
        losses, expected = (each.step(batch, max_norm=0.05) for each in (stack, twin))
        assert torch.allclose(losses, expected, rtol=1e-10)
    for tensor, other in zip(stack.changing(), twin.changing(), strict=True):
        assert torch.allclose(tensor.double(), other.double(), rtol=1e-8, atol=1e-12)


@pytest.mark.gpu
@of_the_compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_of_captured_steps_follows_the_seeds(compiled: bool) -> None:
    def built() -> Stack:
        models = []
        for seed in range(3):
            torch.manual_seed(seed)
            models.append(nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda())
        return Stack(
            models, [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models], loss, compiled=compiled
        )

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    stack, twin, seeds = built(), built(), torch.arange(3, device="cuda")
    batch = torch.randn(16, 6, device="cuda")
    step = CapturedStack(stack, batch)
    found = []
    for index in range(4):
        for each in (stack, twin):
            each.seeds.copy_(mixed(seeds, index))
        found.append(step(batch))
        assert torch.allclose(found[-1], twin.step(batch), rtol=1e-4)
    before = stack.evaluate(lambda model, batch: {"loss": loss(model, batch)}, batch)["loss"]
    assert before.shape == (3,)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet", "gpt2"])
def test_mapped_losses_can_be_captured(model: str) -> None:
    pairs, others = ([made(model, "adamw", index) for index in range(2)] for _ in range(2))
    data = batches(pairs[0][0], 4)
    data = [tuple(t.cuda().to(torch.float32) if t.is_floating_point() else t.cuda() for t in batch)
            if isinstance(batch, tuple) else batch.cuda() for batch in data]  # fmt: skip
    stacks = []
    for each in (pairs, others):
        for module, _ in each:
            module.float().cuda()
        stacks.append(
            Stack([module for module, _ in each], [module.configure_optimizers() for module, _ in each], loss_of)
        )
    step = CapturedStack(stacks[0], data[0])
    for batch in data:
        assert torch.allclose(step(batch), stacks[1].step(batch), rtol=1e-3)
