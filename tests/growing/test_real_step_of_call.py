"""`upscale` with `call`: what only a real step shows is exact, refused with a remedy that works, or named in a note."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import Net, mlp, seq
from nets import take_steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import mupscale
from mupscale.errors import UserError

VECTORS = torch.randn(6, 5, 6, generator=torch.Generator().manual_seed(3))
WORDS = torch.randint(9, (6, 4, 5), generator=torch.Generator().manual_seed(3))

Build = Callable[[int], nn.Module]


def layers(forward: Callable[..., Tensor], **further: Callable[[int], Any]) -> Build:
    """A function that builds a model of three layers, of any width."""

    def build(n: int) -> nn.Module:
        parts = {name: make(n) for name, make in further.items()}
        return Net(
            forward, **{"a": nn.Linear(6, n), "b": nn.Linear(n, n), "c": nn.Linear(n, 4), "n": n, "t": 0, **parts}
        )

    return build


def counted(s: Any) -> int:
    s.t += s.training
    return s.t


def clamped(s: Any, h: Tensor) -> Tensor:
    return h * (1.8 / h.norm(dim=-1, keepdim=True)).clamp(max=1)


def normed_by_average(s: Any, h: Tensor) -> Tensor:
    h = h / s.r.clone()
    if s.training:
        s.r.mul_(0.9).add_(0.1 * h.detach().norm(dim=-1).mean())
    return h


def buffer(persistent: bool, value: Callable[[int], Tensor] = lambda n: torch.ones(())) -> Callable[[int], Any]:
    def make(n: int) -> nn.Module:
        holder = nn.Module()
        holder.register_buffer("r", value(n), persistent=persistent)
        return holder

    return make


def with_gradient(s: Any, x: Tensor) -> Tensor:
    """A force: the gradient of an energy by the input."""
    x = x.detach().requires_grad_()
    energy = s.c(torch.tanh(s.b(torch.tanh(s.a(x))))).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def simple(s: Any, x: Tensor) -> Tensor:
    return s.c(torch.tanh(s.b(torch.tanh(s.a(x)))))


REFUSED: dict[str, tuple[Build, str]] = {
    "W1 a factor of training mode that depends on the width": (
        layers(lambda s, x: s.c(torch.tanh(s.b(s.a(x))) * (1.1 if s.training and s.n > 8 else 1))),
        "'n' (8 → 16)|multiplied by 1.1|call(model) returns differs",
    ),
    "W1 a warm-up counter": (
        layers(lambda s, x: s.c(torch.tanh(s.b(s.a(x))) * (min(1.0, counted(s) / 10) if s.training else 1))),
        "'t' (5 → 0); a counter has to be set by hand",
    ),
    "W1 a counter of every eighth step": (
        layers(lambda s, x: s.c(torch.tanh(s.b(s.a(x))) * (2 if (counted(s) if s.training else 1) % 6 == 0 else 1))),
        "'t' (5 → 0); a counter has to be set by hand",
    ),
    "W1 a counter in a buffer that is not saved": (
        layers(
            lambda s, x: s.c(torch.tanh(s.b(s.a(x))) * min(1.0, float(s.h.r.add_(s.training)) / 10)), h=buffer(False)
        ),
        "'h.r' (6 → 1, a buffer that is not saved, so it keeps the wide model's value); a counter has to be set by",
    ),
    "W2 a clamp on the norm of activations": (
        layers(lambda s, x: s.c(clamped(s, s.b(torch.tanh(s.a(x)))))), "call(model) returns differs"
    ),
    "a factor of evaluation mode": (
        layers(lambda s, x: s.c(torch.tanh(s.b(s.a(x)))) * (1 if s.training else s.n)), "(in evaluation mode)"
    ),
    "W5 a running norm": (
        layers(
            lambda s, x: s.c(torch.tanh(s.b(normed_by_average(s.h, torch.tanh(s.a(x)))))), h=buffer(persistent=True)
        ),
        "the buffer 'h.r' differs",
    ),
}  # fmt: skip


def trained(build: Build, batches: Tensor = VECTORS, n: int = 8) -> tuple[Any, Optimizer]:
    torch.manual_seed(0)
    model = build(n)
    optimizer = AdamW(model.parameters(), lr=0.01)
    take_steps(model, optimizer, list(batches[:5]), lambda model, x: (model(x) - 1).square().mean())
    return model, optimizer


def grown(build: Build, batches: Tensor = VECTORS, **settings: Any) -> Any:
    narrow, optimizer = trained(build, batches)
    return mupscale.upscale(narrow, build(16), optimizer, call=lambda model: model(batches[5]), **settings)


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_step_shows_is_refused(name: str):
    build, words = REFUSED[name]
    with pytest.raises(UserError) as error:
        grown(build)
    assert any(each in str(error.value) for each in words.split("|")), error.value


def test_an_inactive_max_norm_is_compensated_or_refused_with_the_remedy():
    """Rows that are divided by the root of a whole factor keep their norm; with a fraction, some become longer."""

    def build(n: int, largest: float = 3.6) -> nn.Module:
        return seq(nn.Embedding(9, n, max_norm=largest), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 4))

    settings: dict[str, Any] = {"call": lambda model: model(WORDS[5])}
    words = (
        r"call\(model\) returns differs.* First, what '0' \(Embedding\) returns differs.* 0: max_norm renormalises rows"
    )
    for largest, refused in ((3.6, build(12)), (9.0, build(16, 9.0))):
        narrow, optimizer = trained(lambda n, largest=largest: build(n, largest), WORDS)
        with pytest.raises(UserError, match=f"{words}, whose norm grows as sqrt.*unless max_norm grows with it"):
            mupscale.upscale(narrow, refused, optimizer, **settings)
    for largest, further in ((3.6, 3.6), (9.0, 9.0 * math.sqrt(2))):
        narrow, optimizer = trained(lambda n, largest=largest: build(n, largest), WORDS)
        wide = build(16, further)
        report = mupscale.upscale(narrow, wide, optimizer, **settings)
        assert report.exact is True
        assert_trains_alike((narrow, optimizer), (wide, report.optimizer), WORDS)


def assert_trains_alike(narrow: Any, wide: Any, batches: Tensor) -> None:
    losses = [take_steps(*pair, list(batches) * 3, lambda m, x: (m(x) - 1).square().mean()) for pair in (narrow, wide)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)


def test_the_remedy_for_a_counter_works():
    build, _ = REFUSED["W1 a warm-up counter"]
    narrow, optimizer = trained(build)
    wide = build(16)
    wide.t = narrow.t
    report = mupscale.upscale(narrow, wide, optimizer, call=lambda model: model(VECTORS[5]))
    assert report.exact is True


def test_hooks_of_parameters_are_registered_on_both_models():
    narrow, optimizer = trained(mlp)
    wide = mlp(16)
    narrow[2].weight.register_hook(lambda g: g * (torch.arange(len(g)) % 8 < 4)[:, None])
    settings = {"call": lambda model: model(VECTORS[5])}
    with pytest.raises(UserError, match=r"The gradient of '2.weight' has a hook.*register it on the wide model, too"):
        mupscale.upscale(narrow, wide, optimizer, **settings)
    wide[2].weight.register_hook(lambda g: g * (torch.arange(len(g)) % 16 // 2 < 4)[:, None])
    assert mupscale.upscale(narrow, wide, optimizer, **settings).exact is True


def decay(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(0.95)


def clamp(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.1, 0.1)


def clip_by_value(optimizer: Optimizer, *_: Any) -> None:
    torch.nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], 1e-3)


def drop_small(optimizer: Optimizer, *_: Any) -> None:
    for gradient in (p.grad for group in optimizer.param_groups for p in group["params"]):
        gradient[gradient.abs() < 1e-3] = 0


@pytest.mark.parametrize(
    ("kind", "hook", "exact"),
    [("post", decay, True), ("post", clamp, False), ("pre", clip_by_value, False), ("pre", drop_small, False)],
)
def test_step_hooks_of_an_optimizer_are_carried_or_refused(kind: str, hook: Callable[..., None], exact: bool):
    narrow, optimizer = trained(mlp)
    wide = mlp(16)
    getattr(optimizer, f"register_step_{kind}_hook")(hook)
    settings = {"call": lambda model: model(VECTORS[5])}
    if not exact:
        with pytest.raises(UserError, match=r"the step of AdamW, with its hooks, does not scale.*Remove hooks"):
            mupscale.upscale(narrow, wide, optimizer, **settings)
        return
    report = mupscale.upscale(narrow, wide, optimizer, **settings)
    assert report.exact is True
    assert_trains_alike((narrow, optimizer), (wide, report.optimizer), VECTORS)


def test_the_step_of_muon_is_compared_without_its_rounding():
    """A third of a weight is rounded otherwise to bfloat16, in which torch's Newton-Schulz computes."""
    narrow = mlp(8)
    optimizers = [torch.optim.Muon([narrow[2].weight], lr=0.01), AdamW(narrow[4].parameters())]
    report = mupscale.upscale(narrow, mlp(24), optimizers, call=lambda model: model(VECTORS[5]))
    assert report.exact is True


class Lamb(torch.optim.Optimizer):
    """Adam with decay, and updates as large as the weights."""

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-6, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
                corrected = [
                    state["exp_avg"] / (1 - 0.9 ** state["step"]),
                    state["exp_avg_sq"] / (1 - 0.99 ** state["step"]),
                ]
                update = corrected[0] / (corrected[1].sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_(group["lr"] * p.norm() / update.norm() * update)


def test_lamb_registered_as_adam_is_refused_and_the_remedy_works():
    state = {"exp_avg": 1, "exp_avg_sq": 2}

    def pair() -> tuple[nn.Module, Optimizer, nn.Module]:
        torch.manual_seed(0)
        narrow = mlp(8)
        optimizer = Lamb(narrow.parameters())
        take_steps(narrow, optimizer, list(VECTORS), lambda model, x: (model(x) - 1).square().mean())
        return narrow, optimizer, mlp(16)

    settings = {"call": lambda model: model(VECTORS[0])}
    mupscale.register_optimizer(Lamb, degree=0, state=state, decoupled_weight_decay=True)
    narrow, optimizer, wide = pair()
    with pytest.raises(UserError, match=r"the step of Lamb, with its hooks, does not scale.*trust_ratio=True"):
        mupscale.upscale(narrow, wide, optimizer, **settings)
    mupscale.register_optimizer(Lamb, degree=0, state=state, decoupled_weight_decay=True, trust_ratio=True)
    report = mupscale.upscale(narrow, wide, optimizer, **settings)
    assert report.exact is True
    assert_trains_alike((narrow, optimizer), (wide, report.optimizer), VECTORS)


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (lambda w: w.sign() * w.abs().mean(), True),
        (lambda w: w / w.detach().abs().max() * w.abs().mean(), True),
        (lambda w: 2 * w, False),
    ],
)
def test_centred_noise_that_changes_the_function_is_a_note(read: Callable[[Tensor], Tensor], changes: bool):
    build = layers(lambda s, x: s.c(torch.tanh(F.linear(torch.tanh(s.a(x)), read(s.b.weight)))))
    report = grown(build, noise=mupscale.AdditiveNoise(0.5, centred=True))
    notes = [note for note in report.notes if "centred noise changes what call returns" in note]
    assert bool(notes) is changes
    assert all("does not read 'b.weight' linearly" in note for note in notes)
    silent = grown(build, noise=mupscale.AdditiveNoise(0.5, {"b.weight": False}, centred=True))
    assert not any("centred noise" in note for note in silent.notes)


@pytest.mark.parametrize(
    "build",
    [
        layers(lambda s, x: s.c(torch.tanh(s.b(s.a(x) * s.h.r))), h=buffer(False, lambda n: torch.ones(n))),
        layers(with_gradient, c=lambda n: nn.Linear(n, 1)),
        layers(lambda s, x: s.c(torch.tanh(s.b(s.a(x)))) + torch.autograd.grad(
            s.a(x.requires_grad_()).sum(), x, create_graph=True)[0][:, :4] * 0),
    ],
)  # fmt: skip
def test_it_is_exact_without_a_traceback(build: Build):
    assert grown(build).exact is True


def test_a_growing_buffer_that_is_not_saved_is_no_traceback_where_models_differ():
    def build(n: int) -> nn.Module:
        holder = buffer(False, lambda n: torch.arange(n + 3, dtype=torch.float32))(n)
        return Net(
            lambda s, x: s.c(s.a(x) * s.h.r.sum() * math.sqrt(s.n)), a=nn.Linear(6, n), c=nn.Linear(n, 4), h=holder, n=n
        )

    with pytest.raises(UserError, match="does not compute and train as the narrow one"):
        grown(build, on_mismatch="error")


def test_a_constant_of_the_width_is_compensated_by_a_fraction():
    def build(n: int) -> nn.Module:
        parts = {"e": nn.Embedding(9, n), "p": nn.Parameter(torch.randn(5, n)), "c": nn.Linear(n, 4), "n": n}
        return Net(lambda s, x: s.c(torch.tanh(s.e(x) * math.sqrt(s.n) + s.p)), **parts)

    narrow, optimizer = trained(build, WORDS)
    report = mupscale.upscale(narrow, build(12), optimizer, call=lambda model: model(WORDS[5]))
    assert (report.exact, report.plan.parameters["e.weight"].rescale) == (True, 1.5**-0.5)


def test_lists_of_parameters_of_unlike_shapes():
    def build(n: int) -> nn.Module:
        return Net(
            lambda s, x: F.linear(torch.tanh(s.a(x) + s.p[0]), s.p[1].T),
            a=nn.Linear(6, n),
            p=nn.ParameterList([torch.randn(n), torch.randn(n, 2) / n**0.5]),
        )

    assert grown(build).exact is True


@pytest.mark.parametrize(
    ("forward", "exact"),
    [
        (simple, None),
        (lambda s, x: simple(s, x) + 0 * s.further(torch.tanh(s.a(x))).sum(), None),
        (lambda s, x: s.c(torch.tanh(s.b(s.a(x))) + torch.tanh(s.further(s.a(x))).detach()), True),
    ],
)
def test_a_growing_parameter_without_gradient_and_effect_leaves_it_unknown(
    forward: Callable[..., Tensor], exact: bool | None
):
    report = grown(layers(forward, further=lambda n: nn.Linear(n, n)))
    assert report.exact is exact
    assert ("so untested: 'further.weight'" in report.check) is (exact is None)


@pytest.mark.parametrize(("width", "uneven"), [(16, False), (12, True)])
def test_outputs_that_grow_are_a_note(width: int, uneven: bool):
    narrow, wide = (layers(lambda s, x: torch.tanh(s.b(torch.tanh(s.a(x)))))(n) for n in (8, width))
    report = mupscale.upscale(narrow, wide, call=lambda model: model(VECTORS[5]))
    note = next(
        note for note in report.notes if f"returns grows (5, 8) → (5, {width}), by copies of its entries" in note
    )
    assert ("of some more than of others, so a mean over them is another one" in note) is uneven
