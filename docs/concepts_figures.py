"""Draws widening.svg and equivalence.svg of docs/concepts.md. Takes half a minute on one CPU core.

python docs/concepts_figures.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor, nn

import mupscale

matplotlib.rcParams["svg.hashsalt"] = "concepts"  # the same file every time
COLOURS = ("#2f6f9f", "#d9822b")
"""One for each unit of the narrow layer; its copies have the same."""
NARROW, WIDE = 8, 64
STEPS, STEPS_MORE = 300, 900
WINDOW = 25
"""Steps over which a plotted loss is averaged."""


def widening(path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    network(axes[0], copies=1, title="narrow: two hidden units")
    network(axes[1], copies=2, title="wide: two copies of each")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def network(ax: Axes, copies: int, title: str) -> None:
    """Two inputs, hidden units in as many copies, and one output, with the weights of the two layers."""
    inputs = [(0.0, 0.65), (0.0, -0.65)]
    names = [name for name in ("a", "b") for _ in range(copies)]
    top = 0.5 * (len(names) - 1)
    hidden = [(1.0, (top - place) * 1.3 / copies) for place in range(len(names))]
    output = (2.0, 0.0)
    for name, unit in zip(names, hidden, strict=True):
        colour = COLOURS["ab".index(name)]
        for source in inputs:
            ax.plot(*zip(source, unit, strict=True), color=colour, lw=1.6, zorder=1)
        ax.plot(*zip(unit, output, strict=True), color=colour, lw=1.6 / copies, zorder=1)
        label = f"$w_{name}$" if copies == 1 else f"$w_{name}/{copies}$"
        ax.text(1.36, 0.64 * unit[1], label, ha="center", va="center", fontsize=11, bbox={"color": "white", "pad": 1})
    for place, name, colour in (
        *zip(inputs, ("", ""), ("0.75", "0.75"), strict=True),
        *((unit, name, COLOURS["ab".index(name)]) for unit, name in zip(hidden, names, strict=True)),
        (output, "", "0.75"),
    ):
        ax.scatter(*place, s=520, color=colour, edgecolor="white", zorder=2)
        ax.text(*place, name, ha="center", va="center", color="white", fontsize=12, zorder=3)
    ax.text(0.0, 1.15, "input", ha="center")
    ax.text(2.0, 1.15, "output", ha="center")
    ax.set(title=title, xlim=(-0.25, 2.25), ylim=(-1.3, 1.4))
    ax.axis("off")


def spirals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on three interleaved spiral arms."""
    label = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator) * 3 + 0.2
    angle = 2.5 * radius + label * (2 * torch.pi / 3) + 0.1 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> Tensor:
    """The training losses of so many steps."""
    generator = torch.Generator().manual_seed(seed)
    recorded = []
    for _ in range(steps):
        points, labels = spirals(256, generator)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorded.append(loss.item())
    return torch.tensor(recorded)


def equivalence(path: Path) -> None:
    torch.manual_seed(0)
    narrow = build(NARROW)
    narrow_opt = torch.optim.AdamW(narrow.parameters(), lr=3e-3)
    before = losses(narrow, narrow_opt, STEPS, seed=0)
    runs = {}
    points, _ = spirals(32, torch.Generator().manual_seed(2))
    for name, noise in (("wide, without noise", None), ("wide, with noise", mupscale.AdditiveNoise(0.2, centred=True))):
        wide = build(WIDE)
        report = mupscale.upscale(narrow, wide, narrow_opt, noise=noise, call=lambda model: model(points))
        runs[name] = losses(wide, report.optimizer, STEPS_MORE, seed=1)
    runs["narrow, not widened"] = losses(narrow, narrow_opt, STEPS_MORE, seed=1)

    figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    middle = WINDOW / 2
    ax.plot(torch.arange(middle, STEPS, WINDOW), windows(before), color="0.4", lw=2)
    styles = {
        "wide, without noise": {"color": COLOURS[0], "lw": 5, "alpha": 0.35},
        "narrow, not widened": {"color": "0.4", "lw": 2},
        "wide, with noise": {"color": COLOURS[1], "lw": 2},
    }
    for name, style in styles.items():
        both = torch.cat([before[-WINDOW:], runs[name]])  # from the last point before the growth
        ax.plot(torch.arange(STEPS - middle, STEPS + STEPS_MORE, WINDOW), windows(both), label=name, **style)
    ax.axvline(STEPS, color="0.6", lw=0.8, ls=":")
    ax.annotate(f"width {NARROW} → {WIDE}", (STEPS, 0.02), (6, 2), xycoords=("data", "axes fraction"),
                textcoords="offset points")  # fmt: skip
    ax.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def windows(values: Tensor) -> Tensor:
    return values.reshape(-1, WINDOW).mean(1)


if __name__ == "__main__":
    folder = Path(__file__).parent
    widening(folder / "widening.svg")
    equivalence(folder / "equivalence.svg")
