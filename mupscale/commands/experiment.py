"""experiment: run the experiment that a YAML file describes, by one of three protocols.

Protocol upscale, the paper's: tune a small base model; train the large base and the baseline with the best values; tune
a small growth; grow the large base with the best values, for several seeds; write a report. Protocol transfer: check
whether the best hyperparameters of upscaled runs stay the same as the width grows. Protocol midrun: compare growing
during a run with fixed widths, at equal FLOPs and at equal time.

All state is in the folder --out. To continue an interrupted experiment, run the same command again.
"""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.commands.lab.execution import add_options, goes_on_when_repeated, open_driver, refuse_options
from mupscale.commands.process import ArgumentParser, columns, paint, without_collections
from mupscale.errors import needs_extra
from mupscale.text_tables import table

if TYPE_CHECKING:
    from mupscale.commands.lab.protocols import Experiment

EPILOG = """All other options are those of fit, and override the configuration of every run (--data.data_dir=…,
--trainer.max_epochs=40). More in docs/experiments.md."""

QUICK_HELP = """test the experiment in minutes on a CPU, with small widths, few steps and trials, and embedded or random
data; the results are no evidence (default --out runs/experiments/NAME-quick)"""


def main(command: str, arguments: list[str]) -> None:
    options, rest = parser().own_and_other(arguments)
    refuse_options(options)
    with needs_extra("experiment"), without_collections():
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    with goes_on_when_repeated():
        experiment(options, rest, arguments)


def parser() -> ArgumentParser:
    answer = ArgumentParser(
        prog="python -m mupscale experiment",
        usage="%(prog)s FILE [--out FOLDER] [--workers N | --ray ADDRESS] [--stack auto|N|off] [--plan] [--quick] …",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    answer.add_argument("file", type=Path, metavar="FILE", help="the YAML file of the experiment (configs/experiments)")
    answer.add_argument(
        "--out", type=Path, help="the folder of the experiment (default runs/experiments/NAME OF THE FILE)"
    )
    answer.add_argument("--plan", action="store_true", help="list the runs and which of them are done; run nothing")
    answer.add_argument("--quick", action="store_true", help=QUICK_HELP)
    add_options(answer)
    return answer


def experiment(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> None:
    with without_collections():
        from mupscale.commands.lab.file import check, description_of, read
        from mupscale.commands.lab.protocols import Experiment
        from mupscale.commands.lab.quick import quick_content
        from mupscale.commands.lab.run import claim_when_free, without_announcements

    name = f"{options.file.stem}-quick" if options.quick else options.file.stem
    out = options.out or Path("runs/experiments") / name
    description = read(options.file, rest)
    with without_announcements():
        if options.quick:
            description = description_of(quick_content(description, out), rest, quick=True)
        whole = Experiment(out, description)
        whole.refuse_others()
        if options.plan:
            check(description)
            print_plan(whole)
            return
        if whole.left[0]:
            with open_driver(options, description.common["trainer"]["accelerator"], out) as driver:
                whole.begin(["python", "-m", "mupscale", "experiment", *arguments])
                print_start(whole)
                is_finished = whole.make(driver)
            if not is_finished:
                print("this part is finished; the last part to end writes the results")
                return
        else:
            print_start(whole)
        with claim_when_free(out):  # two parts may end together
            print(whole.conclude())


def print_start(whole: "Experiment") -> None:
    left, total = whole.left
    state = f"{left} of {total} runs left; watch them with tensorboard --logdir {shlex.quote(str(whole.out))}"
    print(f"{whole.out}: {state if left else f'all {total} runs are done'}", flush=True)


def print_plan(whole: "Experiment") -> None:
    rows = [("stage", "part", "runs", "done")]
    for number, stage in enumerate(whole.stages, 1):
        rows += [(f"{number}", part.name, f"{part.total}", f"{part.done}") for part in stage]
    print("\n".join(table(rows, right=(0, 2, 3), columns=columns(), paint=paint)))
    print(whole.progress())
