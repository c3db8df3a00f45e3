"""Parameter groups for another program: the factors are those of the growth method."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import mlp
from torch import nn

import mupscale
from mupscale.hf.continuing import growth_record, parameter_groups
from mupscale.methods import Duplication, GrowthMethod, HyperCloning, Net2Net, ShrinkAndPad, ZeroPadding

SETTINGS: dict[str, float] = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.3}

METHODS: dict[str, tuple[Callable[[], GrowthMethod], set[float]]] = {
    "duplication": (Duplication, {0.01, 0.02}),
    "duplication, same rates": (lambda: Duplication(hyperparameters="same"), {0.02}),
    "hypercloning": (HyperCloning, {0.02}),
    "hypercloning, rules": (lambda: HyperCloning("diagonal", hyperparameters="table"), {0.01, 0.02}),
    "net2net, same rates": (lambda: Net2Net(hyperparameters="same"), {0.02}),
    "zero padding": (ZeroPadding, {0.02}),
    "shrink and pad": (ShrinkAndPad, {0.02}),
}


def settings_by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, list[float]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: [group[key] for key in SETTINGS] for group in groups for p in group["params"]}


@pytest.mark.parametrize("name", METHODS)
def test_the_groups_of_a_report_are_those_of_the_continued_optimizer(name: str):
    make, rates = METHODS[name]
    method, narrow, wide = make(), mlp(4), mlp(8)
    report = mupscale.upscale(narrow, wide, torch.optim.AdamW(narrow.parameters(), **SETTINGS), method=method)
    continued = settings_by_name(wide, report.optimizer.param_groups)
    from_report = settings_by_name(wide, parameter_groups(wide, report, **SETTINGS))
    record = growth_record(report.plan, narrow, mlp(8), method, {})
    from_record = settings_by_name(wide, parameter_groups(wide, record, **SETTINGS))
    assert from_report == continued
    assert from_record == continued
    assert {row[0] for row in continued.values()} == rates
