"""Models, roles and blocks that cannot be widened: a ValueError says what is wrong and what to do."""

import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input import Input, assert_refused, linear, registry, stepped
from torch import nn
from torch.optim import AdamW

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet

BAD, bad = registry()


def quietly(build: Callable[[], nn.Module]) -> nn.Module:
    """Lazy modules and the old weight_norm warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


# --- the models


@bad(
    "'0.weight' (4, 4) → (6, 4)",
    "axis 0",
    "6 / 4",
    "nothing reads units that grow so",
    "Choose a multiple of 4",
    'blocks={"0.weight": {0: [(length, block, factor), ...]}}',
)
def indivisible_outputs() -> Input:
    return nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 6)), {}


@bad("'1.weight' (3, 7) → (3, 11)", "axis 1", "11 / 7", "nothing produces units that grow so", "Choose a multiple of 7")
def width_beside_fixed_features() -> Input:
    models = [nn.Sequential(nn.Linear(4, width), nn.Linear(width + 3, 3)) for width in (4, 8)]
    return models[0], models[1], {}


@bad("'0.weight' (8, 4) → (4, 4)", "axis 0 is narrower", "4 < 8", "swap the models?")
def narrower_target() -> Input:
    return *linear(8, 4), {}


@bad("the narrow model is the result of torch.compile: give the model that was compiled")
def compiled() -> Input:
    return quietly(lambda: torch.compile(nn.Sequential(nn.Linear(3, 4)))), nn.Sequential(nn.Linear(3, 8)), {}


@bad("layers (2 → 3 layers)", "say how it becomes deeper", "same number of layers")
def deeper_target() -> Input:
    return MLPNet(4, (4, 4), 3), MLPNet(4, (8, 8, 8), 3), {}


@bad("parameters '0.bias'", "in the narrow one only", "same depth and options")
def bias_in_one_model_only() -> Input:
    return nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 8, bias=False)), {}


@bad("module '1'", "ReLU", "GELU")
def other_module_type() -> Input:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 8), nn.GELU()), {}


class Bare(nn.Module):
    def __init__(self, *shape: int, name: str = "mixing") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.randn(shape)))


@bad("'mixing' (4, 4) → (8, 8)", "2 axes", "Bare", 'roles={"mixing": "matrix"}', '"transposed_matrix"', '"vector"')
def unknown_parameter_with_two_width_axes() -> Input:
    return Bare(4, 4), Bare(8, 8), {}


@bad("'mixing'", "(4,)", "(8, 1)")
def another_number_of_axes() -> Input:
    return Bare(4), Bare(8, 1), {}


@bad(
    "'wte.weight' = 'head.readout.weight'",
    "vector in 'wte' (Embedding)",
    "readout in 'head.readout'",
    "multiplier",
    '"readout"',
    "untie",
)
def embedding_tied_to_a_plain_readout() -> Input:
    return *(GPT2Net(width, layers=1, heads=2, vocabulary=12, context=5) for width in (4, 8)), {}


class Autoencoder(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(b, a, 3), nn.ConvTranspose2d(b, a, 3)
        self.up.weight = self.down.weight


@bad("'down.weight' = 'up.weight'", "'down' (Conv2d)", "'up' (ConvTranspose2d)", "untie")
def convolution_shared_with_its_transpose() -> Input:
    return Autoencoder(4, 4), Autoencoder(8, 12), {}


@bad("'wte.weight' is tied in one", "Tie, or untie, it in both")
def tied_in_the_wide_model_only() -> Input:
    return *(
        GPT2Net(w, layers=1, heads=2, vocabulary=12, context=5, tied=tied) for w, tied in ((4, False), (8, True))
    ), {}


@bad("'1.weight' belongs to both models", "build the wide one by itself")
def parameter_shared_between_the_models() -> Input:
    head = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), head), nn.Sequential(nn.Linear(3, 3), head), {}


@bad("'0'", "MultiheadAttention", "head_dim 4 → 8", "Grow num_heads", "c/head_dim")
def head_dim_growth_in_multihead_attention() -> Input:
    return nn.Sequential(nn.MultiheadAttention(8, 2)), nn.Sequential(nn.MultiheadAttention(16, 2)), {}


@bad("'1'", "LSTM", "reparametrised", "remove_parametrizations")
def weight_norm_of_a_recurrent_layer() -> Input:
    def lstm(w: int) -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.LSTM(w, w), "weight_hh_l0")

    return *(nn.Sequential(nn.Linear(3, w), lstm(w)) for w in (4, 8)), {}


@bad("'0'", "reparametrised", "remove_parametrizations")
def spectral_norm() -> Input:
    return *(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, w))) for w in (4, 8)), {}


@bad("'0.weight' is a lazy one", "run a batch through both models")
def lazy_modules() -> Input:
    return *(quietly(lambda w=w: nn.Sequential(nn.LazyLinear(w))) for w in (4, 8)), {}


@bad("'0.weight' (10, 4) → (20, 8)", "axis 0 of a Embedding is not a width", "same size")
def vocabulary_growth() -> Input:
    return nn.Sequential(nn.Embedding(10, 4)), nn.Sequential(nn.Embedding(20, 8)), {}


@bad("'0'", "Conv2d", "fewer groups", "4 → 2", "Keep the number of groups")
def fewer_groups() -> Input:
    return nn.Sequential(nn.Conv2d(4, 4, 1, groups=4)), nn.Sequential(nn.Conv2d(8, 8, 1, groups=2)), {}


@bad("'0'", "groups (2 → 4)", "(2, 2) → (4, 4)", "two upscales")
def groups_and_their_width_grow() -> Input:
    return nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), nn.Sequential(nn.Conv2d(16, 16, 1, groups=4)), {}


@bad("'0'", "GroupNorm", "groups (2 → 4)", "(2, 2) → (4, 4)", "two upscales")
def groups_of_a_norm_and_their_width_grow() -> Input:
    return nn.Sequential(nn.GroupNorm(2, 4)), nn.Sequential(nn.GroupNorm(4, 16)), {}


@bad("'0.weight'", "LayerNorm", "different factors", "Normalise the pieces separately")
def layer_norm_over_unlike_pieces() -> Input:
    return (
        nn.Sequential(nn.LayerNorm(6)),
        nn.Sequential(nn.LayerNorm(10)),
        {"hints": mupscale.Hints(blocks={"0.*": {0: [(4, 1, 2), (2, 1, 1)]}})},
    )


@bad("'0.weight' (4, 4)", "NaN", "earlier checkpoint")
def nan_weights() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    with torch.no_grad():
        narrow[0].weight[1, 2] = math.nan
    return narrow, wide, {"narrow_opt": optimizer}


@bad("narrow model is on the meta device")
def narrow_on_the_meta_device() -> Input:
    narrow, wide = linear(4, 8)
    return narrow.to("meta"), wide, {}


@bad("'1.weight'", "meta")
def wide_on_the_meta_device_and_referenced() -> Input:
    narrow, wide = linear(4, 8)
    wide.to("meta")
    wide.watch = weakref.ref(wide[1].weight)  # torch cannot give such a parameter memory and keep its identity
    return narrow, wide, {}


@bad("'0.weight'", "meta")
def wide_on_the_meta_device_in_a_live_graph() -> Input:
    narrow, wide = linear(4, 8)
    wide.to("meta")
    wide.output = wide(torch.zeros(1, 4, device="meta"))
    return narrow, wide, {}


@bad("'0.weight'", "int8", "(4, 4) → (8, 8)")
def whole_numbers_that_would_be_divided() -> Input:
    models = [nn.Sequential(nn.Linear(w, w, bias=False)) for w in (4, 8)]
    for model in models:
        model[0].weight = nn.Parameter(torch.full_like(model[0].weight, 5, dtype=torch.int8), requires_grad=False)
    return *models, {}


@bad("buffer '1.running_mean' (4,)", "NaN", "earlier checkpoint")
def nan_in_a_buffer() -> Input:
    narrow, wide = (nn.Sequential(nn.Linear(3, w), nn.BatchNorm1d(w)) for w in (4, 8))
    narrow[1].running_mean[2] = math.nan
    return narrow, wide, {}


@bad("buffer '1.running_var' (4,)", "infinite", "earlier checkpoint")
def infinity_in_a_buffer_that_grows() -> Input:
    narrow, wide = (nn.Sequential(nn.Linear(3, w), nn.BatchNorm1d(w)) for w in (4, 8))
    narrow[1].running_var[2] = math.inf
    return narrow, wide, {}


@bad("'0.weight' (4, 4)", "up to 100000", "torch.float16", "Give the wide model the dtype torch.float32")
def weights_too_large_for_the_wide_dtype() -> Input:
    narrow, wide = linear(4, 8)
    with torch.no_grad():
        narrow[0].weight[0, 0] = 1e5
    return narrow, wide.half(), {}


def mup_mlp(width: int, base: int) -> nn.Module:
    return mupscale.set_base_shapes(*(MLPNet(4, (w, w), 3, readout_zero_init=False) for w in (width, base, 2 * base)))


@bad("readout 'readout' grows 2-fold", "multiplier falls 4-fold", "set_base_shapes on both models with the same base")
def readout_multipliers_from_different_bases() -> Input:
    return mup_mlp(8, base=4), mup_mlp(16, base=2), {}


# --- roles and blocks


@bad("pattern 'fc.*' matches no parameter", "there are '0.weight'")
def role_pattern_without_match() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(roles={"fc.*": "matrix"})}


@bad("'0.weight' has role 'hidden'", "the roles are matrix, transposed_matrix, vector")
def unknown_role() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(roles={"0.weight": "hidden"})}


@bad("'0.weight' (4, 4) → (8, 4) grows, so it is no scalar")
def growing_scalar() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(roles={"0.weight": "scalar"})}


@bad("'mixing' (2, 2, 2) → (4, 4, 4) is no matrix", "3 axes")
def matrix_of_three_width_axes() -> Input:
    return Bare(2, 2, 2), Bare(4, 4, 4), {"hints": mupscale.Hints(roles={"mixing": "matrix"})}


@bad("only one axis of 'mixing' (2, 3, 3) → (4, 3, 3) grows", 'say "vector"', '"readout"')
def matrix_without_a_side() -> Input:
    return Bare(2, 3, 3), Bare(4, 3, 3), {"hints": mupscale.Hints(roles={"mixing": "matrix"})}


@bad("pattern '1.gain' matches no parameter or buffer", "there are '0.weight'")
def block_pattern_without_match() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(blocks={"1.gain": {0: 2}})}


@bad("'0.bias'", "axis 1", "shape (4,)")
def block_on_an_axis_that_is_not_there() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(blocks={"0.bias": {1: 2}})}


@bad("axis 0 of '0.weight' (4, 4) → (8, 4)", "a block of 3 does not divide 4 entries")
def block_that_does_not_divide() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(blocks={"0.weight": {0: 3}})}


@bad("axis 0 of '0.weight' (4, 4) → (7, 4)", "a block of 2 does not divide 7 entries")
def block_of_an_indivisible_axis() -> Input:
    return *linear(4, 7), {"hints": mupscale.Hints(blocks={"0.weight": {0: 2}})}


@bad("axis 0 of '0.weight' (4, 4) → (8, 4)", "[(2, 1, 2), (2, 1, 1)] cover 4 → 6 entries, the axis has 4 → 8")
def pieces_that_do_not_fill_the_axis() -> Input:
    return *linear(4, 8), {"hints": mupscale.Hints(blocks={"0.weight": {0: [(2, 1, 2), (2, 1, 1)]}})}


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
    for case in (indivisible_outputs, deeper_target, spectral_norm, embedding_tied_to_a_plain_readout, unknown_role):
        build, fragments = BAD[case.__name__]
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
