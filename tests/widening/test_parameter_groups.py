"""Parameter groups across widths: split where their parameters scale differently, with settings and names kept."""

import torch
from nets import features, mlp, train

import mupscale


def test_groups_remember_where_they_came_from_and_keep_their_settings():
    narrow, wide = mlp(4), mlp(12)
    weights = [p for p in narrow.parameters() if p.ndim == 2]
    biases = [p for p in narrow.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.2}, {"params": biases, "weight_decay": 0.0, "lr": 0.5}], lr=0.1
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    groups = mupscale.upscale(narrow, wide, optimizer).optimizer.param_groups
    assert {(g["source_group"], g["lr"], g["initial_lr"], g["weight_decay"]) for g in groups} == {
        (0, 0.05, 0.1, 0.2),  # the input layer
        (0, 0.05 / 3, 0.1 / 3, 0.2 * 3),  # the hidden matrix and the plain readout; they differ in eps
        (1, 0.25, 0.5, 0.0),
    }


def test_named_parameters_keep_their_names():
    narrow, wide = mlp(4), mlp(8)
    groups = mupscale.upscale(narrow, wide, torch.optim.AdamW(narrow.named_parameters())).optimizer.param_groups
    names = {id(p): name for name, p in wide.named_parameters()}
    assert all([names[id(p)] for p in g["params"]] == g["param_names"] for g in groups)


def test_parts_of_named_groups_have_names_of_their_own():
    narrow, wide = mlp(4), mlp(8)
    weights = [p for p in narrow.parameters() if p.ndim == 2]
    biases = [p for p in narrow.parameters() if p.ndim == 1]
    settings = [{"params": weights, "name": "decay"}, {"params": biases, "name": "decay-2", "eps": 0.0}]
    groups = mupscale.upscale(narrow, wide, torch.optim.AdamW(settings)).optimizer.param_groups
    assert [group["name"] for group in groups] == ["decay", "decay-3", "decay-4", "decay-2"]
    wider = mupscale.upscale(wide, mlp(16), torch.optim.AdamW(groups)).optimizer.param_groups
    assert [group["name"] for group in wider] == [group["name"] for group in groups]


def test_tensor_learning_rates_stay_tensors_of_their_own():
    narrow, wide = mlp(4), mlp(8)
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam(narrow.parameters(), lr=lr, foreach=False)
    train(narrow, optimizer, features)
    report = mupscale.upscale(narrow, wide, optimizer)
    assert lr.item() == 0.1
    rates = {float(group["lr"]) for group in report.optimizer.param_groups}
    assert rates == {0.1, 0.05}
    for group in report.optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor)
        assert group["lr"] is not lr
