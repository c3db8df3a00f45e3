"""Parameter groups split and rescaled, state moved by name."""

import copy

import pytest
import torch
from architectures import CASES, cross_entropy
from torch import nn

import mupscale
from mupscale.models.mlp import MLPNet


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4).to(next(model.parameters()))).square().mean().backward()
        optimizer.step()


def mlp(width: int) -> nn.Module:
    return MLPNet(4, (width, width), 3, readout_zero_init=False)


def mup_mlp(width: int, base: int = 4) -> nn.Module:
    return mupscale.set_base_shapes(mlp(width), mlp(base), mlp(2 * base))


def hyperparameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, ...]]:
    names = {id(p): name for name, p in model.named_parameters()}
    keys = [key for key in ("lr", "eps", "weight_decay") if key in optimizer.param_groups[0]]
    return {names[id(p)]: tuple(float(g[k]) for k in keys) for g in optimizer.param_groups for p in g["params"]}


def test_mup_hyperparameters_follow_the_table():
    """At twice the base width: the paper's Table "muP scaling in its implementation"."""
    model = mup_mlp(8)
    matrix, vector, readout, scalar = "layers.1.weight", "layers.0.weight", "readout.weight", "readout.bias"

    sgd = hyperparameters(model, mupscale.MuSGD(model, lr=1.0, weight_decay=1.0))
    assert (sgd[matrix], sgd[vector], sgd[readout], sgd[scalar]) == ((1, 1), (2, 0.5), (2, 0.5), (1, 1))
    adam = hyperparameters(model, mupscale.MuAdam(model.parameters(), lr=1.0, eps=1.0, weight_decay=1.0))
    assert (adam[matrix], adam[vector], adam[readout], adam[scalar]) == (
        (0.5, 0.5, 1),
        (1, 0.5, 0.5),
        (1, 0.5, 0.5),
        (1, 1, 1),
    )
    adamw = hyperparameters(model, mupscale.MuAdamW(model, lr=1.0, eps=1.0, weight_decay=1.0))
    assert (adamw[matrix], adamw[vector], adamw[readout], adamw[scalar]) == (
        (0.5, 0.5, 2),
        (1, 0.5, 1),
        (1, 0.5, 1),
        (1, 1, 1),
    )


def test_unequal_fans_of_a_matrix():
    base, delta, model = (MLPNet(4, hidden, 3) for hidden in ((2, 2), (4, 4), (8, 6)))
    mupscale.set_base_shapes(model, base, delta)
    got = hyperparameters(model, mupscale.MuSGD(model, lr=1.0, weight_decay=1.0))
    assert got["layers.1.weight"] == (3 / 4, 4 / 3)


@pytest.mark.parametrize("make", [mupscale.MuSGD, mupscale.MuAdam, mupscale.MuAdamW])
def test_rescaling_relative_to_the_narrow_run_is_muP_at_the_wide_width(make):
    narrow, wide = mup_mlp(8), mup_mlp(24)
    settings = {"lr": 0.1, "weight_decay": 0.3}
    narrow_opt, expected = make(narrow, **settings), make(wide, **settings)
    trained(narrow, narrow_opt)
    report = mupscale.upscale(narrow, wide, narrow_opt)
    got, wanted = hyperparameters(wide, report.optimizer), hyperparameters(wide, expected)
    assert got.keys() == wanted.keys()
    for name in got:
        assert got[name] == pytest.approx(wanted[name], rel=1e-12)


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


def test_tensor_learning_rates_stay_tensors_of_their_own():
    narrow, wide = mlp(4), mlp(8)
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.Adam(narrow.parameters(), lr=lr, foreach=False)
    trained(narrow, optimizer)
    report = mupscale.upscale(narrow, wide, optimizer)
    assert lr.item() == 0.1
    rates = {float(group["lr"]) for group in report.optimizer.param_groups}
    assert rates == {0.1, 0.05}
    assert all(
        isinstance(group["lr"], torch.Tensor) and group["lr"] is not lr for group in report.optimizer.param_groups
    )
    model = mup_mlp(8)
    mupscale.MuAdam(model, lr=lr, foreach=False)
    assert lr.item() == 0.1


def test_frozen_parameters_and_parameters_without_state():
    narrow, wide = mlp(4), mlp(8)
    narrow.layers[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(narrow.parameters())
    report = mupscale.upscale(narrow, wide, optimizer)  # before the first step nothing has state
    assert not report.optimizer.state
    trained(narrow, optimizer)
    state = mupscale.upscale(narrow, wide, optimizer).optimizer.state
    assert wide.layers[0].weight not in state
    assert set(state[wide.layers[1].weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_state_is_moved_by_name_into_groups_of_another_order():
    narrow, wide = mup_mlp(8), mup_mlp(16)
    narrow_opt = mupscale.MuAdamW(narrow)
    trained(narrow, narrow_opt)
    wide_opt = mupscale.MuAdamW(list(reversed(list(wide.parameters()))))
    mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    for name, parameter in wide.named_parameters():
        source = narrow_opt.state[narrow.get_parameter(name)]
        assert wide_opt.state[parameter]["exp_avg"].shape == parameter.shape
        assert wide_opt.state[parameter]["exp_avg"].abs().max() == pytest.approx(
            source["exp_avg"].abs().max().item() / (1 if name == "readout.bias" else 2), rel=1e-6
        )


def test_a_schedule_continues():
    """float64, cosine over 60 steps, widened at step 10; the loss agrees at each of 50 further steps."""
    case = CASES["vit"]
    torch.manual_seed(0)
    narrow, wide = case.build(8).double(), case.build(24).double()
    batches = [(x.double(), y) for x, y in case.batches()]

    def cosine(step: int) -> float:
        return (1 + torch.cos(torch.tensor(step / 60 * torch.pi, dtype=torch.float64)).item()) / 2

    optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.003, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)

    def step(model, opt, sched, index) -> float:
        opt.zero_grad()
        loss = cross_entropy(model, batches[index % 4])
        loss.backward()
        mupscale.clip_grad_norm_(model, 0.05)
        opt.step()
        sched.step()
        return loss.item()

    for index in range(10):
        step(narrow, optimizer, schedule, index)
    wide_opt = mupscale.upscale(narrow, wide, optimizer).optimizer
    wide_schedule = torch.optim.lr_scheduler.LambdaLR(wide_opt, cosine, last_epoch=schedule.last_epoch - 1)
    for index in range(10, 60):
        a, b = step(narrow, optimizer, schedule, index), step(wide, wide_opt, wide_schedule, index)
        assert b == pytest.approx(a, rel=1e-10)


def test_sparse_adam():
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, width, sparse=True), nn.Linear(width, 3))

    torch.manual_seed(0)
    verdict = mupscale.verify(
        build(4),
        build(12),
        steps=20,
        batches=[torch.randint(12, (5,)) for _ in range(3)],
        loss=lambda m, x: m(x).square().mean(),
        optimizer=lambda ps: [torch.optim.SparseAdam(ps[:1], lr=0.01, eps=1e-3), torch.optim.SGD(ps[1:], lr=0.1)],
    )
    assert verdict.passed, verdict


def test_muP_needs_base_shapes_and_is_applied_once():
    with pytest.raises(ValueError, match="has no base shapes"):
        mupscale.apply_mup(torch.optim.SGD((model := mlp(4)).parameters()), model)
    with pytest.raises(ValueError, match="pass the model itself"):
        mupscale.MuAdam(copy.deepcopy(mup_mlp(8)).parameters())
    model = mup_mlp(8)
    optimizer = mupscale.apply_mup(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(ValueError, match="muP-scaled already"):
        mupscale.apply_mup(optimizer, model)
    with pytest.raises(ValueError, match="not in the model"):
        mupscale.apply_mup(torch.optim.SGD(mlp(8).parameters()), model)


def test_symmetry_of_scalings():
    """The paper's proposition: W = θ·W̄ with lr / θ^(1+m), decay · θ², decoupled · θ^(1+m), eps · θ trains as W."""
    theta = 3.7

    class Scaled(nn.Module):
        def __init__(self, theta: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.theta = theta
            self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.float64) / theta)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ (self.theta * self.weight).T)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        torch.manual_seed(1)
        answer = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(torch.randn(6, 4, dtype=torch.float64)) - 0.3).square().mean()
            loss.backward()
            optimizer.step()
            answer.append(loss.item())
        return answer

    for kind, m, decoupled, settings in (
        (torch.optim.SGD, 1, False, {"momentum": 0.9}),
        (torch.optim.Adam, 0, False, {"eps": 0.01}),
        (torch.optim.AdamW, 0, True, {"eps": 0.01}),
    ):
        scaled = {"lr": 0.1 / theta ** (1 + m), "weight_decay": 0.2 * (theta ** (1 + m) if decoupled else theta**2)}
        if "eps" in settings:
            scaled["eps"] = settings["eps"] * theta
        plain_model, scaled_model = Scaled(1.0), Scaled(theta)
        plain = losses(plain_model, kind(plain_model.parameters(), lr=0.1, weight_decay=0.2, **settings))
        assert losses(scaled_model, kind(scaled_model.parameters(), **settings | scaled)) == pytest.approx(
            plain, rel=1e-12
        )
