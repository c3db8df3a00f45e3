"""coord-check: check whether activations and their updates keep their scale as the width, or the depth, grows.

Over widths, the check covers training from initialisation, and training across a growth.
"""

import argparse
import csv
import io
import math
from pathlib import Path
from textwrap import fill

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import tree_map
from mupscale.atomic import replacing, write_text
from mupscale.checks.coordinate_check import DEFAULT_NOISE, FACTORS, CoordCheck, coord_check
from mupscale.commands import figures
from mupscale.commands.process import ArgumentParser, progress_bar, refuse_output_folder, show
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
    )
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--widths", type=numbers, metavar="N,N,N", help="at least three widths, such as 64,128,256,512")
    sizes.add_argument("--layers", type=numbers, metavar="N,N,N", help="at least three depths, such as 2,4,8,16")
    parser.add_argument(
        "--steps", type=int, default=4, help="training steps before the growth, and as many after it (default 4)"
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
    check = run_check(command, configuration, options)
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


def run_check(command: str, configuration: list[str], options: argparse.Namespace) -> CoordCheck:
    """The check of the configured model, with its optimizer, its data, and the noise of its first upscale."""
    from mupscale.callbacks.upscale import swaps_of
    from mupscale.commands.configured import begin_rates, configured, first_batches
    from mupscale.commands.growth_plans import LossBySize
    from mupscale.models._lightning import optimizers_of
    from mupscale.models.checkpoint import Size

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
    scheduled = swaps_of(trainer)
    batches = first_batches(module, data, 2 * options.steps)

    def optimizers(net: nn.Module) -> list[Optimizer]:
        module.net = net
        return begin_rates(optimizers_of(module.configure_optimizers()))

    with progress_bar() as status:
        return coord_check(
            (lambda layers: loss.network(module.width, layers)) if options.layers else loss.network,
            options.layers or options.widths,
            optimizer=optimizers,
            loss=loss,
            steps=options.steps,
            seeds=options.seeds,
            batches=tree_map(lambda x: x[:ROWS] if isinstance(x, Tensor) and x.ndim else x, batches),
            noise=scheduled[0].noise if scheduled and scheduled[0].noise != "auto" else DEFAULT_NOISE,
            clip=trainer.gradient_clip_val,
            axis="depth" if options.layers else "width",
            watch=status,
        )


def write_sizes(check: CoordCheck, path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["scan", "layer", check.axis, "step", "output", "update"])
    for scan in check.scans:
        for layer in check.layers:
            for width, steps in zip(scan.widths, scan.mean(layer).tolist(), strict=True):
                writer.writerows([scan.name, layer, width, step, *size] for step, size in enumerate(steps))
    write_text(path, text.getvalue())


def draw(check: CoordCheck, path: Path) -> None:
    """Draws sizes against width or depth, a column for each scan; layers that fail are red and named.

    Above, outputs at the start of the scan; below, their change after all steps.
    """
    from matplotlib import colormaps

    layers = list(check.layers)
    drawn, axes = figures.panels(4 + 3 * len(check.scans), 6.6, 2, len(check.scans))
    for place, ax in enumerate(axes):
        row, column = divmod(place, len(check.scans))
        scan = check.scans[column]
        for index, layer in enumerate(layers):
            slopes = check.layers[layer][scan.name]
            values = scan.mean(layer)[:, 0, 0] if row == 0 else scan.mean(layer)[:, -1, 1]
            fails = slopes.output_fails if row == 0 else slopes.update_fails
            colour = RED if fails else colormaps["viridis"](0.9 * index / max(1, len(layers) - 1))
            label = layer if index % max(1, math.ceil(len(layers) / MOST_IN_LEGEND)) == 0 else None
            if values.all():  # zeros have no logarithm
                ax.loglog(scan.widths, values, "o-", color=colour, ms=3, lw=1.2, zorder=2 + fails, label=label)
                if fails:
                    end = scan.widths[-1], values[-1].item()
                    ax.annotate(f" {layer}", end, color=RED, fontsize=7, va="center")
        ax.set_xticks(scan.widths, [f"{width:g}" for width in scan.widths])
        ax.minorticks_off()
        ax.set_xlim(scan.widths[0] / 1.2, scan.widths[-1] * (1.2 if check.passed else 2))  # with room for names
        ax.set_xlabel(check.axis)
        ax.set_ylabel(f"size of {'the outputs, at the start' if row == 0 else 'their change, after all steps'}")
        if row == 0:
            ax.set_title(fill(f"{scan.name}: {scan.title}", 50), fontsize=9)
    handles = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    names = [layer for layer in layers if layer in handles]  # a layer whose outputs begin at zero has a change only
    drawn.legend([handles[name] for name in names], names, loc="outside right center", frameon=False, fontsize=7)
    with replacing(path) as stream:
        drawn.savefig(stream, format="png", dpi=100)
