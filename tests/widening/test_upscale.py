"""`upscale` as a whole: what it writes, what it leaves alone, what it frees, and that upscales compose."""

import math
from collections.abc import Callable
from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.models.resnet import ResNet18Net
from mupscale.widening.layout import duplicate


class Net(nn.Module):
    """A tied GPT-2 with width buffers, a buffer that is not saved, and the same one held twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gpt = GPT2Net(width, layers=2, heads=2, vocabulary=30, context=11)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.arange(11.0), persistent=False)
        self.twin = nn.Module()
        self.twin.register_buffer("mask", self.mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens) + self.mask[0] + self.norm(self.gpt.wpe.weight).mean()


class Wrap(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def mlp(width: int) -> nn.Module:
    return MLPNet(4, (width, width), 3, readout_zero_init=False)


def gpt2(width: int) -> nn.Module:
    return GPT2Net(width, layers=1, heads=2, vocabulary=30, context=11)


def mup(build: Callable[[int], nn.Module], width: int, init: str = "fan_in", base: int = 4) -> nn.Module:
    return mupscale.set_base_shapes(build(width), build(base), build(2 * base), init=init)


def tokens() -> Tensor:
    return torch.randint(30, (4, 9))


def backward(model: nn.Module, inputs: Tensor) -> Tensor:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    loss = model(inputs.to(dtype) if inputs.is_floating_point() else inputs).sub(0.3).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, inputs: Callable[[], Tensor], steps: int = 3) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        backward(model, inputs())
        optimizer.step()


def trained_net(width: int = 8) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = mup(lambda w: Net(w), width, "constant")
    optimizer = mupscale.MuAdamW(model, lr=0.01)
    train(model, optimizer, tokens)
    return model, optimizer


def features() -> Tensor:
    return torch.randn(6, 4)


def named_state(model: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, cloned, by name."""
    answer = {
        name: t.detach().clone()
        for name, t in chain(model.named_parameters(), model.named_buffers(remove_duplicate=False))
    }
    for optimizer in optimizers:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                answer[f"{name}/{key}"] = value.detach().clone()
    return answer


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def hyperparameters(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    keys = [key for key in ("lr", "eps", "weight_decay", "source_group") if key in optimizer.param_groups[0]]
    return {
        f"{names[id(p)]}/{key}": float(group[key])
        for group in optimizer.param_groups
        for p in group["params"]
        for key in keys
    }


# --- where the wide model is written


def test_wide_on_the_meta_device():
    narrow, narrow_opt = trained_net()
    expected = mup(Net, 24, "constant")
    expected_opt = mupscale.upscale(narrow, expected, narrow_opt, mupscale.MuAdamW(expected, lr=0.01)).optimizer
    with torch.device("meta"):
        wide = mup(Net, 24, "constant")
    wide.gpt.wpe.weight.requires_grad_(False)
    wide_opt = mupscale.MuAdamW(wide, lr=0.01)
    held = {id(p) for group in wide_opt.param_groups for p in group["params"]}
    report = mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    assert report.optimizer is wide_opt
    assert {id(p) for p in wide.parameters()} == held
    assert wide.gpt.head.readout.weight is wide.gpt.wte.weight
    assert wide.twin.mask is wide.mask
    assert "mask" not in wide.state_dict()
    assert torch.equal(wide.mask, torch.arange(11.0))
    assert [name for name, p in wide.named_parameters() if not p.requires_grad] == ["gpt.wpe.weight"]
    assert_same(named_state(wide, wide_opt), named_state(expected, expected_opt))
    expected.gpt.wpe.weight.requires_grad_(False)
    for model, optimizer in ((wide, wide_opt), (expected, expected_opt)):  # it trains, and wide_opt moves it
        train(model, optimizer, tokens)
    assert_same(named_state(wide, wide_opt), named_state(expected, expected_opt))


def test_whatever_wide_holds_is_overwritten():
    narrow, narrow_opt = trained_net()
    clean, garbage = mup(Net, 16, "constant"), mup(Net, 16, "constant")
    with torch.no_grad():
        for tensor in chain(garbage.parameters(), garbage.buffers()):
            tensor.fill_(math.nan if tensor.is_floating_point() else 99)
    opts = [mupscale.upscale(narrow, wide, narrow_opt).optimizer for wide in (clean, garbage)]
    assert_same(named_state(garbage, opts[1]), named_state(clean, opts[0]))
    assert garbage.norm.num_batches_tracked == 3


def test_narrow_is_untouched():
    narrow, narrow_opt = trained_net()
    before, groups = named_state(narrow, narrow_opt), hyperparameters(narrow, narrow_opt)
    wide = mup(Net, 16, "constant")
    optimizer = mupscale.upscale(narrow, wide, narrow_opt, noise=mupscale.AdditiveNoise(0.1)).optimizer
    train(wide, optimizer, tokens)  # nothing is shared with the wide run either
    assert_same(named_state(narrow, narrow_opt), before)
    assert hyperparameters(narrow, narrow_opt) == groups


def test_consume_empties_narrow_and_gives_the_same():
    answers = []
    for consume in (False, True):
        narrow, narrow_opt = trained_net()
        with torch.device("meta"):
            wide = mup(Net, 16, "constant")
        report = mupscale.upscale(narrow, wide, narrow_opt, consume=consume, noise=mupscale.SignalNoise(0.1))
        answers.append(named_state(wide, report.optimizer))
        left = sum(t.numel() for t in chain(narrow.parameters(), narrow.buffers()))
        left += sum(t.numel() for state in narrow_opt.state.values() for t in state.values())
        assert (left == 0) is consume
        assert all(p.grad is None for p in narrow.parameters()) is consume
    assert_same(answers[1], answers[0])


def test_consume_leaves_a_buffer_that_wide_holds_too():
    table = torch.arange(11.0)

    def build(width: int) -> nn.Module:
        model = mlp(width)
        model.register_buffer("table", table)
        return model

    wide = build(8)
    mupscale.upscale(build(4), wide, consume=True)
    assert torch.equal(wide.table, torch.arange(11.0))


class Memory(TorchDispatchMode):
    """The most bytes that were alive after any operation: what `roots` reaches, `state` while it lives, and
    temporaries.
    """

    def __init__(self, roots: Callable[[], list[Tensor]], state: list[Tensor]) -> None:
        super().__init__()
        self.roots, self.seen = roots, WeakIdKeyDictionary(dict.fromkeys(state))
        self.start = self.peak = self.alive()

    def alive(self) -> int:
        tensors = [t for t in chain(self.roots(), self.seen) if not t.is_meta]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.seen[tensor] = None
        self.peak = max(self.peak, self.alive())
        return result


@pytest.mark.parametrize("noise", [None, mupscale.AdditiveNoise(0.1)])
@pytest.mark.parametrize("consume", [True, False])
def test_peak_memory(consume: bool, noise):
    narrow, narrow_opt = trained_net(32)
    with torch.device("meta"):
        wide = mup(Net, 64, "constant")
    wide_opt = mupscale.MuAdamW(wide, lr=0.01)

    def tensors(optimizer: Optimizer) -> list[Tensor]:
        return [tensor for state in optimizer.state.values() for tensor in state.values()]

    def roots() -> list[Tensor]:
        return [*narrow.parameters(), *narrow.buffers(), *wide.parameters(), *wide.buffers(), *tensors(wide_opt)]

    with Memory(roots, tensors(narrow_opt)) as memory:
        mupscale.upscale(narrow, wide, narrow_opt, wide_opt, consume=consume, noise=noise)
    sizes = [t.nbytes for t in (*wide.parameters(), *wide.buffers(), *tensors(wide_opt))]
    assert memory.start > max(sizes)  # else the bound below would say nothing
    assert memory.peak >= sum(sizes)
    assert (memory.peak <= sum(sizes) + max(sizes)) is consume


def test_the_models_are_walked_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch):
    """Once per parameter would take seconds for a model of a thousand tensors."""
    walk, walks = nn.Module.named_parameters, []
    monkeypatch.setattr(
        nn.Module, "named_parameters", lambda self, *args, **kwargs: walks.append(self) or walk(self, *args, **kwargs)
    )
    counts = []
    for depth in (2, 20):
        narrow, wide = (MLPNet(4, [width] * depth, 3) for width in (4, 8))
        optimizer = torch.optim.AdamW(narrow.parameters())
        train(narrow, optimizer, features, steps=1)
        walks.clear()
        mupscale.upscale(narrow, wide, optimizer)
        counts.append(len(walks))
    assert counts[0] == counts[1]


# --- one upscale after another

TWICE = {
    "mlp": (mlp, features),
    "resnet18": (lambda w: ResNet18Net(w // 2, 5, readout_zero_init=False), lambda: torch.randn(4, 3, 8, 8)),
    "mup_mlp": (lambda w: mup(mlp, w), features),
    "wrapped_mlp": (lambda w: Wrap(mlp(w)), features),
    "wrapped_mup_gpt2": (lambda w: Wrap(mup(gpt2, w, "constant")), tokens),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.003, eps=1e-3, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.003, eps=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("case", TWICE)
def test_two_upscales_are_one(case: str, optimizer_name: str):
    """×2 then ×3 is ×6: weights, state, hyperparameters, and the norm that clipping sees."""
    build, inputs = TWICE[case]
    torch.manual_seed(0)
    narrow, between, twice, once = (build(width).double() for width in (4, 8, 24, 24))
    narrow_opt = OPTIMIZERS[optimizer_name](narrow.parameters())
    if "mup" in case:
        mupscale.apply_mup(narrow_opt, narrow)
    train(narrow, narrow_opt, inputs)
    between_opt = mupscale.upscale(narrow, between, narrow_opt).optimizer
    twice_opt = mupscale.upscale(between, twice, between_opt).optimizer
    once_opt = mupscale.upscale(narrow, once, narrow_opt).optimizer
    a, b = named_state(twice, twice_opt), named_state(once, once_opt)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=0)
    assert hyperparameters(twice, twice_opt) == pytest.approx(hyperparameters(once, once_opt), rel=1e-12)

    batch = inputs()
    norms = []
    for model in (narrow, between, twice, once):
        backward(model, batch)
        norms.append(mupscale.clip_grad_norm_(model, 0.01).item())
    assert norms[1:] == pytest.approx([norms[0]] * 3, rel=1e-10)
    for name, parameter in twice.named_parameters():  # clipped alike
        torch.testing.assert_close(parameter.grad, once.get_parameter(name).grad, rtol=1e-9, atol=1e-15)


# --- optimizers


def test_lists_of_optimizers_are_paired_in_order():
    def optimizers(model: nn.Module) -> list[Optimizer]:
        return [
            torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model.readout.parameters(), lr=0.01),
        ]

    torch.manual_seed(0)
    narrow = mlp(4)
    narrow_opts = optimizers(narrow)
    backward(narrow, features())
    for optimizer in narrow_opts:
        optimizer.step()
    wide, again = mlp(8), mlp(8)
    given = optimizers(again)
    made = mupscale.upscale(narrow, wide, narrow_opts).optimizer
    assert mupscale.upscale(narrow, again, tuple(narrow_opts), given).optimizer == given
    assert [type(optimizer) for optimizer in made] == [torch.optim.SGD, torch.optim.AdamW]
    assert set(made[0].state) == set(wide.layers.parameters())
    assert set(made[1].state) == set(wide.readout.parameters())
    assert_same(named_state(wide, *made), named_state(again, *given))
    assert isinstance(mupscale.upscale(narrow, wide, narrow_opts[:1]).optimizer, list)
    assert mupscale.upscale(narrow, wide).optimizer is None


def test_hyperparameters_off_the_rule_are_noted():
    narrow, wide = mup(mlp, 8), mup(mlp, 16)
    narrow_opt = mupscale.MuAdamW(narrow, lr=0.1)
    report = mupscale.upscale(narrow, wide, narrow_opt, torch.optim.AdamW(wide.parameters(), lr=0.1))
    assert [note.partition(" is ")[0] for note in report.notes] == [
        "wide_opt: lr",
        "wide_opt: eps",
        "wide_opt: weight_decay",
    ]
    assert "lr is 1 times (of layers.0.weight) and 4 times (of layers.1.weight) what continues" in report.notes[0]
    assert report.notes[0] in str(report)
    for lr in (0.1, 0.05):  # another base constant is a decision, not a mistake
        assert mupscale.upscale(narrow, wide, narrow_opt, mupscale.MuAdamW(wide, lr=lr)).notes == ()
    assert mupscale.upscale(narrow, wide, narrow_opt).notes == ()


def test_stale_state_of_wide_opt_is_dropped():
    torch.manual_seed(0)
    narrow, wide = mlp(4), mlp(8)
    narrow_opt, wide_opt = (torch.optim.AdamW(model.parameters()) for model in (narrow, wide))
    train(wide, wide_opt, features)
    mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    assert not wide_opt.state
    train(wide, wide_opt, features, steps=5)
    train(narrow, narrow_opt, features, steps=2)
    mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    assert {float(state["step"]) for state in wide_opt.state.values()} == {2.0}


# --- unlike pieces on one axis


class Concat(nn.Module):
    """A layer that reads its width beside three fixed features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.fc = nn.Linear(3, width), nn.Linear(width + 3, width)
        self.readout = mupscale.Readout(width, 2)

    @staticmethod
    def blocks(width: int, k: int) -> dict:
        return {"fc.weight": {1: [(width, 1, k), (3, 1, 1)]}}

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.fc(torch.cat([self.inputs(x).relu(), x], -1)).tanh())


class MultiQuery(nn.Module):
    """Fused QKV of growing query heads over one key and value head; head_dim 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.qkv, self.project = nn.Linear(3, width), nn.Linear(width, width + 8), nn.Linear(width, width)
        self.readout = mupscale.Readout(width, 2)

    @staticmethod
    def blocks(width: int, k: int) -> dict:
        return {"qkv.weight": {0: [(width, 4, k), (8, 8, 1)]}, "project.weight": {1: 4}}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        y = self.qkv(x)
        q = y[..., :-8].unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = (t[:, None] for t in y[..., -8:].chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.readout((x + self.project(y.transpose(1, 2).flatten(2))).tanh())


class ConcatReadout(nn.Module):
    """The readout itself reads width beside fixed features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.readout = nn.Linear(3, width), mupscale.Readout(width + 3, 2)

    @staticmethod
    def blocks(width: int, k: int) -> dict:
        return {"readout.weight": {1: [(width, 1, k), (3, 1, 1)]}}

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.cat([self.inputs(x).relu(), x], -1))


def sequences() -> Tensor:
    return torch.randn(6, 5, 3)


def follow(
    kind: type, make_optimizer, *, is_mup: bool, widths: tuple[int, ...] = (8, 16), closure: bool = False
) -> float:
    """The largest relative drift of the loss in 30 steps after the last upscale, in float64 with clipping."""
    torch.manual_seed(0)
    models = [(mup(kind, width) if is_mup else kind(width)).double() for width in widths]
    optimizer = make_optimizer(models[0].parameters())
    if is_mup:
        mupscale.apply_mup(optimizer, models[0])
    torch.manual_seed(1)
    batches = [sequences() for _ in range(4)]

    def step(model: nn.Module, optimizer: Optimizer, index: int) -> float:
        def gradients() -> Tensor:
            loss = backward(model, batches[index % 4])
            assert mupscale.clip_grad_norm_(model, 0.05) > 0.05
            return loss

        return (optimizer.step(gradients) if closure else (gradients(), optimizer.step())[0]).item()

    runs = [(models[0], optimizer)]
    for index in range(5):
        step(*runs[0], index)
    for before, after in pairwise(widths):
        wide = models[widths.index(after)]
        report = mupscale.upscale(runs[-1][0], wide, runs[-1][1], blocks=kind.blocks(before, after // before))
        assert any(entry.mixed for entry in report.plan.parameters.values())
        runs.append((wide, report.optimizer))
    drift = 0.0
    for index in range(5, 35):
        losses = [step(*run, index) for run in runs]
        drift = max(drift, *(abs(loss / losses[0] - 1) for loss in losses[1:]))
        if index == 5:
            # the step leaves no trace of its reference units
            torch.testing.assert_close(runs[-1][0].readout.bias, runs[0][0].readout.bias, rtol=1e-10, atol=1e-12)
    return drift


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("is_mup", [False, True])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Concat, MultiQuery])
def test_unlike_pieces_are_exact(kind: type, optimizer_name: str, is_mup: bool, closure: bool):
    assert follow(kind, OPTIMIZERS[optimizer_name], is_mup=is_mup, closure=closure) <= 1e-10


@pytest.mark.parametrize("is_mup", [False, True])
@pytest.mark.parametrize("kind", [Concat, MultiQuery])
def test_unlike_pieces_are_exact_after_two_upscales(kind: type, is_mup: bool):
    for make_optimizer in OPTIMIZERS.values():
        assert follow(kind, make_optimizer, is_mup=is_mup, widths=(8, 16, 48)) <= 1e-10


def test_a_readout_of_unlike_pieces():
    """Exact for a plain one; a muP multiplier falls by another factor than the width grows, which must not pass in
    silence.
    """
    assert follow(ConcatReadout, OPTIMIZERS["adamw"], is_mup=False) <= 1e-10
    with pytest.raises(ValueError, match=r"'readout(\.weight)?'"):
        follow(ConcatReadout, OPTIMIZERS["adamw"], is_mup=True)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_unlike_pieces_need_their_hooks(optimizer_name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mupscale.widening.upscale.keep_reference_units", lambda *_: None)
    assert follow(Concat, OPTIMIZERS[optimizer_name], is_mup=False) > 1e-6
    assert follow(MultiQuery, OPTIMIZERS[optimizer_name], is_mup=False) > 1e-6


def test_a_weight_without_update_is_not_rounded():
    """Converting to reference units and back would move it by a rounding error at each step."""
    narrow, wide = Concat(4), Concat(12)
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    optimizer = mupscale.upscale(narrow, wide, optimizer, blocks=Concat.blocks(4, 3)).optimizer
    before = wide.fc.weight.detach().clone()
    wide.fc.weight.grad = gradient = torch.zeros_like(before)
    optimizer.step()
    assert torch.equal(wide.fc.weight, before)
    assert wide.fc.weight.grad is gradient


# --- the same width, seeds, what is printed


@pytest.mark.parametrize("build", [mlp, lambda width: mup(mlp, width)])
def test_at_equal_widths_it_is_a_copy(build):
    torch.manual_seed(0)
    narrow, wide = build(8), build(8)
    narrow_opt = torch.optim.AdamW(narrow.parameters(), lr=0.01, weight_decay=0.3)
    train(narrow, narrow_opt, features)
    report = mupscale.upscale(narrow, wide, narrow_opt)
    assert_same(named_state(wide, report.optimizer), named_state(narrow, narrow_opt))
    assert len(report.optimizer.param_groups) == 1
    assert [report.optimizer.param_groups[0][key] for key in ("lr", "eps", "weight_decay")] == [0.01, 1e-8, 0.3]
    assert {entry.k_out * entry.k_in for entry in report.plan.parameters.values()} == {1}


def test_the_seed_decides_the_noise_and_the_global_generator_does_not():
    narrow = mlp(8)

    def wide(seed: int) -> dict[str, Tensor]:
        model = mlp(16)
        state = torch.get_rng_state()
        mupscale.upscale(narrow, model, noise=mupscale.AdditiveNoise(0.1), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return named_state(model)

    assert_same(wide(3), wide(3))
    a, b = wide(3), wide(4)
    clean = mlp(16)
    mupscale.upscale(narrow, clean)
    x, y = ((t["layers.1.weight"] - clean.layers[1].weight.detach()).flatten() for t in (a, b))
    assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 4 / 16  # 256 entries: four standard errors


PLAN = """\
parameter        role     narrow → wide  k_out  k_in  weight   duplicated
-----------------------------------------------------------------------------------
layers.0.weight  vector   4×3 → 8×3      2      1     dup      axis 0 ×2
layers.0.bias    vector   4 → 8          2      1     dup      axis 0 ×2
layers.1.weight  matrix   4×4 → 12×8     3      2     dup / 2  axis 0 ×3, axis 1 ×2
layers.1.bias    vector   4 → 12         3      1     dup      axis 0 ×3
readout.weight   readout  2×4 → 2×12     1      3     dup / 3  axis 1 ×3
readout.bias     scalar   2              1      1     copy
46 → 166 parameters"""


def test_the_plan_and_the_report_in_words():
    narrow, wide = MLPNet(3, (4, 4), 2, readout_zero_init=False), MLPNet(3, (8, 12), 2, readout_zero_init=False)
    assert str(mupscale.plan(narrow, wide)) == PLAN
    report = mupscale.upscale(narrow, wide, noise=mupscale.AdditiveNoise(0.5))
    assert str(report).startswith("upscaled 46 → 166 parameters in 0.")
    assert str(report).endswith("; noise on 3 of 6 of them")
    assert report.noise == {name: 0.5 * name.endswith("weight") for name, _ in wide.named_parameters()}
    assert "axis 1: 4·2 by 1 + 3·1 by 1" in str(mupscale.plan(Concat(4), Concat(8), blocks=Concat.blocks(4, 2)))


# --- precision


@pytest.mark.parametrize(("before", "after"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_dtypes(before: torch.dtype, after: torch.dtype):
    """State in its parameter's dtype follows the parameter; state and counters in another keep it."""
    torch.manual_seed(0)
    narrow, wide = mlp(4).to(before), mlp(8).to(after)
    narrow_opt = torch.optim.AdamW(narrow.parameters())
    train(narrow, narrow_opt, features)
    for state in narrow_opt.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()
    report = mupscale.upscale(narrow, wide, narrow_opt)
    for name, parameter in wide.named_parameters():
        source, state = narrow.get_parameter(name), report.optimizer.state[parameter]
        entry = report.plan.parameters[name]
        assert parameter.dtype == state["exp_avg"].dtype == after
        assert (state["step"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.float64)
        assert state["step"] == 3
        for got, old, scale in (
            (parameter, source, 1 / entry.k_in),
            (state["exp_avg"], narrow_opt.state[source]["exp_avg"], 1 / entry.k_out),
            (state["exp_avg_sq"], narrow_opt.state[source]["exp_avg_sq"], 1 / entry.k_out**2),
        ):  # powers of two: exact but for the one rounding to the target's dtype
            assert torch.equal(got.detach(), (duplicate(old.detach().double(), entry.layouts) * scale).to(got.dtype))
    backward(wide, features())


def test_factors_are_applied_in_the_wider_dtype():
    """bf16 / 3 stored as float32 keeps float32's digits."""
    narrow, wide = mlp(4).bfloat16(), mlp(12)
    mupscale.upscale(narrow, wide)
    source = narrow.layers[1].weight.detach().double().repeat_interleave(3, 0).repeat_interleave(3, 1) / 3
    torch.testing.assert_close(wide.layers[1].weight.detach().double(), source, rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_the_meta_device(kind: type[nn.RNNBase]):
    """They keep weak references to their parameters, and flat copies of the list, that must follow."""

    def build(width: int) -> nn.Module:
        return nn.ModuleDict({"rnn": kind(3, width, 2), "head": nn.Linear(width, 2)})

    torch.manual_seed(0)
    narrow = build(4)
    with torch.device("meta"):
        wide = build(8)
    mupscale.upscale(narrow, wide)
    x = torch.randn(5, 2, 3)
    outputs = [model["head"](model["rnn"](x)[0]) for model in (narrow, wide)]
    torch.testing.assert_close(outputs[1], outputs[0])
