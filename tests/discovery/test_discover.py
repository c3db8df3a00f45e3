"""Models that nobody prepared: what is found makes them train exactly as before."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from nets import take_steps
from tiers import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from unprepared import HEAD, MODELS, TOKENS, Attention, Build, Decoder, Sinusoid

import mupscale
from mupscale.discovery.discover import cuts_between
from mupscale.discovery.found import Found
from mupscale.discovery.search import Search
from mupscale.errors import UserError

WIDTH = 8


def pair(build: Build, factor: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return build(WIDTH), build(factor * WIDTH)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    output = model(inputs).flatten(0, -2)
    return F.cross_entropy(output, torch.arange(len(output)) % 2)


def drift_of_training(narrow: nn.Module, wide: nn.Module, found: Found, inputs: Tensor, kind: type) -> float:
    """The largest relative difference of the losses in twelve steps after growing."""
    narrow, wide = narrow.double(), wide.double()
    optimizer = kind(narrow.parameters(), lr=0.01, weight_decay=0.1)
    take_steps(narrow, optimizer, [inputs] * 4, loss_of)
    report = mupscale.upscale(narrow, wide, optimizer, hints=found)
    before = take_steps(narrow, optimizer, [inputs] * 12, loss_of)
    after = take_steps(wide, report.optimizer, [inputs] * 12, loss_of)
    return max(abs(a / b - 1) for a, b in zip(after, before, strict=True))


PAIRS = [(factor, kind) for factor in (2, 3) for kind in (torch.optim.AdamW, torch.optim.SGD)]
CELLS = [(name, *pair) for name in MODELS for pair in PAIRS]
OFTEN = [(name, *PAIRS[row % len(PAIRS)]) for row, name in enumerate([*list(MODELS)[1::2], "experts"])]
"""Every second model, the experts, and each pair of a factor and an optimizer."""


@pytest.mark.parametrize(("name", "factor", "kind"), slow_except(CELLS, kept=OFTEN))
def test_what_is_found_trains_exactly(name: str, factor: int, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    build, inputs = MODELS[name]
    narrow, wide = pair(build, factor)
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert found.untested == ()
    assert drift_of_training(narrow, wide, found, inputs, kind) < 1e-10


@pytest.mark.slow
def test_nothing_is_changed_and_the_answer_is_always_the_same() -> None:
    build, inputs = MODELS["convolutions"]
    narrow, wide = pair(build, 2)
    before = copy.deepcopy((narrow.state_dict(), wide.state_dict()))
    state = torch.get_rng_state()
    first = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert torch.equal(torch.get_rng_state(), state)
    for saved, model in zip(before, (narrow, wide), strict=True):
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    torch.manual_seed(5)
    assert mupscale.discover(narrow, wide, lambda model: model(inputs)) == first
    assert narrow.training


def test_a_table_that_depends_on_the_width_is_refused_by_name() -> None:
    narrow, wide = pair(Sinusoid, 2)
    with pytest.raises(UserError, match=r"stuck at 'read' \(Linear\): what 'read' reads differs.* changes were tried"):
        mupscale.discover(narrow, wide, lambda model: model(TOKENS))


@pytest.mark.slow
def test_an_unused_parameter_is_named() -> None:
    class Unused(Decoder):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.pooler = nn.Linear(width, width)

    found = mupscale.discover(*pair(Unused, 2), lambda model: model(TOKENS))
    assert found.untested == ("pooler.weight", "pooler.bias")
    assert "not tested, because what the model returns does not depend on them: pooler.weight, pooler.bias" in str(
        found
    )


def test_bad_arguments() -> None:
    narrow, wide = pair(Decoder, 2)
    with pytest.raises(UserError, match=r"discover: wide must be a torch\.nn\.Module"):
        mupscale.discover(narrow, None, lambda model: model(TOKENS))
    with pytest.raises(UserError, match="does not run the model"):
        mupscale.discover(narrow, wide, lambda model: None)
    with pytest.raises(UserError, match="wide is on the meta device"):
        mupscale.discover(narrow, Decoder(16).to("meta"), lambda model: model(TOKENS))
    lazy = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(UserError, match=r"'0\.weight' is a lazy one"):
        mupscale.discover(lazy, lazy, lambda model: model(TOKENS))


@pytest.mark.parametrize("name", slow_except(["grouped queries", "convolutions"], "convolutions"))
def test_a_finding_is_carried_over_to_another_size(name: str) -> None:
    build, inputs = MODELS[name]
    found = mupscale.discover(*pair(build, 2), lambda model: model(inputs))
    torch.manual_seed(1)
    narrow, wide = build(16), build(32)
    with torch.device("meta"):
        shapes = build(16), build(32)
    resolved = found.resolved(*shapes, lambda: cuts_between(*shapes, lambda model: model(inputs.to("meta"))))
    again = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert (resolved.roles, resolved.blocks, resolved.rescale) == (again.roles, again.blocks, again.rescale)


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.first, self.last = width, nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class InOut(Perceptron):
    """Weights that are stored as (in, out), or used so."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.plain = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.one, self.other = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(2, width, width) / width**0.5)
        self.layer = nn.Linear(width, width)
        self.outin = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(torch.tanh(self.first(x)) @ self.plain)
        x = torch.tanh(x @ self.one @ self.other)  # nothing between them but sums
        x = torch.tanh(torch.einsum("ni,eio->no", x, self.experts))
        x = torch.tanh(F.linear(x, self.layer.weight.T, self.layer.bias))
        return self.last(torch.tanh(F.linear(x, self.outin)))


@pytest.mark.parametrize("factor", [3])
def test_the_axis_that_is_summed_over_is_found_where_weights_and_gradients_agree_either_way(factor: int) -> None:
    inputs = torch.randn(7, 5, dtype=torch.float64)
    narrow, wide = (model.double() for model in pair(InOut, factor))
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    transposed = dict.fromkeys(("plain", "one", "other", "experts", "layer.weight"), "transposed_matrix")
    assert found.roles == {**transposed, "outin": "matrix"}
    assert found.undecided == ()
    for noise in (mupscale.AdditiveNoise(0.5, centred=True), mupscale.SignalNoise(0.5, centred=True)):
        mupscale.upscale(narrow, wide, noise=noise, hints=found)
        assert torch.allclose(wide(inputs), narrow(inputs), rtol=1e-12)


def test_a_weight_that_is_used_both_ways_is_not_decided() -> None:
    class BothWays(Perceptron):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(torch.tanh(self.first(x)) @ self.weight) @ self.weight.T)

    found = mupscale.discover(*pair(BothWays, 2), lambda model: model(torch.ones(2, 5)))
    assert found.undecided == ("weight",)
    assert "not decided which axis is summed over, so centred noise may change the function: weight" in str(found)


class Features(nn.Module):
    """Runs by a method that is not `forward`. What it returns depends on the width in a way that nothing makes up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.first, self.last = width, nn.Linear(5, width), nn.Linear(width, 3, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.width


@dataclass
class Scores:
    values: Tensor


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], Scores], ids=["tensor", "list", "dataclass"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_the_call_returns_is_compared_without_a_forward(wrap: Callable, dtype: torch.dtype) -> None:
    inputs = torch.randn(6, 5, dtype=dtype)
    found = mupscale.discover(*pair(Features, 2), lambda model: wrap(model.features(inputs)))
    assert found.rescale == {"last.weight": 0.5}
    assert found.untested == ()


@pytest.mark.slow
def test_frozen_parameters_are_tested_too() -> None:
    narrow, wide = pair(Decoder, 2)
    for model in (narrow, wide):
        model.attentions.requires_grad_(False)
    assert mupscale.discover(narrow, wide, lambda model: model(TOKENS)).untested == ()
    assert not narrow.attentions[0].qkv.weight.requires_grad


class Rates(nn.Module):
    """Rates between 0 and 1, used under a logarithm."""

    def __init__(self, width: int, least: float = 0.0, scaled: bool = False) -> None:
        super().__init__()
        self.least, self.factor = least, width if scaled else 1
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3, bias=False)
        self.rate = nn.Parameter(torch.linspace(0.97, 0.99, width))

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.log(self.rate - self.least) + torch.log(1 - self.rate)
        return self.last(torch.tanh(self.first(x) * rates)) * self.factor


@pytest.mark.parametrize("least", [0.9, 2.0])
def test_outputs_that_are_nan_are_refused(least: float) -> None:
    inputs = torch.randn(7, 5)
    narrow, wide = pair(lambda width: Rates(width, least, scaled=True), 2)
    with pytest.raises(UserError, match=r"discover: .* NaN or infinite.*cannot be compared"):
        mupscale.discover(narrow, wide, lambda model: model(inputs))


class TwoStages(nn.Module):
    """Convolutions with a fixed number of groups, of two widths. Rows and columns of each need other blocks at once."""

    def __init__(self, width: int, groups: int = 2) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, width, 1), nn.BatchNorm1d(width)
        self.one = nn.Conv1d(width, width, 3, groups=groups)
        self.wider = nn.Conv1d(width, 2 * width, 1)
        self.other = nn.Conv1d(2 * width, 2 * width, 1, groups=groups)
        self.last = nn.Linear(2 * width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(torch.relu(self.norm(self.first(x)))))
        return self.last(torch.relu(self.other(torch.relu(self.wider(x)))).mean(-1))


@pytest.fixture
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `discover` search also where the plan is right."""
    monkeypatch.setattr(Search, "_agrees_as_planned", lambda *args: False)


@pytest.mark.slow
@pytest.mark.usefixtures("no_plan")
def test_groups_that_stay_are_found_in_two_stages() -> None:
    inputs = torch.randn(4, 3, 5, dtype=torch.float64)
    narrow, wide = pair(TwoStages, 2)
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert found.blocks["one.weight"][1] == 4
    assert found.blocks["other.weight"][1] == 8
    assert drift_of_training(narrow, wide, found, inputs, torch.optim.AdamW) < 1e-10


@pytest.mark.parametrize("power", [-0.5, 1.0])
def test_a_factor_behind_a_bias_that_does_not_grow_is_found(power: float) -> None:
    class Logits(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.width**power

    inputs = torch.randn(7, 5, dtype=torch.float64)
    narrow, wide = pair(Logits, 2)
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert found.rescale == {"last.weight": 2.0**-power, "last.bias": 2.0**-power}
    assert found.resolved(Logits(20), Logits(40)).rescale == found.rescale
    assert drift_of_training(narrow, wide, found, inputs, torch.optim.AdamW) < 1e-10


@pytest.mark.parametrize("replaced", [False, True])
def test_buffers_that_a_forward_pass_changes_are_restored(replaced: bool) -> None:
    class Normaliser(Perceptron):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("mean", torch.zeros(5))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.count += 1
                mean = self.mean + (x.mean(0) - self.mean) / self.count
                if replaced:
                    self.mean = mean
                else:
                    self.mean.copy_(mean)
            return super().forward((x - self.mean) * self.mean)

    inputs = torch.randn(7, 5) + 1
    narrow, wide = pair(Normaliser, 2)
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert (found.roles, found.rescale, found.untested) == ({}, {}, ())
    assert not narrow.count
    assert not wide.count


class Cell(Perceptron):
    """Begins with a state in the default dtype, and counts with whole numbers."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(self.first(x) * (torch.arange(1, 2) / 3), torch.ones(len(x), self.width))
        return self.last(state + torch.tensor(0.1))


class Forces(Perceptron):
    """The gradient of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


class Saving(Perceptron):
    """Saves what is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        pass


class Mapped(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


class OfScores(Perceptron):
    """Reads and returns a dataclass."""

    def forward(self, scores: Scores) -> Scores:
        return Scores(super().forward(scores.values))


class Complex(Perceptron):
    """Returns complex numbers, times a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(super().forward(x), super().forward(x + 1)) * self.width**0.5


@pytest.mark.parametrize("kind", [Cell, Forces, Saving, Mapped, OfScores, Complex])
def test_what_a_forward_pass_may_do(kind: type[nn.Module]) -> None:
    inputs = torch.randn(6, 5)
    narrow, wide = pair(kind, 2)
    found = mupscale.discover(narrow, wide, lambda model: model(Scores(inputs) if kind is OfScores else inputs))
    assert found.untested == ()
    assert found.roles == {}
    assert list(found.rescale) == (["last.weight", "last.bias"] if kind is Complex else [])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_cannot_be_run_is_refused_by_its_cause() -> None:
    class Uncopied:
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("it is the only one")

    narrow, wide = pair(Perceptron, 2)
    narrow.first.handle = Uncopied()
    with pytest.raises(
        UserError, match=r"attribute 'first.handle' of class Uncopied that cannot be copied \(it is the only"
    ):
        mupscale.discover(narrow, wide, lambda model: model(torch.ones(1, 5)))
    scripted = (torch.jit.script(nn.Sequential(nn.Linear(5, n), nn.Linear(n, 3))) for n in (8, 16))
    with pytest.raises(UserError, match=r"narrow is compiled by torch\.jit"):
        mupscale.discover(*scripted, lambda model: model(torch.ones(1, 5)))


def test_units_that_are_zero_on_the_whole_batch_do_not_hide_a_fractional_layout() -> None:
    def build(width: int) -> nn.Module:
        layers = nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    inputs, narrow, wide = torch.randn(2, 16, dtype=torch.float64), build(32), build(48)
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert (torch.relu(narrow[0](inputs.float())) == 0).all(0).any()
    assert drift_of_training(narrow, wide, found, inputs, torch.optim.AdamW) < 1e-10


def test_heads_may_grow_by_a_fraction() -> None:
    class Heads(nn.Module):
        """Without a norm over the width, which a fraction would change."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
            self.attention = Attention(width, width // HEAD, width // HEAD)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(x + self.attention(x))

    torch.manual_seed(0)
    narrow, wide = Heads(16), Heads(24)
    found = mupscale.discover(narrow, wide, lambda model: model(TOKENS))
    assert drift_of_training(narrow, wide, found, TOKENS, torch.optim.AdamW) < 1e-10


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize("kind", slow_except([nn.GRU, nn.LSTM, nn.RNN], kept=[nn.GRU]))
def test_the_second_layer_of_both_directions_reads_them_side_by_side(kind: type[nn.RNNBase]) -> None:
    class BothDirections(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, width)
            self.recurrent = kind(width, width, num_layers=2, bidirectional=True)
            self.last = nn.Linear(2 * width, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.last(self.recurrent(self.embed(tokens))[0])

    narrow, wide = pair(BothDirections, 2)
    found = mupscale.discover(narrow, wide, lambda model: model(TOKENS))
    assert found.blocks["recurrent.weight_ih_l1"][1] == found.blocks["recurrent.weight_ih_l1_reverse"][1] == WIDTH
    assert drift_of_training(narrow, wide, found, TOKENS, torch.optim.AdamW) < 1e-10


class Hypernetwork(nn.Module):
    """Makes a weight: one axis grows as the product of two widths."""

    def __init__(self, width: int, other: int) -> None:
        super().__init__()
        self.shape = other, width
        self.code = nn.Parameter(torch.randn(2))
        self.first, self.make, self.last = nn.Linear(5, width), nn.Linear(2, width * other), nn.Linear(other, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(F.linear(torch.tanh(self.first(x)), self.make(self.code).view(self.shape))))


def test_an_axis_that_is_a_product_of_widths_is_carried_over() -> None:
    inputs = torch.randn(7, 5, dtype=torch.float64)
    torch.manual_seed(0)
    found = mupscale.discover(Hypernetwork(8, 10), Hypernetwork(16, 20), lambda model: model(inputs))
    narrow, wide = Hypernetwork(40, 30).double(), Hypernetwork(80, 60).double()
    mupscale.upscale(narrow, wide, hints=found.resolved(narrow, wide))
    assert torch.allclose(wide(inputs), narrow(inputs), rtol=1e-10)
