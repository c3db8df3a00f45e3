"""Dropout in a stack: masks that depend on the seed, the call and the place, and on no other model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mupscale.errors import UserError
from mupscale.stacking.dropout import batch_norm, kept, mixed
from mupscale.stacking.stack import Stack, mapped

CPU = torch.device("cpu")


def mask(seed: int, step: int = 0, call: int = 0, p: float = 0.5, count: int = 100_000) -> Tensor:
    key = mixed(mixed(torch.tensor(seed), step), call)
    return kept(key, (count,), p, CPU).double()


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_elements_are_kept_with_their_probability(p: float) -> None:
    for seed in range(5):
        keeps = mask(seed, p=p)
        error = (p * (1 - p) / len(keeps)) ** 0.5
        assert abs(keeps.mean().item() - (1 - p)) <= 4.5 * error
        blocks = keeps.view(1000, 100).sum(1)  # binomial, if elements are independent
        variance = 100 * p * (1 - p)
        assert abs(blocks.var().item() - variance) <= 0.25 * variance


def test_mixing_is_splitmix64() -> None:
    assert mixed(torch.tensor([0, 1]), 0).tolist() == [-2152535657050944081, -7995527694508729151]


class Dropping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2, self.training)
        x = torch.relu(self.first(x))
        if self.kind == "attention":
            heads = x.view(-1, 2, 4)[None]
            x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True)[0].reshape(-1, 8)
        else:
            x = KINDS[self.kind](x)
        return self.last(x)


KINDS: dict[str, Any] = {
    "plain": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: F.dropout(x + 1, 0.5, inplace=True),
    "channels": lambda x: F.dropout1d(x.view(-1, 2, 4), 0.5).flatten(1),
    "images": lambda x: F.dropout2d(x.view(-1, 2, 2, 2), 0.5).flatten(1),
    "volumes": lambda x: F.dropout3d(x.view(-1, 2, 2, 2, 1), 0.5).flatten(1),
    "attention": None,
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(kind: str, *seeds: int) -> dict[int, list[Tensor]]:
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(Dropping(kind))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    stack = Stack(models, optimizers, loss_of)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        stack.seeds.copy_(mixed(torch.tensor(seeds), step))
        inputs = torch.randn(5, 6, generator=generator)
        losses = stack.step((inputs, torch.arange(5) % 3))
    return {
        seed: [*(parameter.detach().clone() for parameter in model.parameters()), loss]
        for seed, model, loss in zip(seeds, models, losses, strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_drops_the_same_elements_in_any_stack(kind: str) -> None:
    state = torch.get_rng_state()
    alone = {seed: trained(kind, seed)[seed] for seed in range(3)}
    for seeds in ((1, 2), (2, 0, 1, 7, 8)):
        for seed, tensors in trained(kind, *seeds).items():
            for tensor, expected in zip(tensors, alone.get(seed, tensors), strict=True):
                assert torch.equal(tensor, expected)
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


def test_masks_differ_between_models_calls_and_steps() -> None:
    def drops(_: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([F.dropout(x), F.dropout(x)])

    model, seeds = nn.Linear(1, 1), torch.arange(2)
    tensors = ({name: p.detach().expand(2, *p.shape) for name, p in model.named_parameters()}, {})
    run = mapped(model, drops, seeds)
    first = run(*tensors, torch.ones(64), True)
    assert torch.equal(first, run(*tensors, torch.ones(64), True))
    seeds += 10
    masks = [*first.flatten(0, 1), *run(*tensors, torch.ones(64), True).flatten(0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert all(set(each.tolist()) == {0.0, 2.0} for each in masks)


def outputs(function: Any, x: Tensor) -> Tensor:
    """What a function makes of x for one model."""
    model = nn.Linear(1, 1)
    tensors = {name: p.detach()[None] for name, p in model.named_parameters()}
    return mapped(model, lambda _, x: function(x), torch.zeros(1, dtype=torch.int64))(tensors, {}, x, True)[0]


def test_values_are_those_of_torch() -> None:
    x = torch.randn(400, 50, dtype=torch.float64)
    x[0, 0] = torch.nan
    ours, theirs = outputs(lambda x: F.dropout(x, 0.3), x), F.dropout(x, 0.3)
    assert ours[0, 0].isnan()
    # where both of them keep an element, or both drop it, they agree
    same = torch.isclose(ours, theirs, rtol=1e-14)
    assert abs(same.double().mean().item() - (0.7**2 + 0.3**2)) < 0.02
    for p in (0.0, 1.0):
        assert torch.equal(outputs(lambda x, p=p: F.dropout(x, p), x[1:]), F.dropout(x[1:], p))
    assert torch.equal(outputs(lambda x: F.dropout(x, 0.5, False), x[1:]), x[1:])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("rand", lambda x: x + torch.rand(3)),
        ("randn_like", lambda x: x + torch.randn_like(x)),
        ("bernoulli", lambda x: torch.bernoulli(torch.sigmoid(x))),
        ("normal_", lambda x: x + torch.empty(3).normal_()),
        ("randint", lambda x: x + torch.randint(3, (3,))),
        ("randperm", lambda x: x[torch.randperm(3)]),
        ("multinomial", lambda x: torch.multinomial(torch.sigmoid(x), 1).float()),
        ("gumbel_softmax", F.gumbel_softmax),
        ("rrelu", lambda x: F.rrelu(x, training=True)),
        ("alpha_dropout", lambda x: F.alpha_dropout(x, training=True)),
    ],
)
def test_other_random_functions_are_refused(name: str, function: Any) -> None:
    with pytest.raises(
        UserError, match=f"^{name} has no rule for many models at once: (it draws random|torch.vmap does not)"
    ):
        outputs(function, torch.randn(3))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_torchs(training: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.rand(3), torch.rand(3)
    here, there = ((torch.zeros(3), torch.ones(3)) for _ in range(2))
    arguments = (weight, bias, training, 0.3, 1e-3)
    assert torch.equal(batch_norm(x, *here, *arguments), F.batch_norm(x, *there, *arguments))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
