"""sweep: tune hyperparameters: train with many values of configuration keys, and find the best.

Writes trials.csv, figures, and best.yaml with the best values of the swept keys. To use them in another run: fit
--config TARGET.yaml --config OUT/best.yaml. To continue an interrupted sweep, run the same command again.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.commands.checkpoints import Leftovers
from mupscale.commands.lab.execution import (
    add_options,
    goes_on_when_repeated,
    open_executor,
    part_of,
    refuse_options,
    stack_size,
)
from mupscale.commands.process import ArgumentParser, command_line, without_collections
from mupscale.errors import UserError, needs_extra

if TYPE_CHECKING:
    from mupscale.commands.lab.space import Settings, SweptAxis

EPILOG = """--config FILE and all other options are those of fit, and apply to every trial.

A key is an option of fit (model.optimizer.lr), or starts with the class of a callback in trainer.callbacks
(UpscaleCallback.noise.std). More in docs/sweeps.md."""

SWEEP_HELP = """a key and its values: V1,V2,… is a list; LOW:HIGH:N is N values, spaced logarithmically; LOW:HIGH is a
range for the samplers random and tpe, on a logarithmic scale"""

SIZES = ("--model.width", "--model.layers", "--callback_args")
"""Options of a small model that a target does not share."""

METRIC_HELP = """the metric to minimise: last_epoch (the default) or last_2%% is the mean training loss over the last
epoch or the last 2 %% of the steps; any other name is that of a logged metric, such as val/loss (its last value)"""


def main(command: str, arguments: list[str]) -> None:
    options, rest = parser().own_and_other(arguments)
    refuse_options(options)
    with needs_extra("sweep"), without_collections():
        import matplotlib  # noqa: F401

        if options.sampler != "grid":
            import optuna  # noqa: F401
    with goes_on_when_repeated():
        sweep(options, rest)


def parser() -> ArgumentParser:
    answer = ArgumentParser(
        prog="python -m mupscale sweep",
        usage="%(prog)s --config FILE [--config FILE …] --sweep KEY=VALUES [--sweep …] --out FOLDER [options]",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    answer.add_argument("--sweep", action="append", default=[], metavar="KEY=VALUES", help=SWEEP_HELP)
    answer.add_argument("--out", type=Path, required=True, help="the folder of the sweep")
    answer.add_argument("--seeds", metavar="S1,S2,…", help="run each trial with these seeds, and compare the means")
    answer.add_argument(
        "--sampler", choices=["grid", "random", "tpe"], default="grid", help="how values are chosen (default grid)"
    )
    answer.add_argument("--trials", type=int, help="the number of trials, for the samplers random and tpe")
    answer.add_argument("--metric", default="last_epoch", help=METRIC_HELP)
    add_options(answer)
    return answer


def sweep(options: argparse.Namespace, rest: list[str]) -> None:
    """Makes the trials that are not finished; then writes the results."""
    with without_collections():
        from mupscale.commands.lab.run import claim_when_free, prepare_process
        from mupscale.commands.lab.sweep import Sweep

    prepare_process()
    settings = sweep_settings(options, rest)
    whole = Sweep(options.out, settings)
    part, parts = part_of(options)
    leftovers = Leftovers()
    leftovers.watch(options.out)
    try:
        with open_executor(options, settings.config["trainer"]["accelerator"], options.out) as executor:
            for trials in whole.rounds():
                mine = [trial for cell, trial in trials.items() if cell % parts == part]
                whole.make(mine, executor, stack_size(options.stack))
    except UserError:
        if not whole.outcomes:  # refused before any trial was finished: the folder stays free
            leftovers.remove()
        raise
    if len(whole.outcomes) < settings.trials:
        print("this part is finished; the last part to end writes the results")
        return
    with claim_when_free(options.out):  # two parts may end together
        path, drawn = whole.write_best()
    print(path.read_text("utf-8"), end="")
    print(f"wrote {', '.join(str(p) for p in [path, options.out / 'trials.csv', *drawn])}")
    print(f"  train the target with the best values: {command_line('fit', *without_sizes(rest), '--config', path)}")
    if any("Callback." in axis.key for axis in settings.axes):
        print("  the same from scratch: with --model.width and --trainer.callbacks null at its end")


def without_sizes(rest: list[str]) -> list[str]:
    """The command line without the options that make the model small; without any, the user's target stands for it."""
    words = iter(rest)
    answer = []
    for word in words:
        name, equals, _ = word.partition("=")
        if name in SIZES:
            next(words if not equals else iter(()), None)
        else:
            answer.append(word)
    return answer if answer != rest else ["--config", "TARGET.yaml"]


def sweep_settings(options: argparse.Namespace, rest: list[str]) -> "Settings":
    """The settings of a command line. Raises a UserError for every mistake that can be found without a run."""
    from mupscale.commands.cli import load_configuration
    from mupscale.commands.lab.space import Settings, for_trials, grid, parse_axis, refuse_invalid, seeds_of
    from mupscale.commands.lab.sweep import check_metric, signal_swap

    axes = [parse_axis(text) for text in options.sweep]
    refuse_axes(options, axes)
    check_metric(options.metric)
    given, cli = load_configuration(rest, "sweep")
    config = for_trials(given)
    signal_swap(config)
    if not (options.out / "sweep.json").exists():  # otherwise they were checked when it was written
        refuse_invalid(cli, config, axes)
    seeds = [config["seed_everything"]] if options.seeds is None else seeds_of(options.seeds)
    config["seed_everything"] = seeds[0]
    trials = options.trials or len(list(grid(axes)))
    return Settings(config, axes, options.sampler, trials, seeds, options.metric)


def refuse_axes(options: argparse.Namespace, axes: list["SweptAxis"]) -> None:
    """Raises a UserError if the axes, the sampler and the number of trials do not fit together."""
    if not axes and (options.seeds is None or options.sampler != "grid"):
        raise UserError(
            "--sweep: the grid is empty, name a key and its values: --sweep model.optimizer.lr=0.01,0.02,0.04; or give "
            "--seeds alone, to run one configuration with several seeds"
        )
    keys = [axis.key for axis in axes]
    if len(set(keys)) < len(keys):
        raise UserError(f"--sweep: a key is given twice in {', '.join(keys)}")
    ranges = [axis.key for axis in axes if axis.bounds]
    if options.sampler == "grid" and ranges:
        raise UserError(
            f"--sweep {ranges[0]}=LOW:HIGH is a range; give LOW:HIGH:N for a grid, or --sampler random or tpe"
        )
    if (options.sampler == "grid") != (options.trials is None):
        raise UserError("--trials: give it with --sampler random or tpe, and only then")
    if options.part is not None and options.sampler == "tpe":
        raise UserError("--part: --sampler tpe draws points by the results of all others; give --workers or --ray")
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials must be at least 1, got {options.trials}")
