"""Centred noise: the function stays, to rounding in float64, in every architecture; and the copies part."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import CASES, Case, cross_entropy
from bad_input import assert_refused, linear
from nets import added_noise
from torch import Tensor, nn

import mupscale
from mupscale.methods.noise import Noise, save_constants
from mupscale.models.mlp import MLPNet
from mupscale.widening.growth import Piece, centre_, duplicate, parse_layout

NOISES: dict[str, Callable[[], Noise]] = {
    "additive": lambda: mupscale.AdditiveNoise(0.1, centred=True),
    "signal": lambda: mupscale.SignalNoise(0.5, centred=True),
}


def models(case: Case, *, mup: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    build = case.build_mup if mup else case.build
    return build(case.narrow).double(), build(case.wide).double()


def double(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (batch[0].double() if batch[0].is_floating_point() else batch[0]), batch[1]


def drift(narrow: nn.Module, wide: nn.Module, inputs: Tensor) -> float:
    """The largest deviation of the outputs, relative to the largest output."""
    with torch.no_grad():
        before, after = narrow(inputs), wide(inputs)
    return float((after - before).abs().max() / before.abs().max())


# --- the function stays


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("mup", [False, True], ids=["plain", "mup"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_loss_is_the_last_one(case: str, mup: bool, noise: str):
    narrow, wide = models(CASES[case], mup=mup)
    batch = double(CASES[case].batches(1)[0])
    before = cross_entropy(narrow, batch).item()
    roles = None if mup else CASES[case].plain_roles
    report = mupscale.upscale(narrow, wide, noise=NOISES[noise](), hints=mupscale.Hints(roles=roles))
    assert any(torch.as_tensor(constant).any() for constant in report.noise.values())
    assert abs(cross_entropy(wide, batch).item() / before - 1) <= 1e-12


class Attention(nn.Module):
    """More heads of one size, in torch's own attention, with a bias of keys and values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, 4 * heads)
        self.attention = nn.MultiheadAttention(4 * heads, heads, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(4 * heads, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class TwoInputs(nn.Module):
    """A bilinear layer: it sums over the copies of both inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, width), nn.Linear(3, 2 * width)
        self.both = nn.Bilinear(width, 2 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(self.left(x).tanh(), self.right(x).tanh()))


class FixedFeatures(nn.Module):
    """A layer that reads its width beside three fixed features, and an axis of unlike pieces that it produces."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.middle = nn.Linear(3, width), nn.Linear(width + 3, width + 2)
        self.head = nn.Linear(width + 2, 2)

    @property
    def width_blocks(self) -> dict[str, Any]:
        width, k = self.inputs.out_features, 2
        produced = [(width, width, k), (2, 1, 1)]
        return {"middle.weight": {0: produced, 1: [(width, 1, k), (3, 1, 1)]}, "head.weight": {1: produced}}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.cat([self.inputs(x).relu(), x], -1)).tanh())


class TiedTwice(nn.Module):
    """Two muP readouts with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, width)
        self.first, self.second = mupscale.Readout(width, 2), mupscale.Readout(width, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.first(x.tanh()) + self.second(x.relu())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Attention, ["attention.in_proj_weight", "attention.out_proj.weight", "head.weight"]),
        (TwoInputs, ["both.weight", "head.weight"]),
        (FixedFeatures, ["middle.weight", "head.weight"]),
        (TiedTwice, ["first.weight"]),
    ],
)
def test_further_layers(kind: Callable[[int], nn.Module], expected: list[str]):
    torch.manual_seed(0)
    narrow, wide = (mupscale.set_base_shapes(kind(n).double(), kind(2), kind(4)) for n in (4, 8))
    noise = added_noise(narrow, wide, mupscale.AdditiveNoise(0.5, centred=True))
    assert [name for name in noise if noise[name].any()] == expected
    assert drift(narrow, wide, torch.randn(6, 5, 3).double()) <= 1e-13


# --- the level is that of the noise that is added


@pytest.mark.parametrize("factor", [2, 3])
def test_std_is_meant_after_centring(factor: int):
    torch.manual_seed(0)
    narrow, wide = (MLPNet(10, (n, n), 7, readout_zero_init=False).double() for n in (60, 60 * factor))
    noise = added_noise(narrow, wide, mupscale.AdditiveNoise(0.3, centred=True))
    norms = [torch.linalg.matrix_norm(each, 2) for each in (noise["readout.weight"], narrow.readout.weight.detach())]
    assert float(norms[0] / norms[1]) == pytest.approx(0.3 / math.sqrt(factor))  # a plain readout's own norm
    expected = {"layers.1.weight": 0.3 / math.sqrt(60 * factor), "readout.weight": noise["readout.weight"].std().item()}
    for name, std in expected.items():
        independent = noise[name].numel() * (1 - 1 / factor)
        assert noise[name].std().item() == pytest.approx(std, rel=3 / math.sqrt(2 * independent))
        copies = noise[name].unflatten(1, (-1, factor))
        assert copies.sum(-1).abs().max() <= 1e-14 * std
        assert copies.std((0, 1)).tolist() == pytest.approx([std] * factor, rel=0.1)
    assert [name for name in noise if noise[name].any()] == list(expected)


def test_centring_follows_the_layout():
    generator = torch.Generator().manual_seed(0)
    rows, columns = (Piece(2, 1, 2),), parse_layout([(4, 2, 3), (2, 2, 2), (1, 1, 1)], 7, 17)
    draw = torch.randn(4, 17, generator=generator, dtype=torch.float64)
    noise = draw.clone()
    centre_(noise, [rows, columns], [1])
    inputs = duplicate(torch.randn(7, generator=generator, dtype=torch.float64), [columns])
    assert (noise @ inputs).abs().max() <= 1e-14
    assert not noise[:, -1].any()
    # the first block of two entries stands at columns 0-1, 2-3 and 4-5; a share 1 - 1/3 of the variance stays
    torch.testing.assert_close(noise[:, 2], (draw[:, 2] - draw[:, [0, 2, 4]].mean(1)) / math.sqrt(2 / 3))
    both = draw.clone()
    centre_(both, [rows, columns], [0, 1])
    assert (duplicate(torch.ones(2).double(), [rows]) @ both @ inputs).abs() <= 1e-14
    torch.testing.assert_close(both[0, 0], (draw[0, 0] - draw[:2, [0, 2, 4]].mean()) / math.sqrt(5 / 6))


# --- the same noise again


def test_complex_pieces_are_centred():
    layouts = [parse_layout([[1, 1, 2], [1, 1, 1]], 2, 3)]
    draw = torch.randn(3, dtype=torch.complex64)
    parts = draw.real.clone(), draw.imag.clone()
    for each in (draw, *parts):
        centre_(each, layouts, [0])
    torch.testing.assert_close(draw, torch.complex(*parts))


def test_recorded_noise_is_centred_as_it_was(tmp_path):
    torch.manual_seed(0)
    case, path = CASES["convnet"], tmp_path / "noise.json"
    narrow, wide = models(case, mup=False)
    again, plain = copy.deepcopy(wide), copy.deepcopy(wide)
    report = mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.5, centred=True), seed=5)
    report.save_noise(path)
    assert json.loads(path.read_text()) == {
        "format": "mupscale noise constants, version 2",
        "centred": True,
        "constants": report.noise,
    }
    recorded = mupscale.RecordedNoise(path)
    assert mupscale.upscale(narrow, again, noise=recorded, seed=5).noise == report.noise
    assert all(torch.equal(a, b) for a, b in zip(wide.parameters(), again.parameters(), strict=True))
    mupscale.upscale(narrow, plain, noise=mupscale.RecordedNoise(path, centred=False), seed=5)
    inputs = double(case.batches(1)[0])[0]
    assert drift(narrow, wide, inputs) <= 1e-13
    assert drift(narrow, plain, inputs) > 1e-2


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "compiled and averaged": lambda model: torch.optim.swa_utils.AveragedModel(torch.compile(model, backend="eager")),
}


@pytest.mark.slow
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_average_of_any_dtype_gets_the_very_same_noise(wrapper: str, dtype: torch.dtype, centred: bool):
    def build(width: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

    narrow, wide, clean = build(8), build(16), build(16)
    average, wide_average = (WRAPPERS[wrapper](build(width).to(dtype)) for width in (8, 16))
    report = mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.5, centred=centred), seed=2)
    mupscale.upscale(average, wide_average, noise=report.same_noise(), seed=2)
    mupscale.upscale(narrow, clean)
    found = dict(zip(dict(wide.named_parameters()), wide_average.parameters(), strict=True))
    for name, parameter in wide.named_parameters():
        largest = (found[name].float() - parameter).abs().max() / parameter.abs().max()
        assert largest <= max(torch.finfo(dtype).eps, 2e-7)
    assert (wide[2].weight - clean[2].weight).std() > 0.02
    # and back, with the constants of the wrapped model
    of_average = mupscale.upscale(average, wide_average, noise=report.same_noise(), seed=2)
    again = build(16)
    mupscale.upscale(narrow, again, noise=of_average.same_noise(), seed=2)
    for one, other in zip(again.parameters(), wide.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_noise_of_a_report_is_not_for_another_architecture():
    report = mupscale.upscale(*linear(4, 8), noise=mupscale.AdditiveNoise(0.1))
    fragments = ("the report is of another architecture: it lacks ['weight']", "and has ['0.bias', '0.weight'")
    assert_refused(lambda: (nn.Embedding(3, 4), nn.Embedding(3, 8), {"noise": report.same_noise()}), fragments)


# --- noise that would do nothing


def embedding_only() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    noise = mupscale.AdditiveNoise(0.1, centred=True)
    return nn.Embedding(5, 4), nn.Embedding(5, 8), {"noise": noise}


def zero_initialised_readout() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    return MLPNet(4, (8,), 3), MLPNet(4, (16,), 3), {"noise": mupscale.SignalNoise(0.1, centred=True)}


def noise_on_an_input_layer() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    return *linear(4, 8), {"noise": mupscale.AdditiveNoise(0.1, where={"0.*": True}, centred=True)}


def no_boolean() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    return *linear(4, 8), {"noise": mupscale.AdditiveNoise(0.1, centred="no")}


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (embedding_only, ("would do nothing", "no parameter sums over a width axis", "centred=False")),
        (zero_initialised_readout, ("would do nothing", "where={'readout.weight': True}", "centred=False")),
        (noise_on_an_input_layer, ("centred noise on '0.*'", "0.weight", "Remove the pattern")),
        (no_boolean, ("AdditiveNoise: centred must be true or false, got 'no'",)),
    ],
)
def test_noise_that_would_do_nothing_is_refused(build: Callable[[], Any], fragments: tuple[str, ...]):
    assert_refused(build, fragments)


def test_recorded_noise_that_would_do_nothing_is_refused(tmp_path):
    path = tmp_path / "noise.json"
    save_constants({"0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}, path, centred=True)
    assert_refused(
        lambda: (*linear(4, 8), {"noise": mupscale.RecordedNoise(path)}), ("would do nothing", "get no noise")
    )
    save_constants({"0.weight": 0.0, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}, path, centred=True)
    mupscale.upscale(*linear(4, 8), noise=mupscale.RecordedNoise(path))  # no noise was recorded, and none is added
