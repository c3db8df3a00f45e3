"""Layers by kernels of this project compute what plain layers do, with one pass less over their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gradients import relative_gap, with_gradients
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from triton_kernels_here import COMPILER_WARNINGS, DEVICE, needs_kernel

from mupscale import fused_layers
from mupscale.fused_layers import LinearChunks, LinearGELU, can_fuse, gelu_by_sigmoid
from mupscale.models import gpt2
from mupscale.models.gpt2 import GPT2, Block

pytestmark = pytest.mark.filterwarnings(*COMPILER_WARNINGS)

gelu = partial(F.gelu, approximate="tanh")


def plain_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gelu(F.linear(x, weight, bias))


def plain_chunks(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, weight, bias).chunk(3, dim=-1)


WAYS = {"gelu": (LinearGELU.apply, plain_gelu), "chunks": (LinearChunks.apply, plain_chunks)}


def results(
    function: Callable[..., Any], dtype: torch.dtype, device: str = "cpu", rows: int = 33, columns: int = 300
) -> list[Tensor]:
    """What a layer returns, and the gradients of input, weight and bias, for random gradients of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, rows, 16), (columns, 16), (columns,)
    inputs = [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in shapes]
    for each in inputs:
        each.requires_grad_()
    made = function(*inputs)
    made = torch.cat(made, -1) if isinstance(made, tuple) else made
    factors = torch.randn(made.shape, generator=generator).to(device, dtype)
    return [made.detach(), *with_gradients((made * factors).sum(), *inputs)[1:]]


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of torch take the place of the kernels, and a CPU that of a GPU."""

    def of_gelu(gradient: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.ops.aten.gelu_backward(gradient, hidden, approximate="tanh")
        return result, result.unflatten(0, (2, -1)).sum(1)

    def joined(*gradients: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.cat(gradients, -1)
        return result, result.unflatten(0, (2, -1)).sum(1)

    monkeypatch.setattr(fused_layers, "gelu_gradient", of_gelu)
    monkeypatch.setattr(fused_layers, "join_gradients", joined)
    monkeypatch.setattr(gpt2, "can_fuse", lambda layer, x: True)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_plain_layer(way: str, without_kernels: None) -> None:
    ours, theirs = (results(function, torch.float64) for function in WAYS[way])
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_gap(mine, other) < 1e-14


def test_gelu_by_sigmoid_is_gelu() -> None:
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    torch.testing.assert_close(gelu_by_sigmoid(x), gelu(x), rtol=1e-14, atol=1e-14)


# --- the kernels


@needs_kernel
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("rows", "columns"), [(33, 300), (256, 1536)])  # neither fills its tiles, and both do
def test_kernels_are_exact_to_rounding(
    dtype: torch.dtype,
    tolerance: float,
    rows: int,
    columns: int,
    way: str,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_layers, "GROUPS", 4)
    torch.compiler.reset()
    ours, theirs = WAYS[way]
    function = torch.compile(lambda *inputs: ours(*inputs), fullgraph=True) if compiled else ours
    exact = results(theirs, torch.float64, rows=rows, columns=columns)
    for mine, other in zip(results(function, dtype, DEVICE, rows, columns), exact, strict=True):
        assert mine.dtype == dtype
        assert relative_gap(mine.cpu(), other) < tolerance


@needs_kernel
def test_the_operators_do_what_they_declare() -> None:
    gradients = [torch.randn(20, 24, device=DEVICE) for _ in range(3)]
    torch.library.opcheck(fused_layers.gelu_gradient, gradients[:2])
    torch.library.opcheck(fused_layers.join_gradients, gradients)


# --- blocks of GPT-2


def block(fused: bool) -> Block:
    torch.manual_seed(0)
    made = Block(16, 2)
    made.fused = made.attention.fused = fused
    return made


@pytest.mark.parametrize("enabled", [True, False])
def test_a_fused_block_is_the_plain_block(enabled: bool, without_kernels: None) -> None:
    """To rounding: only the gradients of two biases, which it does not round to bfloat16, differ."""
    x = torch.randn(2, 10, 16, dtype=torch.bfloat16 if enabled else torch.float32)
    outcomes = []
    for fused in (True, False):
        made = block(fused)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = made(x).float().square().sum()
        outcomes.append(with_gradients(loss, *made.parameters()))
    names = "loss", *dict(made.named_parameters())
    for name, mine, other in zip(names, *outcomes, strict=True):
        if name == "attention.qkv.bias":  # that of the keys has no effect, and so no gradient but rounding
            mine, other = (torch.cat([each[:16], each[32:]]) for each in (mine, other))
        assert relative_gap(mine, other) < (2**-7 if enabled else 1e-5), name


def reads_of_wide_gradients(fused: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators of a backward pass that read a gradient of the result of `qkv` or of the first layer of `mlp`."""
    monkeypatch.setattr(gpt2, "can_fuse", lambda layer, x: True)
    monkeypatch.setattr(fused_layers, "GROUPS", 2)
    made = block(fused)
    x = torch.randn(2, 10, 16)

    def step(x: Tensor) -> list[Tensor]:
        return with_gradients(made(x).sum(), *made.parameters())

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x).graph
    found = []
    for node in graph.nodes:
        if getattr(node.target, "__name__", "").partition(".")[0] in ("sum", "cat"):
            sizes = [each.meta["val"].numel() for each in node.all_input_nodes]
            found += [str(node.target)] if sum(sizes) >= 20 * 3 * 16 else []
    return found


def test_no_pass_over_a_wide_gradient_for_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_of_wide_gradients(False, monkeypatch) == [
        "aten.sum.dim_IntList",
        "aten.cat.default",
        "aten.sum.dim_IntList",
    ]
    assert reads_of_wide_gradients(True, monkeypatch) == []


def test_kernels_are_for_plain_layers_on_a_gpu_in_networks_compiled_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = type("OnGPU", (), {"is_cuda": True, "dtype": torch.bfloat16})()
    assert can_fuse(nn.Linear(2, 2), x)
    assert not can_fuse(nn.Linear(2, 2, bias=False), x)
    assert not can_fuse(type("Quantised", (nn.Linear,), {})(2, 2), x)
    assert not can_fuse(nn.Linear(2, 2), torch.ones(2))
    x.dtype = torch.float64
    assert not can_fuse(nn.Linear(2, 2), x)
    monkeypatch.setattr(gpt2, "FUSED_LAYERS", True)
    for compiled in (True, False):
        module = GPT2(8, base_width=8, layers=2, heads=2, vocabulary=10, context=4, compile=compiled)
        module.configure_model()
        net: Any = module.net
        assert {(each.fused, each.attention.fused) for each in net.blocks} == {(compiled, compiled)}
