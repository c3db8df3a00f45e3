"""Units: parameters that make up for constants of the model which depend on its width."""

import math
from itertools import cycle
from typing import Any

import pytest
import torch
from growths import Grown
from nets import OPTIMIZERS, take_steps
from tiers import slow_except
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.errors import UserError
from mupscale.widening.records import attach, records_of

VOCABULARY = 11


class ScaledEmbedding(nn.Module):
    """Multiplies its embedding by sqrt(width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.hidden, self.readout = nn.Linear(width, width), nn.Linear(width, VOCABULARY)

    @staticmethod
    def units(k: float) -> dict:
        return {"embed.weight": k**-0.5}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        return self.readout(x + self.hidden(x).tanh())


class Attention(nn.Module):
    """Two heads whose size grows, with logits scaled by 1/sqrt(head_dim)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.readout = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    @staticmethod
    def units(k: float) -> dict:
        return {"q.*": k**-0.5}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.readout((x + self.o(y.transpose(1, 2).flatten(2))).tanh())


class Norm(nn.Module):
    """An RMSNorm with a gain of 1 + w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + self.weight)


class Gemma(nn.Module):
    """A scaled embedding tied to the readout, and gains of 1 + w; the last of them carries what the tie needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.before, self.hidden, self.last = Norm(width), nn.Linear(width, width), Norm(width)

    roles = {"last.weight": "readout"}  # noqa: RUF012

    @staticmethod
    def units(k: float) -> dict:
        return {"embed.weight": k**-0.5, "last.weight": (k**0.5, 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        return self.head(self.last(x + self.hidden(self.before(x)).relu()))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches(count: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(VOCABULARY, (6, 7)) for _ in range(count)]


def grown(kind: type, make_optimizer, widths: tuple[int, ...], method: Any = None, **changed: Any) -> Grown:
    def hints(before: int, after: int) -> mupscale.Hints:
        given = {"roles": getattr(kind, "roles", None), "rescale": kind.units(after / before)}
        return mupscale.Hints(**given | changed)

    return Grown(kind, widths, make_optimizer, batches(), loss_of, hints, method=method)


KINDS = [ScaledEmbedding, Attention, Gemma]


GRID = [(kind, optimizer_name) for kind in KINDS for optimizer_name in OPTIMIZERS]
ALWAYS = [*zip(KINDS, cycle(OPTIMIZERS), strict=False), *((Gemma, optimizer_name) for optimizer_name in OPTIMIZERS)]


@pytest.mark.parametrize(("kind", "optimizer_name"), slow_except(GRID, *ALWAYS, kept=[]))
def test_units_are_exact_over_two_upscales_and_a_resume(kind: type, optimizer_name: str):
    runs = grown(kind, OPTIMIZERS[optimizer_name], (8, 16, 48))
    runs.reload()
    assert runs.drift() <= 1e-12


def test_an_affine_unit_under_decay_needs_its_hooks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mupscale.widening.records._work_of", lambda _: [])
    for make_optimizer in OPTIMIZERS.values():
        assert grown(Gemma, make_optimizer, (8, 16)).drift() > 1e-6


NOISES = [
    mupscale.AdditiveNoise(0.3),
    mupscale.SignalNoise(0.5),
    mupscale.AdditiveNoise(0.3, centred=True),
    mupscale.SignalNoise(0.5, centred=True),
]


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_added_in_the_unit_and_recorded_without_it(noise):
    torch.manual_seed(0)
    narrow = Gemma(4).double()
    results = []
    for units in ({}, {"hidden.weight": 0.25, "last.weight": (0.5, 1.0), "embed.weight": 0.5}):
        quiet, loud = Gemma(8).double(), Gemma(8).double()
        mupscale.upscale(narrow, quiet, hints=mupscale.Hints(roles=Gemma.roles, rescale=units))
        report = mupscale.upscale(narrow, loud, hints=mupscale.Hints(roles=Gemma.roles, rescale=units), noise=noise)
        added = {name: p - dict(quiet.named_parameters())[name] for name, p in loud.named_parameters()}
        results.append((report.noise, added))
    (constants, base), (again, scaled) = results
    for name, constant in constants.items():
        torch.testing.assert_close(torch.tensor(again[name]), torch.tensor(constant), rtol=1e-9, atol=0)
    assert float(base["hidden.weight"].detach().abs().max()) > 0.01
    torch.testing.assert_close(scaled["hidden.weight"], 0.25 * base["hidden.weight"])
    torch.testing.assert_close(scaled["embed.weight"], 0.5 * base["embed.weight"])


def test_the_weights_of_an_affine_unit():
    """1 + w' = (s / k) (1 + w) in role readout, s (1 + w) in role vector."""
    narrow, wide = Gemma(4), Gemma(8)
    units = {"last.weight": (3.0, 1.0), "before.weight": (0.5, 2.0)}
    mupscale.upscale(narrow, wide, hints=mupscale.Hints(roles=Gemma.roles, rescale=units))
    torch.testing.assert_close(1 + wide.last.weight, 1.5 * (1 + narrow.last.weight).repeat_interleave(2))
    torch.testing.assert_close(2 + wide.before.weight, 0.5 * (2 + narrow.before.weight).repeat_interleave(2))
    widths = records_of(wide)
    assert widths["last.weight"].shift == pytest.approx(0.5)
    assert widths["before.weight"].shift == pytest.approx(-1.0)


def test_a_model_class_may_declare_units_roles_and_blocks_as_methods_of_the_wide_twin():
    class Declared(Gemma):
        def width_rescale(self, wide: Gemma) -> dict:
            return self.units((wide.scale / self.scale) ** 2)

        def width_roles(self, wide: Gemma) -> dict:
            assert wide.scale > self.scale
            return self.roles

        def width_blocks(self, wide: Gemma) -> dict:
            return {"hidden.weight": {0: 2, 1: 2}, "*.weight": {-1: 2}, "hidden.bias": {0: 2}}

    plan = mupscale.plan(Declared(4), Declared(12))
    last = plan.parameters["last.weight"]
    assert (last.rescale, last.offset) == pytest.approx((3**0.5, 1.0))
    assert plan.parameters["last.weight"].role == "readout"
    assert plan.parameters["hidden.weight"].in_blocks
    assert grown(Declared, OPTIMIZERS["adamw"], (8, 16), rescale=None, roles=None).drift() <= 1e-12
    # what is given comes last
    assert (
        mupscale.plan(Declared(4), Declared(12), hints=mupscale.Hints(rescale={"*": 1.0}))
        .parameters["last.weight"]
        .rescale
        == 1.0
    )


def mup_model(width: int, **given) -> nn.Module:
    model = mupscale.set_base_shapes(
        Gemma(width), Gemma(4), Gemma(8), init="constant", hints=mupscale.Hints(roles=Gemma.roles, **given)
    )
    return model.double()


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_units_of_base_shapes_are_exact_under_mup(optimizer_name: str):
    """Both models take their rates from the base width, in units from there."""
    torch.manual_seed(0)
    narrow, wide = (mup_model(width, rescale=Gemma.units(width / 4)) for width in (8, 16))
    optimizers = []
    for model in (narrow, wide):
        optimizers.append(mupscale.apply_mup(OPTIMIZERS[optimizer_name](model.parameters()), model))
        attach(model, optimizers[-1])
    data = batches()
    take_steps(narrow, optimizers[0], [*data, data[0]], loss_of, clip=0.05)
    report = mupscale.upscale(
        narrow, wide, *optimizers, hints=mupscale.Hints(roles=Gemma.roles, rescale=Gemma.units(2))
    )
    assert not any("wide_opt" in note for note in report.notes)
    pairs = zip((narrow, wide), optimizers, strict=True)
    losses = [take_steps(*pair, data * 5, loss_of, clip=0.05) for pair in pairs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_units_that_base_shapes_do_not_have_are_refused():
    with pytest.raises(UserError, match=r"rescale: 'embed.weight' is rescaled by .* set_base_shapes"):
        mupscale.upscale(mup_model(8), mup_model(16), hints=mupscale.Hints(roles=Gemma.roles, rescale=Gemma.units(2)))


@pytest.mark.parametrize(
    "units",
    [0.5, {"nothing.*": 0.5}]
    + [{"embed.weight": value} for value in (0, -1.0, math.nan, math.inf, True, "2", None)]
    + [{"embed.weight": value} for value in ((1.0,), (1.0, math.nan), (1.0, 2.0, 3.0))],
)
def test_bad_units_are_refused_in_one_line(units):
    with pytest.raises(UserError, match="rescale") as refusal:
        mupscale.plan(ScaledEmbedding(4), ScaledEmbedding(8), hints=mupscale.Hints(rescale=units))
    assert "\n" not in str(refusal.value)


class Mapped(ScaledEmbedding):
    """With a feed-forward layer whose units methods may map."""

    width_groups = {"inner": {"up.weight": 0, "up.bias": 0, "down.weight": 1}}  # noqa: RUF012

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        return self.readout(x + self.down(self.up(x).tanh()))


METHODS = {
    "lemon": mupscale.methods.Lemon(),
    "net2net": mupscale.methods.Net2Net(),
    "fpi": mupscale.methods.FPI(state="carry", hyperparameters="table"),
    "diagonal": mupscale.methods.HyperCloning("diagonal", state="carry", hyperparameters="table"),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_apply_units(name: str):
    units = ScaledEmbedding.units(2) | {"up.*": 1.0}
    assert grown(Mapped, OPTIMIZERS["adamw"], (8, 16), METHODS[name], rescale=units).drift() <= 1e-12


@pytest.mark.parametrize("method", [mupscale.methods.ZeroPadding(), mupscale.methods.ShrinkAndPad()])
def test_padding_refuses_units(method):
    with pytest.raises(UserError, match=f"{type(method).__name__}: parameter 'embed.weight' has a unit"):
        mupscale.upscale(
            ScaledEmbedding(4),
            ScaledEmbedding(8),
            method=method,
            hints=mupscale.Hints(rescale=ScaledEmbedding.units(2)),
        )
