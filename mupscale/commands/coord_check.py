"""coord-check: check whether activations and their updates keep their scale as the width, or the depth, grows.

Over widths, the check covers training from initialisation, and training across an upscale.
"""

import argparse
import csv
import math
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import tree_map
from mupscale.checks.coordinate_check import DEFAULT_NOISE, FACTORS, CoordCheck, coord_check
from mupscale.commands.arguments import ArgumentParser, refuse_output_folder
from mupscale.commands.terminal import Status, show
from mupscale.errors import UserError, needs_extra, refuse_unless_whole

ROWS = 16
"""How many rows of each batch are used. Slopes do not depend on it, and the time does."""

MOST_IN_LEGEND = 16
RED = "#d62728"


def main(command: str, arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="python -m mupscale coord-check",
        description=__doc__,
        epilog="Give the model with --config FILE; further options are those of fit. "
        f"Trains networks of up to {FACTORS[0]} times the widest width, or of these depths, on the CPU. "
        "The exit status is 1 if a layer fails.",
        allow_abbrev=False,
    )
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--widths", type=numbers, metavar="N,N,N", help="at least three widths, such as 64,128,256,512")
    sizes.add_argument("--layers", type=numbers, metavar="N,N,N", help="at least three depths, such as 2,4,8,16")
    parser.add_argument(
        "--steps", type=int, default=4, help="training steps before the upscale, and as many after it (default 4)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="the number of networks per width to average over (default 3)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/coord-check"),
        metavar="DIR",
        help="the folder of the figure and the table (default %(default)s)",
    )
    options, configuration = parser.own_and_other(arguments)
    refuse_unless_whole("--steps", options.steps)
    refuse_unless_whole("--seeds", options.seeds)
    with needs_extra("plot"):
        import matplotlib  # noqa: F401
    refuse_output_folder("--out", options.out)
    check = checked(command, configuration, options)
    options.out.mkdir(parents=True, exist_ok=True)
    show(check)
    write_sizes(check, options.out / "coord_check.csv")
    draw(check, options.out / "coord_check.png")
    print(f"figure and sizes: {options.out}/coord_check.png, coord_check.csv")
    return int(not check.passed)


def numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"wanted numbers like 64,128,256,512, got {text!r}")
    return [int(part) for part in parts]


def checked(command: str, configuration: list[str], options: argparse.Namespace) -> CoordCheck:
    """The check of the configured model, with its optimizer, its data, and the noise of its first upscale."""
    from mupscale.commands.configured import configured, first_batches, upscales
    from mupscale.models._lightning import optimizers_of
    from mupscale.models.checkpoint import Size
    from mupscale.models.growth_check import LossBySize

    module, data, trainer = configured(command, configuration, __doc__)
    if options.layers and not module.builds_layers:
        raise UserError(f"--layers: {type(module).__name__} has a fixed number of layers; give --widths")
    loss = LossBySize(module)
    widths, factors = options.widths or (), (1, *FACTORS)
    sizes = [Size(width) for width in sorted({factor * width for width in widths for factor in factors})]
    sizes += [Size(module.width, layers) for layers in options.layers or ()]
    for size in sizes:
        try:
            module.network(*size, meta=True)
        except (ValueError, AssertionError) as error:  # a model of the user's may assert that heads divide its width
            key = "--layers" if options.layers else "--widths"
            raise UserError(f"{key}: {str(error) or f'the model refuses {size}'}") from error
    scheduled = upscales(trainer)
    batches = first_batches(module, data, 2 * options.steps)

    def optimizers(net: nn.Module) -> list[Optimizer]:
        module.net = net
        made = optimizers_of(module.configure_optimizers())
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])  # a schedule may begin with a rate of zero
        return made

    with Status() as status:
        return coord_check(
            (lambda layers: loss.network(module.width, layers)) if options.layers else loss.network,
            options.layers or options.widths,
            optimizer=optimizers,
            loss=loss,
            steps=options.steps,
            seeds=options.seeds,
            batches=tree_map(lambda x: x[:ROWS] if isinstance(x, Tensor) and x.ndim else x, batches),
            noise=scheduled[0].noise if scheduled else DEFAULT_NOISE,
            clip=trainer.gradient_clip_val,
            axis="depth" if options.layers else "width",
            watch=status,
        )


def write_sizes(check: CoordCheck, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["scan", "layer", check.axis, "step", "output", "update"])
        for scan in check.scans:
            for layer in check.layers:
                for width, steps in zip(scan.widths, scan.mean(layer).tolist(), strict=True):
                    writer.writerows([scan.name, layer, width, step, *size] for step, size in enumerate(steps))


def draw(check: CoordCheck, path: Path) -> None:
    """Draws sizes against width or depth, a column for each scan; layers that fail are red.

    Above, outputs at the start of the scan; below, their change after every step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    layers = list(check.layers)
    colours = dict(zip(layers, plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(layers)).numpy()), strict=True))
    columns = len(check.scans)
    form: dict[str, Any] = {"sharex": "col", "sharey": "row", "layout": "constrained", "squeeze": False}
    fig, axes = plt.subplots(2, columns, figsize=(4 + 3 * columns, 6.6), **form)
    for (above, below), scan in zip(axes.T, check.scans, strict=True):
        for layer in layers:
            sizes, slopes = scan.mean(layer), check.layers[layer][scan.name]
            for ax, values, fails in (
                (above, sizes[:, 0, 0], slopes.output_fails),
                (below, sizes[:, -1, 1], slopes.update_fails),
            ):
                if values.all():  # zeros have no logarithm
                    colour = RED if fails else colours[layer]
                    ax.loglog(scan.widths, values, "o-", color=colour, ms=3, lw=1.2, zorder=3 if fails else 2)
                    if fails:
                        ax.annotate(
                            f" {layer}", (scan.widths[-1], values[-1].item()), color=RED, fontsize=7, va="center"
                        )
            for earlier in sizes[:, 1:-1, 1].T:
                below.loglog(scan.widths, earlier.where(earlier > 0, math.nan), ":", color=colours[layer], lw=0.7)
        above.set_title(fill(f"{scan.name}: {scan.title}", 50), fontsize=9)
        below.set_xlabel(check.axis)
        below.xaxis.set(
            major_locator=FixedLocator(scan.widths),
            minor_locator=NullLocator(),
            major_formatter=StrMethodFormatter("{x:g}"),
        )
        below.set_xlim(scan.widths[0] / 1.2, scan.widths[-1] * (1.2 if check.passed else 2))  # with room for names
    last = [scan.mean(layer)[:, -1, 1] for scan in check.scans for layer in layers]
    smallest = min((values.min().item() for values in last if values.all()), default=1.0)
    axes[1, 0].set_ylim(bottom=smallest / 10)  # below a readout that starts at zero, the first step is tiny
    axes[0, 0].set_ylabel("size of the outputs, at the start")
    axes[1, 0].set_ylabel("size of their change, after all steps\n(dotted: after fewer)")
    every = max(1, math.ceil(len(layers) / MOST_IN_LEGEND))
    handles = [plt.Line2D([], [], color=colours[layer], marker="o", ms=3, label=layer) for layer in layers[::every]]
    fig.legend(
        handles=handles,
        loc="outside right center",
        frameon=False,
        fontsize=7,
        title="layers" if every == 1 else "some layers",
    )
    fig.savefig(path, dpi=100)
    plt.close(fig)
