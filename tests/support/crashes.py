"""Work that is killed at its file operations, and done again: it ends as if it had not been killed.

    python crashes.py prepare TEXT FOLDER KILLS
    python crashes.py widen NARROW FOLDER KILLS

prepare a text, and widen a model folder. Processes of their own, because they fork before each run, and threads do not
survive that.
"""

import json
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mupscale  # noqa: F401  # isort: skip  first, so that torchvision can be imported beside a CPU-only torch
from kill_points import Operation, Point, Watch
from programs import run_in_fork
from run_ends import differences


def contents(folder: Path) -> dict[str, Any]:
    """The bytes of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def all_points(recorded: dict[str, list[Operation]]) -> list[Point]:
    """Every point of some work; writes also in their middle."""
    answer = []
    for thread, operations in recorded.items():
        for index, operation in enumerate(operations):
            answer.append(Point(thread, index))
            if operation.writes:
                answer.append(Point(thread, index, half=True))
    return answer


def kill_and_repeat(
    work: Callable[[Path], object], folder: Path, kills: int, observe: Callable[[Path], dict[str, Any]] = contents
) -> int:
    """Kills work in a folder at so many points of it, does it again to its end, and compares what it leaves.

    Each third work is killed a second time on the way. Returns how many points there are.
    """
    notes, place, chance = folder / "operations.json", folder / "work", random.Random(0)

    def attempt(point: Point | None) -> int:
        def watched() -> None:
            watch = Watch([place], point)
            watch.start()
            work(place)
            watch.stop()
            notes.write_text(json.dumps(watch.operations))

        return run_in_fork(watched, folder / "log.txt")

    assert attempt(None) == 0, (folder / "log.txt").read_text()
    expected = observe(place)
    recorded = json.loads(notes.read_text())
    points = all_points({thread: [Operation(*each) for each in found] for thread, found in recorded.items()})
    for number, point in enumerate(points[len(points) // kills // 2 :: len(points) // kills]):
        shutil.rmtree(place)
        assert attempt(point) == -signal.SIGKILL, f"it does not come to {point}"
        if number % 3 == 2:
            attempt(chance.choice(points))
        assert attempt(None) == 0, f"killed at {point}: it does not finish: {(folder / 'log.txt').read_text()}"
        found = list(differences(observe(place), expected))
        assert found == [], f"killed at {point}: {found[:5]}"
    return len(points)


def prepare_text(text: Path) -> Callable[[Path], object]:
    from mupscale.datamodules import documents, preparation

    documents.BATCH = 1000
    preparation.COMMIT_SECONDS = 0.0
    source = documents.TextFiles([text])
    return lambda out: preparation.prepare(source, out, vocabulary=270, val_fraction=0.2, file_tokens=1500)


def widen_folder(narrow: Path) -> Callable[[Path], object]:
    from transformers import LlamaForCausalLM  # noqa: F401  once, before the forks

    from mupscale.hf import widened_folder
    from mupscale.hf.config import wide_config
    from mupscale.hf.family import Family
    from mupscale.hf.folder import read_folder

    widened_folder.CHUNK_BYTES = 4096
    widened_folder.MOST_SHARD_BYTES = 40_000
    source = read_folder(narrow)
    # a search of seconds, which each fork would repeat
    Family(source.model_class).found_for(source.config, wide_config(source.config, 2))

    def work(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        if (folder / "wide").exists():  # it is whole; its lock is an empty file, which is deleted last
            (folder / ".wide.lock").unlink(missing_ok=True)
        else:
            widened_folder.upscale_folder(narrow, 2, folder / "wide")

    return work


if __name__ == "__main__":
    make = {"prepare": prepare_text, "widen": widen_folder}[sys.argv[1]]
    print(kill_and_repeat(make(Path(sys.argv[2])), Path(sys.argv[3]), int(sys.argv[4])))
