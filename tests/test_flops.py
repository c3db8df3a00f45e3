"""The paper's cost figures to every printed digit, from the operations that our networks do."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from mupscale.flops import first_reach
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

MLP_EPOCH = 464_809
RESNET_EPOCH = 50_000
GPT2_STEP = 524_288


def labelled(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, device="meta"), torch.empty(shape[0], dtype=torch.long, device="meta")


def mlp_flops(width: int) -> float:
    """Per sample, with the gradient of the data, which the paper charges and nobody computes."""
    return MLP(width).training_flops(labelled(3, 54)) / 3 + 2 * 54 * width


def resnet18_flops(width: int) -> float:
    """Per image; likewise."""
    return ResNet18(width).training_flops(labelled(2, 3, 32, 32)) / 2 + 2 * 3 * width * 9 * 32 * 32


@cache
def gpt2_flops(width: int) -> float:
    """Per token of a full context, with biases and norms, which are in no matrix product."""
    module = GPT2(width, layers=12)
    vectors = sum(p.numel() for p in module.network(width, meta=True).parameters() if p.ndim == 1)
    return module.training_flops(torch.empty(2, 1025, dtype=torch.long, device="meta")) / 2048 + 6 * vectors


def teraflops(flops: float) -> str:
    """As the paper prints costs."""
    return f"{flops / 1e12:,.0f}"


def test_tuning_speedups():
    """Net2Net tunes at the target width kn, this method at kn₀."""
    assert f"{mlp_flops(2000) / mlp_flops(400):.1f}" == "23.6"
    assert f"{resnet18_flops(256) / resnet18_flops(64):.1f}" == "16.0"
    assert f"{gpt2_flops(3840) / gpt2_flops(384):.1f}" == "48.2"


@pytest.mark.parametrize(
    ("flops", "width", "samples", "printed"),
    [
        pytest.param(mlp_flops, 500, 500 * MLP_EPOCH, "740", id="mlp-base"),
        pytest.param(mlp_flops, 2000, 500 * MLP_EPOCH, "11,326", id="mlp-scratch"),
        pytest.param(mlp_flops, 2000, 26.4 * MLP_EPOCH, "598", id="mlp-sgd-upscaled"),
        pytest.param(mlp_flops, 2000, 133.8 * MLP_EPOCH, "3,031", id="mlp-adamw-upscaled"),
        pytest.param(resnet18_flops, 128, 100 * RESNET_EPOCH, "66,547", id="resnet-base"),
        pytest.param(resnet18_flops, 256, 100 * RESNET_EPOCH, "265,970", id="resnet-scratch"),
        pytest.param(resnet18_flops, 256, 50 * RESNET_EPOCH, "132,985", id="resnet-upscaled"),
        pytest.param(gpt2_flops, 1920, 5000 * GPT2_STEP, "10,615,488", id="gpt2-base"),
        pytest.param(gpt2_flops, 3840, 5000 * GPT2_STEP, "37,929,809", id="gpt2-scratch"),
        pytest.param(gpt2_flops, 3840, 862 * GPT2_STEP, "6,539,099", id="gpt2-upscaled"),
        pytest.param(gpt2_flops, 384, 25 * 5000 * GPT2_STEP, "19,679,775", id="gpt2-tuning"),
    ],
)
def test_costs(flops: Callable[[int], float], width: int, samples: float, printed: str):
    assert teraflops(flops(width) * samples) == printed


def test_first_reach_counts_from_one():
    assert first_reach([3.0, 1.0, 0.5, 0.2, 0.5], 0.5) == 3
    assert first_reach([0.5, 0.2], 0.5) == 1
    assert first_reach([3.0, float("nan"), 1.0], 0.5) is None
