"""Draws docs/theory.svg: trained and upscaled networks of finite width approach their infinite-width limits.

python docs/theory_figure.py

The limits are those of the paper's two worked examples: training across an upscale, in closed form. Linear MLPs under
muP with frozen input and output weights, trained by gradient descent on one sample x:

    three layers   y = A B C x / n        B is trained
    four layers    y = A B C D x / n      B and C are trained

Entries of A and of the input layer are drawn from N(0, σ²), those of the matrices between from N(0, σ²/n). The upscale
to width kn adds noise of the same form, with a σ_Δ for each weight. As n grows the output becomes deterministic.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import mupscale
from mupscale.methods.noise import Noise

K = 2
NOISE = 1.0
SEEDS = {32: 48, 64: 48, 128: 48, 256: 48, 512: 48, 1024: 12}
"""How many networks of each width the errors are averaged over; the upscaled ones are K times as wide."""


@dataclass(frozen=True)
class Training:
    """Training before and after an upscale; rates and standard deviations are base constants at base width 1."""

    slope: Callable[[float], float]
    """L′(y), the derivative of the loss by the output."""
    lr: float
    steps: int
    """Gradient steps before the upscale, the paper's T − 1."""
    lr_up: float
    steps_up: int
    x: float = 1.0
    sigma: float = 1.0


class Limit(NamedTuple):
    """The output before each gradient step and after the last one, of the narrow and of the upscaled network."""

    before: list[float]
    after: list[float]


def three_layer_limit(run: Training, *, noise_A: float = 0.0, noise_C: float = 0.0) -> Limit:
    """The outputs of the three-layer network; neither the noise on B nor the factor k has any influence."""

    def descend(y: float, rate: float, steps: int) -> list[float]:
        outputs = [y]
        for _ in range(steps):
            outputs.append(outputs[-1] - rate * run.slope(outputs[-1]))
        return outputs

    variance = run.sigma**2
    before = descend(0.0, run.lr * run.x**2 * variance**2, run.steps)
    rate_up = run.lr_up * run.x**2 * (variance + noise_C**2) * (variance + noise_A**2)
    return Limit(before, descend(before[-1], rate_up, run.steps_up))


class Span(NamedTuple):
    """A vector by its coefficients of p₀, p, q₀ and q."""

    p0: float = 0.0
    p: float = 0.0
    q0: float = 0.0
    q: float = 0.0

    def plus(self, factor: float, other: "Span") -> "Span":
        return Span(*(mine + factor * theirs for mine, theirs in zip(self, other, strict=True)))


def four_layer_limit(
    run: Training, k: int, *, noise_A: float = 0.0, noise_B: float = 0.0, noise_C: float = 0.0, noise_D: float = 0.0
) -> Limit:
    """The outputs of the four-layer network upscaled by the factor k.

    y is the inner product of h = C D x and d = (A B)ᵀ over the width. Both stay in the span of four Gaussian vectors:
    p₀ = C₀ D₀ x and q₀ = (A₀ B₀)ᵀ of the untrained narrow network, and p, q, the same products with these weights
    duplicated and noisy. Training moves only the coefficients; those of h are the paper's M, M′, N, N′.
    """
    variance, x2 = run.sigma**2, run.x**2
    noisy_A, noisy_D = variance + noise_A**2, variance + noise_D**2
    # duplicated matrices see the mean over k copies of the noise before them, noise on the matrices sees all of it
    p0_p0, p_p = x2 * variance**2, x2 * (variance * (variance + noise_D**2 / k) + noise_C**2 * noisy_D)
    q0_q0, q_q = variance**2, variance * (variance + noise_A**2 / k) + noise_B**2 * noisy_A

    def inner_product(a: Span, b: Span) -> float:
        # noise has mean zero, so that <p₀|p> = <p₀|p₀> and <q₀|q> = <q₀|q₀>
        of_p = p0_p0 * (a.p0 * b.p0 + a.p0 * b.p + a.p * b.p0) + p_p * a.p * b.p
        return of_p + q0_q0 * (a.q0 * b.q0 + a.q0 * b.q + a.q * b.q0) + q_q * a.q * b.q

    def train(
        h: Span, d: Span, lr: float, input_square: float, output_square: float, steps: int
    ) -> tuple[Span, Span, list[float]]:
        outputs = [inner_product(h, d)]
        for _ in range(steps):
            rate = lr * run.slope(outputs[-1])
            h, d = h.plus(-rate * input_square, d), d.plus(-rate * output_square, h)
            outputs.append(inner_product(h, d))
        return h, d, outputs

    h, d, before = train(Span(p0=1.0), Span(q0=1.0), run.lr, x2 * variance, variance, run.steps)
    # p takes the place of p₀ in h, and q that of q₀ in d; what training has added stays as it is
    h, d = Span(p0=h.p0 - 1, p=1.0, q0=h.q0), Span(p0=d.p0, q0=d.q0 - 1, q=1.0)
    _, _, after = train(h, d, run.lr_up, x2 * noisy_D, noisy_A, run.steps_up)
    return Limit(before, after)


class Example(NamedTuple):
    layers: str
    """The weights by the paper's letters, input first."""
    run: Training
    limit: Limit
    undisturbed: Limit
    """The limit of going on without an upscale."""


def examples() -> dict[str, Example]:
    """Both examples under the logistic loss of a positive sample, log(1 + e^-y)."""

    def slope(y: float) -> float:
        return -1 / (1 + math.exp(y))

    # the noise multiplies the rate of three layers by (1 + 1)(1 + 1): divided by that, their limit goes on as if
    # nothing had happened
    three = Training(slope, lr=0.4, steps=6, lr_up=0.1, steps_up=8)
    four = Training(slope, lr=0.1, steps=6, lr_up=0.05, steps_up=8)
    noises = {f"noise_{letter}": NOISE for letter in "ABCD"}
    limits = three_layer_limit(three, noise_A=NOISE, noise_C=NOISE), four_layer_limit(four, K, **noises)
    undisturbed = three_layer_limit(replace(three, lr_up=three.lr)), four_layer_limit(replace(four, lr_up=four.lr), k=1)
    return {
        "three layers": Example("CBA", three, limits[0], undisturbed[0]),
        "four layers": Example("DCBA", four, limits[1], undisturbed[1]),
    }


def network(layers: str, width: int) -> nn.Module:
    """The linear MLP with these weights under muP at base width 1, drawn with σ = 1; only the middle trains."""
    first, *hidden, last = layers

    def build(n: int) -> nn.Module:
        between = [(name, nn.Linear(n, n, bias=False)) for name in hidden]
        return nn.Sequential(
            OrderedDict([(first, nn.Linear(1, n, bias=False)), *between, (last, mupscale.Readout(n, 1, bias=False))])
        )

    with torch.device("meta"):
        base, delta = build(1), build(2)
    net = build(width)
    for name, weight in net.named_parameters():
        nn.init.normal_(weight).requires_grad_(name[0] in hidden)
    return mupscale.set_base_shapes(net, base, delta, init="constant")


def train(net: nn.Module, optimizer: torch.optim.Optimizer, run: Training, steps: int) -> list[float]:
    """Gradient descent on the one sample; the output before each step and after the last."""
    outputs = []
    for step in range(steps + 1):
        y = net(torch.tensor([run.x]))
        outputs.append(y.item())
        if step < steps:
            optimizer.zero_grad()
            y.backward(torch.tensor([run.slope(y.item())]))
            optimizer.step()
    return outputs


def finite_width(layers: str, run: Training, width: int, k: int, noise: Noise, seed: int) -> Limit:
    """What the limits are limits of: a network of this width is trained, upscaled by the factor k, and trained on."""
    torch.manual_seed(seed)
    narrow = network(layers, width)
    narrow_opt = mupscale.apply_mup(torch.optim.SGD(narrow.parameters(), lr=run.lr), narrow)
    before = train(narrow, narrow_opt, run, run.steps)
    with torch.device("meta"):
        wide = network(layers, k * width)
    wide_opt = mupscale.apply_mup(torch.optim.SGD(wide.parameters(), lr=run.lr_up), wide)
    mupscale.upscale(narrow, wide, narrow_opt, wide_opt, noise=noise, seed=seed)
    return Limit(before, train(wide, wide_opt, run, run.steps_up))


def curves(example: Example, width: int, seeds: Iterable[int]) -> list[Limit]:
    return [finite_width(example.layers, example.run, width, K, mupscale.AdditiveNoise(NOISE), seed) for seed in seeds]


def errors(example: Example) -> tuple[Tensor, Tensor]:
    """Root mean square distance from the limit, over steps and seeds, before and after the upscale, at each width."""
    distances = []
    for width, seeds in SEEDS.items():
        runs = curves(example, width, range(seeds))
        distances.append(
            [_rms(torch.tensor([run[phase] for run in runs]) - torch.tensor(example.limit[phase])) for phase in (0, 1)]
        )
    before, after = torch.tensor(distances, dtype=torch.float64).T
    return before, after


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def log_log_slope(values: Tensor) -> float:
    """The power of the width with which `values`, one for each of the widths, fall."""
    x = torch.tensor(list(SEEDS), dtype=torch.float64).log()
    x -= x.mean()
    return (x @ values.log() / (x @ x)).item()


def figure(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "theory"  # the same file every time
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(12.5, 3.7), layout="constrained")
    for ax, (name, example) in zip(axes, examples().items(), strict=False):
        grown_at, steps_up = example.run.steps, example.run.steps_up
        before, after = range(grown_at + 1), range(grown_at, grown_at + steps_up + 1)
        for width, colour in ((32, "#f2b380"), (512, "#2f6f9f")):
            for seed, run in enumerate(curves(example, width, range(8))):
                label = f"width {width}, then {K * width}" if seed == 0 else None
                ax.plot(before, run.before, color=colour, lw=0.9, label=label)
                ax.plot(after, run.after, color=colour, lw=0.9)
        ax.plot(before, example.limit.before, "k--", lw=1.8, label="infinite width")
        ax.plot(after, example.limit.after, "k--", lw=1.8)
        ax.plot(after, example.undisturbed.after, color="#d62728", ls=":", lw=2, label="infinite width, no upscale")
        ax.axvline(grown_at, color="grey", lw=0.8, ls=":")
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        ax.annotate("upscale, noise 1", (grown_at, 0.02), (4, 2), **place)
        ax.set(title=name, xlabel="gradient step", ylabel="output", ylim=(-1.0, 1.5 * example.limit.after[-1]))
        ax.legend(loc="upper left", frameon=False, fontsize=8)
    widths = torch.tensor(list(SEEDS))
    for (name, example), colour in zip(examples().items(), ("#7a4b94", "#2f8f5b"), strict=True):
        for values, when, style in zip(errors(example), ("before", "after"), ("o--", "s-"), strict=True):
            label = f"{name}, {when} (slope {log_log_slope(values):.2f})".replace("-", "−")
            axes[2].loglog(widths, values, style, color=colour, lw=1, ms=4, label=label)
    axes[2].loglog(widths, 4 * widths**-0.5, "k:", lw=1, label="∝ width$^{-1/2}$")
    axes[2].set(title="distance from the limit", xlabel="width of the narrow network", ylabel="root mean square error")
    axes[2].set_ylim(bottom=0.006)
    axes[2].legend(loc="lower left", frameon=False, fontsize=8)
    fig.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    figure(Path(__file__).with_name("theory.svg"))
