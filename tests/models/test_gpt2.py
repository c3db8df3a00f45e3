"""GPT-2's own loss is the cross-entropy of its logits, in every precision, compiled or not."""

from collections.abc import Iterator
from functools import partial, partialmethod
from itertools import product
from typing import Any

import pytest
import torch
from gradients import relative_gap, with_gradients
from mup_optimizers import MuAdamW
from tiers import slow_except
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import mupscale
from mupscale.errors import UserError
from mupscale.models.gpt2 import GPT2, Head

VOCABULARY, CONTEXT = 37, 12


# --- the loss


@pytest.mark.parametrize("targets_given", [True, False])
def test_in_bfloat16_the_loss_is_right_to_rounding(targets_given: bool) -> None:
    """By autocast; the other side of the comparison is the logits that a validation sees."""
    torch.manual_seed(0)
    head, exact = Head(64, VOCABULARY), Head(64, VOCABULARY).double()
    exact.load_state_dict(head.state_dict())
    x, targets = torch.randn(4, CONTEXT, 64), torch.randint(VOCABULARY, (4, CONTEXT))
    truth = with_gradients(exact(x.double(), targets), *exact.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(x, targets) if targets_given else F.cross_entropy(head(x).flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.float32
    ours = with_gradients(loss, *head.parameters())
    assert [gradient.dtype for gradient in ours] == [torch.float32] * 4
    # a product of rounded factors is off by 2⁻⁸; a mean over many by less
    assert relative_gap(ours[0], truth[0]) < 2**-9
    for mine, other in zip(ours[1:], truth[1:], strict=True):
        assert relative_gap(mine, other) < 2**-7


# --- the network


def network(tied: bool, compile: bool = False) -> GPT2:
    torch.manual_seed(0)
    module = GPT2(
        16, base_width=4, layers=3, heads=2, vocabulary=VOCABULARY, context=CONTEXT, tied=tied, compile=compile
    )
    module.configure_model()
    return module


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_logits_of_a_network_agree(tied: bool) -> None:
    net: Any = network(tied).double().net
    rows = tokens()
    assert net.head.readout.multiplier == 1 / 4
    assert (net.head.readout.weight is net.wte.weight) == tied
    parameters = dict(net.named_parameters())
    assert ("head.readout.weight" in parameters) != tied
    ours = with_gradients(net(rows[:, :-1], rows[:, 1:]), *parameters.values())
    logits = net(rows[:, :-1])
    assert logits.shape == (3, CONTEXT, VOCABULARY)
    theirs = with_gradients(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), *parameters.values())
    for name, mine, other in zip(("loss", *parameters), ours, theirs, strict=True):
        if "qkv.bias" in name:  # that of the keys has no effect, and so no gradient
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-15)
        else:
            assert relative_gap(mine, other) < 1e-12, name


@pytest.mark.parametrize(("enabled", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_residual_stream_has_the_precision_of_the_matmuls(enabled: bool, expected: torch.dtype) -> None:
    net: Any = network(tied=True).net
    rows, seen = tokens(), []
    for part in (*net.blocks, net.head):
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        net(rows[:, :-1], rows[:, 1:])
    assert seen == [expected] * 4


# --- how weights are drawn

RECIPE: dict[str, Any] = {"tied": False, "gain": 0.5, "embedding_std": 0.1, "output_mult": 4.0}


@pytest.mark.parametrize("width", [64, 256])
def test_weights_are_drawn_as_the_recipe_says(width: int) -> None:
    torch.manual_seed(0)
    module = GPT2(width, base_width=64, layers=1, heads=8, vocabulary=500, context=64, **RECIPE)
    weights = dict(module.network(width).named_parameters())
    expected = {
        "wte.weight": 0.1,
        "wpe.weight": 0.1,
        "blocks.0.attention.qkv.weight": 0.5 / width**0.5,
        "blocks.0.attention.project.weight": 0.5 / width**0.5,
        "blocks.0.mlp.0.weight": 0.5 / width**0.5,
        "blocks.0.mlp.2.weight": 0.5 / (4 * width) ** 0.5,
        "head.readout.weight": 0.5 / 64**0.5,  # whose multiplier falls with the width in its place
    }
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.03), name
    readout = module.network(width).get_submodule("head.readout")
    assert readout.multiplier == 4.0 * 64 / width


# --- growing by heads


@pytest.mark.parametrize(
    ("kept", "tied", "attention_scale"),
    slow_except(
        product(("heads", "head_dim"), (True, False), (8.0, 3.7)),
        ("head_dim", True, 3.7),
        kept=[("heads", True, 8.0), ("heads", False, 3.7)],
    ),
)
def test_both_ways_to_grow_are_exact(
    kept: str, tied: bool, attention_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mupscale.models.gpt2.ATTENTION_SCALE", attention_scale)
    torch.manual_seed(0)
    module = GPT2(8, base_width=4, layers=2, vocabulary=VOCABULARY, context=CONTEXT, tied=tied, **{kept: 4})
    rows = [torch.randint(VOCABULARY, (4, 9)) for _ in range(4)]
    verdict = mupscale.verify(
        module.network(8),
        module.network(24),
        optimizer=lambda params: MuAdamW(params, lr=0.003, eps=1e-3, weight_decay=0.1),
        batches=rows,
        loss=lambda net, batch: net(batch[:, :-1], batch[:, 1:]),
        steps=20,
        clip=0.05,
    )
    assert verdict.passed, verdict
    assert verdict.loss_drift <= 1e-12
    assert verdict.activation_drift <= 1e-12
    assert verdict.plan is not None
    assert not verdict.plan.notes
    in_blocks = [name for name, entry in verdict.plan.parameters.items() if entry.in_blocks]
    of_heads = ("qkv.weight", "qkv.bias", "project.weight")
    expected = [f"blocks.{layer}.attention.{name}" for layer in range(2) for name in of_heads]
    assert in_blocks == (expected if kept == "head_dim" else [])


# --- depth


def deep(layers: int, base_layers: int | None, optimizer: Any = torch.optim.AdamW, **options: Any) -> GPT2:
    torch.manual_seed(0)
    shape = {"base_width": 8, "heads": 2, "vocabulary": VOCABULARY, "context": CONTEXT}
    module = GPT2(8, layers=layers, base_layers=base_layers, optimizer=optimizer, **shape, **options)
    module.configure_model()
    return module


def levels(module: GPT2, key: str) -> dict[str, float]:
    """A hyperparameter of every parameter."""
    names = {id(parameter): name for name, parameter in module.net.named_parameters()}
    groups = module.configure_optimizers().param_groups
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-6, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.01, weight_decay=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "of_blocks"),
    [(ADAMW, {"lr": 0.01, "eps": 2.5e-7, "weight_decay": 0.1}), (SGD, {"lr": 0.04, "weight_decay": 0.025})],
)
def test_hyperparameters_follow_completep(optimizer: Any, of_blocks: dict[str, float]) -> None:
    """At four times the base depth: Adam's eps falls, and only in blocks; so that SGD does the same, its rate rises."""
    module = deep(8, 2, optimizer)
    for key, expected in of_blocks.items():
        for name, level in levels(module, key).items():
            base = module.configure_optimizers().defaults[key]
            assert level == pytest.approx(expected if name.startswith("blocks.") else base), (name, key)


def test_residual_branches_fall_with_the_depth_and_initial_weights_do_not() -> None:
    module = deep(8, 2)
    net: Any = module.net
    assert {block.branch_multiplier for block in net.blocks} == {0.25}
    drawn = torch.stack([block.mlp[2].weight for block in net.blocks])
    assert drawn.std().item() == pytest.approx(0.02 / 4**0.5, rel=0.05)
    block, x = net.blocks[0].double(), torch.randn(3, 5, 8, dtype=torch.float64)
    attended = x + block.attention(block.ln_1(x)) / 4
    expected = attended + block.mlp(block.ln_2(attended)) / 4
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-15)


def test_the_norm_for_clipping_does_not_depend_on_the_depth() -> None:
    """Eight blocks, each with a quarter of the gradient of the two of the base, have a norm as large as theirs."""
    norms = []
    for layers in (2, 8):
        module = deep(layers, 2)
        assert module.net is not None
        for name, parameter in module.net.named_parameters():
            in_block = name.startswith("blocks.")
            parameter.grad = torch.full_like(parameter, 2 / layers if in_block else 0.0)
        norms.append(float(mupscale.clip_grad_norm_(module.net, 1e9)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("base_layers", [0, -1, 1.5])
def test_a_base_depth_that_does_not_exist_is_refused(base_layers: Any) -> None:
    with pytest.raises(UserError, match=r"model.base_layers must be a whole number of at least 1, got"):
        GPT2(8, heads=2, base_layers=base_layers)


# --- compiled


@pytest.fixture
def in_one_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules compile for a backend that changes nothing and needs no compiler, and a graph that breaks is an error."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_the_head_compiles_as_one_graph(enabled: bool, in_one_graph: None) -> None:
    torch.manual_seed(0)
    stream = torch.bfloat16 if enabled else torch.float32
    head, x, targets = (
        Head(8, VOCABULARY),
        torch.randn(2, CONTEXT, 8, dtype=stream),
        torch.randint(VOCABULARY, (2, CONTEXT)),
    )

    def result() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = head(x, targets)
        return with_gradients(loss, *head.parameters())

    eager = result()
    head.compile()
    for mine, other in zip(result(), eager, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 1
