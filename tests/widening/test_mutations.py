"""Breaking any one rule is noticed: `verify` answers no, and names where it first shows."""

from dataclasses import replace

import pytest
import torch
from architectures import CASES, cross_entropy
from test_equivalence_grid import OPTIMIZERS, float64_newton_schulz

import mupscale
from mupscale.widening import optimizer_state, rules, weights
from mupscale.widening.plan import TensorPlan


def verdict(case_name: str, optimizer_name: str, **settings) -> mupscale.Verdict:
    case = CASES[case_name]
    torch.manual_seed(0)
    return mupscale.verify(
        case.build(case.narrow), case.build(case.wide), optimizer=OPTIMIZERS[optimizer_name], batches=case.batches(),
        loss=cross_entropy, steps=8, clip=0.05, **{"roles": case.plain_roles} | settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "optimizer_name"),
    [
        ("lr_factor", "sgd"),
        ("lr_factor", "adamw"),
        ("eps_factor", "adam"),
        ("coupled_weight_decay_factor", "sgd_dampened"),
        ("coupled_weight_decay_factor", "adam"),
        ("decoupled_weight_decay_factor", "adamw"),
    ],
)
def test_an_unscaled_hyperparameter(rule: str, optimizer_name: str, monkeypatch: pytest.MonkeyPatch):
    assert verdict("mlp", optimizer_name).passed
    monkeypatch.setattr(rules, rule, lambda *_: 1.0)
    assert not verdict("mlp", optimizer_name).passed


@pytest.mark.parametrize("side", ["k_out", "k_in"])
@pytest.mark.parametrize("rule", ["lr_factor", "coupled_weight_decay_factor"])
def test_one_half_of_a_factor_missing(rule: str, side: str, monkeypatch: pytest.MonkeyPatch):
    original = getattr(rules, rule)
    monkeypatch.setattr(rules, rule, lambda f, *m: original(f._replace(**{side: 1}), *m))
    assert not verdict("mlp", "sgd_dampened").passed


@pytest.mark.parametrize(
    ("optimizer_name", "kind", "key"),
    [
        ("sgd_nesterov", torch.optim.SGD, "momentum_buffer"),
        ("adam", torch.optim.Adam, "exp_avg"),
        ("adam", torch.optim.Adam, "exp_avg_sq"),
        ("adam_amsgrad", torch.optim.Adam, "max_exp_avg_sq"),
        ("adamax", torch.optim.Adamax, "exp_inf"),
        ("rmsprop_centered", torch.optim.RMSprop, "square_avg"),
        ("rmsprop_centered", torch.optim.RMSprop, "grad_avg"),
        ("rmsprop_centered", torch.optim.RMSprop, "momentum_buffer"),
        ("adagrad", torch.optim.Adagrad, "sum"),
        ("muon", torch.optim.Muon, "momentum_buffer"),
    ],
)
def test_a_state_moved_by_another_power(optimizer_name: str, kind: type, key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float64_newton_schulz)
    rule = rules._REGISTRY[kind]
    wrong = {**rule.state, key: 1 - rule.state[key] if rule.state[key] < 2 else 1}
    monkeypatch.setitem(rules._REGISTRY, kind, replace(rule, state=wrong))
    assert not verdict("gpt2_untied", optimizer_name).passed


def test_a_counter_shared_instead_of_cloned(monkeypatch: pytest.MonkeyPatch):
    moved = optimizer_state._moved
    monkeypatch.setattr(
        optimizer_state, "_moved", lambda key, value, *rest: value if key == "step" else moved(key, value, *rest)
    )
    assert not verdict("mlp", "adamw").passed


def test_weights_not_divided_by_the_fan_in_factor(monkeypatch: pytest.MonkeyPatch):
    original = TensorPlan.scales
    monkeypatch.setattr(TensorPlan, "scales", lambda self, out_power, in_power: original(self, out_power, 0))
    answer = verdict("mlp", "adamw")
    assert not answer.passed
    assert answer.first_divergent == "layers.1"  # the first layer with a width behind it


def test_buffers_left_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mupscale.widening.upscale.widen_buffers_", lambda *_: None)
    case = CASES["resnet18"]
    torch.manual_seed(0)
    narrow, wide = case.build(2).eval(), case.build(4).eval()
    for module in narrow.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean)
    answer = mupscale.verify(
        narrow, wide, optimizer=OPTIMIZERS["sgd"], batches=case.batches(), loss=cross_entropy, steps=2
    )
    assert not answer.passed
    assert answer.first_divergent == "stem.1"


def test_widths_forgotten_in_clipping(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "store_table", lambda *_: None)
    assert not verdict("mlp", "adamw").passed


@pytest.mark.parametrize(
    ("pattern", "axis", "wrong", "named"),
    [
        ("layers.*.q_proj.weight", 0, 4, "layers.0.o_proj"),  # whole heads, but not whole query groups
        ("layers.*.k_proj.weight", 0, 1, "layers.0"),
        ("layers.*.v_proj.weight", 0, 1, "layers.0"),
        ("layers.*.o_proj.weight", 1, 1, "layers.0.o_proj"),
    ],
)
def test_a_head_block_of_another_length(pattern: str, axis: int, wrong: int, named: str):
    answer = verdict("llama", "adamw", blocks={pattern: {axis: wrong}})
    assert not answer.passed
    assert answer.first_divergent == named


@pytest.mark.parametrize(
    ("pattern", "axis", "named"),
    [
        ("prelu.weight", 0, "prelu"),
        ("fixed_groups.weight", 1, "fixed_groups"),
        ("bn.*", 0, "bn"),
        ("up.weight", 0, "up"),
        ("head.weight", 1, "head"),
    ],
)
def test_a_convolution_block_forgotten(pattern: str, axis: int, named: str):
    answer = verdict("convnet", "adamw", blocks={pattern: {axis: 1}})
    assert not answer.passed
    assert answer.first_divergent == named
