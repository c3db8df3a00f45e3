"""Which parameters make a layer the identity, over layers of many kinds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.discovery.depth import find_residual
from mupscale.errors import UserError

N = 6


class Gain(nn.Module):
    """A norm whose gain is `shift` + w."""

    def __init__(self, shift: float = 0.0, has_gain: bool = True) -> None:
        super().__init__()
        self.shift = shift
        self.weight = nn.Parameter(torch.full((N,), 1 - shift)) if has_gain else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x if self.weight is None else x * (self.shift + self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(N, N, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(N), Attention(), nn.LayerNorm(N), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Parallel(PreNorm):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm2(self.norm1(x))
        return x + 0.5 * (self.attention(h) + self.mlp(h)), h


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class LayerScale(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1e-5 * torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.mlp(self.norm1(x))


class Sandwich(nn.Module):
    """A norm before each branch, and one behind it."""

    def __init__(self, shift: float = 0.0, has_gain: bool = True) -> None:
        super().__init__()
        self.before, self.attention, self.after = Gain(shift), Attention(), Gain(shift, has_gain)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.attention(self.before(x)))


class ScaledStream(PreNorm):
    """Multiplies what it gets by factors that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x + self.mlp(self.norm1(x))


class InPlace(nn.Module):
    """Changes what it gets, and is called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = FeedForward()

    def forward(self, mask: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        hidden += self.mlp(hidden * mask)
        return {"hidden": hidden}


class Convolution(nn.Module):
    """A block of a ResNet: a rectifier acts on the sum, whose first term is never negative."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(N, N, 3, stride, padding=1), nn.BatchNorm1d(N)
        self.conv2, self.bn2 = nn.Conv1d(N, N, 3, padding=1), nn.BatchNorm1d(N)
        self.shortcut = nn.Conv1d(N, N, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + (x if self.shortcut is None else self.shortcut(x)))


class UsedTwice(nn.Module):
    """Uses its output projection once before the branch, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(N, N, bias=False), nn.Linear(N, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size = self.value.weight.detach().abs().amax() + 1
        return x + size * F.linear(F.relu(self.key(x)), self.value.weight)


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, N), nn.utils.parametrizations.weight_norm(nn.Linear(N, N, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Layers between two others; their first floating-point output is the next one's input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(3, N), nn.ModuleList(layers), nn.Linear(N, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.run(layer, x)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x)

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class ConvNet(Net):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(F.relu(x).mT).mT


class InPlaceNet(Net):
    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(mask=torch.ones(N), hidden=x)["hidden"]


INPUTS = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


def call(model: nn.Module) -> Tensor:
    return model(INPUTS)


BIASED = ("weight", "bias")
CASES: dict[str, tuple[Callable[..., nn.Module], Callable[[], nn.Module], dict[str, float]]] = {
    "pre-norm": (Net, PreNorm, {"attention.o.weight": 0, "mlp.down.weight": 0, "mlp.down.bias": 0}),
    "parallel": (Net, Parallel, {"attention.o.weight": 0, "mlp.down.weight": 0, "mlp.down.bias": 0}),
    "LayerScale": (Net, LayerScale, {"gamma": 0}),
    "a norm behind the branch": (Net, Sandwich, {"after.weight": 0}),
    "a gain 1 + w behind it": (Net, lambda: Sandwich(1.0), {"after.weight": -1}),
    "a scaled stream": (Net, ScaledStream, {"factor": 1, "mlp.down.weight": 0, "mlp.down.bias": 0}),
    "changed in place": (InPlaceNet, InPlace, {f"mlp.down.{name}": 0 for name in BIASED}),
    "convolutions": (ConvNet, Convolution, {f"bn2.{name}": 0 for name in BIASED}),
    "used twice": (Net, UsedTwice, {"value.weight": 0}),
    "weight norm": (Net, WeightNormed, {"down.parametrizations.weight.original0": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_finds_what_ends_the_branches_of_every_layer(case: str) -> None:
    torch.manual_seed(0)
    net, layer, expected = CASES[case]
    model = net(layer(), layer(), layer()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = find_residual(model, ["layers"], call)
    assert found == {f"layers.{i}.{name}": value for i in range(3) for name, value in expected.items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shallow = net(*model.layers[:1], *model.layers[2:]).eval()
    shallow.first, shallow.last = model.first, model.last
    with torch.no_grad():
        for name, value in found.items():
            if name.startswith("layers.1."):
                model.get_parameter(name).fill_(value)
        assert torch.equal(call(model), call(shallow))


def test_layers_of_one_list_may_differ_and_those_that_cannot_are_left_out() -> None:
    model = ConvNet(Convolution(stride=2), Convolution(), Convolution())
    found = find_residual(model, ["layers"], call)
    assert found == {f"layers.{i}.bn2.{name}": 0 for i in (1, 2) for name in BIASED}
    model = Net(PreNorm(), Sandwich(), PostNorm())
    found = find_residual(model, ["layers"], call)
    assert {name.split(".")[1] for name in found} == {"0", "1"}


def test_several_lists_and_frozen_parameters() -> None:
    model = nn.ModuleDict({"first": Net(PreNorm()), "second": Net(Sandwich(), Sandwich())}).requires_grad_(False)
    both = find_residual(_Both(model), ["nets.first.layers", "nets.second.layers"], call)
    assert list(both) == [
        *(f"nets.first.layers.0.{name}" for name in ("attention.o.weight", "mlp.down.weight", "mlp.down.bias")),
        *(f"nets.second.layers.{i}.after.weight" for i in range(2)),
    ]


class _Both(nn.Module):
    def __init__(self, nets: nn.ModuleDict) -> None:
        super().__init__()
        self.nets = nets

    def forward(self, x: Tensor) -> Tensor:
        return self.nets["first"](x) + self.nets["second"](x)


def test_refuses_a_norm_over_the_sum() -> None:
    with pytest.raises(
        UserError, match=r"no layer of 'layers' can be made the identity: 'layers.0' \(PostNorm\) "
    ) as no:
        find_residual(Net(PostNorm(), PostNorm()), ["layers"], call)
    assert "even if all of its parameters are neutral" in str(no.value)
    assert str(no.value).endswith('Grow with depth="interleave" or depth="stack", which change the function')


def test_refuses_a_norm_without_a_gain_behind_the_branch() -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match=r"a norm without a gain after 'attention.o.weight', .* (\d+) times") as refusal:
        find_residual(Net(Sandwich(has_gain=False)), ["layers"], call)
    assert 100 < int(str(refusal.value).split(" times")[0].split()[-1]) < 10_000


def test_refuses_shared_layers_and_shared_weights() -> None:
    layer = PreNorm()
    with pytest.raises(UserError, match="'layers' has the same layer several times"):
        find_residual(Net(layer, layer), ["layers"], call)
    model = Net(PreNorm(), PreNorm())
    model.layers[1].mlp.down.weight = model.layers[0].mlp.down.weight
    with pytest.raises(UserError, match=r"'mlp.down.weight' is 'layers.1.mlp.down.weight', too"):
        find_residual(model, ["layers"], call)
    model = Net(PreNorm(), PreNorm())
    model.layers[1].mlp.up.weight = model.layers[0].mlp.up.weight  # which stays as it is
    assert len(find_residual(model, ["layers"], call)) == 6


def test_refuses_what_is_no_list_and_what_does_not_run() -> None:
    model = Net(PreNorm())
    with pytest.raises(UserError, match=r"'first' is no nn.ModuleList or nn.Sequential of layers, but a Linear"):
        find_residual(model, ["first"], call)
    with pytest.raises(UserError, match=r"call\(model\) does not run 'layers.0'"):
        find_residual(model, ["layers"], lambda model: model.last(model.first(INPUTS)))


def test_refuses_a_layer_that_returns_nothing_like_its_input() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5)))
    with pytest.raises(UserError, match=r"'1.0' \(Linear\) changes what it gets even if"):
        find_residual(model, ["1"], call)


def test_a_residual_outside_of_the_layer_is_found():
    """The model adds what a layer returns: a layer of zeros adds nothing."""

    class Branch(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(self.norm(x))))

    class Stack(nn.Module):
        def __init__(self, n: int, depth: int) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(5, n), nn.Linear(n, 3)
            self.blocks = nn.ModuleList(Branch(n) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = x + block(x)
            return self.leave(x)

    x = torch.randn(4, 5)
    narrow, deep = Stack(8, 2), Stack(16, 4)
    report = mupscale.upscale(narrow, deep, depth="identity", call=lambda model: model(x))
    assert report.exact is True
    assert torch.allclose(deep(x), narrow(x), atol=1e-5)
