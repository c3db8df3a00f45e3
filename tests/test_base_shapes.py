"""muP: width tables that survive copies, readout multipliers, initialisation."""

import copy
import io
import math
import pickle

import mup
import pytest
import torch
from architectures import CASES
from mup_optimizers import MuAdam, MuAdamW, MuSGD
from torch import nn

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.models.resnet import ResNet18Net
from mupscale.widening.records import records_of


def gpt2(width: int, tied: bool = True) -> nn.Module:
    return GPT2Net(width, layers=2, heads=2, vocabulary=64, context=16, tied=tied)


def mup_gpt2(width: int, **settings) -> nn.Module:
    return mupscale.set_base_shapes(gpt2(width, **settings), gpt2(8, **settings), gpt2(16, **settings), init="constant")


def _assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def _emptied(model: nn.Module) -> nn.Module:
    weights = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu").load_state_dict(weights)
    return model


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch_save": lambda model: _saved(model),
    "assign": _assigned,
    "to_empty": _emptied,
    "ema": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
def test_copies_lose_nothing(how: str):
    torch.manual_seed(0)
    model, tokens = mup_gpt2(32), torch.randint(64, (2, 8))
    wanted = model(tokens)
    wanted_rates = rates(model)
    twin = COPIES[how](model)
    assert torch.equal(twin(tokens), wanted)
    assert twin.head.readout.multiplier == 0.25
    assert all(wanted_rates[name] == rate for name, rate in rates(twin).items())
    assert records_of(twin) == records_of(mup_gpt2(32))


def rates(model: nn.Module) -> dict[str, tuple[float, float]]:
    """By every name: some copies untie what was tied."""
    groups = {id(p): (g["lr"], g["eps"]) for g in MuAdamW(model).param_groups for p in g["params"]}
    return {name: groups[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("width", [4, 8, 32])
def test_the_readout_averages(width: int):
    """Below, at and above the base width of 8."""
    model = mup_gpt2(width, tied=False)
    assert model.head.readout.multiplier == 8 / width
    model.head.readout.output_mult = 3.0
    x = torch.randn(5, width)
    torch.testing.assert_close(model.head.readout(x), x @ model.head.readout.weight.T * 8 / width)


def std(model: nn.Module, name: str) -> float:
    return model.get_parameter(name).std().item()


def test_init_mlp():
    torch.manual_seed(0)
    narrow, wide = (
        mupscale.set_base_shapes(*(MLPNet(200, (n, n), 300, readout_zero_init=False) for n in (width, 32, 64)))
        for width in (256, 1024)
    )
    assert std(wide, "layers.0.weight") / std(narrow, "layers.0.weight") == pytest.approx(1, rel=0.05)
    assert std(wide, "layers.1.weight") / std(narrow, "layers.1.weight") == pytest.approx(1 / 2, rel=0.05)
    assert std(wide, "readout.weight") / std(narrow, "readout.weight") == pytest.approx(1, rel=0.05)
    # torch draws biases ∝ fan_in^-1/2; muP wants them as at the base width of 32: uniform with bound 32^-1/2
    for model in (narrow, wide):
        assert std(model, "layers.1.bias") == pytest.approx(1 / math.sqrt(32) / math.sqrt(3), rel=0.1)
        assert std(model, "readout.bias") == pytest.approx(1 / math.sqrt(32) / math.sqrt(3), rel=0.1)
        assert std(model, "readout.weight") == pytest.approx(1 / math.sqrt(32) / math.sqrt(3), rel=0.05)


def test_init_resnet():
    torch.manual_seed(0)
    narrow, wide = (mupscale.set_base_shapes(ResNet18Net(w), ResNet18Net(4), ResNet18Net(8)) for w in (8, 32))
    assert std(wide, "stem.0.weight") / std(narrow, "stem.0.weight") == pytest.approx(1, rel=0.2)
    assert std(wide, "stages.1.rest.0.conv2.weight") / std(narrow, "stages.1.rest.0.conv2.weight") == pytest.approx(
        1 / 2, rel=0.05
    )
    assert not wide.readout.weight.any()
    assert wide.stages[0].first.bn1.weight.eq(1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_init_gpt2(tied: bool):
    torch.manual_seed(0)
    for width in (8, 64, 256):
        model = mup_gpt2(width, tied=tied)
        assert std(model, "wte.weight") == pytest.approx(0.02, rel=0.15)
        assert std(model, "wpe.weight") == pytest.approx(0.02, rel=0.15)
        assert std(model, "blocks.0.attention.qkv.weight") == pytest.approx(0.02 / math.sqrt(width / 8), rel=0.15)
        assert std(model, "blocks.0.mlp.2.weight") == pytest.approx(0.02 / 2 / math.sqrt(width / 8), rel=0.15)
        assert std(model, "head.readout.weight") == pytest.approx(0.02, rel=0.15)
        assert (model.head.readout.weight is model.wte.weight) == tied


def test_the_norm_of_a_tied_multiplier_free_readout_carries_the_width():
    class Tied(nn.Module):
        width_roles = {"norm.*": "readout"}  # noqa: RUF012

        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed, self.norm, self.head = (
                nn.Embedding(9, width),
                nn.LayerNorm(width),
                nn.Linear(width, 9, bias=False),
            )
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(tokens)))

    Untold = type("Untold", (Tied,), {"width_roles": {}})
    with pytest.raises(ValueError, match="conflicting roles"):
        mupscale.set_base_shapes(Untold(8), Untold(2), Untold(4))
    model = mupscale.set_base_shapes(Tied(8), Tied(2), Tied(4))
    assert model.norm.weight.eq(0.25).all()
    got = {tuple(p.shape): g["lr"] for g in MuAdam(model, lr=1.0).param_groups for p in g["params"]}
    assert got == {(9, 8): 1.0, (8,): 0.25}
    verdict = mupscale.verify(
        model,
        mupscale.set_base_shapes(Tied(24), Tied(2), Tied(4)),
        optimizer=lambda ps: MuAdamW(ps, lr=0.01),
        steps=20,
        batches=[torch.arange(9)],
        loss=lambda m, x: nn.functional.cross_entropy(m(x), x.flip(0)),
        clip=0.1,
    )
    assert verdict.passed, verdict


def test_mups_own_readout_works_too():
    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer, self.hidden, self.readout = (
                nn.Linear(4, width),
                nn.Linear(width, width),
                mup.MuReadout(width, 3),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.readout(self.hidden(self.layer(x).relu()).relu())

    torch.manual_seed(0)
    narrow, wide = (mupscale.set_base_shapes(Net(n), Net(2), Net(4)) for n in (8, 24))
    verdict = mupscale.verify(
        narrow, wide, optimizer=lambda ps: MuSGD(ps, lr=0.1, momentum=0.9), steps=20,
        batches=[torch.randn(8, 4) for _ in range(3)], loss=lambda m, x: (m(x) - 1).square().mean(),
    )  # fmt: skip
    assert verdict.passed, verdict


def test_depthwise_transposed_and_grouped_widths():
    case = CASES["convnet"]
    table = records_of(mupscale.set_base_shapes(case.build(16), case.build(4), case.build(8)))
    width = {name: (1 / w.scale.gradient, 1 / w.scale.weight) for name, w in table.items()}
    assert width["stem.weight"] == (4, 1)
    assert width["depthwise.weight"] == (4, 1)
    assert width["fixed_groups.weight"] == (4, 4)
    assert width["growing_groups.weight"] == (4, 1)
    assert width["up.weight"] == (4, 4)
    assert width["up_depthwise.weight"] == (4, 1)
    assert width["head.weight"] == (1, 4)
    assert width["head.bias"] == (1, 1)


def test_errors():
    def build(*hidden: int) -> nn.Module:
        return MLPNet(4, hidden, 3)

    with pytest.raises(ValueError, match="nothing is width"):
        mupscale.set_base_shapes(build(8, 8), build(8, 8))
    with pytest.raises(ValueError, match="different depth"):
        mupscale.set_base_shapes(build(8, 8), build(8), build(4))
    with pytest.raises(
        ValueError, match=r"axis 0 of 'layers.1.weight' is 4 in the base model and 8 here, but is not width"
    ):
        mupscale.set_base_shapes(build(8, 8), build(4, 4), build(8, 4))
    model = mupscale.set_base_shapes(build(8, 8), build(4, 4))
    with pytest.raises(ValueError, match="already; pass init=None"):
        mupscale.set_base_shapes(model, build(2, 2))
    mupscale.set_base_shapes(model, build(2, 2), init=None)
    assert model.readout.multiplier == 0.25
    with pytest.raises(ValueError, match="init must be"):
        mupscale.set_base_shapes(build(8, 8), build(4, 4), init="normal")
