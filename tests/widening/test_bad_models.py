"""Models, roles and blocks that cannot be widened: a ValueError says what is wrong and what to do."""

import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input import Cases, Input, assert_refused, linear, stepped
from torch import nn
from torch.optim import AdamW

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet


def pair(build: Callable[[int], nn.Module], narrow: int = 4, wide: int = 8) -> Callable[[], Input]:
    """A model at two widths; lazy modules and compiled ones warn."""

    def make() -> Input:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build(narrow), build(wide), {}

    return make


def layers(build: Callable[[int], nn.Module]) -> Callable[[], Input]:
    return pair(lambda width: nn.Sequential(build(width)))


def hinted(**hints: Any) -> Callable[[], Input]:
    return lambda: (*linear(4, 8), {"hints": mupscale.Hints(**hints)})


class Bare(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(shape))


class Autoencoder(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(b, a, 3), nn.ConvTranspose2d(b, a, 3)
        self.up.weight = self.down.weight


def gpt2(width: int, tied: bool = True) -> nn.Module:
    return GPT2Net(width, layers=1, heads=2, vocabulary=12, context=5, tied=tied)


def weight_normed_lstm(width: int) -> nn.Module:
    lstm = nn.utils.parametrizations.weight_norm(nn.LSTM(width, width), "weight_hh_l0")
    return nn.Sequential(nn.Linear(3, width), lstm)


def with_a_common_layer() -> Input:
    head = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), head), nn.Sequential(nn.Linear(3, 3), head), {}


def with_nan() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    with torch.no_grad():
        narrow[0].weight[1, 2] = math.nan
    return narrow, wide, {"narrow_opt": optimizer}


def with_a_large_weight() -> Input:
    narrow, wide = linear(4, 8)
    with torch.no_grad():
        narrow[0].weight[0, 0] = 1e5
    return narrow, wide.half(), {}


def on_the_meta_device(change: Callable[[nn.Module], Any]) -> Callable[[], Input]:
    def make() -> Input:
        narrow, wide = linear(4, 8)
        wide.to("meta")
        wide.held = change(wide)
        return narrow, wide, {}

    return make


def whole_numbers(width: int) -> nn.Module:
    model = nn.Linear(width, width, bias=False)
    model.weight = nn.Parameter(torch.full_like(model.weight, 5, dtype=torch.int8), requires_grad=False)
    return model


def with_statistics(name: str, value: float) -> Callable[[], Input]:
    def make() -> Input:
        narrow, wide = (nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width)) for width in (4, 8))
        narrow[1].get_buffer(name)[2] = value
        return narrow, wide, {}

    return make


def mup_mlp(width: int, base: int) -> nn.Module:
    return mupscale.set_base_shapes(*(MLPNet(4, (w, w), 3, readout_zero_init=False) for w in (width, base, 2 * base)))


def as_matrix(narrow: nn.Module, wide: nn.Module) -> Callable[[], Input]:
    return lambda: (narrow, wide, {"hints": mupscale.Hints(roles={"mixing": "matrix"})})


UNLIKE = [(2, 1, 2), (2, 1, 1)]

BAD: Cases = {
    # the models
    "indivisible outputs": (
        pair(lambda width: nn.Sequential(nn.Linear(4, width)), 4, 6),
        ("'0.weight' (4, 4) → (6, 4)", "axis 0", "6 / 4", "nothing reads units that grow so", "Choose a multiple of 4",
         'blocks={"0.weight": {0: [(2, 1, 2), (2, 1, 1)]}}'),
    ),
    "a width beside fixed features": (
        pair(lambda width: nn.Sequential(nn.Linear(4, width), nn.Linear(width + 3, 3))),
        ("'1.weight' (3, 7) → (3, 11)", "axis 1", "11 / 7", "nothing produces units that grow so", "a multiple of 7",
         'if the last 3 are fixed features): hints=Hints(blocks={"1.weight": {1: [(4, 1, 2), (3, 1, 1)]}})',
         "or an attribute width_blocks of the model"),
    ),
    "narrower": (
        lambda: (*linear(8, 4), {}), ("'0.weight' (8, 4) → (4, 4)", "it is narrower", "Give the smaller model first"),
    ),
    "compiled": (
        pair(lambda width: (torch.compile if width == 4 else nn.Sequential)(nn.Linear(3, width))),
        ("the narrow model is the result of torch.compile: give the model that was compiled",),
    ),
    "deeper": (
        lambda: (MLPNet(4, (4, 4), 3), MLPNet(4, (8, 8, 8), 3), {}),
        ("layers (2 → 3 layers)", "say how it becomes deeper", "same number of layers"),
    ),
    "a bias in one model only": (
        layers(lambda width: nn.Linear(4, width, bias=width == 4)),
        ("parameters '0.bias'", "in the narrow one only", "same depth and options"),
    ),
    "another module type": (
        pair(lambda width: nn.Sequential(nn.Linear(4, width), nn.ReLU() if width == 4 else nn.GELU())),
        ("module '1'", "ReLU", "GELU"),
    ),
    "an unknown parameter with two width axes": (
        pair(lambda width: Bare(width, width)),
        ("'mixing' (4, 4) → (8, 8)", "2 axes", "Bare", 'roles={"mixing": "matrix"}', '"transposed_matrix"', '"vector"'),
    ),
    "another number of axes": (lambda: (Bare(4), Bare(8, 1), {}), ("'mixing'", "(4,)", "(8, 1)")),
    "an embedding tied to a plain readout": (
        pair(gpt2),
        ("'wte.weight' = 'head.readout.weight'", "vector in 'wte' (Embedding)", "readout in 'head.readout'",
         "multiplier", '"readout"', "untie"),
    ),
    "a convolution shared with its transpose": (
        lambda: (Autoencoder(4, 4), Autoencoder(8, 12), {}),
        ("'down.weight' = 'up.weight'", "'down' (Conv2d)", "'up' (ConvTranspose2d)", "untie"),
    ),
    "tied in the wide model only": (
        pair(lambda width: gpt2(width, tied=width == 8)),
        ("'wte.weight' is tied in one", "Tie, or untie, it in both"),
    ),
    "a layer of both models": (with_a_common_layer, ("'1.weight' belongs to both models", "build the wide one by it")),
    "head_dim of MultiheadAttention": (
        pair(lambda width: nn.Sequential(nn.MultiheadAttention(width, 2)), 8, 16),
        ("'0'", "MultiheadAttention", "head_dim 4 → 8", "Grow num_heads", "c/head_dim"),
    ),
    "weight_norm of an LSTM": (
        pair(weight_normed_lstm),
        ("'1'", "LSTM", "reparametrised", "remove_parametrizations"),
    ),
    "spectral_norm": (
        layers(lambda width: nn.utils.parametrizations.spectral_norm(nn.Linear(3, width))),
        ("'0'", "reparametrised", "remove_parametrizations"),
    ),
    "lazy modules": (layers(nn.LazyLinear), ("'0.weight' is a lazy one", "run a batch through both models")),
    "a vocabulary that grows": (
        layers(lambda width: nn.Embedding(10 * width // 4, width)),
        ("'0.weight' (10, 4) → (20, 8)", "axis 0 of a Embedding is not a width", "same size"),
    ),
    "fewer groups": (
        layers(lambda width: nn.Conv2d(width, width, 1, groups=16 // width)),
        ("'0'", "Conv2d", "fewer groups", "4 → 2", "Keep the number of groups"),
    ),
    "groups and their width grow": (
        pair(lambda width: nn.Sequential(nn.Conv2d(width, width, 1, groups=int(width**0.5))), 4, 16),
        ("'0'", "groups (2 → 4)", "(2, 2) → (4, 4)", "two growths, one of each"),
    ),
    "groups of a norm and their width grow": (
        pair(lambda width: nn.Sequential(nn.GroupNorm(int(width**0.5), width)), 4, 16),
        ("'0'", "GroupNorm", "groups (2 → 4)", "(2, 2) → (4, 4)", "two growths, one of each"),
    ),
    "a norm over unlike pieces": (
        lambda: (nn.Sequential(nn.LayerNorm(4)), nn.Sequential(nn.LayerNorm(6)),
                 {"hints": mupscale.Hints(blocks={"0.*": {0: UNLIKE}})}),
        ("'0.weight'", "LayerNorm", "different factors", "Normalise the pieces separately"),
    ),
    "nan": (with_nan, ("'0.weight' (4, 4)", "NaN", "earlier checkpoint")),
    "narrow on meta": (lambda: (linear(4, 8)[0].to("meta"), linear(4, 8)[1], {}), ("narrow model is on the meta dev",)),
    # torch cannot give such a parameter memory and keep its identity
    "wide on meta and referenced": (on_the_meta_device(lambda wide: weakref.ref(wide[1].weight)), ("1.weight", "meta")),
    "wide on meta in a live graph": (
        on_the_meta_device(lambda wide: wide(torch.zeros(1, 4, device="meta"))), ("'0.weight'", "meta"),
    ),
    "whole numbers that would be divided": (layers(whole_numbers), ("'0.weight'", "int8", "(4, 4) → (8, 8)")),
    "nan in a buffer": (
        with_statistics("running_mean", math.nan), ("buffer '1.running_mean' (4,)", "NaN", "earlier checkpoint"),
    ),
    "infinity in a buffer that grows": (
        with_statistics("running_var", math.inf), ("buffer '1.running_var' (4,)", "infinite", "earlier checkpoint"),
    ),
    "weights too large for the wide dtype": (
        with_a_large_weight,
        ("'0.weight' (4, 4)", "up to 100000", "torch.float16", "Give the wide model the dtype torch.float32"),
    ),
    "readout multipliers from different bases": (
        lambda: (mup_mlp(8, base=4), mup_mlp(16, base=2), {}),
        ("readout 'readout' grows 2-fold", "multiplier falls 4-fold", "set_base_shapes on both models with the same"),
    ),
    # roles and blocks
    "a role of nothing": (hinted(roles={"fc.*": "matrix"}), ("pattern 'fc.*' matches no parameter", "'0.weight'")),
    "an unknown role": (
        hinted(roles={"0.weight": "hidden"}),
        ("'0.weight' has role 'hidden'", "the roles are matrix, transposed_matrix, vector"),
    ),
    "a growing scalar": (hinted(roles={"0.weight": "scalar"}), ("'0.weight' (4, 4) → (8, 4) grows, so it is no sca",)),
    "a matrix of three axes": (
        as_matrix(Bare(2, 2, 2), Bare(4, 4, 4)), ("'mixing' (2, 2, 2) → (4, 4, 4) is no matrix", "3 axes"),
    ),
    "a matrix without a side": (
        as_matrix(Bare(2, 3, 3), Bare(4, 3, 3)),
        ("only one axis of 'mixing' (2, 3, 3) → (4, 3, 3) grows", 'say "vector"', '"readout"'),
    ),
    "a block of nothing": (hinted(blocks={"1.gain": {0: 2}}), ("'1.gain' matches no parameter or buffer", "0.weight")),
    "a block of no axis": (hinted(blocks={"0.bias": {1: 2}}), ("'0.bias'", "axis 1", "shape (4,)")),
    "a block that does not divide": (
        hinted(blocks={"0.weight": {0: 3}}),
        ("axis 0 of '0.weight' (4, 4) → (8, 4)", "a block of 3 does not divide 4 entries"),
    ),
    "a block of an indivisible axis": (
        lambda: (*linear(4, 7), {"hints": mupscale.Hints(blocks={"0.weight": {0: 2}})}),
        ("axis 0 of '0.weight' (4, 4) → (7, 4)", "a block of 2 does not divide 7 entries"),
    ),
    "pieces that do not fill the axis": (
        hinted(blocks={"0.weight": {0: UNLIKE}}),
        ("axis 0 of '0.weight' (4, 4) → (8, 4)", "[(2, 1, 2), (2, 1, 1)] cover 4 → 6 entries, the axis has 4 → 8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str):
    assert_refused(*BAD[case])


def test_a_buffer_without_width_may_hold_infinities_but_no_nan():
    narrow, wide = linear(4, 8)
    for model in (narrow, wide):
        model.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))
    mupscale.upscale(narrow, wide)
    assert torch.equal(wide.mask, narrow.mask)
    narrow.mask[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"buffer 'mask' \(5, 5\) of the narrow model has NaN"):
        mupscale.upscale(narrow, wide)


def test_the_plan_refuses_the_same_models():
    tied = "an embedding tied to a plain readout"
    for case in ("indivisible outputs", "deeper", "spectral_norm", tied, "an unknown role"):
        build, fragments = BAD[case]
        narrow, wide, settings = build()
        with pytest.raises(ValueError, match=re.escape(fragments[0])):
            mupscale.plan(narrow, wide, **settings)


# --- whole numbers, and other numbers that would be cut off


class Table(nn.Module):
    """An embedding of some dtype, and a buffer."""

    def __init__(self, width: int, weight: torch.dtype = torch.float32, buffer: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(5, width)
        numbers = torch.arange(5 * width).view(5, width)
        self.table.weight = nn.Parameter(numbers.to(weight), requires_grad=False)
        self.head = nn.Linear(width, 2)
        self.register_buffer("seen", torch.arange(width).to(buffer))


def tables(*narrow: torch.dtype, wide: tuple[torch.dtype, ...] = (), **settings: Any) -> Callable[[], Input]:
    return lambda: (Table(4, *narrow), Table(8, *(wide or narrow)), settings)


CUT_OFF: dict[str, tuple[Callable[[], Input], tuple[str, ...]]] = {
    "a float weight in whole numbers": (
        tables(torch.float32, wide=(torch.int32,)),
        ("'table.weight' holds torch.float32 in the narrow model and torch.int32 in the wide one",),
    ),
    "a complex weight in real numbers": (
        tables(torch.complex64, wide=(torch.float32,)),
        ("'table.weight' holds torch.complex64 in the narrow model and torch.float32 in the wide one",),
    ),
    "a float buffer in whole numbers": (
        tables(torch.float32, torch.float32, wide=(torch.float32, torch.int64)),
        ("'seen' holds torch.float32 in the narrow model and torch.int64 in the wide one", "would cut off its values"),
    ),
    "noise": (
        tables(torch.int32, noise=mupscale.AdditiveNoise(3.0)),
        ("'table.weight' holds whole numbers (torch.int32)", "where={'table.weight': False}"),
    ),
    "noise by the signal": (
        tables(torch.int64, noise=mupscale.SignalNoise(0.5)),
        ("'table.weight' holds whole numbers (torch.int64)", "to which noise cannot be added"),
    ),
    "a method that shrinks": (
        tables(torch.int32, method=mupscale.methods.ShrinkAndPad(0.4)),
        ("ShrinkAndPad: 'table.weight' holds whole numbers (torch.int32), which cannot be multiplied by 0.4",),
    ),
}


@pytest.mark.parametrize("case", CUT_OFF)
def test_numbers_that_would_be_cut_off_are_refused(case: str):
    assert_refused(*CUT_OFF[case])


@pytest.mark.parametrize("noise", [mupscale.AdditiveNoise(3.0, where={"table.*": False}), None])
def test_whole_numbers_are_duplicated(noise: mupscale.AdditiveNoise | None):
    narrow, wide = Table(4, torch.int32, torch.int64), Table(8, torch.int32, torch.float64)
    mupscale.upscale(narrow, wide, noise=noise)
    assert torch.equal(wide.table.weight, narrow.table.weight.repeat_interleave(2, 1))
    assert wide.seen.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
