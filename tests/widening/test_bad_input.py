"""Bad input is a ValueError that names what is wrong and what to do, raised before anything is written."""

import copy
import json
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, AdamW, Muon, Optimizer, RAdam

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.widening import rules

Input = tuple[nn.Module, nn.Module, dict[str, Any]]
"""The narrow model, the wide one, and the further arguments of `upscale`."""

BAD: dict[str, tuple[Callable[[], Input], tuple[str, ...]]] = {}

REMEDY = re.compile(
    r"^(roles|blocks)\b"  # the fault is in the argument itself
    r"|\b(build|call|choose|do it|give|grow|keep|load|move|must be|normalise|pass|register|remove|run|say"
    r"|scale|swap|take|there are|tie|train|untie|use|drop|free)\b",
    re.IGNORECASE,
)
"""Every message says what to do, or what there is to choose from."""


def bad(*fragments: str):
    """Registers an input; its message must contain the fragments."""

    def register(build: Callable[[], Input]) -> Callable[[], Input]:
        BAD[build.__name__] = build, fragments
        return build

    return register


def snapshot(*things: nn.Module | Optimizer) -> list[Any]:
    """Everything an upscale could change, bit by bit."""
    return [_optimizer(thing) if isinstance(thing, Optimizer) else _model(thing) for thing in things]


def _model(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tables = [copy.deepcopy(module.__dict__.get("_mupscale_table")) for module in model.modules()]
    return [(name, id(t), _bits(t), _bits(t.grad)) for name, t in tensors] + tables


def _optimizer(optimizer: Optimizer) -> list[Any]:
    groups = [
        {key: value if key != "params" else [*map(id, value)] for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    state = [(id(p), key, _bits(value)) for p, values in optimizer.state.items() for key, value in values.items()]
    return [groups, state, len(optimizer._optimizer_step_pre_hooks)]


def _bits(tensor: Tensor | None) -> Any:
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return repr(tensor)
    described = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
    return (
        described if tensor.is_meta else (*described, tensor.detach().contiguous().flatten().view(torch.uint8).tolist())
    )


def optimizers(settings: dict[str, Any]) -> Iterable[Optimizer]:
    for key in ("narrow_opt", "wide_opt"):
        given = settings.get(key)
        yield from [] if given is None else [given] if isinstance(given, Optimizer) else given


def linear(narrow: int, wide: int) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(4, narrow), nn.Linear(narrow, 3)), nn.Sequential(
        nn.Linear(4, wide), nn.Linear(wide, 3)
    )


def stepped(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> Optimizer:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


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
    "Choose a multiple of 4",
    'blocks={"0.weight": {0: [(length, block, factor), ...]}}',
)
def indivisible_widths() -> Input:
    return *linear(4, 6), {}


@bad("'0.weight' (8, 4) → (4, 4)", "axis 0 is narrower", "4 < 8", "swap the models?")
def narrower_target() -> Input:
    return *linear(8, 4), {}


@bad("different depth?", "'layers.2'", "in the wide one only", "same depth")
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


@bad("'wte.weight' is tied in one", "Tie, or untie, it in both")
def tied_in_the_narrow_model_only() -> Input:
    return *(
        GPT2Net(w, layers=1, heads=2, vocabulary=12, context=5, tied=tied) for w, tied in ((4, True), (8, False))
    ), {}


@bad("'1.weight' belongs to both models", "build the wide one by itself")
def parameter_shared_between_the_models() -> Input:
    head = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), head), nn.Sequential(nn.Linear(3, 3), head), {}


@bad("'0'", "MultiheadAttention", "head_dim 4 → 8", "Grow num_heads", "c/head_dim")
def head_dim_growth_in_multihead_attention() -> Input:
    return nn.Sequential(nn.MultiheadAttention(8, 2)), nn.Sequential(nn.MultiheadAttention(16, 2)), {}


@bad("'1'", "Linear", "reparametrised", "remove_parametrizations")
def weight_norm() -> Input:
    return *(nn.Sequential(nn.Linear(3, w), nn.utils.parametrizations.weight_norm(nn.Linear(w, w))) for w in (4, 8)), {}


@bad("'0'", "reparametrised", "remove_weight_norm")
def old_weight_norm() -> Input:
    return *(quietly(lambda w=w: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, w)))) for w in (4, 8)), {}


@bad("'0'", "reparametrised", "remove_parametrizations")
def spectral_norm() -> Input:
    return *(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, w))) for w in (4, 8)), {}


@bad("'0'", "Conv1d", "remove_spectral_norm")
def old_spectral_norm() -> Input:
    return *(quietly(lambda w=w: nn.Sequential(nn.utils.spectral_norm(nn.Conv1d(3, w, 1)))) for w in (4, 8)), {}


@bad("'0.weight' is a lazy one", "run a batch through both models")
def lazy_modules() -> Input:
    return *(quietly(lambda w=w: nn.Sequential(nn.LazyLinear(w))) for w in (4, 8)), {}


@bad("'0.running_mean'", "lazy", "run a batch through both models")
def lazy_buffers() -> Input:
    return *(quietly(lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False))) for _ in range(2)), {}


@bad("'0.weight' (10, 4) → (20, 8)", "axis 0 of a Embedding is not a width", "same size")
def vocabulary_growth() -> Input:
    return nn.Sequential(nn.Embedding(10, 4)), nn.Sequential(nn.Embedding(20, 8)), {}


@bad("'0.weight' (4, 3, 1, 1) → (8, 3, 3, 3)", "axis 2 of a Conv2d is not a width")
def kernel_growth() -> Input:
    return nn.Sequential(nn.Conv2d(3, 4, 1)), nn.Sequential(nn.Conv2d(3, 8, 3)), {}


@bad("'0'", "Conv2d", "fewer groups", "4 → 2", "Keep the number of groups")
def fewer_groups() -> Input:
    return nn.Sequential(nn.Conv2d(4, 4, 1, groups=4)), nn.Sequential(nn.Conv2d(8, 8, 1, groups=2)), {}


@bad("'0'", "groups (2 → 4)", "(2, 2) → (4, 4)", "two upscales")
def groups_and_their_width_grow() -> Input:
    return nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), nn.Sequential(nn.Conv2d(16, 16, 1, groups=4)), {}


@bad("'0'", "GroupNorm", "groups (2 → 4)", "(2, 2) → (4, 4)", "two upscales")
def groups_of_a_norm_and_their_width_grow() -> Input:
    return nn.Sequential(nn.GroupNorm(2, 4)), nn.Sequential(nn.GroupNorm(4, 16)), {}


@bad("'0.weight'", "LayerNorm", "different factors", "Normalise the pieces apart")
def layer_norm_over_unlike_pieces() -> Input:
    return (
        nn.Sequential(nn.LayerNorm(6)),
        nn.Sequential(nn.LayerNorm(10)),
        {"blocks": {"0.*": {0: [(4, 1, 2), (2, 1, 1)]}}},
    )


@bad("'0.weight' (4, 4)", "NaN", "earlier checkpoint")
def nan_weights() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    with torch.no_grad():
        narrow[0].weight[1, 2] = math.nan
    return narrow, wide, {"narrow_opt": optimizer}


@bad("'1.bias' (3,)", "infinite", "earlier checkpoint")
def infinite_weights() -> Input:
    narrow, wide = linear(4, 8)
    with torch.no_grad():
        narrow[1].bias[0] = -math.inf
    return narrow, wide, {}


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


def mup_mlp(width: int, base: int) -> nn.Module:
    return mupscale.set_base_shapes(*(MLPNet(4, (w, w), 3, readout_zero_init=False) for w in (width, base, 2 * base)))


@bad("readout 'readout' grows 2-fold", "multiplier falls 4-fold", "set_base_shapes on both models with the same base")
def readout_multipliers_from_different_bases() -> Input:
    return mup_mlp(8, base=4), mup_mlp(16, base=2), {}


# --- roles and blocks


@bad("pattern 'fc.*' matches no parameter", "there are '0.weight'")
def role_pattern_without_match() -> Input:
    return *linear(4, 8), {"roles": {"fc.*": "matrix"}}


@bad("'0.weight' has role 'hidden'", "the roles are matrix, transposed_matrix, vector")
def unknown_role() -> Input:
    return *linear(4, 8), {"roles": {"0.weight": "hidden"}}


@bad("roles must map name patterns", "['matrix']")
def roles_that_are_no_mapping() -> Input:
    return *linear(4, 8), {"roles": ["matrix"]}


@bad("'0.weight' (4, 4) → (8, 4) grows, so it is no scalar")
def growing_scalar() -> Input:
    return *linear(4, 8), {"roles": {"0.weight": "scalar"}}


@bad("'mixing' (2, 2, 2) → (4, 4, 4) is no matrix", "3 axes")
def matrix_of_three_width_axes() -> Input:
    return Bare(2, 2, 2), Bare(4, 4, 4), {"roles": {"mixing": "matrix"}}


@bad("only one axis of 'mixing' (2, 3, 3) → (4, 3, 3) grows", 'say "vector"', '"readout"')
def matrix_whose_side_is_not_told() -> Input:
    return Bare(2, 3, 3), Bare(4, 3, 3), {"roles": {"mixing": "matrix"}}


@bad("pattern '1.gain' matches no parameter or buffer", "there are '0.weight'")
def block_pattern_without_match() -> Input:
    return *linear(4, 8), {"blocks": {"1.gain": {0: 2}}}


@bad("'0.weight' must map to {axis: block}", "got 2")
def block_without_axis() -> Input:
    return *linear(4, 8), {"blocks": {"0.weight": 2}}


@bad("blocks must map name patterns", "got 4")
def blocks_that_are_no_mapping() -> Input:
    return *linear(4, 8), {"blocks": 4}


@bad("'0.bias'", "axis 1", "shape (4,)")
def block_on_an_axis_that_is_not_there() -> Input:
    return *linear(4, 8), {"blocks": {"0.bias": {1: 2}}}


@bad("axis 0 of '0.weight' (4, 4) → (8, 4)", "a block of 3 does not divide 4 entries")
def block_that_does_not_divide() -> Input:
    return *linear(4, 8), {"blocks": {"0.weight": {0: 3}}}


@bad("axis 0 of '0.weight' (4, 4) → (6, 4)", "6 is not a multiple of 4")
def block_of_an_indivisible_axis() -> Input:
    return *linear(4, 6), {"blocks": {"0.weight": {0: 2}}}


@bad("axis 0 of '0.weight' (4, 4) → (8, 4)", "[(2, 1, 2), (2, 1, 1)] cover 4 → 6 entries, the axis has 4 → 8")
def pieces_that_do_not_fill_the_axis() -> Input:
    return *linear(4, 8), {"blocks": {"0.weight": {0: [(2, 1, 2), (2, 1, 1)]}}}


@bad("axis 0 of '0.weight'", "at least 1", "(4, 0, 2)")
def empty_block() -> Input:
    return *linear(4, 8), {"blocks": {"0.weight": {0: [(4, 0, 2)]}}}


@bad("axis 0 of '0.weight'", "give a block length, or a list of (length, block, factor)", "'heads'")
def block_that_is_no_number() -> Input:
    return *linear(4, 8), {"blocks": {"0.weight": {0: "heads"}}}


@bad("axis 0 of 'mixing' (0, 2) → (0, 4)")
def block_of_an_empty_axis() -> Input:
    return Bare(0, 2), Bare(0, 4), {"blocks": {"mixing": {0: 1}}}


# --- optimizers


class Tuned(AdamW):
    """May update in any way: nobody said how it scales."""


@bad("test_bad_input.Tuned is not registered", "mupscale.register_optimizer(Tuned, degree=0 or 1")
def optimizer_outside_the_registry() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, Tuned(narrow.parameters()))}


def _not_homogeneous(kind: type[Optimizer]) -> Callable[[], Input]:
    def build() -> Input:
        narrow, wide = linear(4, 8)
        return narrow, wide, {"narrow_opt": kind(narrow.parameters())}

    build.__name__ = kind.__name__.lower()
    return build


for _kind in (torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS):
    bad(f"{_kind.__name__} is not homogeneous", "narrow_opt=None", "Adagrad, Adam, AdamW")(_not_homogeneous(_kind))


@bad("a parameter of shape (4, 4) that is not in the narrow model", "another model")
def optimizer_of_another_model() -> Input:
    narrow, wide = linear(4, 8)
    other, _ = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(other, AdamW(other.parameters()))}


@bad("'exp_avg' of '0.weight' has shape (2, 2)", "(4, 4)", "does not belong to this model")
def state_of_another_shape() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.state[narrow[0].weight]["exp_avg"] = torch.zeros(2, 2)
    return narrow, wide, {"narrow_opt": optimizer}


@bad("'history' of '1.bias'", "(3, 7)", "no rule covers", "register the optimizer")
def state_that_no_rule_covers() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.state[narrow[1].bias]["history"] = torch.zeros(3, 7)
    return narrow, wide, {"narrow_opt": optimizer}


@bad("in none of its groups")
def state_of_a_parameter_without_group() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.param_groups[0]["params"].pop()
    return narrow, wide, {"narrow_opt": optimizer}


@bad("the state of SGD cannot move into AdamW", "same class")
def wide_optimizer_of_another_class() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": SGD(narrow.parameters()), "wide_opt": AdamW(wide.parameters())}


@bad("'1.weight' has optimizer state, but wide_opt does not hold it", "build it over all parameters")
def wide_optimizer_lacking_a_parameter() -> Input:
    narrow, wide = linear(4, 8)
    return (
        narrow,
        wide,
        {"narrow_opt": stepped(narrow, AdamW(narrow.parameters())), "wide_opt": AdamW(wide[0].parameters())},
    )


@bad("wide_opt holds parameters that are not in the wide model", "build it over wide.parameters()")
def wide_optimizer_of_another_model() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": AdamW(narrow.parameters()), "wide_opt": AdamW(linear(4, 8)[1].parameters())}


@bad("2 narrow optimizers and 1 wide ones", "one for each")
def lists_of_different_lengths() -> Input:
    narrow, wide = linear(4, 8)
    return (
        narrow,
        wide,
        {"narrow_opt": [SGD(part.parameters()) for part in narrow], "wide_opt": [SGD(wide.parameters())]},
    )


@bad("0 narrow optimizers and 1 wide ones", "one for each")
def wide_optimizer_alone() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"wide_opt": SGD(wide.parameters())}


@bad("'0.weight'", "RAdam's variance term is still off", "at its next step, 4", "train a few more steps")
def radam_too_early() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, RAdam(narrow.parameters()), 3)}


@bad("'0.weight'", "β₂ = 0.5", "never switches on")
def radam_that_never_gets_ready() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, RAdam(narrow.parameters(), betas=(0.9, 0.5)), 9)}


@bad("'0.weight'", "unlike pieces", "Muon")
def muon_on_unlike_pieces() -> Input:
    narrow, wide = (nn.Sequential(nn.Linear(w + 2, w, bias=False)) for w in (4, 8))
    return narrow, wide, {"narrow_opt": Muon(narrow.parameters()), "blocks": {"0.weight": {1: [(4, 1, 2), (2, 1, 1)]}}}


class Demanding(SGD):
    def __init__(self, params: Any, *, secret: int) -> None:
        super().__init__(params, lr=0.1)


@bad("Demanding cannot be built from its defaults", "'secret'", "give wide_opt yourself")
def optimizer_that_cannot_be_rebuilt() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, Demanding(narrow.parameters(), secret=1))}


# --- noise


def _noise(name: str, make: Callable[[], Any], *fragments: str) -> None:
    def build() -> Input:
        return *linear(4, 8), {"noise": make()}

    build.__name__ = name
    bad(*fragments)(build)


_noise(
    "noise_as_a_number", lambda: 0.1, "noise must be AdditiveNoise(std), SignalNoise(t) or RecordedNoise(path), got 0.1"
)
_noise("noise_as_a_class", lambda: mupscale.AdditiveNoise, "noise must be AdditiveNoise(std)")
_noise("negative_noise", lambda: mupscale.AdditiveNoise(-0.1), "std must be a finite number of at least 0, got -0.1")
_noise("noise_in_words", lambda: mupscale.AdditiveNoise("0.1"), "std must be a finite number of at least 0, got '0.1'")
_noise("infinite_signal", lambda: mupscale.SignalNoise(math.inf), "t must be a finite number of at least 0, got inf")
_noise("noise_nowhere", lambda: mupscale.AdditiveNoise(0.1, where={"fc.*": True}), "'fc.*'", "matches no parameter")
_noise("noise_where_in_a_list", lambda: mupscale.AdditiveNoise(0.1, where=["*"]), "where", "['*']")
_noise("noise_where_in_words", lambda: mupscale.SignalNoise(0.1, where={"*": "no"}), "where", "'no'")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(rules._REGISTRY, Demanding, rules._REGISTRY[SGD])
    build, fragments = BAD[case]
    torch.manual_seed(0)
    narrow, wide, settings = build()
    for opt in optimizers(settings):  # a wide optimizer with a past of its own, which must survive too
        for group in opt.param_groups if opt is settings.get("wide_opt") else ():
            for parameter in group["params"]:
                opt.state[parameter]["step"] = torch.tensor(7.0)
    before = snapshot(narrow, wide, *optimizers(settings))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is checked below
        mupscale.upscale(narrow, wide, **settings, consume=True)
    assert snapshot(narrow, wide, *optimizers(settings)) == before
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    assert REMEDY.search(message), f"no remedy in: {message}"


def test_the_plan_refuses_the_same_models():
    for case in (
        "indivisible_widths",
        "deeper_target",
        "spectral_norm",
        "embedding_tied_to_a_plain_readout",
        "unknown_role",
    ):
        build, fragments = BAD[case]
        narrow, wide, settings = build()
        with pytest.raises(ValueError, match=re.escape(fragments[0])):
            mupscale.plan(narrow, wide, **settings)


def test_noise_on_a_number_without_axes():
    """Asked for by `where`: a fraction t of its own size."""

    def build(width: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, width))
        model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0)))
        return model

    narrow, wide = build(4), build(8)
    mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.1, where={"*": True}))
    assert (wide.temperature - 2).abs().item() == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize(
    ("constants", "fragments"),
    [
        ({"0.weight": 0.1}, ("another architecture", "'0.bias'")),
        ({"0.weight": [[0.1]], "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}, ("shape (1, 1) for '0.weight'", "()")),
        ({"0.weight": 0.1, "0.bias": -1.0, "1.weight": 0.0, "1.bias": 0.0}, ("'0.bias'", "no standard deviation")),
        (
            {"0.weight": math.nan, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0},
            ("'0.weight'", "no standard deviation"),
        ),
        ({"0.weight": "0.1"}, ("damaged", "numbers")),
        ({"0.weight": [[0.1, 0.2], [0.3]]}, ("damaged", "numbers")),
    ],
)
def test_recorded_noise_that_does_not_fit(constants: dict[str, Any], fragments: tuple[str, ...], tmp_path):
    narrow, wide = linear(4, 8)
    path = tmp_path / "noise.json"
    mupscale.upscale(*linear(4, 8)).save_noise(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"constants": constants}))
    before = snapshot(narrow, wide)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        mupscale.upscale(narrow, wide, noise=mupscale.RecordedNoise(path))
    assert all(fragment in str(caught.value) for fragment in fragments)
    assert snapshot(narrow, wide) == before
