"""Weight normalisation: W = g · v / ‖v‖ grows exactly, however torch holds g and v."""

import warnings

import pytest
import torch
from nets import OPTIMIZERS, take_steps
from tiers import slow_except
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import mupscale
from mupscale.errors import UserError


def old_weight_norm(layer, dim=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, dim=dim)


APIS = {"parametrisation": parametrizations.weight_norm, "hook": old_weight_norm}


class OverTime(nn.Module):
    def forward(self, x_BCT):
        return x_BCT.mean(-1)


def network(width, norm=parametrizations.weight_norm, dim=0):
    of_matrices = dim if dim in (0, 1) else None
    return nn.Sequential(
        norm(nn.Conv1d(3, width, 3, padding=1), dim=dim),
        nn.ReLU(),
        norm(nn.Conv1d(width, width, 3, padding=1, groups=width), dim=dim),
        norm(nn.Conv1d(width, width, 3, padding=1, groups=2, bias=False), dim=dim),
        nn.Tanh(),
        norm(nn.ConvTranspose1d(width, width, 3, padding=1), dim=dim),
        norm(nn.ConvTranspose1d(width, width, 3, padding=1, groups=width), dim=dim),
        OverTime(),
        norm(nn.Linear(width, width), dim=of_matrices),
        nn.GELU(),
        norm(nn.Linear(width, 2), dim=of_matrices),
    )


def batches(count=4):
    torch.manual_seed(1)
    return [(torch.randn(6, 3, 8), torch.randn(6, 2)) for _ in range(count)]


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


NEW = "parametrisation"
CELLS = [(NEW, 0, "adamw"), (NEW, 1, "sgd"), (NEW, -2, "adamw"), (NEW, None, "sgd"), ("hook", 1, "adamw")]


@pytest.mark.parametrize(("api", "dim", "optimizer"), slow_except(CELLS, CELLS[0]))
def test_training_goes_on_as_before(api, dim, optimizer):
    torch.manual_seed(0)
    narrow, wide = (network(width, APIS[api], dim) for width in (4, 12))
    verdict = mupscale.verify(narrow, wide, optimizer=OPTIMIZERS[optimizer], batches=batches(), loss=loss, steps=8)
    assert verdict, str(verdict)


@pytest.mark.parametrize("api", APIS)
def test_discover_finds_blocks_and_leaves_the_models_alone(api):
    """Of a flattened image every channel is a block; a copy of a parametrised layer shares its class."""

    def build(width):
        layers = nn.Conv1d(3, width, 3), nn.Flatten(), nn.Tanh(), nn.Linear(6 * width, 2)
        return nn.Sequential(APIS[api](layers[0]), *layers[1:3], APIS[api](layers[3]))

    torch.manual_seed(0)
    narrow, wide = build(4), build(8)
    take_steps(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), batches(3), loss)
    names, types = [*dict(narrow.named_parameters())], [type(module) for module in narrow.modules()]
    x = torch.randn(5, 3, 8)
    found = mupscale.discover(narrow, wide, lambda model: model(x))
    assert found.blocks["3.weight"] in ({1: 6}, {1: 24})
    assert [*dict(narrow.named_parameters())] == names
    assert [type(module) for module in narrow.modules()] == types
    mupscale.upscale(narrow, wide, hints=found)
    torch.testing.assert_close(wide(x), narrow(x))
    larger, largest = build(10), build(30)
    mupscale.upscale(larger, largest, hints=found.resolved(larger, largest))
    torch.testing.assert_close(largest(x), larger(x))


def test_a_unit_of_the_weight_scales_its_gain():
    torch.manual_seed(0)
    narrow, wide = (nn.Sequential(parametrizations.weight_norm(nn.Linear(3, width))) for width in (4, 8))
    mupscale.upscale(narrow, wide, hints=mupscale.Hints(rescale={"0.weight": 0.5}))
    torch.testing.assert_close(wide[0].weight, 0.5 * narrow[0].weight.repeat_interleave(2, 0))


def test_noise():
    """Centred noise preserves the function, so it spares weights whose norm it would change; plain noise does not."""
    torch.manual_seed(0)
    layers = [parametrizations.weight_norm, lambda layer: layer, parametrizations.weight_norm]
    narrow, *wider = (
        nn.Sequential(*(norm(nn.Linear(n, m)) for norm, (n, m) in zip(layers, ((3, w), (w, w), (w, 2)), strict=True)))
        for w in (4, 8, 8)
    )
    x = torch.randn(5, 3)
    v = "2.parametrizations.weight.original1"
    for wide, centred in zip(wider, (True, False), strict=True):
        report = mupscale.upscale(narrow, wide, noise=mupscale.AdditiveNoise(0.5, centred=centred))
        assert (report.noise[v] == 0) == centred
        assert report.noise["1.weight"] > 0
        assert torch.allclose(wide(x), narrow(x), atol=1e-5) == centred


@pytest.mark.parametrize(
    "method", [mupscale.methods.ZeroPadding(), mupscale.methods.HyperCloning("diagonal"), mupscale.methods.Lemon]
)
def test_methods_whose_copies_differ_are_refused(method):
    narrow, wide = (
        nn.Sequential(nn.Linear(3, width), parametrizations.weight_norm(nn.Linear(width, 2))) for width in (4, 8)
    )
    if isinstance(method, type):
        method = method(groups={"hidden": {"0.weight": 0, "1.parametrizations.weight.original1": 1}})
    with pytest.raises(UserError, match="Use Duplication"):
        mupscale.upscale(narrow, wide, method=method)


def test_units_with_unequal_numbers_of_copies_are_refused():
    narrow, wide = (network(width) for width in (4, 6))
    with pytest.raises(UserError, match=r"divided by its norm \(weight_norm\).*whole factor"):
        mupscale.plan(narrow, wide)


def test_mup_is_refused():
    with pytest.raises(UserError, match=r"'0' .*weight_norm, for which muP's rates are not known"):
        mupscale.set_base_shapes(network(8), network(4))


def test_a_weight_that_is_only_named_like_a_gain_gets_noise():
    class Gated(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.w_g = nn.Parameter(torch.randn(width, width))

    entry = mupscale.plan(Gated(4), Gated(8), hints=mupscale.Hints(roles={"w_g": "matrix"})).parameters["w_g"]
    assert entry.kind == "weight"
