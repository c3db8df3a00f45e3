"""Models that take their steps together train as they do alone."""

from typing import Any

import pytest
import torch
from nets import take_steps
from stacks import CARRIED, MIXED, UNLIKE, Rules, batches, grown, loss_of, made, stacked
from tiers import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.models.base import Growable
from mupscale.models.mlp import MLP
from mupscale.stacking.stack import Stack
from mupscale.widening.records import step_records


def own_loss(module: Growable, batch: Any) -> Tensor:
    return module.loss(batch)


def rate(step: int) -> float:
    return 1 / (1 + step / 20)


def separately(
    model: str, optimizer: str, count: int, steps: int, grow_at: int, clip: float | None, rules: Rules = CARRIED
) -> Tensor:
    curves = []
    for index in range(count):
        pair = made(model, optimizer, index)
        curve = []
        for step, batch in enumerate(batches(pair[0], steps)):
            if step == grow_at:
                pair = grown(model, optimizer, index, pair, rules)
            set_rates(pair[1], step)
            curve += take_steps(*pair, [batch], own_loss, clip)
        curves.append(curve)
    return torch.tensor(curves, dtype=torch.float64)


def set_rates(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * rate(step)


def together(
    model: str,
    optimizer: str,
    count: int,
    steps: int,
    grow_at: int,
    clip: float | None,
    kernel: bool = True,
    rules: Rules = CARRIED,
) -> Tensor:
    pairs = [made(model, optimizer, index) for index in range(count)]
    stack = stacked(pairs, kernel)
    curve = []
    for step, batch in enumerate(batches(pairs[0][0], steps)):
        if step == grow_at:
            pairs = [grown(model, optimizer, index, pair, rules) for index, pair in enumerate(pairs)]
            stack = stacked(pairs, kernel)
        for _, own in pairs:
            set_rates(own, step)
        curve.append(stack.step(batch, max_norm=clip))
    return torch.stack(curve).T


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    slow_except([("adamw", 0.05), ("adam", None), ("sgd", 0.05), ("plain sgd", None)], ("adamw", 0.05)),
)
def test_the_mlp_trains_as_alone(optimizer: str, clip: float | None) -> None:
    alone = separately("mlp", optimizer, 4, 30, 15, clip)
    for kernel in (True, False):
        ours = together("mlp", optimizer, 4, 30, 15, clip, kernel)
        assert (ours - alone).abs().max() <= 1e-12 * alone.abs().max()


@pytest.mark.parametrize(("optimizer", "grow_at"), slow_except([("adamw", 10), ("sgd", 0)], ("adamw", 10)))
def test_new_copies_with_a_count_of_their_own_train_as_alone(optimizer: str, grow_at: int) -> None:
    alone = separately("mlp", optimizer, 4, 30, grow_at, None, MIXED)
    ours = together("mlp", optimizer, 4, 30, grow_at, None, rules=MIXED)
    assert (ours - alone).abs().max() <= 1e-12 * alone.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_new_copies_leave_and_enter_a_stack(optimizer: str) -> None:
    data = batches(made("mlp", optimizer, 0)[0], 33)
    early, data = data[:3], data[3:]

    def pair(index: int) -> tuple[Growable, Any]:
        narrow = made("mlp", optimizer, index)
        take_steps(*narrow, early, own_loss)
        return grown("mlp", optimizer, index, narrow, MIXED)

    ours, alone = ([pair(index) for index in range(3)] for _ in range(2))
    for module, own in alone:
        take_steps(module, own, data, own_loss)
    stack = stacked(ours)
    records = [record for _, own in ours for record in step_records(own).values() if record.births]
    assert len(records) == 14  # of two models; the bias of the readout does not grow
    for batch in data[:10]:
        stack.step(batch)
    for module, own in ours:
        take_steps(module, own, data[10:20], own_loss)
    stack = stacked(ours)
    for batch in data[20:]:
        stack.step(batch)
    for (module, own), (other, its) in zip(ours, alone, strict=True):
        for name, tensor in other.state_dict().items():
            assert torch.allclose(module.state_dict()[name], tensor, rtol=1e-11), name
        mine, theirs = own.state_dict()["state"], its.state_dict()["state"]
        assert all(set(mine[index]) == set(state) for index, state in theirs.items())
        assert all(torch.equal(mine[i]["step"], state["step"]) for i, state in theirs.items() if "step" in state)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "clip"), [("adamw", None), ("sgd", 0.05)])
def test_growth_by_different_factors_trains_as_alone(optimizer: str, clip: float | None) -> None:
    alone = separately("mlp", optimizer, 4, 30, 10, clip, UNLIKE)
    ours = together("mlp", optimizer, 4, 30, 10, clip, rules=UNLIKE)
    assert (ours - alone).abs().max() <= 1e-12 * alone.abs().max()


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
    with pytest.raises(UserError, match="RMSprop cannot step many models"):
        stacked([(module, torch.optim.RMSprop(module.parameters()))])
    with pytest.raises(UserError, match="an optimizer for each model"):
        Stack([], [], loss_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype", "width"),
    [("adamw", torch.float32, 17), ("sgd", torch.float64, 17), ("sgd", torch.float32, 8)],
)
def test_the_mlp_trains_to_the_same_bits_in_any_stack(optimizer: str, dtype: torch.dtype, width: int) -> None:
    """On the CPU with one thread: at any place of a stack of any size."""

    def trained(*indices: int) -> dict[int, list[Tensor]]:
        pairs = [made("mlp", optimizer, index, width) for index in indices]
        for module, _ in pairs:
            module.to(dtype)
        stack = stacked(pairs)
        for inputs, labels in batches(pairs[0][0], 6):
            losses = stack.step((inputs.to(dtype)[:7], labels[:7]), max_norm=0.05)
        return {
            index: [*(tensor.clone() for tensor in module.state_dict().values()), loss]
            for index, (module, _), loss in zip(indices, pairs, losses, strict=True)
        }

    alone = {index: trained(index)[index] for index in range(4)}
    for indices in ((1, 0), (2, 3, 1), (3, 1, 2, 0, 3, 1, 2)):
        for index, tensors in trained(*indices).items():
            assert all(map(torch.equal, tensors, alone[index])), indices


def test_small_weights_of_the_readout_keep_their_digits_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = MLP(1024, 1, hidden_layers=1)
    module.configure_model()
    torch.nn.init.normal_(module.net.readout.weight, std=1e-3)
    x, labels = torch.randn(64, 54), torch.randint(7, (64,))
    exact = module.net.double()(x.double())
    module.half()
    logits: list[Tensor] = []
    entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda x, *rest, **more: (logits.append(x), entropy(x, *rest, **more))[1])
    parameters = {name: parameter[None] for name, parameter in module.named_parameters()}
    module.stacked_losses()(parameters, {}, (x.half(), labels), True)
    assert ((logits[0] - exact).norm() / exact.norm()).item() < 0.005


def test_a_step_reads_what_it_is_given() -> None:
    pairs = [made("mlp", "adamw", index) for index in range(2)]
    stack, data = stacked(pairs), batches(pairs[0][0], 2)
    twin = stacked([made("mlp", "adamw", index) for index in range(2)])
    stack.step(data[0])
    twin.step(data[0])
    for _, optimizer in pairs:
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.5 * group["lr"], 0.7
    stack.advance(data[1])
    twin.advance(data[1])
    assert all(map(torch.equal, stack.parameters.values(), twin.parameters.values()))  # nothing was read
    before = {name: tensor.detach().clone() for name, tensor in stack.parameters.items()}
    for optimizer in twin.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    stack.optimizer.read_rates()  # and no weight decay
    stack.advance(data[0])
    twin.step(data[0])
    assert all(map(torch.equal, stack.parameters.values(), twin.parameters.values()))
    assert not torch.equal(before["net.layers.0.weight"], stack.parameters["net.layers.0.weight"])
    for optimizer in twin.optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.7
    stack.optimizer.read_numbers()
    stack.advance(data[1])
    twin.step(data[1])
    assert all(map(torch.equal, stack.parameters.values(), twin.parameters.values()))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    def pair(index: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(index)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

    def loss(model: Any, batch: tuple[Tensor, bool]) -> Tensor:
        inputs, uses_all = batch
        return model[0](inputs).square().mean() + (model[1](inputs).mean() if uses_all else 0)

    pairs, alone = [pair(0), pair(1)], [pair(0), pair(1)]
    stack = Stack(*zip(*pairs, strict=True), loss)
    for uses_all in (False, True, False):
        batch = torch.randn(5, 4, dtype=torch.float64), uses_all
        stack.step(batch)
        for model, optimizer in alone:
            take_steps(model, optimizer, [batch], loss)
    for (model, _), (other, _) in zip(pairs, alone, strict=True):
        for tensor, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(tensor, expected, rtol=1e-13)


@pytest.mark.parametrize("model", slow_except(["mlp", "resnet", "gpt2"], "mlp", "resnet"))
def test_evaluation_of_all_models(model: str) -> None:
    pairs = [made(model, "adamw", index) for index in range(3)]
    data = batches(pairs[0][0], 3)
    stack = stacked(pairs)
    for batch in data[:2]:
        stack.step(batch)
    buffers = {name: tensor.clone() for name, tensor in stack.buffers.items()}
    measured = stack.evaluate(
        lambda model, batch: {"loss": (loss := loss_of(model, batch)), "twice": 2 * loss}, data[2]
    )
    assert all(torch.equal(buffers[name], tensor) for name, tensor in stack.buffers.items())
    assert all(module.training for own, _ in pairs for module in own.modules())
    assert set(measured) == {"loss", "twice"}
    assert not measured["loss"].requires_grad
    for (module, _), loss, twice in zip(pairs, measured["loss"], measured["twice"], strict=True):
        module.eval()
        assert torch.allclose(loss_of(module, data[2]), loss, rtol=1e-12)
        assert torch.allclose(2 * loss, twice)
