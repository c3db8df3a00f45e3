"""Checkpoints on disk: finds the newest undamaged one of a run, and refuses to continue it as another run.

Loads torch only when it reads one.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mupscale.commands.config import Config, brief, class_name, differences
from mupscale.commands.run_folder import RUN, read_run
from mupscale.data_files import read_yaml
from mupscale.errors import UserError
from mupscale.sharded_checkpoints import META, METADATA, check_sharded, damage_in, damage_in_shards, data_in


def newest_checkpoint(
    folder: Path, tell: Callable[[str], None] = lambda line: None
) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint of a run and its content; `tell` gets a line about each that is newer, but damaged.

    The last checkpoint of a finished run counts only once it is kept for resuming: then nothing is left to do. A
    checkpoint that was written by another callback, or on an error in the middle of a step, counts if there is no
    other.
    """
    from mupscale.models.checkpoint import peek, run_in

    found: list[tuple[tuple[bool, int, bool, float], Path, dict[str, Any]]] = []
    identity = identity_of(folder)
    for path in checkpoints_of(folder):
        checkpoint = peek(path)
        if checkpoint is None:
            if not path.is_dir():  # a folder without its last file was never finished
                tell(f"{path} is damaged")
            continue
        theirs = run_in(checkpoint).get("id")
        is_of_run = theirs == identity if theirs is not None else _is_in(folder, path)
        if is_of_run and "optimizer_states" in {*checkpoint, *sharded(path)}:
            rank = _counts(path, checkpoint), checkpoint["global_step"], _is_for_resuming(path), path.stat().st_mtime
            found.append((rank, path, checkpoint))
    for _, path, checkpoint in sorted(found, key=lambda entry: entry[0], reverse=True):
        problem = damage_at(path)
        if problem is None:
            return path, checkpoint
        tell(f"{path} is damaged ({problem})")
    return None, {}


def is_finished(checkpoint: dict[str, Any]) -> bool:
    return bool(dictionary(dictionary(checkpoint.get("callbacks")).get("ExactResume")).get("finished"))


def checkpoints_of(folder: Path) -> Iterator[Path]:
    """Where the checkpoints of a run may be: in its folder, and in `checkpoint.dirpath`."""
    yield from below(folder)
    elsewhere = dirpath_of(folder)
    if elsewhere is not None and elsewhere.is_dir() and not elsewhere.resolve().is_relative_to(folder.resolve()):
        yield from below(elsewhere)


def below(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder, but not those of runs inside it. Links, such as last.ckpt, are left out."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_symlink() or name.startswith("."):
            continue
        if path.suffix == ".ckpt":
            yield path
        elif path.is_dir() and not (path / "config.yaml").exists():
            yield from below(path)


def checked(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that a user names, its tensors memory-mapped; of a sharded one, all but its shards.

    Raises a UserError if it is damaged, or holds more than data.
    """
    if path.is_dir():
        check_sharded(path)
    problem = damage_at(path)
    if problem is not None:
        raise UserError(f"{path} is damaged ({problem}); nothing of it was loaded")
    return data_in(path / META if path.is_dir() else path, mapped=True)


def sharded(path: Path) -> set[str]:
    """The keys that a sharded checkpoint keeps outside of meta.pt."""
    return {"optimizer_states"} if (path / METADATA).is_file() else set()


def damage_at(path: Path) -> str | None:
    """What is wrong with a checkpoint, a file or a folder, by its checksums; None if nothing is.

    The processes of a run share the work of a folder. One that finds damage there raises a UserError: the others would
    otherwise resume from this checkpoint.
    """
    if not path.is_dir():
        return damage_in(path)
    share = share_of_process(os.environ)
    if _key(path) not in undamaged:
        problem = damage_in_shards(path, share)
        if problem is not None and share[1] > 1:
            raise UserError(f"{path} is damaged ({problem}); delete it to continue from the one before it")
        if problem is not None:
            return problem
        undamaged.add(_key(path))
    return None


undamaged: set[tuple[Path, int]] = set()
"""Sharded checkpoints in which this process has found no damage, by place and time of writing."""


def _key(folder: Path) -> tuple[Path, int]:
    metadata = folder / METADATA
    return folder.resolve(), metadata.stat().st_mtime_ns if metadata.is_file() else 0


def share_of_process(environment: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the number of processes, if torchrun or srun has started several; else (0, 1)."""
    for rank, processes in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in environment and processes in environment:
            return int(environment[rank]), int(environment[processes])
    return 0, 1


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


def identity_of(folder: Path) -> str | None:
    """The identity of the run in a folder, from run.json, or from its checkpoints where that is missing or damaged.

    None if neither has one. A folder for checkpoints that the user named may be that of several runs: each checkpoint
    names the folder of its run. Raises a UserError if the checkpoints in the folder are of several runs.
    """
    from mupscale.models.checkpoint import peek, run_in

    identity = read_run(folder).get("id")
    if isinstance(identity, str):
        return identity
    found: dict[str, list[Path]] = {}
    for path in checkpoints_of(folder):
        run = run_in(peek(path) or {})
        if isinstance(run.get("id"), str) and (_is_in(folder, path) or run.get("folder") == str(folder.resolve())):
            found.setdefault(run["id"], []).append(path)
    if len(found) > 1:
        examples = ", ".join(str(paths[0]) for paths in found.values())
        raise UserError(
            f"{folder / RUN} is missing or damaged, and there are checkpoints of {len(found)} runs ({examples}). Move "
            "those of the others elsewhere, or continue from one of them in a new folder: fit --ckpt_path CHECKPOINT"
        )
    return next(iter(found), None)


def _is_in(folder: Path, path: Path) -> bool:
    return folder.resolve() in path.resolve().parents


def dictionary(value: Any) -> dict[Any, Any]:
    """A value that should be a dictionary; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def dirpath_of(folder: Path) -> Path | None:
    config = folder / "config.yaml"
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
"""Those of them on which the random numbers in the processes of a DataLoader depend."""

PLACE = ("trainer.logger", "trainer.default_root_dir", "checkpoint.dirpath")
"""Keys that determine the folder of a run; `resume` continues in the same folder."""

SUMMARY = (
    "These may change: trainer.*, checkpoint.*, loop.*, stop_on_nan, model.compile, data.data_dir, upscales after the "
    "checkpoint, additional callbacks"
)


def refuse_changes(saved: Any, config: Config, step: int, *, same_place: bool) -> None:
    """Raises a UserError if a configuration differs from that of a checkpoint of `step` in what must not change."""
    try:
        found = differences(saved, _of_then(saved, config))
        callbacks = _callbacks(saved)
    except (AttributeError, KeyError, TypeError) as error:
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
                "numbers that a data set draws in worker processes, for augmentation say, will be others from here on",
                stacklevel=2,
            )
    _refuse_callbacks(callbacks, _callbacks(config), step)


def _of_then(there: Any, here: Any) -> Any:
    """The values `here` of the keys in `there`, because a later version may have more keys."""
    if isinstance(there, dict) and isinstance(here, dict):
        return {key: _of_then(value, here.get(key)) for key, value in there.items()}
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        return [_of_then(a, b) for a, b in zip(there, here, strict=True)]
    return here


def _refuse_callbacks(there: list[Config], here: list[Config], step: int) -> None:
    """Those of the run must be there, in their order, but for upscales to come; and no upscale that is too late."""
    wanted = [callback for callback in there if not _is_to_come(callback, step)]
    given = [callback for callback in here if not _is_to_come(callback, step)]
    for callback in given:
        if wanted and _are_same(wanted[0], callback):
            wanted.pop(0)
        elif class_name(callback) == "UpscaleCallback":
            raise UserError(
                f"trainer.callbacks: {brief(callback)} comes too late, the run is at step {step} and was without it. "
                "Upscales that are still to come may change"
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
    """Whether two callbacks have one class, and the same values of the arguments that there were then.

    The folder of a callback's checkpoints may be another one, as `checkpoint.dirpath` may.
    """
    then, now = there.get("init_args", {}), here.get("init_args", {})
    then = {key: value for key, value in then.items() if key != "dirpath"}
    return class_name(there) == class_name(here) and not differences(then, _of_then(then, now))


def _is_one_class(key: str, there: Any, here: Any) -> bool:
    """Whether two names are of one class, by its short name: the module of a user's class may go by two."""
    return key.endswith(".class_path") and str(there).rpartition(".")[2] == str(here).rpartition(".")[2]
