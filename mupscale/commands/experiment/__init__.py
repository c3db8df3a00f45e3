"""experiment: run the experiment that a YAML file describes, by one of three protocols.

Protocol upscale, the paper's: tune a small base model; train the large base and the baseline with the best values; tune
a small growth; grow the large base with the best values, for several seeds; write a report. Protocol transfer: check
whether the best hyperparameters of upscaled runs stay the same as the width grows. Protocol midrun: compare growing
during a run with fixed widths, at equal FLOPs and at equal time.

All state is in the folder --out. To continue an interrupted experiment, run the same command again. To share the work
among machines that share the folder, start the same command on each of them.
"""

import argparse
import shlex
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.commands import cluster
from mupscale.commands.arguments import STACK_HELP, ArgumentParser, Size, stack_size
from mupscale.commands.loading import without_collections
from mupscale.commands.terminal import columns, paint
from mupscale.commands.termination import EXIT_CODE, Terminated
from mupscale.errors import UserError, as_user_errors, needs_extra
from mupscale.text_tables import table

if TYPE_CHECKING:
    from mupscale.commands.experiment.protocols import Experiment

WAIT = 1.0
"""Seconds between two looks at what other processes do."""

EPILOG = """All other options are those of fit, and override the configuration of every run (--data.data_dir=…,
--trainer.max_epochs=40). More in docs/experiments.md."""

WORKERS_HELP = """the number of processes on this machine (default: one per GPU; for small networks, several per GPU are
faster)"""


QUICK_HELP = """test the experiment in minutes on a CPU, with small widths, few steps and trials, and embedded or random
data; the results are no evidence (default --out runs/experiments/NAME-quick)"""


def main(command: str, arguments: list[str]) -> int:
    options, rest = parser().own_and_other(arguments)
    cluster.refuse_options(options)
    with needs_extra("experiment"), without_collections():
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import optuna  # noqa: F401
    try:
        with as_user_errors(OSError):
            experiment(options, rest, arguments)
    except KeyboardInterrupt as interrupt:
        if options.child:  # the process that started it prints the message
            return 128 + signal.SIGINT
        raise KeyboardInterrupt("run the same command again to continue") from interrupt
    except Terminated as ending:
        if options.child:
            return EXIT_CODE
        raise Terminated("run the same command again to continue") from ending
    return 0


def parser() -> ArgumentParser:
    answer = ArgumentParser(
        prog="python -m mupscale experiment",
        usage="%(prog)s FILE [--out FOLDER] [--workers N | --ray ADDRESS] [--stack auto|N|off] [--plan] [--quick] …",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    answer.add_argument("file", type=Path, metavar="FILE", help="the YAML file of the experiment (configs/experiments)")
    answer.add_argument(
        "--out", type=Path, help="the folder of the experiment (default runs/experiments/NAME OF THE FILE)"
    )
    answer.add_argument("--workers", type=int, metavar="N", help=WORKERS_HELP)
    answer.add_argument("--stack", metavar="auto|N|off", default="auto", help=STACK_HELP)
    answer.add_argument("--plan", action="store_true", help="list the runs and which of them are done; run nothing")
    answer.add_argument("--quick", action="store_true", help=QUICK_HELP)
    cluster.add_options(answer)
    # for processes that `supervise` starts, which leave the last messages to it: which of them it is, as 0/4
    answer.add_argument("--child", metavar="INDEX/WORKERS", help=argparse.SUPPRESS)
    return answer


def experiment(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> None:
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be at least 1, got {options.workers}")

    with without_collections():
        from mupscale.commands.experiment.file import check, description_of, read
        from mupscale.commands.experiment.protocols import Experiment
        from mupscale.commands.experiment.quick import quick_content
        from mupscale.commands.experiment.workers import supervise, visible_gpus
        from mupscale.commands.runs import without_announcements

    size = stack_size(options.stack)
    name = f"{options.file.stem}-quick" if options.quick else options.file.stem
    out = options.out or Path("runs/experiments") / name
    description = read(options.file, rest)
    if options.quick:
        description = description_of(quick_content(description, out), rest, quick=True)
    whole = Experiment(out, description)
    with without_announcements():
        if options.plan:
            whole.refuse_others()
            check(description)
            print_plan(whole)
            return
        command = ["python", "-m", "mupscale", "experiment", *arguments]
        whole.refuse_others()
        if options.ray is not None and not whole.finished:
            with cluster.connected(options, description.common["trainer"]["accelerator"], out) as there:
                whole.begin(command)
                print_start(whole)
                there.carry_out(whole, partial(Experiment, out, description), size)
            print(whole.conclude())
            return
        whole.begin(command)
        if not options.child:
            print_start(whole)
        gpus = [] if description.common["trainer"]["accelerator"] == "cpu" else visible_gpus()
        workers = options.workers or max(1, len(gpus))
        if workers > 1 and not whole.finished:
            supervise(arguments, workers, gpus)
        else:
            work(whole, size, options.child)
        if not options.child:
            print(whole.conclude())


def work(whole: "Experiment", size: Size, child: str | None) -> None:
    """Makes runs until all are done, by this process or by others. `child` is the option of that name."""
    from mupscale.commands.runs import set_aside
    from mupscale.commands.stacks import Share, Unit, Workshop

    set_aside()
    share = Share(*map(int, child.split("/"))) if child else None

    def tell(line: str) -> None:
        print(line, flush=True)

    def take() -> Unit | None:
        unit = whole.take()
        if unit is not None:
            tell(f"{unit.name}: begins")
        return unit

    waiting = False
    while True:
        worked = False
        if share is None:
            made = Workshop(take, size, tell).carry_out()
        else:
            made = share.carry_out(whole, whole.under_way, size, tell)
        for unit, end in made:
            tell(f"{unit.name}: {end}; {whole.progress()}")
            worked = True
        if worked:
            waiting = False
            continue
        if whole.finished:
            return
        if not waiting and not child:
            tell("waiting for other processes")
            waiting = True
        time.sleep(WAIT)


def print_start(whole: "Experiment") -> None:
    left, total = whole.left
    state = f"{left} of {total} runs left; watch them with tensorboard --logdir {shlex.quote(str(whole.out))}"
    print(f"{whole.out}: {state if left else f'all {total} runs are done'}", flush=True)


def print_plan(whole: "Experiment") -> None:
    rows = [("part", "runs", "done", "running", "")]
    for part in whole.parts:
        state = part.state()
        after = f"after {', '.join(need.name for need in part.needs)}" if part.needs else ""
        rows.append((part.name, f"{state.total}", f"{state.done}", f"{state.running}", after))
    print("\n".join(table(rows, right=(1, 2, 3), columns=columns(), paint=paint)))
    print(whole.progress())
