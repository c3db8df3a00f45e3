"""The paper's cost figures to every printed digit, and its formulas against torch's own FLOP counter."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mupscale.flops import first_reach, gpt2_flops, mlp_flops, resnet18_flops, speedup
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

MLP_EPOCH = 464_809
RESNET_EPOCH = 50_000
GPT2_STEP = 524_288


def teraflops(flops: float) -> str:
    """As the paper prints costs."""
    return f"{flops / 1e12:,.0f}"


def test_tuning_speedups():
    """Net2Net tunes at the target width kn, this method at kn₀."""
    assert f"{speedup(mlp_flops(2000), mlp_flops(400)):.1f}" == "23.6"
    assert f"{speedup(resnet18_flops(256), resnet18_flops(64)):.1f}" == "16.0"
    assert f"{speedup(gpt2_flops(3840), gpt2_flops(384)):.1f}" == "48.2"


@pytest.mark.parametrize(
    ("flops", "samples", "printed"),
    [
        pytest.param(mlp_flops(500), 500 * MLP_EPOCH, "740", id="mlp-base"),
        pytest.param(mlp_flops(2000), 500 * MLP_EPOCH, "11,326", id="mlp-scratch"),
        pytest.param(mlp_flops(2000), 26.4 * MLP_EPOCH, "598", id="mlp-sgd-upscaled"),
        pytest.param(mlp_flops(2000), 133.8 * MLP_EPOCH, "3,031", id="mlp-adamw-upscaled"),
        pytest.param(resnet18_flops(128), 100 * RESNET_EPOCH, "66,547", id="resnet-base"),
        pytest.param(resnet18_flops(256), 100 * RESNET_EPOCH, "265,970", id="resnet-scratch"),
        pytest.param(resnet18_flops(256), 50 * RESNET_EPOCH, "132,985", id="resnet-upscaled"),
        pytest.param(gpt2_flops(1920), 5000 * GPT2_STEP, "10,615,488", id="gpt2-base"),
        pytest.param(gpt2_flops(3840), 5000 * GPT2_STEP, "37,929,809", id="gpt2-scratch"),
        pytest.param(gpt2_flops(3840), 862 * GPT2_STEP, "6,539,099", id="gpt2-upscaled"),
        pytest.param(gpt2_flops(384), 25 * 5000 * GPT2_STEP, "19,679,775", id="gpt2-tuning"),
    ],
)
def test_costs(flops: int, samples: float, printed: str):
    assert teraflops(flops * samples) == printed


@pytest.mark.parametrize(
    ("scratch", "charged", "total", "printed"),
    [
        pytest.param(11_326, (598, 740), 1_338, "8.5", id="mlp-sgd"),
        pytest.param(11_326, (3_031, 740), 3_771, "3.0", id="mlp-adamw"),
        pytest.param(265_970, (132_985, 66_547), 199_532, "1.3", id="resnet"),
        pytest.param(37_929_809, (6_539_099, 10_615_488), 17_154_587, "2.2", id="gpt2"),
        pytest.param(37_929_809, (6_539_099, 19_679_775), 26_218_874, "1.4", id="gpt2-tuning"),
        pytest.param(37_929_809, (6_539_099,), 6_539_099, "5.8", id="gpt2-base-is-there"),
    ],
)
def test_what_is_charged(scratch: float, charged: tuple[float, ...], total: float, printed: str):
    assert sum(charged) == total
    assert f"{speedup(scratch, *charged):.1f}" == printed


def test_first_reach_counts_from_one():
    assert first_reach([3.0, 1.0, 0.5, 0.2, 0.5], 0.5) == 3
    assert first_reach([0.5, 0.2], 0.5) == 1
    assert first_reach([3.0, float("nan"), 1.0], 0.5) is None


def torch_count(net: nn.Module, inputs: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        net(inputs).sum().backward()
    return counter.get_total_flops()


def labelled(inputs: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, torch.empty(len(inputs), dtype=torch.long, device="meta")


@pytest.mark.parametrize(("width", "layers"), [(100, 2), (2000, 4)])
def test_torch_counts_the_mlp_but_for_the_gradient_of_its_data(width: int, layers: int):
    module = MLP(width, hidden_layers=layers - 1)
    first_layer = 54 * width
    paper = 3 * mlp_flops(width, layers=layers)
    assert module.training_flops(labelled(torch.empty(3, 54, device="meta"))) == paper - 3 * 2 * first_layer
    assert torch_count(module.network(width, meta=True), torch.empty(3, 54, device="meta", requires_grad=True)) == paper


@pytest.mark.parametrize("width", [32, 256])
def test_torch_counts_resnet18_but_for_the_gradient_of_its_images(width: int):
    module = ResNet18(width)
    stem = 3 * width * 9 * 32 * 32
    paper = 2 * resnet18_flops(width)
    assert module.training_flops(labelled(torch.empty(2, 3, 32, 32, device="meta"))) == paper - 2 * 2 * stem
    assert (
        torch_count(module.network(width, meta=True), torch.empty(2, 3, 32, 32, device="meta", requires_grad=True))
        == paper
    )


@pytest.mark.parametrize(("width", "layers"), [(384, 2), (3840, 12)])
def test_torch_counts_gpt2_but_for_biases_and_norms(width: int, layers: int):
    module = GPT2(width, layers=layers)
    vectors = sum(
        parameter.numel() for parameter in module.network(width, meta=True).parameters() if parameter.ndim == 1
    )
    batch = torch.empty(2, 1025, dtype=torch.long, device="meta")
    assert module.training_flops(batch) == 2 * 1024 * (gpt2_flops(width, layers=layers) - 6 * vectors)


def test_gpt2_counts_every_parameter_but_the_position_table():
    net = GPT2(384, layers=2, vocabulary=100).network(384, meta=True)
    parameters = sum(parameter.numel() for name, parameter in net.named_parameters() if name != "wpe.weight")
    assert gpt2_flops(384, layers=2, vocabulary=100, context=0) == 6 * parameters
