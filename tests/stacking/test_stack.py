"""Models that take their steps together train as they do alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tiers import slow_except
from tiny_modules import gpt2, mlp, resnet, rows
from torch import Tensor
from torch.optim import Optimizer

import mupscale
from mupscale.errors import UserError
from mupscale.models.base import WidthScalable
from mupscale.stacking.stack import Stack

MODELS: dict[str, tuple[Callable[..., WidthScalable], Any]] = {
    "mlp": (mlp, 24),
    "resnet": (resnet, 4),
    "gpt2": (gpt2, 24),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, i: torch.optim.AdamW(
        p, lr=1e-2 * 2 ** (i % 3), betas=(0.9 - 0.05 * i, 0.99), eps=10.0 ** (-8 + i), weight_decay=0.1 * i
    ),
    "adam": lambda p, i: torch.optim.Adam(p, lr=1e-2 / (1 + i), weight_decay=0.01 * i, amsgrad=True),
    "sgd": lambda p, i: torch.optim.SGD(
        p, lr=0.1 / (1 + i), momentum=0.9 - 0.1 * i, dampening=0.1 * i, weight_decay=0.01 * i
    ),
    "nesterov": lambda p, i: torch.optim.SGD(p, lr=0.1, momentum=0.5 + 0.1 * i, nesterov=True),
    "plain sgd": lambda p, i: torch.optim.SGD(p, lr=0.1 / (1 + i)),
}


def made(model: str, optimizer: str, index: int, width: Any = None) -> tuple[WidthScalable, Any]:
    build = MODELS[model][0]
    torch.manual_seed(index)
    module = build(*([] if width is None else [width]), optimizer=lambda p: OPTIMIZERS[optimizer](p, index))
    module.configure_model()
    module.double()
    return module, module.configure_optimizers()


def loss_of(model: Any, batch: Any) -> Tensor:
    return model.mappable_loss(batch)


def batches(module: LightningModule, count: int) -> list[Any]:
    data = rows(module, 8 * count, torch.float64)
    parts = [tuple(tensor[8 * i : 8 * (i + 1)] for tensor in data) for i in range(count)]
    return [part if len(part) > 1 else part[0] for part in parts]


def grown(model: str, optimizer: str, index: int, pair: tuple[WidthScalable, Optimizer]) -> tuple[WidthScalable, Any]:
    wide, _ = made(model, optimizer, index, MODELS[model][1])
    assert pair[0].net is not None
    assert wide.net is not None
    report = mupscale.upscale(pair[0].net, wide.net, pair[1], noise=mupscale.AdditiveNoise(0.1 * index), seed=index)
    return wide, report.optimizer


def rate(step: int) -> float:
    return 1 / (1 + step / 20)


def separately(model: str, optimizer: str, count: int, steps: int, grow_at: int, clip: float | None) -> Tensor:
    curves = []
    for index in range(count):
        pair = made(model, optimizer, index)
        curve = []
        for step, batch in enumerate(batches(pair[0], steps)):
            if step == grow_at:
                pair = grown(model, optimizer, index, pair)
            set_rates(pair[1], step)
            loss = pair[0].loss(batch)
            pair[1].zero_grad()
            loss.backward()
            if clip is not None:
                assert pair[0].net is not None
                mupscale.clip_grad_norm_(pair[0].net, clip)
            pair[1].step()
            curve.append(loss.detach())
        curves.append(torch.stack(curve))
    return torch.stack(curves)


def set_rates(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * rate(step)


def together(
    model: str, optimizer: str, count: int, steps: int, grow_at: int, clip: float | None, kernel: bool = True
) -> Tensor:
    pairs = [made(model, optimizer, index) for index in range(count)]
    stack = stacked(pairs, kernel)
    curve = []
    for step, batch in enumerate(batches(pairs[0][0], steps)):
        if step == grow_at:
            pairs = [grown(model, optimizer, index, pair) for index, pair in enumerate(pairs)]
            stack = stacked(pairs, kernel)
        for _, own in pairs:
            set_rates(own, step)
        curve.append(stack.step(batch, max_norm=clip))
    return torch.stack(curve).T


def stacked(pairs: list[tuple[WidthScalable, Optimizer]], kernel: bool = True) -> Stack:
    modules, optimizers = zip(*pairs, strict=True)
    return Stack(modules, optimizers, loss_of, modules[0].stacked_losses() if kernel else None)


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    slow_except([*((name, None) for name in OPTIMIZERS), ("adamw", 0.05), ("sgd", 0.05)], ("adamw", 0.05)),
)
def test_the_mlp_trains_as_alone(optimizer: str, clip: float | None) -> None:
    alone = separately("mlp", optimizer, 4, 200, 100, clip)
    for kernel in (True, False):
        ours = together("mlp", optimizer, 4, 200, 100, clip, kernel)
        assert (ours - alone).abs().max() <= 1e-12 * alone.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet", "gpt2"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_others_train_as_alone(model: str, optimizer: str) -> None:
    alone = separately(model, optimizer, 3, 12, 6, 1.0)
    ours = together(model, optimizer, 3, 12, 6, 1.0)
    assert (ours - alone).abs().max() <= 1e-10 * alone.abs().max()


def test_each_model_has_its_weights_and_state_at_any_time() -> None:
    pairs = [made("resnet", "adamw", index) for index in range(3)]
    data = batches(pairs[0][0], 6)
    stack = stacked(pairs)
    for batch in data[:3]:
        stack.step(batch)
    alone = [made("resnet", "adamw", index) for index in range(3)]
    for module, optimizer in alone:
        for batch in data[:3]:
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
    for (module, optimizer), (other, its) in zip(pairs, alone, strict=True):
        for (name, tensor), expected in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.allclose(tensor.double(), expected.double(), rtol=1e-12, atol=1e-12), name
        mine, theirs = optimizer.state_dict(), its.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        for index, state in theirs["state"].items():
            assert mine["state"][index].keys() == state.keys()
            assert all(torch.allclose(mine["state"][index][key], value, rtol=1e-12) for key, value in state.items())
    module, optimizer = pairs[1]  # one goes on alone, and the others are as they were
    before = {name: tensor.clone() for name, tensor in pairs[0][0].state_dict().items()}
    module.loss(data[3]).backward()
    optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in pairs[0][0].state_dict().items())


def test_a_model_that_diverges_touches_no_other() -> None:
    def pair(index: int, rate: float) -> tuple[WidthScalable, Any]:
        torch.manual_seed(index)
        module = mlp(optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9))
        module.configure_model()
        module.double()
        return module, module.configure_optimizers()

    data = batches(pair(0, 0.1)[0], 20)
    healthy, sick = stacked([pair(i, 0.1) for i in (0, 2)]), stacked([pair(0, 0.1), pair(1, 1e300), pair(2, 0.1)])
    for batch in data:
        expected, losses = healthy.step(batch), sick.step(batch)
    assert not losses[1].isfinite()
    assert torch.allclose(losses[[0, 2]], expected, rtol=1e-14)


def test_batches_of_their_own() -> None:
    pairs = [made("mlp", "adamw", index) for index in range(2)]
    data = batches(pairs[0][0], 4)
    stack = stacked(pairs)
    losses = [stack.step(tuple(torch.stack(parts) for parts in zip(a, b, strict=True)), shared=False)
              for a, b in ((data[0], data[1]), (data[2], data[3]))]  # fmt: skip
    for index in range(2):
        module, optimizer = made("mlp", "adamw", index)
        for step in range(2):
            optimizer.zero_grad()
            loss = module.loss(data[2 * step + index])
            loss.backward()
            optimizer.step()
            assert torch.allclose(losses[step][index], loss, rtol=1e-13)


def test_what_does_not_stack_is_refused() -> None:
    pairs = [made("mlp", "adamw", index) for index in range(2)]
    wide = made("mlp", "adamw", 2, 16)
    with pytest.raises(UserError, match=r"one architecture and width.*net\.layers\.0\.weight"):
        stacked([*pairs, wide])
    with pytest.raises(UserError, match="of one class"):
        stacked([pairs[0], made("mlp", "sgd", 1)])
    with pytest.raises(UserError, match="amsgrad in common"):
        stacked([made("mlp", "adam", 0), (lambda m: (m, torch.optim.Adam(m.parameters())))(made("mlp", "adam", 1)[0])])
    module = pairs[0][0]
    with pytest.raises(UserError, match="RMSprop has no step for many models"):
        stacked([(module, torch.optim.RMSprop(module.parameters()))])
    with pytest.raises(UserError, match="an optimizer for each model"):
        Stack([], [], loss_of)
