"""A folder widened by a process that is killed, and widened again: `folder_crashes.py NARROW FOLDER MOMENTS`.

Prints how many operations on files there are, and at how many the process was killed; or fails. A process of its own,
because it forks before each run, and threads do not survive that.
"""

import json
import shutil
import signal
import sys
from pathlib import Path

from programs import run_in_fork

import collector  # isort: skip  before what takes long to import
import mupscale  # noqa: F401  # isort: skip  first, so that torchvision can be imported beside a CPU-only torch
from kill_points import Point, Watch
from transformers import LlamaForCausalLM  # noqa: F401  once, before the forks

from mupscale.hf import streaming, widened_folder
from mupscale.hf.config import wide_config
from mupscale.hf.family import found_for
from mupscale.hf.folder import read_folder
from mupscale.hf.widened_folder import upscale_folder


def main(narrow: Path, folder: Path, moments: int) -> None:
    streaming.CHUNK_BYTES = 4096
    widened_folder.MOST_SHARD_BYTES = 40_000
    expected, counts = folder / "expected", folder / "counts.json"
    source = read_folder(narrow)
    # a search of seconds, which each fork would repeat
    found_for(source.config, wide_config(source.config, 2), model_class=source.model_class)
    assert run(narrow, expected / "wide", None, counts) == 0
    reference = contents(expected / "wide")
    found = json.loads(counts.read_text())
    points = [Point(thread, index) for thread, count in found.items() for index in range(count)]
    points += [Point(thread, index, half=True) for thread, count in found.items() for index in range(count)]
    step = max(len(points) // moments, 1)
    chosen = [*points[step // 2 :: step][:moments], Point("main", found["main"] - 1)]
    killed = 0
    for number, point in enumerate(chosen):
        work = folder / str(number)
        killed += run(narrow, work / "wide", point) == -signal.SIGKILL
        if (work / "wide").exists():
            assert contents(work / "wide") == reference, f"killed at {point}: a folder that is not whole"
            (work / ".wide.lock").unlink()  # an empty file, which is deleted last
        else:
            assert run(narrow, work / "wide", None) == 0, f"killed at {point}: it does not finish"
        assert contents(work / "wide") == reference, f"killed at {point}: other bytes"
        assert [path.name for path in work.iterdir()] == ["wide"], f"killed at {point}: it leaves files behind"
        shutil.rmtree(work)
    print(json.dumps({"operations": len(points), "killed": killed}))


def run(narrow: Path, out: Path, point: Point | None, counts: Path | None = None) -> int:
    """The exit status, or minus the signal, of a process that widens a folder and is killed at a point."""

    def widen() -> None:
        out.parent.mkdir(exist_ok=True)
        watch = Watch([out.parent], point)
        watch.start()
        upscale_folder(narrow, 2, out)
        watch.stop()
        if counts is not None:
            found = {thread: len(operations) for thread, operations in watch.operations.items()}
            counts.write_text(json.dumps(found))

    return run_in_fork(widen)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    collector.begin()
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
