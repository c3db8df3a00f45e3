"""Noise: its standard deviation per role, its seed, its recorded constants."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CASES, ConvNet
from bad_input import assert_refused, linear, snapshot
from nets import added_noise
from torch import nn

import mupscale
from mupscale.methods.grow import grow
from mupscale.methods.noise import widened_norms
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.models.resnet import ResNet18Net
from mupscale.spectral import spectral_norms


def assert_std(sample: torch.Tensor, std: float) -> None:
    """Within 3 standard errors; those of a normal sample's std and mean are std / sqrt(2n) and std / sqrt(n)."""
    n = sample.numel()
    assert abs(sample.std().item() - std) <= 3 * std / math.sqrt(2 * n)
    assert abs(sample.mean().item()) <= 3 * std / math.sqrt(n)


def relative_norm(noise: torch.Tensor, weight: torch.Tensor) -> float:
    """The spectral norm of noise, as a fraction of that of a weight."""
    norms = [torch.linalg.matrix_norm(matrix.detach().double(), 2) for matrix in (noise, weight)]
    return float(norms[0] / norms[1])


def test_std_per_role_mlp():
    narrow, wide = (MLPNet(10, widths, 7, readout_zero_init=False) for widths in ((40, 60, 30), (80, 180, 120)))
    noise = added_noise(narrow, wide, mupscale.AdditiveNoise(0.3))
    assert_std(noise["layers.0.weight"], 0.3)
    assert_std(noise["layers.1.weight"], 0.3 / math.sqrt(80))
    assert_std(noise["layers.2.weight"], 0.3 / math.sqrt(180))
    assert relative_norm(noise["readout.weight"], narrow.readout.weight) == pytest.approx(0.3 / math.sqrt(4))
    assert not any(noise[name].any() for name in noise if name.endswith("bias"))


def test_std_per_role_resnet_counts_channels_not_kernel_positions():
    noise = added_noise(ResNet18Net(8, 5), ResNet18Net(16, 5), mupscale.AdditiveNoise(0.2))
    assert_std(noise["stem.0.weight"], 0.2)
    assert_std(noise["stages.0.first.conv1.weight"], 0.2 / math.sqrt(16))
    assert_std(noise["stages.3.rest.0.conv2.weight"], 0.2 / math.sqrt(128))
    assert not noise["readout.weight"].any()  # initialised at zero
    assert not any(noise[name].any() for name in noise if ".bn" in name)


def test_std_per_role_gpt2_embeddings_do_not_grow_with_width():
    def build(width: int) -> nn.Module:
        return GPT2Net(width, layers=1, heads=2, vocabulary=50, context=20)

    models = (mupscale.set_base_shapes(build(w), build(8), build(16), init="constant") for w in (16, 64))
    noise = added_noise(*models, mupscale.AdditiveNoise(0.1))
    assert_std(noise["wte.weight"], 0.1)
    assert_std(noise["wpe.weight"], 0.1)
    assert_std(noise["blocks.0.attention.qkv.weight"], 0.1 / math.sqrt(64))
    assert_std(noise["blocks.0.mlp.2.weight"], 0.1 / math.sqrt(256))


def with_head(head: type[nn.Linear], width: int) -> nn.Module:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), head(width, 4))

    torch.manual_seed(0)
    return mupscale.set_base_shapes(build(width), build(16), build(32)).double()


@pytest.mark.parametrize("width", [32, 128])
def test_noise_on_a_plain_readout_with_base_shapes_acts_as_on_a_muP_readout(width: int):
    x, changes = torch.randn(64, 6, dtype=torch.float64), []
    for head in (nn.Linear, mupscale.Readout):
        narrow, wide = with_head(head, width), with_head(head, 2 * width)
        mupscale.upscale(narrow, wide, noise=mupscale.AdditiveNoise(0.1, where={"0.*": False}))
        changes.append(wide(x) - narrow(x))
    assert changes[0].std() > 0.01
    torch.testing.assert_close(*changes, rtol=0, atol=1e-14)


@pytest.mark.parametrize("noise", [mupscale.AdditiveNoise(0.3), mupscale.SignalNoise(0.3)], ids=["std", "t"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_padding_row_of_an_embedding_gets_no_noise(kind: type[nn.Module], noise: mupscale.AdditiveNoise):
    narrow, wide = (kind(200, width, padding_idx=-198) for width in (8, 16))
    drawn = added_noise(narrow, wide, noise)["weight"]
    assert torch.equal(drawn.abs().sum(1) == 0, torch.arange(200) == 2)
    if isinstance(noise, mupscale.AdditiveNoise):
        assert_std(drawn[torch.arange(200) != 2], 0.3)
    else:
        with torch.no_grad():
            signal = spectral_norms((wide.weight.double() - drawn)[None])
        torch.testing.assert_close(spectral_norms(drawn[None]), 0.3 * signal)


def test_the_padding_row_of_a_tied_embedding_gets_noise_because_the_readout_trains_it():
    def build(width: int) -> nn.Module:
        net = nn.Sequential(nn.Embedding(50, width, padding_idx=0), mupscale.Readout(width, 50, bias=False))
        net[1].weight = net[0].weight
        return net

    models = (mupscale.set_base_shapes(build(width), build(8), build(16)) for width in (8, 16))
    drawn = added_noise(*models, mupscale.AdditiveNoise(0.3))["0.weight"]
    assert (drawn.abs().sum(1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("centred", [False, True])
def test_signal_noise_on_complex_weights(dtype: torch.dtype, centred: bool):
    def build(width: int) -> nn.Module:
        torch.manual_seed(0)
        sizes = ((3, width), (width, width), (width, 2))
        return nn.Sequential(*(nn.Linear(*size, dtype=dtype) for size in sizes))

    narrow, noisy, clean = build(8), build(16), build(16)
    mupscale.upscale(narrow, noisy, noise=mupscale.SignalNoise(0.25, centred=centred))
    mupscale.upscale(narrow, clean)
    delta = (noisy[1].weight - clean[1].weight).detach()
    assert delta.real.std().item() == pytest.approx(delta.imag.std().item(), rel=0.2)
    norms = [torch.linalg.matrix_norm(matrix, 2) for matrix in (delta, clean[1].weight.detach())]
    assert (norms[0] / norms[1]).item() == pytest.approx(0.25, rel=2e-4)
    x = torch.randn(5, 3, dtype=dtype)
    change = (noisy(x) - clean(x)).abs().max().item()
    assert change <= 1e-6 if centred else change > 1e-2


def test_the_muP_table_tells_a_matrix_from_a_readout_when_one_side_does_not_grow():
    models = (
        mupscale.set_base_shapes(*(MLPNet(4, widths, 3) for widths in (hidden, (2, 2), (4, 4))))
        for hidden in ((40, 60), (80, 60))
    )
    noise = added_noise(*models, mupscale.AdditiveNoise(1.0))
    assert_std(noise["layers.1.weight"], 1 / math.sqrt(80))


def test_where_overrides_the_rule():
    where = {"*.bias": True, "readout.*": True, "layers.0.*": False}
    narrow = MLPNet(10, (8, 8), 5)
    nn.init.normal_(narrow.readout.weight)
    noise = added_noise(narrow, MLPNet(10, (64, 64), 5), mupscale.AdditiveNoise(0.5, where=where))
    assert relative_norm(noise["readout.weight"], narrow.readout.weight) == pytest.approx(0.5 / math.sqrt(8))
    assert_std(noise["layers.1.bias"], 0.5)
    assert not noise["layers.0.weight"].any()
    assert not noise["layers.0.bias"].any()


def test_zero_noise_and_none_are_the_same_and_seeds_decide():
    narrow = MLPNet(4, (8, 8), 3)

    def weights(noise, seed=0) -> list[torch.Tensor]:
        wide = MLPNet(4, (16, 16), 3)
        torch.randn(7)  # the global generator must not matter, nor change
        state = torch.get_rng_state()
        mupscale.upscale(narrow, wide, noise=noise, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [p.detach().clone() for p in wide.parameters()]

    def equal(a, b) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert equal(weights(None), weights(mupscale.AdditiveNoise(0.0)))
    assert equal(weights(mupscale.AdditiveNoise(0.1)), weights(mupscale.AdditiveNoise(0.1)))
    assert not equal(weights(mupscale.AdditiveNoise(0.1)), weights(mupscale.AdditiveNoise(0.1), seed=1))


def test_signal_noise_is_a_fraction_of_the_signal_per_kernel_position():
    torch.manual_seed(0)
    narrow, wide, clean = (ResNet18Net(width, 5) for width in (8, 24, 24))
    report = mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.25))
    mupscale.upscale(narrow, clean)
    for name in ("stem.0.weight", "stages.0.first.conv1.weight", "stages.1.first.shortcut.0.weight"):
        signal = clean.get_parameter(name).detach()
        noise = wide.get_parameter(name).detach() - signal
        for i in range(signal.shape[2]):
            for j in range(signal.shape[3]):
                ratio = torch.linalg.matrix_norm(noise[:, :, i, j], 2) / torch.linalg.matrix_norm(signal[:, :, i, j], 2)
                assert ratio.item() == pytest.approx(0.25, rel=1e-3)
    assert torch.tensor(report.noise["stages.0.first.conv1.weight"]).shape == (3, 3)


def test_the_widened_norm_follows_from_the_narrow_one():
    torch.manual_seed(0)
    case = CASES["mlp"]
    narrow, wide = case.build((8, 12, 6)), case.build((16, 36, 24))
    report = mupscale.upscale(narrow, wide)
    for name, entry in report.plan.parameters.items():
        if entry.kind == "weight":
            assert widened_norms(entry, narrow.get_parameter(name)).item() == pytest.approx(
                torch.linalg.matrix_norm(wide.get_parameter(name).detach(), 2).item(), rel=1e-4
            )


def test_recorded_constants_transfer(tmp_path):
    torch.manual_seed(0)
    narrow, wide = ConvNet(4), ConvNet(8)
    report = mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.5), seed=5)
    report.save_noise(tmp_path / "noise.json")
    noise = added_noise(ConvNet(8), ConvNet(16), mupscale.RecordedNoise(tmp_path / "noise.json"))
    for i in range(2):
        for j in range(2):  # σ̄ of each kernel position at N_in^-1/2 of the target width
            assert_std(noise["up.weight"][:, :, i, j], report.noise["up.weight"][i][j] / math.sqrt(16))


def test_noise_in_half_precision_is_added_before_rounding():
    narrow, wide = (MLPNet(4, (n, n), 3).bfloat16() for n in (32, 64))
    noise = added_noise(narrow, wide, mupscale.AdditiveNoise(0.5))["layers.1.weight"]
    assert noise.std().item() == pytest.approx(0.5 / 8, rel=0.05)
    assert spectral_norms(wide.layers[1].weight[None]).dtype == torch.float64


# --- bad input

BAD: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a number": (lambda: 0.1, ("RecordedNoise(path); got 0.1",)),
    "a class": (lambda: mupscale.AdditiveNoise, ('noise must be "auto", None, AdditiveNoise(std)',)),
    "negative": (lambda: mupscale.AdditiveNoise(-0.1), ("std must be a finite number of at least 0, got -0.1",)),
    "a string": (lambda: mupscale.AdditiveNoise("0.1"), ("std must be a finite number of at least 0, got '0.1'",)),
    "infinite": (lambda: mupscale.SignalNoise(math.inf), ("t must be a finite number of at least 0, got inf",)),
    "nowhere": (lambda: mupscale.AdditiveNoise(0.1, where={"fc.*": True}), ("'fc.*'", "matches no parameter")),
    "a list as where": (lambda: mupscale.AdditiveNoise(0.1, where=["*"]), ("where", "['*']")),
    "a string in where": (lambda: mupscale.SignalNoise(0.1, where={"*": "no"}), ("where", "'no'")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_noise_is_refused_before_anything_is_written(case: str):
    make, fragments = BAD[case]
    assert_refused(lambda: (*linear(4, 8), {"noise": make()}), fragments)


@pytest.mark.parametrize(
    ("dtype", "noise", "fits"),
    [
        (torch.float16, mupscale.AdditiveNoise(1e5), mupscale.AdditiveNoise(1e3)),
        (torch.float16, mupscale.SignalNoise(1e6), mupscale.SignalNoise(1e2)),
        (torch.bfloat16, mupscale.AdditiveNoise(1e39), mupscale.AdditiveNoise(1e35)),
        (torch.float32, mupscale.AdditiveNoise(1e39), mupscale.AdditiveNoise(1e35)),
    ],
    ids=["float16", "float16 relative", "bfloat16", "float32"],
)
def test_noise_that_overflows_is_refused_before_anything_is_written(
    dtype: torch.dtype, noise: mupscale.AdditiveNoise, fits: mupscale.AdditiveNoise
):
    def build() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
        narrow, wide = linear(4, 8)
        return narrow.to(dtype), wide.to(dtype), {"noise": noise}

    assert_refused(build, ("noise: on parameter '0.weight' (8, 4)", str(dtype), "Give a lower level"))
    narrow, wide, _ = build()
    mupscale.upscale(narrow, wide, noise=fits)
    assert all(bool(p.isfinite().all()) for p in wide.parameters())


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


@pytest.mark.parametrize("wrap", [lambda net: nn.ModuleDict({"net": net}), nn.DataParallel], ids=["module", "DDP"])
def test_a_wrapper_changes_neither_the_draw_nor_the_record(wrap: Any, tmp_path: Path) -> None:
    """The same network in a module of a run, or by itself, gets the same noise for the same seed."""
    answers = []
    for around in (lambda net: net, wrap):
        torch.manual_seed(0)
        narrow, wide = (around(nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2))) for n in (4, 8))
        report = grow(narrow, wide, noise=mupscale.AdditiveNoise(0.3, where={"2.bias": True}), seed=7)
        answers.append([parameter.detach().clone() for parameter in wide.parameters()])
        path = tmp_path / f"{len(answers)}.json"
        report.save_noise(path)
    mupscale.RecordedNoise(tmp_path / "1.json").check(report.plan)
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
    assert answers[0][3].any(), "a pattern means names in the network"
