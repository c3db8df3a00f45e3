"""Kills runs at their file operations, resumes them, and compares their ends with that of an undisturbed run.

    python attack.py FOLDER (small | large) [VARIANT …]
    python attack.py FOLDER lab COUNT [driver | worker | node …]

The second kills the driver, a worker and a node of experiments, so often each. Writes a line of JSON for each case. A
process of its own, because it forks for each command line, and threads do not survive that. It has imported everything
before, so that a command line takes one second.
"""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from programs import run_in_fork

import collector  # isort: skip  before what takes long to import
import mupscale  # noqa: F401  # isort: skip  first, so that torchvision can be imported beside a CPU-only torch
import attack_classes  # noqa: F401
import attack_lab
import pytest
import torch
import yaml
from attack_variants import BACKGROUND, EVERYTHING, VARIANTS, configuration
from crashes import all_points
from kill_points import Operation, Point, Watch
from run_ends import END, contents, differences, observed
from slow_saves import save_in_background

from mupscale import __main__ as command_line
from mupscale.callbacks import growth_schedule
from mupscale.commands import cli, resume  # noqa: F401
from mupscale.models import checkpoint_files
from mupscale.models.base import Growable

SMALL = ("everything", f"everything, {BACKGROUND}", "dirpath elsewhere")
"""Variants of the small attack; the first one is killed at an operation of each kind."""

KILLS = 8
"""Cases of a variant in the large attack, besides those around its swaps."""

IN_A_ROW = {"small": 2, "large": 24}
"""Kills of the one run that is killed again and again."""

SHARES = 12
"""Parts of the attack on `everything`, which several processes share."""

PATIENCE = 120
"""Seconds after which a command line hangs."""

LOST = 3
"""Steps that a kill may cost: every configuration asks for a checkpoint after three steps at most."""

SLOWLY = 0.03
"""Seconds, several steps, that a thread waits before it writes a checkpoint."""

BEGINS = re.compile(r"^step (\d+): \w+, width", re.MULTILINE)
"""What a run prints when it begins, with its step."""

NOTHING_TO_RESUME = re.compile(r"no checkpoint|no config\.yaml")
"""What `resume` says of a run that was killed before it could save anything."""

HANGS = 124
"""The status of a command line that does."""

FILE_SYSTEMS = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"))
"""Where to look for one that is not that of the run."""


@dataclass
class Case:
    """A run that is killed once or several times, and what differs at its end."""

    variant: str
    kills: list[Point]
    where: list[str] = field(default_factory=list)
    """What it was about to do when it was killed; empty if it ended first."""

    differences: list[str] = field(default_factory=list)


class Arena:
    """The folders in which one process attacks a variant; every case of it has the same paths."""

    def __init__(self, folder: Path, variant: str) -> None:
        self.variant = variant
        self.home = folder
        self.work, self.config = folder / "work", folder / "config.yaml"
        self.log, self.end = folder / "log.txt", folder / "end.ckpt"
        self.operations, self.kill = folder / "operations.json", folder / "kill.json"
        self.temporary = folder / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        if "TMPDIR" in variant:
            self.temporary = on_another_file_system(folder) or self.temporary
        self.config.write_text(yaml.safe_dump(configuration(variant, str(self.work))))
        self.clear()
        self.fit = ["fit", "--config", str(self.config)]
        status = self.command(self.fit)
        if status != 0 or not BEGINS.search(self.log.read_text()):
            raise RuntimeError(f"the undisturbed run fails: {self.last_words()}")
        self.expected = self.left()
        recorded = json.loads(self.operations.read_text())
        self.recorded = {thread: [Operation(*entry) for entry in entries] for thread, entries in recorded.items()}
        if not around_swaps(self.recorded):
            raise RuntimeError("the undisturbed run ends before its swap")

    def clear(self) -> None:
        for path in (self.work, self.temporary):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        for path in (self.end, self.operations, self.log, self.kill):
            path.unlink(missing_ok=True)
        self.step = 0  # of the run, when it was killed

    def case(self, kills: list[Point]) -> Case:
        """Kills a run at the first point, the run that goes on at the second one, and so on."""
        answer = Case(self.variant, kills)
        self.clear()
        arguments = self.fit
        for killed_at in [*kills, None]:
            status = self.attempt(answer, arguments, killed_at)
            if status > 0 and arguments[0] == "resume":
                if not NOTHING_TO_RESUME.search(self.last_words()):
                    answer.differences.append(f"resume fails: {self.last_words()}")
                arguments = self.again()
                status = self.attempt(answer, arguments, killed_at)
            if status > 0:
                answer.differences.append(f"{arguments[0]} fails: {self.last_words()}")
                return answer
            if status == 0:
                break
            run = self.run()
            arguments = self.fit if run is None else ["resume", str(run)]
        if not answer.where:
            answer.differences.append(f"the run did not come to {kills[0]}")
        answer.differences += list(differences(self.left(), self.expected))
        return answer

    def attempt(self, case: Case, arguments: list[str], killed_at: Point | None) -> int:
        """Runs a command line, which must not begin long before the step at which the run was killed."""
        self.end.unlink(missing_ok=True)
        before = len(self.log.read_text()) if self.log.exists() else 0
        status = self.command(arguments, killed_at)
        assert status in (0, -signal.SIGKILL) or status > 0, f"{arguments} died of signal {-status}"
        start = BEGINS.search(self.log.read_text()[before:])
        # in the background one is written, one waits, and the run may wait for them with a third one
        most = LOST * (1 + checkpoint_files.AT_ONCE if BACKGROUND in self.variant else 1)
        if start is not None and self.step - int(start[1]) > most:
            case.differences.append(f"{arguments[0]} begins at step {start[1]}, but {self.step} were done")
        if status < 0:
            noted = json.loads(self.kill.read_text())
            case.where.append(noted["where"].replace(str(self.home), ""))
            self.step = max(self.step, noted["step"])
        return status

    def again(self) -> list[str]:
        """The command line that starts a run anew after `resume` has found nothing to go on from."""
        run = self.run()
        if "numbered" in self.variant and run is not None:
            shutil.rmtree(run)  # or the next one would have another number
        return self.fit

    def run(self) -> Path | None:
        """The folder of the run, once it is known as one."""
        return next((path.parent for path in sorted(self.work.rglob("config.yaml"))), None)

    def last_words(self) -> str:
        lines = self.log.read_text().strip().splitlines()
        return lines[-1][-300:] if lines else "without a word"

    def command(self, arguments: list[str], killed_at: Point | None = None) -> int:
        """Runs a command line in a fork; its exit status, negative for a signal."""
        status = run_in_fork(lambda: self.inside(arguments, killed_at), self.log, PATIENCE)
        if status == -signal.SIGALRM:
            self.log.write_text(f"hangs for {PATIENCE} seconds")
            return HANGS
        return status

    def inside(self, arguments: list[str], killed_at: Point | None) -> None:
        os.environ["TMPDIR"] = str(self.temporary)
        tempfile.tempdir = str(self.temporary)  # or Python tries whether it can write there, and may die at it
        os.chdir(self.work)
        watch = Noting([self.work, self.temporary], killed_at, self.kill)
        note_steps(watch)
        save_the_end(watch, self.end)
        if BACKGROUND in self.variant:
            save_in_background(pytest.MonkeyPatch(), SLOWLY)
        watch.start()
        try:
            command_line.main(arguments)
        finally:
            watch.stop()
        self.operations.write_text(json.dumps(watch.operations))

    def left(self) -> dict[str, Any]:
        """All that a run has left behind, by name."""
        answer = observed(self.work)
        answer |= {f"TMPDIR/{path.name}": None for path in self.temporary_files()}
        if self.end.exists():
            answer[END] = contents(self.end)
        return answer

    def temporary_files(self) -> list[Path]:
        """What is in TMPDIR, once the workers of data loaders have noticed that their run is dead."""
        deadline = time.monotonic() + 10
        while any(path.name.startswith("pymp-") for path in self.temporary.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return sorted(self.temporary.iterdir())


def on_another_file_system(folder: Path) -> Path | None:
    for place in FILE_SYSTEMS:
        if os.access(place, os.W_OK) and place.stat().st_dev != folder.stat().st_dev:
            return place / f"attack-{os.getpid()}"
    return None


class Noting(Watch):
    """Writes down the operation at which it kills, and the step of the run."""

    def __init__(self, folders: list[Path], killed_at: Point | None, notes: Path) -> None:
        super().__init__(folders, killed_at)
        self.notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.step = 0

    def killing(self, operation: Operation) -> None:
        assert self.killed_at is not None
        where = f"{operation.what} {operation.path}{' (half)' if self.killed_at.half else ''}"
        os.pwrite(self.notes, json.dumps({"where": where, "step": self.step}).encode(), 0)


def note_steps(watch: Noting) -> None:
    """Makes a point of the moment in which a swap has just been made, and nothing of it is on disk."""
    widened, training_step = growth_schedule.grow, Growable.training_step

    def counted(*arguments: Any, **options: Any) -> Any:
        report = widened(*arguments, **options)
        watch.reach("swap", "")
        return report

    def stepping(self: Growable, *arguments: Any) -> Any:
        watch.step = self.trainer.global_step
        return training_step(self, *arguments)

    growth_schedule.grow = counted
    Growable.training_step = stepping  # type: ignore[method-assign]


def save_the_end(watch: Watch, path: Path) -> None:
    """Saves a checkpoint after each fit, whatever the run itself saves."""
    after = getattr(cli.CLI, "after_fit", lambda self: None)  # Lightning calls it where there is one

    def after_fit(self: cli.CLI) -> None:
        after(self)
        watch.stop()
        self.trainer.save_checkpoint(path)

    cli.CLI.after_fit = after_fit  # type: ignore[attr-defined]


# --- which points


def around_swaps(recorded: dict[str, list[Operation]]) -> list[Point]:
    """The operation before each swap, the swap, and the operation after it."""
    swaps = [index for index, operation in enumerate(recorded["main"]) if operation.what == "swap"]
    near = {index + offset for index in swaps for offset in (-1, 0, 1)}
    return [Point("main", index) for index in sorted(near) if index in range(len(recorded["main"]))]


def one_of_each(recorded: dict[str, list[Operation]]) -> list[Point]:
    """The last operation of each kind, and the middle of the last write; of checkpoints and of other files."""
    answer = {}
    for point in all_points(recorded):
        operation = recorded[point.thread][point.index]
        if operation.what not in ("fsync", "mkdir"):
            answer[operation.what, ".ckpt" in operation.path, point.half] = point
    return list(answer.values())


# --- the attack


@cache
def arena(folder: Path, variant: str) -> Arena:
    return Arena(folder / f"{os.getpid()}-{variant}", variant)


def attack(folder: Path, variant: str, size: str, share: int) -> list[dict[str, Any]]:
    """The cases of a variant, or a share of those of `everything`."""
    try:
        place = arena(folder, variant)
    except RuntimeError as error:
        elsewhere = on_another_file_system(folder)
        if elsewhere is not None:
            shutil.rmtree(elsewhere, ignore_errors=True)
        return [asdict(Case(variant, [], differences=[str(error)]))]
    chance, everywhere = random.Random(f"{variant} {share}"), all_points(place.recorded)
    if size == "small":
        points = one_of_each(place.recorded)
        if variant != SMALL[0]:
            points = [point for point in points if ".ckpt" in place.recorded[point.thread][point.index].path][:1]
    elif variant in EVERYTHING:
        points = everywhere[share::SHARES]
    else:
        points = around_swaps(place.recorded) + chance.sample(everywhere, KILLS)
    cases = []
    if share == 0 and variant in (SMALL[:1] if size == "small" else EVERYTHING):
        soon = everywhere[: len(everywhere) // 3]
        cases.append(place.case([chance.choice(soon) for _ in range(IN_A_ROW[size])]))
    for number, point in enumerate(points):
        again = size == "large" and number % 4 == 3
        cases.append(place.case([point, *([chance.choice(everywhere)] if again else [])]))
    shutil.rmtree(place.temporary, ignore_errors=True)
    return [asdict(case) for case in cases]


def main(folder: Path, size: str, *variants: str) -> None:
    if size == "lab":
        count, *kinds = variants
        for kind in kinds or attack_lab.IN_A_ROW:
            for case in attack_lab.attack(folder / kind, kind, int(count)):
                print(json.dumps(case), flush=True)
        return
    torch.set_num_threads(1)
    cli.import_classes()
    collector.begin()
    chosen = variants or (SMALL if size == "small" else (*EVERYTHING, *VARIANTS))
    tasks = []
    for variant in chosen:
        shares = SHARES if variant in EVERYTHING and size == "large" else 1
        tasks += [(folder, variant, size, share) for share in range(shares)]
    tasks.sort(key=lambda task: task[1] != "workers")  # these fork, which hangs once this process has threads of torch
    processes = len(os.sched_getaffinity(0)) if size == "large" else 1
    # forks, which find everything imported
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        for future in as_completed([pool.submit(attack, *task) for task in tasks]):
            for case in future.result():
                print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
