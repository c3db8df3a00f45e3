"""The infinite-width limits of the paper's two worked examples: training across an upscale, in closed form.

Linear MLPs under muP with frozen input and output weights, trained by gradient descent on one sample x:

    three layers   y = A B C x / n        B is trained
    four layers    y = A B C D x / n      B and C are trained

Entries of A and of the input layer are drawn from N(0, σ²), those of the matrices between from N(0, σ²/n). The upscale
to width kn adds noise of the same form, with a σ_Δ for each weight. As n grows the output becomes deterministic, and
these functions compute it. They are the paper's equations in a shorter form, derived in docs/theory.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


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
