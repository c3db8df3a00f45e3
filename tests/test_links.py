"""Files that a command writes, each replaced by a link out of the folder: no command writes through one.

The files are those that a first run of the command opens, so a new one is tested as soon as a command writes it.
"""

import json
import os
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
from command_line import small, upscale
from corpus import ENTRIES
from kill_points import Watch
from model_folders import llama, save
from programs import run_in_fork
from saved import save_mlp

from mupscale.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_an_empty_folder")]

QUIET = "--trainer.enable_progress_bar=false --trainer.limit_val_batches=1"
FIT = f"fit --config c.yaml {QUIET} --trainer.logger.version=0"
OF_RUN = "--config c.yaml --ckpt_path runs/default/version_0/checkpoints/last.ckpt"
SWEEP = f"sweep --config c.yaml --sweep model.optimizer.lr=0.1,0.2 --out theirs {QUIET}"
COORD_CHECK = "coord-check --config c.yaml --widths 8,16,32 --steps 1 --seeds 1 --out theirs"
UPSCALE = "upscale mlp.ckpt --width 16 --noise 0.1 --save-noise theirs/noise.json --out theirs/wide.ckpt --force"
PREPARE = "prepare text text.txt --vocab 300 --val-fraction 0.3 --out theirs"

COMMANDS: dict[str, tuple[list[str], str]] = {
    "fit": ([], FIT),
    "fit: a table": ([], f"fit --config c.yaml {QUIET} --trainer.logger=CSVLogger --trainer.logger.save_dir=theirs "
                         "--trainer.logger.name=x --trainer.logger.version=0"),
    "fit: no logger": ([], f"fit --config c.yaml {QUIET} --trainer.logger=false --trainer.default_root_dir=theirs "
                           "--checkpoint.dirpath=elsewhere"),
    "resume": ([FIT], "resume runs/default/version_0 --trainer.max_steps=5"),
    "validate": ([FIT], f"validate {OF_RUN} {QUIET} --trainer.logger.version=1"),
    "predict": ([FIT], f"predict {OF_RUN} {QUIET} --trainer.logger=false --trainer.default_root_dir=theirs"),
    "coord-check": ([], COORD_CHECK),
    "coord-check again": ([COORD_CHECK], COORD_CHECK),
    "upscale": ([], UPSCALE),
    "upscale again": ([UPSCALE], UPSCALE),
    "upscale a folder": ([], "upscale llama --factor 2 --out theirs/wide"),
    "sweep": ([], SWEEP),
    "sweep again": ([SWEEP], SWEEP),
    "report": ([FIT], "report runs --out theirs"),
    "report again": ([FIT, "report runs --out theirs"], "report runs --out theirs"),
    "prepare": ([], PREPARE),
    "prepare again": ([PREPARE], PREPARE),
}  # fmt: skip
"""The commands before, and the one whose files are replaced."""

WRITES = ("open", "write", "rename", "replace", "symlink", "link", "truncate", "ftruncate")

MOST_REFUSALS = 30

STRANGE = ("has files but no report", "has other files", "is not empty and has no sweep")
"""Why a command refuses a whole folder, in which there is no file of its own."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that commands read."""
    folder = tmp_path_factory.mktemp("inputs")
    small(folder / "c.yaml", upscale(1, 16), max_steps=6)
    save_mlp(folder / "mlp.ckpt")
    save(llama(), folder / "llama")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(ENTRIES[:20]))
    return folder


def run(command: str, log: Path) -> tuple[int, list[str]]:
    """Runs a command in a fork: its status, and the last lines that it printed."""
    log.unlink(missing_ok=True)
    status = run_in_fork(partial(main, shlex.split(command)), log)
    return status, log.read_text().strip().splitlines()


def written_by(command: str, folder: Path, notes: Path) -> list[Path]:
    """The files in a folder that a command opens to write, as often as it is run: not those named by process."""

    def watched() -> None:
        watch = Watch([folder])
        watch.start()
        main(shlex.split(command))
        watch.stop()
        notes.write_text(json.dumps(watch.operations))

    assert run_in_fork(watched, notes.with_name("log.txt")) == 0, notes.with_name("log.txt").read_text()[-3000:]
    operations = [each for found in json.loads(notes.read_text()).values() for each in found]
    paths = {Path(path) for what, path, _ in operations if what in WRITES}
    return sorted(path for path in paths if f".{os.uname().nodename}." not in path.name and "tfevents" not in path.name)


def replace_by_link(path: Path, outside: Path, *, dangling: bool) -> None:
    """A link to the file itself, moved outside; to another file, if there is none yet, or to nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and not path.is_symlink():
        path.rename(outside)
    else:
        path.unlink(missing_ok=True)
        if not dangling:
            outside.write_text("precious")
    path.symlink_to(outside)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_through_a_link(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, command = COMMANDS[name]
    start, home, outside, log = (tmp_path / each for each in ("start", "home", "outside", "log.txt"))
    shutil.copytree(inputs, home)
    monkeypatch.chdir(home)
    for each in before:
        status, printed = run(each, log)
        assert status == 0, printed[-20:]
    shutil.copytree(home, start, symlinks=True)
    paths = written_by(command, home, tmp_path / "notes.json")
    assert paths
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(home)
    start.rename(home)
    monkeypatch.chdir(home)

    outside.mkdir()
    links: set[Path] = set()
    for number, path in enumerate(paths):
        if not path.is_dir() and not any(parent in links for parent in path.parents):
            replace_by_link(path, outside / str(number), dangling=number % 2 == 0)
            links.add(path)
    expected = {path.name: path.read_bytes() for path in outside.iterdir()}
    for _ in range(MOST_REFUSALS):
        status, printed = run(command, log)
        assert {path.name: path.read_bytes() for path in outside.iterdir()} == expected
        if status == 0:
            break
        assert printed[-1].startswith("error: "), printed
        if any(f"--out theirs {words}" in printed[-1] for words in STRANGE):
            return
        named = [link for link in links if link.is_symlink() and str(link.relative_to(home)) in printed[-1]]
        assert named, printed[-1]
        max(named, key=lambda link: len(str(link))).unlink()
    assert status == 0, printed
