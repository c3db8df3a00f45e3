"""muP optimizers: learning rate, eps and weight decay of every parameter, with the numbers written out."""

import copy

import pytest
import torch
from mup_optimizers import MuAdam, MuAdamW, MuSGD
from nets import features, mlp, mup, train
from torch import nn

import mupscale


def hyperparameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, ...]]:
    names = {id(p): name for name, p in model.named_parameters()}
    keys = [key for key in ("lr", "eps", "weight_decay") if key in optimizer.param_groups[0]]
    return {names[id(p)]: tuple(float(g[k]) for k in keys) for g in optimizer.param_groups for p in g["params"]}


def test_mup_hyperparameters_follow_the_table():
    """At twice the base width: the paper's Table "muP scaling in its implementation"."""
    model = mup(mlp, 8)
    matrix, vector, readout, scalar = "layers.1.weight", "layers.0.weight", "readout.weight", "readout.bias"

    units = {"lr": 1.0, "weight_decay": 1.0}
    expected = [
        (MuSGD(model, **units), (1, 1), (2, 0.5), (2, 0.5), (1, 1)),
        (MuAdam(model.parameters(), eps=1.0, **units), (0.5, 0.5, 1), (1, 0.5, 0.5), (1, 0.5, 0.5), (1, 1, 1)),
        (MuAdamW(model, eps=1.0, **units), (0.5, 0.5, 2), (1, 0.5, 1), (1, 0.5, 1), (1, 1, 1)),
    ]
    for optimizer, *rows in expected:
        found = hyperparameters(model, optimizer)
        assert [found[name] for name in (matrix, vector, readout, scalar)] == rows


@pytest.mark.parametrize("make", [MuSGD, MuAdam, MuAdamW])
def test_rescaling_relative_to_the_narrow_run_is_muP_at_the_wide_width(make):
    narrow, wide = mup(mlp, 8), mup(mlp, 24)
    settings = {"lr": 0.1, "weight_decay": 0.3}
    narrow_opt, expected = make(narrow, **settings), make(wide, **settings)
    train(narrow, narrow_opt, features)
    report = mupscale.upscale(narrow, wide, narrow_opt)
    got, wanted = hyperparameters(wide, report.optimizer), hyperparameters(wide, expected)
    assert got.keys() == wanted.keys()
    for name in got:
        assert got[name] == pytest.approx(wanted[name], rel=1e-12)


def test_muP_needs_base_shapes_and_is_applied_once():
    with pytest.raises(ValueError, match="has no base shapes"):
        mupscale.apply_mup(torch.optim.SGD((model := mlp(4)).parameters()), model)
    with pytest.raises(ValueError, match="pass the model itself"):
        MuAdam(copy.deepcopy(mup(mlp, 8)).parameters())
    model = mup(mlp, 8)
    optimizer = mupscale.apply_mup(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(ValueError, match="muP-scaled already"):
        mupscale.apply_mup(optimizer, model)
    with pytest.raises(ValueError, match="not in the model"):
        mupscale.apply_mup(torch.optim.SGD(mlp(8).parameters()), model)
