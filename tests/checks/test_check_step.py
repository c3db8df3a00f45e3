"""The check of a plan: what it compares, in which precision, what it leaves alone, and what it says."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from exactness import Net, act, attention, batch, channel_shuffle, conv_flatten, mlp, seq
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.checks import check_step as module
from mupscale.checks.check_step import Agreement, check_step
from mupscale.errors import UserError

VECTORS = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))


def checked(build: Callable[[int], nn.Module], call: Callable[[nn.Module], Any] | None = None, n: int = 8) -> Agreement:
    narrow, wide = build(n), build(2 * n)
    plan = mupscale.plan(narrow, wide)
    return check_step(narrow, wide, (), call or (lambda model: model(VECTORS)), plan)


def test_a_right_plan_agrees_to_rounding():
    found = checked(mlp)
    assert found.exact is True
    assert 0 < found.outputs < 1e-14
    assert found.updates < 1e-13
    assert (found.precision, found.untested, found.notes, found.first_difference) == ("float64", (), (), None)
    assert str(found).startswith("exact: a training step in float64 equals the narrow model's, outputs agree to")


@pytest.mark.parametrize(
    ("build", "data", "place", "words"),
    [
        (conv_flatten, "images", "4", "what '4' (Linear) returns differs"),
        (channel_shuffle, "images", "3", "what '3' (Conv2d) returns differs"),
        (lambda n: attention(n, heads=2), "sequences", "(the model)", "the model (Net) computes before 'proj' differs"),
        (
            lambda n: seq(nn.Linear(6, n), act(lambda x: x.sum(-1, keepdim=True)), nn.Linear(1, 3)),
            "vectors", "1", "what '1' (Net) returns is multiplied by 2",
        ),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_at_the_first_module_that_differs(
    build: Callable[[int], nn.Module], data: str, place: str, words: str
):
    inputs = batch(data).float()
    found = checked(build, lambda model: model(inputs), 4 if data == "images" else 8)
    assert found.exact is False
    assert found.first_difference == place
    assert words in found.reason
    assert found.outputs > 1e-3
    assert str(found) == f"not exact: {found.reason}"


def test_gradients_are_compared_where_outputs_agree():
    """`max` gives its gradient to one of the largest copies, `amax` to all of them."""
    exact = checked(lambda n: seq(nn.Linear(6, n), act(lambda x: x.amax(-1, keepdim=True)), nn.Linear(1, 3)))
    found = checked(lambda n: seq(nn.Linear(6, n), act(lambda x: x.max(-1, keepdim=True).values), nn.Linear(1, 3)))
    assert exact.exact is True
    assert found.exact is False
    assert found.outputs < 1e-14
    assert 0.5 <= found.updates <= 2
    assert found.first_difference == "0"
    assert "the update of '0.bias' differs by 100 % from that of Table 1" in found.reason


def autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return s.body(x)


def with_small_dtype(dtype: torch.dtype) -> Callable[[int], nn.Module]:
    return lambda n: seq(mlp(n), act(lambda x: x.float() + torch.zeros(4).to(dtype))).to(dtype)


def with_logarithm(n: int) -> nn.Module:
    """Of perturbed parameters it is NaN."""
    return Net(
        lambda s, x: s.out(s.inp(x)) + torch.log(1 - (s.one - 1).abs() * 1e3),
        inp=nn.Linear(6, n), out=nn.Linear(n, 4), one=nn.Parameter(torch.ones(4)),
    )  # fmt: skip


EXACT: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module], Any]]] = {
    **{
        str(dtype): (with_small_dtype(dtype), lambda model, dtype=dtype: model(VECTORS.to(dtype)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    "autocast": (lambda n: Net(autocast, body=mlp(n)), lambda model: model(VECTORS)),
    "a logarithm": (with_logarithm, lambda model: model(VECTORS)),
    "a dictionary": (mlp, lambda model: {"logits": model(VECTORS), "loss": None}),
    "a tuple": (mlp, lambda model: (out := model(VECTORS), None, [out.sum()])),
    "a number": (mlp, lambda model: model(VECTORS).square().mean()),
    "indices": (mlp, lambda model: (model(VECTORS).argmax(-1), model(VECTORS))),
    "complex numbers": (mlp, lambda model: torch.complex(model(VECTORS), 2 * model(VECTORS))),
}


@pytest.mark.parametrize("case", EXACT)
def test_any_dtype_and_structure_is_compared_in_float64(case: str):
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        found = checked(*EXACT[case])
        assert torch.is_autocast_enabled("cpu") is (case == "autocast")
    assert (found.exact, found.untested, found.updates < 1e-12) == (True, (), True)
    assert found.outputs < 1e-14


@pytest.fixture
def memory_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as float32 copies of models of 8 → 16 units need, and float64 ones do not."""

    def free(*_: Any) -> Iterator[torch.dtype]:
        yield torch.float32

    monkeypatch.setattr(module, "_precisions", free)


@pytest.mark.usefixtures("memory_for_float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float32_ten_times_the_rounding_is_allowed(dtype: torch.dtype):
    inputs = VECTORS.to(dtype)
    found = checked(lambda n: mlp(n).to(dtype), lambda model: model(inputs))
    assert (found.exact, found.precision) == (True, "float32")
    assert 1e-9 < found.outputs < 1e-6
    sequences = batch("sequences").to(dtype)
    wrong = checked(lambda n: attention(n, heads=2).to(dtype), lambda model: model(sequences))
    assert wrong.exact is False
    assert wrong.outputs > 1e-4


def test_the_precision_follows_the_memory(monkeypatch: pytest.MonkeyPatch):
    narrow, wide = mlp(8), mlp(16)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (narrow, wide)]
    in_float64 = 8 * (3 * sizes[1] + 4 * sizes[0])
    in_float32 = 4 * 3 * sizes[1] + (4 * 4 + 24) * sizes[0]
    for free, wanted in ((2 * in_float64, "float64"), (2 * in_float64 - 2, "float32"), (2 * in_float32 - 2, None)):
        monkeypatch.setattr(module, "free_bytes", lambda device, free=free: free)
        found = check_step(narrow, wide, (), lambda model: model(VECTORS), mupscale.plan(narrow, wide))
        assert (found.precision if found.exact else None) == wanted
    assert found.exact is None
    assert str(found).startswith("not checked: copies of both models do not fit into half of the free memory")


def test_what_only_training_uses_is_tested_there():
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.always(x) + (s.trained(x) if s.training else 0)

    found = checked(lambda n: Net(forward, always=mlp(n), trained=mlp(n)))
    assert (found.exact, found.untested) == (True, ())

    def summed(s: Any, x: Tensor) -> Tensor:
        return s.always(x) + (s.trained(x).tanh().sum() if s.training else 0)

    wrong = checked(lambda n: Net(summed, always=mlp(n), trained=nn.Linear(6, n)))
    assert wrong.exact is False


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (lambda s, h: F.dropout(h, 0.5, s.training), "exact apart from random numbers: "),
        (lambda s, h: h + 0.1 * torch.randn_like(h), "exact apart from random numbers: "),
        (lambda s, h: s.drop(h), "exact apart from dropout: "),
        (lambda s, h: h * s.drop(torch.ones(5, 1)), "exact: "),
        (lambda s, h: h + torch.randn(5, 1), "exact: "),
        (lambda s, h: h * torch.rand(5, 1, generator=GENERATOR), "exact: "),
    ],
)
def test_random_numbers_are_replayed(middle: Callable[..., Tensor], words: str):
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.out(middle(s, s.inp(x)))

    parts = {"drop": nn.Dropout(0.5)} if "drop" in middle.__code__.co_names else {}
    found = checked(lambda n: Net(forward, inp=nn.Linear(6, n), out=nn.Linear(n, 4), **parts))
    assert bool(found.settled) is (words == "exact: " and "drop" in parts)
    assert (found.exact, found.notes) == (True, ())
    assert str(found).startswith(words)


GENERATOR = torch.Generator().manual_seed(1)


def test_nothing_of_the_caller_changes():
    def forward(s: Any, x: Tensor) -> Tensor:
        s.calls += 1
        s.seen.append(s.calls)
        x.mul_(2)
        noise = torch.rand(()) + random.random() + np.random.rand()
        return s.body(x) * noise.to(x)

    narrow, wide = (
        Net(forward, body=seq(nn.Linear(6, n), nn.BatchNorm1d(n), nn.Linear(n, 4)), calls=0, seen=[]) for n in (8, 16)
    )
    narrow.body[2].requires_grad_(False)
    narrow.body[1].eval()
    narrow.body[0].weight.grad = torch.ones(8, 6)
    inputs, before = VECTORS.clone(), copy.deepcopy((narrow.state_dict(), wide.state_dict()))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = check_step(narrow, wide, (), lambda model: model(inputs), mupscale.plan(narrow, wide))
    assert found.exact is True
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    for model, saved in zip((narrow, wide), before, strict=True):
        assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
        assert (model.calls, model.seen, model.training) == (0, [], True)
    assert torch.equal(narrow.body[0].weight.grad, torch.ones(8, 6))
    assert [p.grad is None for p in wide.parameters()] == [True] * 6
    assert [module.training for module in narrow.body] == [True, False, True]
    assert not narrow.body[2].weight.requires_grad
    assert torch.equal(inputs, VECTORS)


BATCHES = iter(torch.randn(100, 5, 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: None, "returns no tensor of floats. Let it return what the model computes"),
        (lambda model: model(VECTORS).argmax(-1), "returns no tensor of floats"),
        (lambda model: float(model(VECTORS).sum()), "returns no tensor of floats"),
        (lambda model: model(VECTORS).detach(), "has no gradient with respect to a parameter that grows"),
        (lambda model: F.relu(VECTORS), "has no gradient with respect to a parameter that grows"),
        (lambda model: model(VECTORS[:, :3]), "fails on the narrow model: RuntimeError: mat1 and mat2 shapes"),
        (lambda model: model(VECTORS)[:, 7], "fails on the narrow model: IndexError"),
        (lambda model: model(next(BATCHES)), "returns other numbers when it runs again.*Let it use one fixed batch"),
        (
            lambda model: model(VECTORS).view(model[0].out_features % 16 // 2, -1),
            "fails on the wide model: RuntimeError",
        ),
    ],
)
def test_a_call_that_shows_nothing_is_refused(call: Callable[[nn.Module], Any], message: str):
    with pytest.raises(UserError, match=f"upscale: .*{message}"):
        checked(mlp, call)


def test_a_wrapped_model_is_refused_with_the_remedy():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        narrow, wide = (nn.parallel.DistributedDataParallel(mlp(n)) for n in (8, 16))
        with pytest.raises(
            UserError, match=r"Give narrow\.module and wide\.module, and wrap the wide model afterwards"
        ):
            check_step(narrow, wide, (), lambda model: model(VECTORS), mupscale.plan(narrow, wide))
    finally:
        torch.distributed.destroy_process_group()


def unpadded_conv(n: int) -> nn.Module:
    """Of a constant image, all positions are equal, and any layout of the flattened axis gives the same."""
    return seq(nn.Conv2d(3, n, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * n, 3))


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (unpadded_conv, torch.ones(2, 3, 8, 8)),
        (lambda n: seq(nn.Embedding(11, n), attention_of(n)), torch.zeros(2, 7, dtype=torch.long)),
        (lambda n: seq(nn.Embedding(11, n), attention_of(n)), torch.full((2, 7), 10)),
    ],
)
def test_inputs_of_equal_entries_do_not_hide_a_difference(build: Callable[[int], nn.Module], inputs: Tensor):
    before = inputs.clone()
    assert checked(build, lambda model: model(inputs)).exact is False
    assert torch.equal(inputs, before)


def attention_of(n: int) -> nn.Module:
    """Two heads, whose size grows under 1/sqrt(head_dim)."""

    def forward(s: Any, h: Tensor) -> Tensor:
        q, k, v = s.qkv(h).view(*h.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Net(forward, qkv=nn.Linear(n, 3 * n), out=nn.Linear(n, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype):
    inputs, sequences = VECTORS.to("cuda", dtype), batch("sequences").to("cuda", dtype)
    state = torch.cuda.get_rng_state()
    found = checked(lambda n: mlp(n).to("cuda", dtype), lambda model: model(inputs))
    assert (found.exact, found.precision) == (True, "float64")
    assert found.outputs < 1e-14
    wrong = checked(lambda n: attention(n, heads=2).to("cuda", dtype), lambda model: model(sequences))
    assert wrong.exact is False
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_for_float32")
def test_on_a_gpu_in_float32_without_tf32():
    torch.set_float32_matmul_precision("high")
    try:
        images = batch("images").to("cuda", torch.float32)
        found = checked(lambda n: seq(nn.Conv2d(3, n, 3), nn.Flatten(2), nn.Linear(36, 5)).cuda(), lambda m: m(images))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found.exact, found.precision) == (True, "float32")
    assert found.outputs < 1e-5
