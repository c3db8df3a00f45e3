"""Checkpoints on disk: finds the newest undamaged one of a run. Loads torch only when it reads one."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
