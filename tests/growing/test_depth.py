"""Growth in depth: the function, the optimizer state, and which layer comes from where."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from bad_input import snapshot
from nets import take_steps
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

import mupscale
from mupscale.errors import UserError
from mupscale.methods import Duplication
from mupscale.widening.layers import layers_of

torch.manual_seed(0)
X = torch.randn(8, 5, dtype=torch.float64)
Y = torch.randn(8, 3, dtype=torch.float64)


class Block(nn.Module):
    residual_outputs = ("down.weight", "down.bias")

    def __init__(self, width: int, multiplier: float = 1.0, hidden: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden or 2 * width)
        self.down = nn.Linear(hidden or 2 * width, width)
        self.branch_multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch_multiplier * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Pre-norm blocks; with `base`, residual branches fall as 1 / depth."""

    def __init__(self, width: int, layers: int, base: int | None = None, hidden: int | None = None) -> None:
        super().__init__()
        multiplier = 1.0 if base is None else base / layers
        self.enter = nn.Linear(5, width)
        self.layers = nn.ModuleList(Block(width, multiplier, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(self.norm(x))


def run(model: nn.Module) -> Tensor:
    return model(X)


def trained(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    return take_steps(model, optimizer, [X] * steps, lambda model, x: (model(x) - Y).square().mean())


def begun(
    build: Callable[[], nn.Module], optimizer: Callable[[Any], Optimizer] = AdamW, steps: int = 5
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(1)
    model = build().double()
    made = optimizer(model.parameters())
    trained(model, made, steps)
    return model, made


def grown(
    depth: Any,
    size: tuple[int, int] = (8, 4),
    base: int | None = None,
    optimizer: Callable[[Any], Optimizer] = AdamW,
    **settings: Any,
) -> tuple[nn.Module, Optimizer, nn.Module, Any]:
    """Two layers of width 8 after a few steps and their optimizer, then what they grew to, of this width and depth."""
    narrow, before = begun(lambda: Net(8, 2, base), optimizer)
    wide = Net(*size, base).double()
    return narrow, before, wide, mupscale.upscale(narrow, wide, before, call=run, depth=depth, **settings)


OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    lambda p: Adam(p, lr=1e-2, amsgrad=True),
    lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    lambda p: Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    lambda p: RMSprop(p, lr=1e-3, momentum=0.5),
    lambda p: RAdam(p, lr=1e-3),
    lambda p: NAdam(p, lr=1e-3),
    lambda p: Adamax(p, lr=1e-3),
]


SIZES = [(8, None), (16, None), (8, 24)]
"""Depth alone, with the width, and with 3/2 of the hidden units."""


@pytest.mark.parametrize(
    ("optimizer", "sizes", "base"), [*zip(OPTIMIZERS, cycle(SIZES), cycle([None, 2]), strict=False)]
)
def test_identity_keeps_the_function(
    optimizer: Callable[[Any], Optimizer], sizes: tuple[int, int | None], base: int | None
) -> None:
    narrow, before = begun(lambda: Net(8, 2, base), optimizer)
    wide = Net(sizes[0], 5, base, sizes[1]).double()
    report = mupscale.upscale(narrow, wide, before, call=run, depth="identity")
    assert report.exact is True
    assert (run(wide) - run(narrow)).abs().max() <= 1e-12
    losses = trained(wide, report.optimizer, 20)
    assert losses[0] == pytest.approx(trained(narrow, before, 1)[0], rel=1e-12)
    assert losses[-1] < losses[0]
    new = wide.get_parameter("layers.1.down.weight")
    assert new.abs().max() > 0  # it has learned


@pytest.mark.parametrize(
    ("optimizer", "depth", "base"),
    [
        (OPTIMIZERS[0], "identity", None),
        (OPTIMIZERS[2], "identity", 2),
        (OPTIMIZERS[4], "interleave", 2),
        (OPTIMIZERS[6], "stack", None),
        (OPTIMIZERS[0], {"layers": [0, 0, 1, 0]}, 2),
    ],
)
def test_width_and_depth_commute(optimizer: Callable[[Any], Optimizer], depth: Any, base: int | None) -> None:
    """Growing in both at once trains as growing in depth alone."""
    losses = []
    for width in (8, 16):
        _, _, wide, report = grown(depth, (width, 4), base, optimizer)
        losses.append(trained(wide, report.optimizer, 20))
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)


def test_copies_continue_the_state_of_their_source_by_the_branch_ratio() -> None:
    narrow, before, wide, report = grown("interleave", base=2)
    after = report.optimizer
    source = before.state[narrow.get_parameter("layers.1.up.weight")]
    for layer in (2, 3):
        copied = after.state[wide.get_parameter(f"layers.{layer}.up.weight")]
        assert torch.equal(copied["exp_avg"], source["exp_avg"] / 2)
        assert torch.equal(copied["exp_avg_sq"], source["exp_avg_sq"] / 4)
        assert copied["step"] == source["step"] == 5
    eps = {name: group["eps"] for group in after.param_groups for name in names_in(wide, group)}
    assert eps["layers.0.up.weight"] == pytest.approx(eps["enter.weight"] / 2)
    sgd = SGD(narrow.parameters(), lr=0.1)
    report = mupscale.upscale(narrow, Net(8, 4, 2).double(), sgd, call=run, depth="interleave")
    assert {group["lr"] for group in report.optimizer.param_groups} == {0.1, 0.2}


def names_in(model: nn.Module, group: dict[str, Any]) -> list[str]:
    held = {id(parameter) for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in held]


def test_inserted_layers_begin_without_state() -> None:
    _, _, wide, report = grown("identity")
    after = report.optimizer
    new = set(report.new_parameters)
    assert new == {name for name in dict(wide.named_parameters()) if name.startswith(("layers.1.", "layers.3."))}
    stateless = {name for name, parameter in wide.named_parameters() if parameter not in after.state}
    assert stateless == new
    trained(wide, after, 3)
    assert {int(after.state[p]["step"]) for n, p in wide.named_parameters() if n in new} == {3}
    assert {int(after.state[p]["step"]) for n, p in wide.named_parameters() if n not in new} == {8}


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[2]])
def test_new_layers_warm_up(optimizer: Callable[[Any], Optimizer]) -> None:
    updates = []
    for steps in (0, 10):
        method = Duplication(state="reset_new_copies", rewarm_steps=steps)
        _, _, wide, report = grown("identity", optimizer=optimizer, method=method)
        trained(wide, report.optimizer, 1)
        updates.append([wide.get_parameter(f"layers.{n}.down.weight").detach().clone() for n in (0, 1)])
    assert torch.equal(updates[0][0], updates[1][0])
    assert updates[1][1] == pytest.approx(updates[0][1] / 10)


def test_which_layer_comes_from_where() -> None:
    def sources(depth: Any, old: int, new: int) -> list[str]:
        (rows,) = layers_of(Net(8, old), Net(8, new), depth).values()
        return [("" if not row.is_new else "+") + row.source for row in rows]

    assert sources("identity", 2, 4) == ["0", "+0", "1", "+1"]
    assert sources("identity", 3, 4) == ["0", "+0", "1", "2"]
    assert sources("interleave", 2, 6) == ["0", "+0", "+0", "1", "+1", "+1"]
    assert sources("stack", 2, 4) == ["0", "1", "+0", "+1"]
    assert sources({"layers": [0, 1, 1]}, 2, 3) == ["0", "1", "+1"]


def test_like_layers_of_a_sequence_are_spread_among_themselves() -> None:
    """A stem and a head in the same list stay where they are."""

    def build(layers: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 8), *(Block(8) for _ in range(layers)), nn.Linear(8, 3))

    rows = layers_of(build(2), build(5), "identity")[""]
    assert [row.source for row in rows] == ["0", "1", "1", "1", "2", "2", "3"]
    unlike = [[nn.Linear(8, 8), *(Block(8) for _ in range(layers))] for layers in (2, 4)]
    rows = layers_of(*(nn.Sequential(*each) for each in unlike), "random")[""]
    assert [row.source for row in rows] == ["0", "1", "1", "2", "2"]
    narrow, _ = begun(lambda: build(2))
    wide = build(5).double()
    assert mupscale.upscale(narrow, wide, call=run, depth="identity").exact
    assert torch.equal(run(wide), run(narrow))


def test_periods_of_unlike_layers_stay_whole() -> None:
    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def build(periods: int) -> nn.Module:
        net = Net(8, 2 * periods)
        for number in range(1, 2 * periods, 2):
            net.layers[number] = Other(8)
        return net

    narrow, _ = begun(lambda: build(2))
    wide = build(4).double()
    report = mupscale.upscale(narrow, wide, call=run, depth="identity")
    assert [row.source for row in report.plan.layers["layers"]] == ["0", "1", "0", "1", "2", "3", "2", "3"]
    assert torch.equal(run(wide), run(narrow))


def test_layers_that_nobody_prepared_are_probed() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    def build(layers: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), *(Plain() for _ in range(layers)), nn.Linear(8, 3))

    narrow, before = begun(lambda: build(2))
    wide = build(4).double()
    report = mupscale.upscale(narrow, wide, before, call=run, depth="identity")
    assert report.exact
    assert torch.equal(run(wide), run(narrow))
    assert {name for name, entry in report.plan.parameters.items() if entry.fill is not None} == {
        f"{layer}.down.{kind}" for layer in (2, 4) for kind in ("weight", "bias")
    }
    with pytest.raises(UserError, match=r"not known which parameters of '1' \(Plain\) make it add nothing"):
        mupscale.plan(narrow, wide, depth="identity")


class Heads(nn.Module):
    """Attention with a fused projection, whose layout only a search finds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = width // 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, len(x), 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(len(x), -1))


@pytest.mark.slow
def test_a_width_that_needs_a_search_is_found_in_a_deeper_model() -> None:
    def build(width: int, layers: int) -> nn.Module:
        return nn.Sequential(nn.Linear(5, width), *(Heads(width) for _ in range(layers)), nn.Linear(width, 3))

    narrow, before = begun(lambda: build(8, 2))
    wide = build(16, 4).double()
    report = mupscale.upscale(narrow, wide, before, call=run, depth="identity")
    assert report.exact is True
    assert (run(wide) - run(narrow)).abs().max() <= 1e-12
    with pytest.raises(UserError, match=r"with new layers that add nothing, the wide model .* Nothing was written"):
        mupscale.upscale(narrow, build(16, 4).double(), call=run, depth="identity", on_mismatch="error")


def test_random_layers_keep_their_initial_values() -> None:
    narrow, before = begun(lambda: Net(8, 2))
    wide = Net(8, 4).double()
    own = wide.get_parameter("layers.1.up.weight").detach().clone()
    report = mupscale.upscale(narrow, wide, before, call=run, depth="random", noise=mupscale.AdditiveNoise(0.1))
    assert torch.equal(wide.get_parameter("layers.1.up.weight"), own)
    assert report.exact is False
    assert "change what call returns by" in report.check
    with pytest.raises(UserError, match="keeps the initial values of the deep model"):
        mupscale.upscale(narrow, lambda: Net(8, 4).double(), before, call=run, depth="random")


def test_noise_leaves_inserted_outputs_alone_and_parts_copies() -> None:
    wide = grown("identity", (16, 4), noise=mupscale.AdditiveNoise(0.1))[2]
    assert not wide.get_parameter("layers.1.down.weight").any()
    wide = grown("interleave", (16, 4), noise=mupscale.AdditiveNoise(0.1))[2]
    assert not torch.equal(wide.get_parameter("layers.0.up.weight"), wide.get_parameter("layers.1.up.weight"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "function"), [("identity", True), ("interleave", False), ("stack", False), ("random", False)]
)
def test_each_choice_keeps_what_it_claims(depth: Any, function: bool) -> None:
    check = mupscale.check_claim(
        Net(8, 2),
        Net(16, 4),
        Duplication(),
        optimizer=lambda p: AdamW(p, lr=1e-2),
        batches=[X],
        loss=lambda model, x: (model(x) - Y).square().mean(),
        depth=depth,
    )
    assert check.claim == (function, False)
    assert check.holds


def test_consuming_frees_the_shallow_model_and_gives_the_same() -> None:
    answers = []
    for consume in (False, True):
        narrow, before, wide, report = grown("interleave", (16, 4), consume=consume)
        answers.append(trained(wide, report.optimizer, 3))
    assert answers[0] == answers[1]
    assert not any(parameter.numel() for parameter in narrow.parameters())
    assert not before.state


def test_gradients_that_wait_are_carried_to_copies_and_not_to_inserted_layers() -> None:
    for depth, names in (("interleave", ["layers.0", "layers.1"]), ("identity", ["layers.0"])):
        narrow, _ = begun(lambda: Net(8, 2, 2), steps=0)
        (run(narrow) - Y).square().mean().backward()
        wide = Net(8, 4, 2).double()
        mupscale.upscale(narrow, wide, call=run, depth=depth)
        scale = 0.5 if depth == "interleave" else 1.0
        waiting = narrow.get_parameter("layers.0.up.weight").grad
        for name in names:
            assert torch.allclose(wide.get_parameter(f"{name}.up.weight").grad, waiting * scale, rtol=1e-12)
    assert wide.get_parameter("layers.1.up.weight").grad is None


def test_mup_follows_the_branch_multiplier_at_any_depth_of_the_base() -> None:
    for base_layers in (2, 3, 8):
        model = mupscale.set_base_shapes(Net(16, 8, 2), Net(8, base_layers, 2), Net(4, base_layers, 2))
        optimizer = mupscale.apply_mup(AdamW(model.parameters(), lr=0.01, eps=1e-8), model)
        eps = {name: group["eps"] for group in optimizer.param_groups for name in names_in(model, group)}
        assert eps["layers.5.up.weight"] == pytest.approx(1e-8 / 2 / 4)
        assert eps["enter.weight"] == pytest.approx(1e-8 / 2)


def shared() -> nn.Module:
    net = Net(8, 2)
    net.layers[1].up = net.layers[0].up
    return net


@pytest.mark.parametrize(
    ("narrow", "wide", "depth", "message"),
    [
        (Net(8, 4), Net(8, 2), "identity", r"layers \(4 → 2 layers\): the deep model has fewer layers"),
        (Net(8, 2), Net(8, 3), "interleave", "interleave needs a multiple of the number of layers"),
        (Net(8, 2), Net(8, 3), "stack", "stack needs a multiple of the number of layers"),
        (nn.Linear(5, 3), nn.Linear(5, 3), "identity", "no list of layers is longer in the deep model; there is none"),
        (Net(8, 2), Net(8, 4), None, "say how it becomes deeper, with depth"),
        (Net(8, 2), Net(8, 4), "twice", "depth must be identity, interleave, stack, random, or the source"),
        (Net(8, 2), Net(8, 4), {"blocks": [0, 0, 1, 1]}, r"no list of layers 'blocks' .* layers \(2 → 4 layers\)"),
        (Net(8, 2), Net(8, 4), {"layers": [0, 0, 1, 2]}, "needs 4 numbers from 0 to 1, the source of each layer"),
        (Net(8, 2), Net(8, 4), {"layers": [0, 1]}, "needs 4 numbers from 0 to 1, the source of each layer"),
        (shared(), Net(8, 4), "stack", "is shared between layers"),
    ],
)
def test_bad_depth(narrow: nn.Module, wide: nn.Module, depth: Any, message: str) -> None:
    before = snapshot(narrow, wide)
    with pytest.raises(UserError, match=message) as error:
        mupscale.upscale(narrow, wide, call=lambda model: model(X.float()), depth=depth)
    assert "\n" not in str(error.value)
    assert snapshot(narrow, wide) == before
