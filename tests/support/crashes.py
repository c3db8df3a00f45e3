"""Work that is killed at its file operations, and done again: it ends as if it had not been killed."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kill_points import Operation, Point, Watch
from paths import contents
from programs import run_in_fork
from run_ends import differences


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
