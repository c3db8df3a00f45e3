"""Growth methods: their maps, their weights, and what they refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input import assert_refused, linear
from method_maps import maps
from nets import features, mlp, train
from torch import Tensor, nn

import mupscale
from mupscale import methods
from mupscale.errors import UserError
from mupscale.methods import Duplication, GrowthMethod, HyperCloning, Net2Net, ShrinkAndPad, ZeroPadding
from mupscale.methods.noise import Noise
from mupscale.models.mlp import MLPNet
from mupscale.widening.growth import Growth


def grown(method: GrowthMethod, narrow: nn.Module, wide: nn.Module, **settings: Any) -> mupscale.UpscaleReport:
    torch.manual_seed(0)
    return mupscale.upscale(narrow, wide, method=method, **settings)


@pytest.mark.parametrize("name", [name for name, make in methods.METHODS.items() if make().keeps_function])
def test_weights_follow_from_two_maps(name: str):
    """innᵀ · out = 1 on every axis, and W̃ = out · W · innᵀ + N with N · out = 0."""
    torch.manual_seed(0)
    narrow, wide, method = mlp(5).double(), mlp(15).double(), methods.METHODS[name]()
    plan = grown(method, narrow, wide).plan
    for parameter_name, entry in plan.parameters.items():
        both = [maps(method, entry, axis) for axis in range(len(entry.layouts))]
        for out, inn in both:
            torch.testing.assert_close(inn.T @ out, torch.eye(out.shape[1]).double())
        source, target = narrow.get_parameter(parameter_name).detach(), wide.get_parameter(parameter_name).detach()
        if entry.role in ("matrix", "readout"):
            out_rows = both[0][0] if entry.sides[0] == "out" else torch.eye(len(source)).double()
            expected = out_rows @ source @ both[1][1].T
            rest = target - expected
            assert (rest @ both[1][0]).abs().max() <= 1e-14
            has_rest = name == "hypercloning-noisy" or (name == "hypercloning-diagonal" and entry.role == "matrix")
            assert bool(rest.abs().max() > 1e-3) == has_rest
        elif entry.grows:
            torch.testing.assert_close(target, torch.einsum("ij,j...->i...", both[0][0], source))


UNEQUAL_COPIES = {"aki", "ligo", "shrink-and-pad", "zero-padding"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in methods.METHODS if name != "hypercloning-noisy"])
def test_centred_noise_keeps_what_a_method_computes_or_is_refused(name: str):
    """Also that what is refused would change it."""

    def build(width: int) -> nn.Module:
        torch.manual_seed(1)
        return MLPNet(4, (width, width, width), 3, readout_zero_init=False).double()

    def outputs(noise: mupscale.AdditiveNoise | None) -> Tensor:
        narrow, wide = build(4), build(8)
        method.fit(narrow, wide, [x] * 3, lambda model, batch: model(batch).square().mean())
        grown(method, narrow, wide, noise=noise)
        return wide(x).detach()

    method, noise = methods.METHODS[name](), mupscale.AdditiveNoise(0.5, centred=True)
    x = features().double()
    clean = outputs(None)
    if name in UNEQUAL_COPIES:
        with pytest.raises(UserError, match=rf"those of {type(method).__name__} do not\. Use plain noise"):
            outputs(noise)
        method.equal_copies = True
        assert (outputs(noise) - clean).abs().max() > 1e-3
    else:
        assert (outputs(noise) - clean).abs().max() <= 1e-14


def test_net2net_maps_at_random_and_by_its_seed():
    def copies(seed: int) -> list[int]:
        entry = grown(Net2Net(seed=seed), mlp(8), mlp(24)).plan.parameters["layers.1.weight"]
        assert sum(piece.factor for piece in entry.layouts[0]) == 24
        assert entry.layouts[0] != entry.layouts[1]  # each layer has a map of its own
        return [piece.factor for piece in entry.layouts[0]]

    assert copies(1) == copies(1)
    assert copies(1) != copies(2)
    entry = grown(Net2Net(), mlp(8), mlp(24)).plan.parameters["layers.1.weight"]
    assert entry.scale == (1 / 3, 1 / 3, 9, 1)  # so that rates are those that muP gives to the width
    assert min(copies(1)) >= 1
    assert len(set(copies(1))) > 1


def test_weights_are_shrunk_before_they_are_padded():
    narrow, wide = mlp(4).double(), mlp(8).double()
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.1)
    train(narrow, optimizer, features)
    report = grown(ShrinkAndPad(0.25), narrow, wide, narrow_opt=optimizer)
    weight = wide.layers[1].weight.detach()
    assert torch.equal(weight[::2, ::2], 0.25 * narrow.layers[1].weight)
    assert not weight[1::2].any()
    assert not weight[:, 1::2].any()
    assert torch.equal(wide.readout.weight[:, ::2], 0.25 * narrow.readout.weight)
    assert torch.equal(wide.layers[1].bias[::2], narrow.layers[1].bias)  # biases as they are
    assert not report.optimizer.state
    assert ShrinkAndPad().shrink == 0.4


# --- bad input


def two_layers(method: GrowthMethod, **settings: Any) -> Callable[[], Any]:
    return lambda: (*linear(4, 8), {"method": method, **settings})


def pieces() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2)) for n in (5, 9))
    row = [(4, 1, 2), (1, 1, 1)]
    return (
        narrow,
        wide,
        {"method": ZeroPadding(), "hints": mupscale.Hints(blocks={"0.*": {0: row}, "1.weight": {1: row}})},
    )


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (two_layers(Net2Net()), ("Net2Net: Sequential does not declare which axes hold the same", "width_groups")),
        (two_layers(Net2Net(groups={"hidden": {"fc": 0}})), ("'fc' of the group 'hidden' matches no parameter",)),
        (two_layers(Net2Net(groups={"hidden": {"0.weight": 5}})), ("'0.weight' of the group 'hidden' has no axis 5",)),
        (
            two_layers(Net2Net(groups={"hidden": {"0.weight": 0, "1.weight": 0}})),
            ("the axes of the group 'hidden' do not hold the same units", "Give axes of the same units"),
        ),
        (two_layers(HyperCloning("noisy"), noise=mupscale.AdditiveNoise(0.1)), ("HyperCloning has noise of its own",)),
        (two_layers(Net2Net), ("method must be a growth method",)),
        (pieces, ("ZeroPadding", "different factors", "Use Duplication")),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(build: Callable[[], Any], fragments: tuple[str, ...]):
    assert_refused(build, fragments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Duplication(hyperparameters="mup"), "hyperparameters must be table or same, got 'mup'"),
        (lambda: ShrinkAndPad(0.0), "ShrinkAndPad: shrink must be a number above 0 and at most 1, got 0.0"),
        (lambda: ShrinkAndPad(1.1), "ShrinkAndPad: shrink must be a number above 0 and at most 1, got 1.1"),
        (lambda: ShrinkAndPad(float("nan")), "ShrinkAndPad: shrink must be a number above 0 and at most 1, got nan"),
        (lambda: HyperCloning("noisy", float("nan")), "decibels must be a finite number, got nan"),
        (lambda: HyperCloning("symmetrical"), "variant must be one of symmetric, diagonal, noisy; got 'symmetrical'"),
    ],
)
def test_methods_that_do_not_exist(make: Callable[[], Any], message: str):
    with pytest.raises(UserError, match=message):
        make()


# --- methods and noise of a user


def perceptrons() -> tuple[nn.Module, nn.Module]:
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Linear(n, 2)) for n in (4, 8))
    return narrow, wide


class MeanSquare(Noise):
    """As strong as the weight, which has to be known whole."""

    def constant(self, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> float:
        assert widened.shape == entry.wide_shape
        return float(widened.square().mean().sqrt())


def test_noise_needs_nothing_but_a_constant():
    narrow, wide = perceptrons()
    assert mupscale.upscale(narrow, wide, noise=MeanSquare()).noise["0.weight"] > 0
