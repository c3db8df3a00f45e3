"""Axes that grow by any factor: unequal numbers of copies, training that goes on exactly, and what is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from architectures import CASES as WHOLE
from architectures import Case, ConvNet, Llama, Recurrent, cross_entropy, rotate
from bad_input import Cases, Input, assert_refused, linear
from growths import Grown
from mup_optimizers import MuAdamW
from nets import OPTIMIZERS, features, mlp, mup, take_steps, train
from tiers import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.models.resnet import ResNet18Net
from mupscale.widening.growth import copies_of_entries, copy_index, duplicate, evenly, parse_layout, source_index
from mupscale.widening.records import records_of
from mupscale.widening.write import widen_

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=1e-2)


# --- the rule


def copies(narrow: int, wide: int, block: int = 1) -> list[int]:
    return torch.bincount(source_index(evenly(narrow, wide, block)))[::block].tolist()


def test_extra_copies_are_spread_evenly():
    assert copies(12, 20) == [1, 2, 2] * 4
    assert copies(4, 6) == [1, 2, 1, 2]
    assert copies(4, 10) == [2, 3, 2, 3]
    assert copies(5, 7) == [1, 1, 2, 1, 2]
    assert evenly(4, 12) == parse_layout(1, 4, 12)


def test_an_axis_that_holds_the_units_several_times_over_agrees():
    assert copies(36, 60) == copies(12, 20) * 3
    assert copies(48, 72, 4) == copies(4, 6) * 3  # the three sections of a fused QKV, heads of 4
    assert duplicate(torch.arange(6), [evenly(6, 8, 2)]).tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert copy_index(evenly(6, 10, 2)).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]


# --- architectures


class Attention(nn.Module):
    """Rotary positions, grouped queries, and a gated feed-forward layer whose two halves are one matrix.

    The stream keeps its width, and has a norm; heads of 4 and feed-forward units grow in number.
    """

    def __init__(self, size: tuple[int, int, int]) -> None:
        super().__init__()
        self.heads, self.kv_heads, hidden = size
        self.embed, self.norm_1, self.norm_2 = nn.Embedding(30, 8), nn.LayerNorm(8), nn.RMSNorm(8)
        self.q_proj = nn.Linear(8, 4 * self.heads)
        self.kv_proj = nn.Linear(8, 2 * 4 * self.kv_heads)
        self.o_proj = nn.Linear(4 * self.heads, 8)
        self.gate_up, self.down = nn.Linear(8, 2 * hidden), nn.Linear(hidden, 8)
        self.head = nn.Linear(8, 30)

    @property
    def width_blocks(self) -> dict[str, dict[int, int]]:
        group = 4 * self.heads // self.kv_heads
        return {"q_proj.weight": {0: group}, "kv_proj.weight": {0: 4}, "o_proj.weight": {1: group}}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm_1(x)
        k, v = self.kv_proj(y).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q_proj(y), k, v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (rotate(k), v))
        y = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return self.head(x + self.down(F.silu(gate) * up))


class PairedConvNet(ConvNet):
    """Channels grow in pairs from the stem on: the groups of its GroupNorm, which grow in number."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.GroupNorm(width // 2, width)

    @property
    def width_blocks(self) -> dict[str, dict[int, int]]:
        pairs, fours = {0: 2}, {0: 4}
        return super().width_blocks | {
            "stem.*": pairs,
            "depthwise.*": fours,
            "prelu.weight": fours,
            "fixed_groups.weight": {0: 2, 1: 4},
        }


def gpt2(size: tuple[int, int, int]) -> nn.Module:
    width, attention, units = size
    shape: Any = {"layers": 2, "head_dim": 4, "vocabulary": 30, "context": 11}
    return GPT2Net(width, attention_width=attention, feed_forward=units, **shape)


tokens, images, labelled = (WHOLE[name].batch for name in ("llama", "convnet", "mlp"))

CASES = {
    "mlp": (Case(lambda n: MLPNet(10, (n, n, 2 * n), 5, readout_zero_init=False), 4, 12, 20, labelled), 30),
    # heads 4 → 6 → 9 and feed-forward units by 3/2; the stream keeps its width, then doubles
    "gpt2": (
        Case(gpt2, (8, 8, 32), (16, 16, 64), (16, 24, 96), tokens, {"head.ln_f.*": "readout"}, init="constant"),
        (32, 36, 144),
    ),
    "grouped queries": (Case(Attention, (2, 1, 4), (4, 2, 6), (6, 3, 9), tokens), (8, 4, 15)),
    "resnet18": (Case(lambda n: ResNet18Net(n, 5, readout_zero_init=False), 1, 2, 3, images), 5),
    "convnet": (Case(PairedConvNet, 4, 8, 12, images), 20),
    "recurrent": (Case(Recurrent, 2, 3, 5, tokens), 7),
}
"""Each grows by a fraction, and by another one to a third size."""


class Bag(nn.Module):
    """The mean of embeddings, read by the same weights; no norm in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.readout = nn.Embedding(30, width), mupscale.Readout(width, 30, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.embed(tokens).mean(-2))


class Normed(nn.Module):
    """A norm over the width between two layers."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.inputs, self.norm, self.outputs = nn.Linear(4, width), norm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.norm(self.inputs(x)))


def built(case: Case, size: Any, *, is_mup: bool) -> nn.Module:
    model = case.build(size)
    if is_mup:
        bigger = case.wide if size != case.wide else case.narrow
        mupscale.set_base_shapes(model, case.build(case.base), case.build(bigger), init=case.init)
    return model.double()


def grown(
    name: str, make_optimizer: Callable[..., Optimizer], *, is_mup: bool, growths: int = 2, **settings: Any
) -> Grown:
    case, third = CASES[name]
    hints = mupscale.Hints(roles=None if is_mup else case.plain_roles)
    sizes = (case.narrow, case.wide, third)[: growths + 1]
    batches = [(x.double() if x.is_floating_point() else x, y) for x, y in case.batches()]
    build = partial(built, case, is_mup=is_mup)
    return Grown(build, sizes, make_optimizer, batches, cross_entropy, lambda *_: hints, **settings)


PLAIN, MUP = (ADAMW, False), (SGD, True)
KEPT = [("gpt2", *PLAIN), ("grouped queries", *MUP), ("convnet", *PLAIN), ("recurrent", *MUP)]
GRID = [(name, *setting) for name in CASES for setting in (PLAIN, MUP)]


@pytest.mark.parametrize(("name", "optimizer", "is_mup"), slow_except(GRID, ("mlp", *PLAIN), ("mlp", *MUP), kept=KEPT))
def test_training_goes_on_exactly(name: str, optimizer: Callable[..., Optimizer], is_mup: bool):
    """Through two growths by different fractions, with weight decay, momentum and clipping."""
    runs = grown(name, optimizer, is_mup=is_mup)
    for report in runs.reports:
        assert any(entry.fractional_axes for entry in report.plan.parameters.values())
    assert runs.drift() <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_exactly(optimizer: str):
    assert grown("mlp", OPTIMIZERS[optimizer], is_mup=True).drift() <= 1e-11


def test_rates_are_those_of_mup():
    """So that an optimizer made for the wide model continues the run, and base constants mean what they meant."""
    torch.manual_seed(0)
    narrow, wide = (mup(mlp, width).double() for width in (13, 15))
    optimizers = [MuAdamW(model, lr=0.01, weight_decay=0.1) for model in (narrow, wide)]
    train(narrow, optimizers[0], features)
    report = mupscale.upscale(narrow, wide, *optimizers)
    assert report.notes == ()
    assert records_of(wide)["layers.1.weight"].scale.weight == 4 / 15  # exactly
    batches = [features().double()] * 3
    losses = [
        take_steps(*pair, batches, lambda model, x: model(x).square().mean())
        for pair in zip((narrow, wide), optimizers, strict=True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


# --- noise


@pytest.mark.parametrize("name", slow_except(CASES, "mlp", kept=["gpt2"]))
def test_centred_noise_keeps_the_function(name: str):
    torch.manual_seed(0)
    case, _ = CASES[name]
    narrow, wide = (built(case, size, is_mup=True).eval() for size in (case.narrow, case.wide))
    report = mupscale.upscale(narrow, wide, noise=mupscale.AdditiveNoise(0.5, centred=True))
    for x, y in case.batches():
        batch = (x.double() if x.is_floating_point() else x), y
        assert cross_entropy(wide, batch).item() == pytest.approx(cross_entropy(narrow, batch).item(), rel=1e-12)
    noisy = [name for name, constant in report.noise.items() if torch.as_tensor(constant).any()]
    assert noisy
    for name in noisy:
        entry, weight = report.plan.parameters[name], wide.get_parameter(name).detach()
        clean = torch.empty_like(weight)
        widen_(clean, narrow.get_parameter(name).detach(), entry)
        assert (weight - clean).abs().max() > 1e-3, name
        for axis in entry.summed_axes:
            alone = copies_of_entries(entry.layouts[axis]) == 1
            if len(entry.summed_axes) == 1 and alone.any():
                assert not (weight - clean).movedim(axis, 0)[alone].abs().max() > 1e-15  # nothing to be centred over


# --- pieces of one axis that grow by different factors


class Concat(nn.Module):
    """A layer that reads its width beside three fixed features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.fc = nn.Linear(3, width), nn.Linear(width + 3, width)
        self.readout = mupscale.Readout(width, 2)

    def width_blocks(self, wide: nn.Module) -> dict[str, Any]:
        width = self.inputs.out_features
        k = wide.inputs.out_features // width
        return {"fc.weight": {1: [(width, 1, k), (3, 1, 1)]}}

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.fc(torch.cat([self.inputs(x).relu(), x], -1)).tanh())


class MultiQuery(nn.Module):
    """Fused QKV of growing query heads over one key and value head; head_dim 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.qkv, self.project = nn.Linear(3, width), nn.Linear(width, width + 8), nn.Linear(width, width)
        self.readout = mupscale.Readout(width, 2)

    def width_blocks(self, wide: nn.Module) -> dict[str, Any]:
        width = self.inputs.out_features
        k = wide.inputs.out_features // width
        return {"qkv.weight": {0: [(width, 4, k), (8, 8, 1)]}, "project.weight": {1: 4}}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        y = self.qkv(x)
        q = y[..., :-8].unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = (t[:, None] for t in y[..., -8:].chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.readout((x + self.project(y.transpose(1, 2).flatten(2))).tanh())


class ConcatReadout(nn.Module):
    """The readout itself reads width beside fixed features.

    The multiplier of a muP readout falls by the growth of all of its inputs; weights and rates make up for it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.readout = nn.Linear(3, width), mupscale.Readout(width + 3, 2)

    def width_blocks(self, wide: nn.Module) -> dict[str, Any]:
        width = self.inputs.out_features
        k = wide.inputs.out_features // width
        return {"readout.weight": {1: [(width, 1, k), (3, 1, 1)]}}

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.cat([self.inputs(x).relu(), x], -1))


@pytest.mark.parametrize("is_mup", [False, True])
@pytest.mark.parametrize("optimizer", slow_except(OPTIMIZERS, "adamw"))
@pytest.mark.parametrize("kind", [Concat, MultiQuery, ConcatReadout])
def test_unlike_pieces_are_exact_after_two_growths(kind: type, optimizer: str, is_mup: bool):
    torch.manual_seed(1)
    batches = [torch.randn(6, 5, 3).double() for _ in range(4)]
    build = partial(mup, kind) if is_mup else kind
    runs = Grown(build, (8, 16, 48), OPTIMIZERS[optimizer], batches, mean_square)
    assert all(any(entry.mixed for entry in report.plan.parameters.values()) for report in runs.reports)
    assert runs.drift() <= 1e-10
    # a step leaves no trace of its reference units
    torch.testing.assert_close(runs.models[-1].readout.bias, runs.models[0].readout.bias, rtol=1e-9, atol=1e-11)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sub(0.3).square().mean()


def concatenated() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    narrow, wide = Concat(4), Concat(12)
    return wide, mupscale.upscale(narrow, wide, torch.optim.SGD(narrow.parameters(), lr=0.1)).optimizer


def test_a_closure_is_called_with_the_weights_as_they_are():
    x, pairs = torch.randn(6, 5, 3), [concatenated(), concatenated()]

    def gradients(model: nn.Module) -> Tensor:
        loss = mean_square(model, x)
        loss.backward()
        return loss

    losses = [pairs[0][1].step(lambda: gradients(pairs[0][0])), gradients(pairs[1][0])]
    pairs[1][1].step()
    assert torch.equal(*losses)
    assert all(torch.equal(*both) for both in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True))


def test_a_weight_without_update_is_not_rounded():
    """Converting to reference units and back would move it by a rounding error at each step."""
    wide, optimizer = concatenated()
    before = wide.fc.weight.detach().clone()
    wide.fc.weight.grad = gradient = torch.zeros_like(before)
    optimizer.step()
    assert torch.equal(wide.fc.weight, before)
    assert wide.fc.weight.grad is gradient


# --- what is refused

WEIGHS = "normalises over a width that grows by 3/2 (4 → 6)", "weigh 2 / 1 times", "by a whole factor, such as to 8"


def normed(norm: Callable[[int], nn.Module]) -> Callable[[], Input]:
    return lambda: (Normed(4, norm), Normed(6, norm), {})


def the_stream_of_a_transformer() -> Input:
    models = [mupscale.set_base_shapes(gpt2((n, n, 64)), gpt2((8, 8, 32)), gpt2((12, 12, 64))) for n in (16, 24)]
    return models[0], models[1], {}


def larger_heads() -> Input:
    shape: Any = {"layers": 1, "heads": 2, "vocabulary": 5, "context": 4, "tied": False}
    return GPT2Net(8, attention_width=8, **shape), GPT2Net(8, attention_width=12, **shape), {}


def buffer_that_is_no_width() -> Input:
    models = linear(4, 6)
    for model, size in zip(models, (6, 10), strict=True):
        model.register_buffer("table", torch.zeros(size))
    return *models, {}


BAD: Cases = {
    "LayerNorm": (normed(nn.LayerNorm), ("module 'norm' (LayerNorm)", *WEIGHS)),
    "GroupNorm": (normed(partial(nn.GroupNorm, 1)), ("module 'norm' (GroupNorm)", *WEIGHS)),
    "a norm of another library": (
        lambda: (Llama((4, 2, 12)), Llama((6, 3, 18)), {}),
        ("module 'layers.0.norm_1' (RMSNorm)", "grows by 3/2 (16 → 24)", "Grow this width by a whole factor"),
    ),
    "the stream": (
        the_stream_of_a_transformer, ("module 'blocks.0.ln_1' (LayerNorm)", "grows by 3/2 (16 → 24)", "such as to 32"),
    ),
    "larger heads": (
        larger_heads,
        ("module 'blocks.0.attention' (CausalAttention) keeps its 2 heads", "grows by 3/2", "Grow the number of heads"),
    ),
    "an embedding tied to a readout": (
        lambda: (mup(Bag, 4, base=2), mup(Bag, 6, base=2), {}),
        ("readout 'embed.weight' (30, 4) → (30, 6) is tied to an embedding", "Untie the two", "by a whole factor"),
    ),
    "a buffer": (
        buffer_that_is_no_width,
        ("'table' (6,) → (10,)", "does not grow by a whole factor (10 / 6)", "no parameter has units that grow so"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str):
    assert_refused(*BAD[case])
