"""The check of a module's growth by small networks: which widths, which samples, and what it leaves alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_modules import ADAMW, MODELS, mlp, rows
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.commands.growth_plans import check_growth
from mupscale.models.base import Growable
from mupscale.models.checkpoint import Size
from mupscale.models.twin import TwinSpec


class Heads(Growable):
    """Heads of 4 dimensions, one if there are not 32 units: then its size grows, and the logits are not exact."""

    def __init__(self, width: int = 32, least: int = 32) -> None:
        super().__init__(width, 8, optimizer=ADAMW)

    def build(self, width: int) -> nn.Module:
        return Attention(width, width // 4 if width >= self.hparams["least"] else 1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0][:, None] * torch.arange(1.0, 4.0)[:, None].to(batch[0])), batch[1])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inp, self.out = nn.Linear(6, width), mupscale.Readout(width, 3)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    @property
    def width_blocks(self) -> dict[str, dict[int, int]]:
        return {"[qkv].*": {0: 4}, "out.weight": {1: 4}} if self.heads > 1 else {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)


def batch_of(module: Growable) -> Any:
    batch = rows(module, 8, torch.float32)
    return batch if len(batch) > 1 else batch[0]


@pytest.mark.parametrize(
    ("before", "after", "smallest"),
    [
        (500, 2000, (10, 40)),
        (64, 96, (8, 12)),
        (768, 1536, (8, 16)),
        (7, 14, (7, 14)),
        ([8, 4, 12], [16, 12, 24], ([8, 4, 12], [16, 12, 24])),
        ([80, 40, 120], [160, 120, 240], ([16, 8, 24], [32, 24, 48])),
    ],
)
def test_the_smallest_widths_have_the_same_factors(before: Any, after: Any, smallest: Any):
    module: Any = SimpleNamespace(hparams={"width": before})
    pairs = TwinSpec({"width": after}, None).small_pairs(module)
    widths = [tuple(recipe.hparams["width"] for recipe in pair) for pair in pairs]
    assert widths[0] == smallest
    assert widths[-1] == (before, after)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_grow_exactly(name: str):
    build, after = MODELS[name]
    module = build()
    _, found = check_growth(module, module.size, module.size._replace(width=after), batch_of(module))
    assert found.exact is True
    assert found.outputs < 1e-12
    assert 0 < found.updates < 1e-10


def test_the_module_does_not_change():
    module = mlp()
    module.configure_model()
    net, state = module.net, torch.get_rng_state()
    check_growth(module, Size(8), Size(24), batch_of(module))
    assert module.net is net
    assert module.width == 8
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_difference_of_small_networks_alone_does_not_count():
    inputs = torch.randn(4, 6), torch.randint(3, (4,))
    assert check_growth(Heads(32), Size(8), Size(16), inputs)[1].exact is False
    assert check_growth(Heads(32), Size(32), Size(64), inputs)[1].exact is True
    _, wrong = check_growth(Heads(32, least=1000), Size(32), Size(64), inputs)
    assert wrong.exact is False
    assert "what the model (Attention) computes before 'out' differs" in wrong.reason


def test_what_cannot_run_is_not_checked():
    class Fails(type(mlp())):
        def loss(self, batch: Any) -> Tensor:
            raise RuntimeError("no kernel on the CPU")

    module = Fails(8, base_width=4, inputs=6, outputs=3, optimizer=ADAMW)
    _, found = check_growth(module, Size(8), Size(16), torch.zeros(2, 6))
    assert found.exact is None
    assert "call(model) fails on the narrow model: RuntimeError: no kernel on the CPU" in str(found)
