"""`upscale` as a whole: what it writes, what it leaves alone, what it frees, and that upscales compose."""

import math
from itertools import chain
from typing import Any

import pytest
import torch
from dispatched import LiveBytes
from mup_optimizers import MuAdamW
from nets import assert_same, features, mlp, mup, named_state, tokens, train
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from mupscale.methods.grow import grow
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.resnet import ResNet18Net
from mupscale.widening import growth
from mupscale.widening.growth import Piece


class Net(nn.Module):
    """A tied GPT-2 with width buffers, a buffer that is not saved, and the same one held twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gpt = GPT2Net(width, layers=2, heads=2, vocabulary=30, context=11)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.arange(11.0), persistent=False)
        self.twin = nn.Module()
        self.twin.register_buffer("mask", self.mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens) + self.mask[0] + self.norm(self.gpt.wpe.weight).mean()


class Wrap(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def trained_net(width: int = 8) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = mup(lambda w: Net(w), width, "constant")
    optimizer = MuAdamW(model, lr=0.01)
    train(model, optimizer, tokens)
    return model, optimizer


# --- where the wide model is written


def test_wide_on_the_meta_device():
    narrow, narrow_opt = trained_net()
    narrow.gpt.wpe.weight.requires_grad_(False)
    expected = mup(Net, 24, "constant")
    expected_opt = mupscale.upscale(narrow, expected, narrow_opt, MuAdamW(expected, lr=0.01)).optimizer
    with torch.device("meta"):
        wide = mup(Net, 24, "constant")
    wide_opt = MuAdamW(wide, lr=0.01)
    held = {id(p) for group in wide_opt.param_groups for p in group["params"]}
    report = mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    assert report.optimizer is wide_opt
    assert {id(p) for p in wide.parameters()} == held
    assert wide.gpt.head.readout.weight is wide.gpt.wte.weight
    assert wide.twin.mask is wide.mask
    assert "mask" not in wide.state_dict()
    assert torch.equal(wide.mask, torch.arange(11.0))
    assert [name for name, p in wide.named_parameters() if not p.requires_grad] == ["gpt.wpe.weight"]
    assert_same(named_state(wide, wide_opt), named_state(expected, expected_opt))
    for model, optimizer in ((wide, wide_opt), (expected, expected_opt)):  # it trains, and wide_opt moves it
        train(model, optimizer, tokens)
    assert_same(named_state(wide, wide_opt), named_state(expected, expected_opt))


def test_whatever_wide_holds_is_overwritten():
    narrow, narrow_opt = trained_net()
    clean, garbage = mup(Net, 16, "constant"), mup(Net, 16, "constant")
    with torch.no_grad():
        for tensor in chain(garbage.parameters(), garbage.buffers()):
            tensor.fill_(math.nan if tensor.is_floating_point() else 99)
    opts = [mupscale.upscale(narrow, wide, narrow_opt).optimizer for wide in (clean, garbage)]
    assert_same(named_state(garbage, opts[1]), named_state(clean, opts[0]))
    assert garbage.norm.num_batches_tracked == 3


def test_consume_empties_narrow_and_gives_the_same():
    answers = []
    for consume in (False, True):
        narrow, narrow_opt = trained_net()
        with torch.device("meta"):
            wide = mup(Net, 16, "constant")
        report = mupscale.upscale(narrow, wide, narrow_opt, consume=consume, noise=mupscale.SignalNoise(0.1))
        answers.append(named_state(wide, report.optimizer))
        left = sum(t.numel() for t in chain(narrow.parameters(), narrow.buffers()))
        left += sum(t.numel() for state in narrow_opt.state.values() for t in state.values())
        assert (left == 0) is consume
        assert all(p.grad is None for p in narrow.parameters()) is consume
    assert_same(answers[1], answers[0])


@pytest.mark.slow
def test_peak_memory():
    narrow, narrow_opt = trained_net(32)
    with torch.device("meta"):
        wide = mup(Net, 64, "constant")
    wide_opt = MuAdamW(wide, lr=0.01)

    def tensors(optimizer: Optimizer) -> list[Tensor]:
        return [tensor for state in optimizer.state.values() for tensor in state.values()]

    memory = LiveBytes([*narrow.parameters(), *narrow.buffers(), *tensors(narrow_opt)])
    start = memory.now
    with memory:
        mupscale.upscale(narrow, wide, narrow_opt, wide_opt, consume=True, noise=mupscale.AdditiveNoise(0.1))
    sizes = [t.nbytes for t in (*wide.parameters(), *wide.buffers(), *tensors(wide_opt))]
    assert start > max(sizes)  # else the bound below would say nothing
    assert sum(sizes) <= memory.peak <= sum(sizes) + max(sizes)


def test_pieces_are_written_without_a_temporary_of_the_same_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growth, "AT_ONCE", 64)
    source, target = torch.randn(24, 32), torch.empty(40, 64)
    layouts = [(Piece(16, 4, 2), Piece(8, 8, 1)), (Piece(32, 32, 2),)]
    memory = LiveBytes([source, target])
    with memory:
        growth.duplicate_(target, source, layouts, [torch.arange(40.0), 0.5])
    assert memory.peak - source.nbytes - target.nbytes < target.nbytes / 4
    rows = source[growth.source_index(layouts[0])] * 0.5 * torch.arange(40.0)[:, None]
    assert torch.equal(target, torch.cat([rows, rows], 1))


# --- the same width, seeds, what is printed


@pytest.mark.parametrize("build", [mlp, lambda width: mup(mlp, width)])
def test_at_equal_widths_it_is_a_copy(build):
    torch.manual_seed(0)
    narrow, wide = build(8), build(8)
    narrow_opt = torch.optim.AdamW(narrow.parameters(), lr=0.01, weight_decay=0.3)
    train(narrow, narrow_opt, features)
    report = mupscale.upscale(narrow, wide, narrow_opt)
    assert_same(named_state(wide, report.optimizer), named_state(narrow, narrow_opt))
    assert len(report.optimizer.param_groups) == 1
    assert [report.optimizer.param_groups[0][key] for key in ("lr", "eps", "weight_decay")] == [0.01, 1e-8, 0.3]
    assert {entry.scale for entry in report.plan.parameters.values()} == {(1, 1, 1, 1)}


# --- recurrent layers, and noise that waits


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_the_meta_device(kind: type[nn.RNNBase]):
    """They keep weak references to their parameters, and flat copies of the list, that must follow."""

    def build(width: int) -> nn.Module:
        return nn.ModuleDict({"rnn": kind(3, width, 2), "head": nn.Linear(width, 2)})

    torch.manual_seed(0)
    narrow = build(4)
    with torch.device("meta"):
        wide = build(8)
    mupscale.upscale(narrow, wide)
    x = torch.randn(5, 2, 3)
    outputs = [model["head"](model["rnn"](x)[0]) for model in (narrow, wide)]
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("noise", [mupscale.AdditiveNoise, mupscale.SignalNoise])
def test_noise_that_waits_is_the_same(noise: Any, centred: bool) -> None:
    """A swap compares the losses before noise is added; the weights are those of an upscale in one go."""
    narrow, at_once, later, clean = (ResNet18Net(n, outputs=3) for n in (2, 4, 4, 4))
    grow(narrow, clean)
    seen = []

    def compare() -> None:
        seen.append(all(torch.equal(p, q) for p, q in zip(later.parameters(), clean.parameters(), strict=True)))

    reports = [
        grow(narrow, at_once, noise=noise(0.3, centred=centred), seed=3),
        grow(narrow, later, noise=noise(0.3, centred=centred), seed=3, before_noise=compare, consume=True),
    ]
    assert seen == [True]
    assert reports[0].noise == reports[1].noise
    assert all(torch.equal(p, q) for p, q in zip(later.parameters(), at_once.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(later.parameters(), clean.parameters(), strict=True))
