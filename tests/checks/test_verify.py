"""`verify`: what it answers, and that breaking any one rule is noticed and named where it first shows."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import CASES, cross_entropy
from grid_optimizers import GRID_OPTIMIZERS, float64_newton_schulz
from tiers import slow_except
from torch import Tensor, nn

import mupscale
from mupscale.checks.verify import TOLERANCE, TOLERANCE_FLOAT32, WARM_UP
from mupscale.methods import grow
from mupscale.widening import optimizers, state, table, write


def verdict(case_name: str, optimizer_name: str, **settings) -> mupscale.Verdict:
    case = CASES[case_name]
    torch.manual_seed(0)
    hints = mupscale.Hints(**{"roles": case.plain_roles} | settings)
    return mupscale.verify(
        case.build(case.narrow), case.build(case.wide), optimizer=GRID_OPTIMIZERS[optimizer_name],
        batches=case.batches(), loss=cross_entropy, steps=8, clip=0.05, hints=hints,
    )  # fmt: skip


# --- the answer


def layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def verify_layers(narrow: nn.Module, wide: nn.Module, **settings) -> mupscale.Verdict:
    torch.manual_seed(0)
    batches = [torch.randn(8, 3) for _ in range(3)]
    defaults = {"optimizer": GRID_OPTIMIZERS["adamw"], "batches": batches, "loss": mean_square, "steps": 3}
    return mupscale.verify(narrow, wide, **defaults | settings)


class AlwaysOn(nn.Dropout):
    def train(self, mode: bool = True) -> "AlwaysOn":
        return super().train(True)


@pytest.mark.parametrize(
    ("dropped", "head", "divergent"),
    [
        (lambda n: (nn.Dropout(0.5), nn.Linear(3, n), nn.Dropout(0.1)), "exact apart from dropout (", None),
        (lambda n: (AlwaysOn(0.5), nn.Linear(3, n), nn.Dropout(0.1)), "exact apart from dropout (", None),
        (lambda n: (nn.Dropout(0.5).eval(), nn.Linear(3, n), nn.Dropout(0.1).eval()), "exact (", None),
        (lambda n: (nn.Linear(3, n), nn.Dropout(0.1), Shrink()), "NOT exact: 2 diverges first", "2"),
    ],
)
def test_layers_that_drop_units_drop_none(dropped: Any, head: str, divergent: str | None):
    answer = verify_layers(*(nn.Sequential(*dropped(n), nn.Linear(n, 2)) for n in (4, 12)))
    assert str(answer).startswith(head)
    assert answer.first_divergent == divergent
    assert answer.dropout == {"exact (": (), "NOT exact: 2 diverges first": ("1",)}.get(head, ("0", "2"))
    assert str(answer).endswith("\ncompared without '0', '2'") is (answer.dropout == ("0", "2"))


def test_a_verdict_in_words_and_as_a_truth_value():
    answer = verify_layers(layers(4), layers(12))
    assert answer
    head, heading, _, *drifts = str(answer).splitlines()
    assert head == "exact (tolerance 1e-08, 3 steps after the growth)"
    assert heading.split() == ["largest", "relative", "drift", "allowed"]
    allowed = {line.split()[0]: line.split()[2] for line in drifts}
    assert allowed == {"loss": "1e-10", "activations": "1e-08", "gradients": "1e-07", "weights": "1e-07"}
    assert drifts[0].split()[1] == f"{answer.loss_drift:.1e}"
    assert answer.first_divergent is answer.reason is None
    assert list(answer.drift_by_module) == ["0", "1", "2", "3", ""]
    answer = verify_layers(layers(4), layers(12), hints=mupscale.Hints(blocks={"3.weight": {1: 2}}))
    assert not answer
    head, *_, reason, _ = str(answer).splitlines()
    assert head == "NOT exact: 3 diverges first (tolerance 1e-08, 3 steps after the growth)"
    assert reason == answer.reason
    painted = answer.text(paint=lambda text, style: f"<{style}>{text}").splitlines()
    assert [line.split()[0] for line in painted if line.startswith("<bad>")][:2] == ["<bad>NOT", "<bad>loss"]
    assert answer.reason.startswith("what '3' (Linear) returns differs by ")
    assert answer.reason.endswith(" at step 0 after the growth")


def test_verify_changes_neither_the_models_nor_the_generator():
    narrow, wide = layers(4), layers(12)
    before, state = copy.deepcopy([narrow.state_dict(), wide.state_dict()]), torch.get_rng_state()
    batches = [torch.ones(8, 3)]
    mupscale.verify(narrow, wide, optimizer=GRID_OPTIMIZERS["sgd"], batches=batches, loss=mean_square, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    for model, saved in zip((narrow, wide), before, strict=True):
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_rounds_inside_is_compared_in_float64():
    class Rounding(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = layers(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.float().half()).float().double()

    answer = verify_layers(Rounding(4), Rounding(12))
    assert answer.passed
    assert answer.tolerance == TOLERANCE
    rounds = verify_layers(layers(4), layers(12), optimizer=lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)))
    assert rounds.tolerance == TOLERANCE_FLOAT32


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        verify_layers(layers(4), layers(12), steps=0)
    with pytest.raises(ValueError, match="batches is empty"):
        verify_layers(layers(4), layers(12), batches=[])


def relu_layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


def with_dead_units() -> nn.Module:
    narrow = relu_layers(4)
    with torch.no_grad():
        narrow[0].bias.fill_(-1e6)  # only the bias of the readout learns, which does not grow
    return narrow


UNTESTED: dict[str, tuple[dict[str, Any], str]] = {
    "a dead network": (
        {"narrow": with_dead_units, "wide": lambda: relu_layers(12)},
        "has a gradient in any of 3 steps",
    ),
    "another leaf": ({"loss": lambda model, x: torch.ones((), requires_grad=True) * 1}, "has a gradient"),
    "no graph": ({"loss": lambda model, x: torch.ones(())}, "has a gradient"),
    "times zero": ({"loss": lambda model, x: model(x).sum() * 0}, "has a gradient"),
    "no rate": (
        {"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)},
        "moves in any of 3 steps. Is the learning",
    ),
}


@pytest.mark.parametrize("case", UNTESTED)
def test_what_tests_nothing_is_not_called_exact(case: str):
    settings, words = UNTESTED[case]
    settings = {"narrow": lambda: layers(4), "wide": lambda: layers(12), **settings}
    answer = verify_layers(settings.pop("narrow")(), settings.pop("wide")(), **settings)
    assert not answer.passed
    assert answer.first_divergent is None
    assert answer.reason.startswith(f"nothing was tested: no parameter that grows {words}")
    assert str(answer).startswith("NOTHING TESTED (tolerance 1e-08")


def test_nan_is_not_called_exact():
    """Not even of an exact growth: nothing tells what it trains to."""
    batches = [torch.full((8, 3), math.nan if number > WARM_UP else 0.5) for number in range(WARM_UP + 3)]
    answer = verify_layers(layers(4), layers(12), batches=batches)
    assert not answer.passed
    assert math.isinf(answer.gradient_drift)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_complex_weights_are_compared_in_complex128(optimizer: str):
    def build(width: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(a, b, dtype=torch.complex64) for a, b in ((3, width), (width, width), (width, 2)))
        )

    def power(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - 1).abs().square().mean()

    batches = [torch.randn(8, 3, dtype=torch.complex64) for _ in range(3)]
    settings = {"batches": batches, "loss": power, "optimizer": GRID_OPTIMIZERS[optimizer]}
    answer = verify_layers(build(4), build(12), **settings)
    assert answer.passed, answer
    assert answer.tolerance == TOLERANCE
    assert answer.weight_drift < 1e-12
    broken = verify_layers(build(4), build(12), **settings, hints=mupscale.Hints(blocks={"2.weight": {1: 2}}))
    assert broken.first_divergent == "2"
    assert "mupscale.discover looks for a plan" in str(broken)


# --- broken rules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "optimizer_name"),
    [
        ("lr", "sgd"),
        ("lr", "adamw"),
        ("eps", "adam"),
        ("coupled_weight_decay", "sgd_dampened"),
        ("coupled_weight_decay", "adam"),
        ("decoupled_weight_decay", "adamw"),
    ],
)
def test_an_unscaled_hyperparameter(rule: str, optimizer_name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table, rule, lambda *_: 1.0)
    assert not verdict("mlp", optimizer_name).passed


STATE = [
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
]
FAST = ("sgd_nesterov", "muon")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer_name", "kind", "key"),
    slow_except(STATE, *(row for row in STATE if row[0] in FAST), kept=[row for row in STATE if row[0] == "adam"]),
)
def test_a_state_moved_by_another_power(optimizer_name: str, kind: type, key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float64_newton_schulz)
    rule = optimizers._REGISTRY[kind]
    wrong = {**rule.state, key: 1 - rule.state[key] if rule.state[key] < 2 else 1}
    monkeypatch.setitem(optimizers._REGISTRY, kind, replace(rule, state=wrong))
    assert not verdict("gpt2_untied", optimizer_name).passed


def test_a_counter_shared_instead_of_cloned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "_copy_of", lambda value, *rest: value)
    assert not verdict("mlp", "adamw").passed


def test_weights_not_divided_by_the_fan_in_factor(monkeypatch: pytest.MonkeyPatch):
    original = table.scale_of_axis
    monkeypatch.setattr(table, "scale_of_axis", lambda *given: original(*given)._replace(weight=1.0))
    answer = verdict("mlp", "adamw")
    assert not answer.passed
    assert answer.first_divergent == "layers.1"  # the first layer with a width behind it


@pytest.mark.slow
def test_buffers_left_behind(monkeypatch: pytest.MonkeyPatch):
    original = grow.grow_tensors
    monkeypatch.setattr(
        grow, "grow_tensors", lambda entries, *rest: original([e for e in entries if e.kind != "buffer"], *rest)
    )
    case = CASES["resnet18"]
    torch.manual_seed(0)
    narrow, wide = case.build(2).eval(), case.build(4).eval()
    for module in narrow.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean)
    answer = mupscale.verify(
        narrow, wide, optimizer=GRID_OPTIMIZERS["sgd"], batches=case.batches(), loss=cross_entropy, steps=2
    )
    assert not answer.passed
    assert answer.first_divergent == "stem.1"


def test_widths_forgotten_in_clipping(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "store_records", lambda *_: None)
    assert not verdict("mlp", "adamw").passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "axis", "wrong", "named"),
    [
        ("layers.*.q_proj.weight", 0, 4, "layers.0.o_proj"),  # whole heads, but not whole query groups
        ("layers.*.v_proj.weight", 0, 1, "layers.0"),
        ("layers.*.o_proj.weight", 1, 1, "layers.0.o_proj"),
    ],
)
def test_a_head_block_of_another_length(pattern: str, axis: int, wrong: int, named: str):
    answer = verdict("llama", "adamw", blocks={pattern: {axis: wrong}})
    assert not answer.passed
    assert answer.first_divergent == named


# --- who is blamed


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner[0](x)


class ScaledInside(nn.Module):
    """Multiplies by its width between two modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, width), Residual(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.block(x * x.shape[-1]))


def test_the_module_that_computed_a_wrong_input_is_blamed_and_not_one_inside_the_next():
    torch.manual_seed(0)
    models = [nn.Sequential(ScaledInside(n)) for n in (4, 8)]
    answer = verify_layers(*models)
    assert answer.first_divergent == "0"
    assert "what '0' (ScaledInside) computes before '0.block' is multiplied by 2" in answer.reason


# --- a scale inside the model


class Mixture(nn.Module):
    """A mixture of `width` experts; what else it computes from them goes through `beside`, and out of the model."""

    def __init__(self, width: int, beside: nn.Module | None = None, returned: bool = False) -> None:
        super().__init__()
        self.score, self.value, self.softmax = nn.Linear(3, width), nn.Linear(3, width), nn.Softmax(-1)
        self.beside, self.returned = beside, returned

    def forward(self, x: Tensor) -> Any:
        values = self.value(x)
        answer = (self.softmax(self.score(x)) * values).sum(-1)
        extra = None if self.beside is None else self.beside(values)
        return (answer, extra) if self.returned else answer


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return x.norm()


class TrackedNorm(Norm):
    """Remembers the norm, as for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        norm = super().forward(x)
        self.running.lerp_(norm.detach(), 0.1)
        return norm


class GrowingPower(Norm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) ** self.calls


def first_square(model: nn.Module, x: Tensor) -> Tensor:
    answer = model(x)
    return ((answer[0] if isinstance(answer, tuple) else answer) - 1).square().mean()


def test_another_scale_of_what_the_model_returns_is_not_exact():
    answer = verify_layers(Mixture(4, Norm(), True), Mixture(12, Norm(), True), loss=first_square)
    assert not answer.passed
    assert answer.activation_drift > 0.5

    def direction(model: nn.Module, x: Tensor) -> Tensor:
        return (torch.nn.functional.normalize(model(x), dim=-1) - 1).square().mean()

    scaled = [nn.Sequential(layers(n), Times(n)) for n in (4, 12)]
    answer = verify_layers(*scaled, loss=direction)
    assert answer.first_divergent == "1"
    assert answer.loss_drift < 1e-10


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize("kind", [TrackedNorm, GrowingPower])
def test_a_scale_that_moves_a_buffer_or_changes_is_not_exact(kind: type[nn.Module]):
    answer = verify_layers(Mixture(4, kind()), Mixture(12, kind()), loss=first_square)
    assert answer.loss_drift < 1e-10
    assert not answer.passed


class Scaled(nn.Module):
    """A harmless scale before a norm, and a harmful one after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, width), nn.LayerNorm(width, eps=0.0)
        self.b, self.shrink, self.c = nn.Linear(width, width), Shrink(), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(self.shrink(self.b(self.norm(h / h.shape[-1] ** 0.5))))


class Shrink(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[-1] ** 0.5


def test_an_input_whose_module_makes_up_for_it_is_not_blamed() -> None:
    torch.manual_seed(0)
    assert "shrink diverges first" in str(verify_layers(Scaled(4), Scaled(8)))


def test_optimizer_state_is_compared():
    """A statistic of the optimizer that no update depends on yet."""

    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                self.state[parameter]["seen"] = parameter.grad.square() + self.state[parameter].get("seen", 0)
            return super().step(closure)

    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
    batches = [torch.randn(5, 3) for _ in range(3)]
    for power, passed in ((2, True), (1, False)):
        mupscale.register_optimizer(Counting, degree=1, state={"momentum_buffer": 1, "seen": power})
        found = mupscale.verify(
            narrow, wide, optimizer=lambda p: Counting(p, lr=0.1), batches=batches, steps=2,
            loss=lambda model, batch: model(batch).square().mean(),
        )  # fmt: skip
        assert found.passed is passed, found
        assert passed or "the optimizer's seen of" in str(found.reason)
