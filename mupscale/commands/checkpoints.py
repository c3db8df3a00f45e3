"""Runs on disk: the folder of one, its lock, its newest undamaged checkpoint, and what a continued run may change.

Loads torch only when it reads a checkpoint.
"""

import fcntl
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mupscale.atomic import missing_folders, open_to_write, remove_empty, write_durably
from mupscale.commands.config import Config, brief, class_name, dictionary, differing_keys, read_json
from mupscale.data_files import (
    META,
    METADATA,
    data_in,
    interpreting,
    json_of,
    read_bytes,
    read_yaml,
    refuse_endless_file,
)
from mupscale.errors import UserError, refuse_unless_whole

RUN = "run.json"
"""A file in the folder of a run: its identity (`id`), which its checkpoints have too, and its
length (`steps`, `steps_per_epoch`)."""

RESULT = "result.json"
"""A file in the folder of a run that has ended: its numbers."""

AT_GROWTH = ("loss_before", "loss_after", "seconds")
"""Numbers of a growth in result.json: the losses of the next batch just before and after it, and its pause."""

CONFIG = "config.yaml"
"""A file in the folder of a run: its whole configuration."""

LOCK = "run.lock"
"""A file in the folder of a run: machine and number of the process that last wrote there. It may be deleted."""

FILES = (CONFIG, RUN, LOCK)
"""What a run writes to its folder before its first step."""

_held: dict[Path, "FolderLock"] = {}


class FolderLock:
    """The right to write to a folder, until it is released or this process ends, however it ends.

    It is a POSIX lock, which a forked worker does not inherit: one that outlives its parent would keep it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises a UserError if another process has it."""
        self.folder = folder.absolute()
        self._made = missing_folders(self.folder)
        if self.folder in _held:
            raise FolderLocked(f"{folder} is already in use by this process")
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = open_to_write(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._file: IO[str] = os.fdopen(lock, "a+", encoding="utf-8", errors="replace")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise FolderLocked(f"{folder} is in use: {owner} writes to it. Wait until that ends, or stop it") from error
        except OSError:
            pass  # a file system without locks
        _held[self.folder] = self

    def __enter__(self) -> "FolderLock":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def begin(self) -> None:
        """Writes which process it is."""
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}\n")
        self._file.flush()

    def release(self) -> None:
        """Gives it back; folders that it made, and in which nothing else was written, are deleted."""
        if _held.pop(self.folder, None) is None:
            return
        lock = self.folder / LOCK
        if self._made and self.folder.exists() and set(os.listdir(self.folder)) <= {LOCK, RUN}:
            (self.folder / RUN).unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        elif lock.exists() and not lock.stat().st_size:
            lock.unlink()
        remove_empty(self._made)
        self._file.close()


class FolderLocked(UserError):
    """Another process writes to the folder."""


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says of the run in a folder; empty if it is missing or damaged."""
    try:
        content = json_of(read_bytes(folder / RUN))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_run(folder: Path, **fields: Any) -> None:
    write_durably(folder / RUN, (json.dumps({**read_run(folder), **fields}, indent=1) + "\n").encode())


def read_result(folder: Path) -> dict[str, Any]:
    """What result.json says of a run that has ended; empty if it has not. Raises a UserError if it is damaged."""
    path = folder / RESULT
    if not path.is_file():
        return {}
    content = read_json(path)
    with interpreting(f"{path} is damaged; delete it and run the same command again"):
        refuse_unless_whole(f"{path} is damaged: steps", content.get("steps", 0), 0)
        validation = {name: float(number) for name, number in dict(content.get("validation", {})).items()}
        growths = [{name: float(growth[name]) for name in AT_GROWTH} for growth in content.get("growths", [])]
        value = {"value": float(content["value"])} if "value" in content else {}
        return {**content, "validation": validation, "growths": growths, **value}


class Leftovers:
    """The files that appear in a run's folder from `watch` on. `remove` deletes them, and folders made for them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._names: tuple[str, ...] = ()
        self._before: set[Path] = set()
        self._missing: list[Path] = []

    def watch(self, folder: Path, names: tuple[str, ...] = ()) -> None:
        """Begins to watch a folder, or with `names` only these files: other programs may write to the folder."""
        self._folder, self._names = folder, names
        self._before = self._files()
        self._missing = missing_folders(folder)

    def remove(self) -> None:
        if self._folder is None:
            return
        if self._folder in self._missing:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            for path in self._files() - self._before:
                if path.is_file() or path.is_symlink():
                    path.unlink(missing_ok=True)
        remove_empty(self._missing)

    def _files(self) -> set[Path]:
        assert self._folder is not None
        if self._names:
            return {self._folder / name for name in self._names if (self._folder / name).exists()}
        return set(self._folder.rglob("*")) if self._folder.is_dir() else set()


# --- its checkpoints


def newest_checkpoint(
    folder: Path, tell: Callable[[str], None] = lambda line: None
) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint of a run and its content; `tell` gets a line about each that is newer, but damaged."""
    from mupscale.models.sharded import damage_at

    for path, checkpoint in checkpoints_of_run(folder, tell):
        problem = damage_at(path)
        if problem is None:
            return path, checkpoint
        tell(f"{path} is damaged ({problem})")
    return None, {}


def checkpoints_of_run(
    folder: Path, tell: Callable[[str], None] = lambda line: None
) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints from which a run can go on and their content, the newest first; `tell` gets a line for damage.

    The last checkpoint of a finished run counts only once it is kept for resuming: then nothing is left to do. A
    checkpoint that was written by another callback, or on an error in the middle of a step, comes after all others.
    """
    from mupscale.models.checkpoint import peek, run_in

    found: list[tuple[tuple[bool, int, bool, float], Path, dict[str, Any]]] = []
    identity = read_run(folder).get("id")
    places: dict[str, Path] = {}
    """A checkpoint of each run, if run.json does not say which is the folder's own."""
    for path in checkpoints_of(folder):
        checkpoint = peek(path)
        if checkpoint is None:
            if not path.is_dir():  # a folder without its last file was never finished
                tell(f"{path} is damaged")
            continue
        run = run_in(checkpoint)
        if None in (identity, run.get("id")):
            is_inside = folder.resolve() in path.resolve().parents
            is_of_run = is_inside or run.get("folder") == str(folder.resolve())
        else:
            is_of_run = run["id"] == identity
        # a sharded one keeps them outside of meta.pt
        if is_of_run and identity is None and isinstance(run.get("id"), str):
            places.setdefault(run["id"], path)
        if is_of_run and ("optimizer_states" in checkpoint or (path / METADATA).is_file()):
            rank = _counts(path, checkpoint), checkpoint["global_step"], _is_for_resuming(path), path.stat().st_mtime
            found.append((rank, path, checkpoint))
    if len(places) > 1:
        raise UserError(
            f"{folder / RUN} is missing or damaged, and there are checkpoints of {len(places)} runs "
            f"({', '.join(map(str, places.values()))}). Move those of the others elsewhere, or continue from one of "
            "them in a new folder: fit --ckpt_path CHECKPOINT"
        )
    return [(path, checkpoint) for _, path, checkpoint in sorted(found, key=lambda entry: entry[0], reverse=True)]


def is_finished(checkpoint: dict[str, Any]) -> bool:
    return bool(dictionary(dictionary(checkpoint.get("callbacks")).get("ExactResume")).get("finished"))


def checkpoints_of(folder: Path) -> Iterator[Path]:
    """Where the checkpoints of a run may be: in its folder, and in `checkpoint.dirpath`."""
    yield from find_checkpoints(folder)
    elsewhere = dirpath_of(folder)
    if elsewhere is not None and elsewhere.is_dir() and not elsewhere.resolve().is_relative_to(folder.resolve()):
        yield from find_checkpoints(elsewhere)


def find_checkpoints(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder, but not those of runs inside it. Links, such as last.ckpt, are left out."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_symlink() or name.startswith("."):
            continue
        if path.suffix == ".ckpt" and (path.is_file() or path.is_dir()):
            yield path
        elif path.is_dir() and not (path / CONFIG).exists():
            yield from find_checkpoints(path)


def load_validated(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that a user names, its tensors memory-mapped; of a sharded one, all but its shards.

    Raises a UserError if it is damaged, or holds more than data.
    """
    from mupscale.models.sharded import check_sharded, damage_at

    refuse_endless_file(path)
    if path.is_dir():
        check_sharded(path)
    problem = damage_at(path)
    if problem is not None:
        raise UserError(f"{path} is damaged ({problem}); nothing of it was loaded")
    return data_in(path / META if path.is_dir() else path, mapped=True)


def _counts(path: Path, checkpoint: dict[str, Any]) -> bool:
    """Whether a run continues exactly from a checkpoint, with nothing left to do before."""
    from mupscale.models.checkpoint import PRE_UPSCALE, run_in

    if _is_for_resuming(path) or not run_in(checkpoint):
        return True  # without a run, it is of a version that kept none apart for resuming, or of a fit of its own
    states = dictionary(checkpoint.get("callbacks"))
    policy = dictionary(next((states[key] for key in states if str(key).startswith("RunCheckpoint")), None))
    last = Path(str(dictionary(policy.get("progress")).get("last_path", "")))
    ending = dictionary(states.get("ExactResume"))
    is_own = last.name == path.name or path.name.startswith(PRE_UPSCALE)
    return is_own and not (ending.get("finished") or ending.get("failed"))


def _is_for_resuming(path: Path) -> bool:
    """Whether it is one of those that a run keeps apart from what its policy keeps."""
    from mupscale.models.checkpoint import RESUME

    return path.name.startswith("step=") and path.parent.name.partition("-")[0] == RESUME


def dirpath_of(folder: Path) -> Path | None:
    config = folder / CONFIG
    content = dictionary(read_yaml(config)) if config.is_file() else {}
    named = dictionary(content.get("checkpoint")).get("dirpath")
    return Path(named) if isinstance(named, str) else None


# --- what may change in a continued run

FREE = (
    "trainer.",
    "checkpoint.",
    "loop.",
    "stop_on_nan",
    "ckpt_path",
    "weights_only",
    "callback_args",
    "model.init_args.compile",
)
"""Keys that may change in a continued run; for `trainer.callbacks` see the rules below."""

FREE_DATA = ("data_dir", "resident", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
"""Arguments of data modules that determine where samples are and how they are read, but not which samples."""

WORKERS = ("num_workers", "persistent_workers")
"""Those of `FREE_DATA` on which the random numbers in the processes of a DataLoader depend."""

PLACE = ("trainer.logger", "trainer.default_root_dir", "checkpoint.dirpath")
"""Keys that determine the folder of a run; `resume` continues in the same folder."""

SUMMARY = (
    "These may change: trainer.*, checkpoint.*, loop.*, stop_on_nan, model.compile, data.data_dir, growths after the "
    "checkpoint, additional callbacks"
)


def refuse_changes(saved: Any, config: Config, step: int, *, same_place: bool) -> None:
    """Raises a UserError if a configuration differs from that of a checkpoint of `step` in what must not change."""
    try:
        found = differing_keys(saved, config)
        callbacks = _callbacks(saved)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:  # tensors cannot be compared
        raise UserError("the configuration in the checkpoint is damaged; use another checkpoint") from error
    for key, there, here in found:
        if key.startswith("trainer.callbacks") or _is_one_class(key, there, here):
            continue
        is_place = key.startswith(PLACE)
        free = key.startswith(FREE) or (key.startswith("data.init_args.") and key.rpartition(".")[2] in FREE_DATA)
        if (same_place and is_place) or not free:
            rule = (
                "A continued run stays in its folder" if is_place else "A continued run keeps what its checkpoint holds"
            )
            raise UserError(
                f"{key.replace('.init_args.', '.')} is {brief(there)} in the run and {brief(here)} here. {rule}. "
                f"{SUMMARY}. To change anything else, start a new run from the weights: --model.init_from CHECKPOINT"
            )
        if key.startswith("data.init_args.") and key.rpartition(".")[2] in WORKERS:
            warnings.warn(
                f"{key.replace('.init_args.', '.')} is {brief(there)} in the run and {brief(here)} here: random "
                "numbers that a data set draws in worker processes, for augmentation say, will differ from here on",
                stacklevel=2,
            )
    _refuse_callbacks(callbacks, _callbacks(config), step)


def _refuse_callbacks(there: list[Config], here: list[Config], step: int) -> None:
    """A resumed run must keep its callbacks in order; only later growths may change."""
    wanted = [callback for callback in there if not _is_to_come(callback, step)]
    given = [callback for callback in here if not _is_to_come(callback, step)]
    for callback in given:
        if wanted and _are_same(wanted[0], callback):
            wanted.pop(0)
        elif class_name(callback) == "UpscaleCallback":
            raise UserError(
                f"trainer.callbacks: {brief(callback)} comes too late, the run is at step {step} and was without it. "
                "Growths that are still to come may change"
            )
    if wanted:
        raise UserError(
            f"trainer.callbacks: the run has {brief(wanted[0])}, which is missing here, or has other arguments. A "
            f"continued run keeps it, because its state is in the checkpoint. {SUMMARY}"
        )


def _callbacks(config: Config) -> list[Config]:
    given = config["trainer"]["callbacks"] or []
    answer = given if isinstance(given, list) else [given]
    if not all(isinstance(callback, dict) and "class_path" in callback for callback in answer):
        raise TypeError("trainer.callbacks is not a list of classes")
    return answer


def _is_to_come(callback: Config, step: int) -> bool:
    at_step = callback.get("init_args", {}).get("at_step")
    return class_name(callback) == "UpscaleCallback" and isinstance(at_step, int) and at_step >= step


def _are_same(there: Config, here: Config) -> bool:
    """Whether two callbacks have one class, and the same arguments, but for the folder of their checkpoints."""
    then, now = (
        {key: value for key, value in each.get("init_args", {}).items() if key != "dirpath"} for each in (there, here)
    )
    return class_name(there) == class_name(here) and not differing_keys(then, now)


def _is_one_class(key: str, there: Any, here: Any) -> bool:
    """Whether two names are of one class, by its short name: the module of a user's class may go by two."""
    return key.endswith(".class_path") and str(there).rpartition(".")[2] == str(here).rpartition(".")[2]
