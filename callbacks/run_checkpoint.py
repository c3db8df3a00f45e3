"""The checkpoints of a run: those that the user's options keep, and those that are kept for resuming.

Uses private names of Lightning's ModelCheckpoint, as `models/_lightning.py` does of others; see tests/test_seams.py.
"""

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from mupscale.atomic import delete, partial, sync_folder
from mupscale.errors import UserError
from mupscale.models._lightning import (
    accumulates,
    callbacks_in,
    callbacks_of,
    is_remote,
    is_trial_run,
    run_folder,
    set_callbacks,
)
from mupscale.models.checkpoint import PRE_UPSCALE, RESUME, peek, run_and_step
from mupscale.models.checkpoint_files import files_of, write_whole_files
from mupscale.models.sharded import damage_at

KEPT = 2
"""How many of the newest checkpoints stay for resuming: one may be damaged."""


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that also saves at the end of a run, and keeps working after interruptions and moved folders.

    The options (`monitor`, `save_top_k`, `filename`, `save_weights_only`) decide which checkpoints are kept. Apart from
    these, the two newest checkpoints are always kept for resuming, in the folder `resume` next to the others. A
    checkpoint in both folders is stored once.

    The last step is saved after the last validation, when the run is over. So a run with this checkpoint is finished.

    Ctrl-C, SIGTERM and SIGHUP end a run on one process after its step, with a checkpoint of that step for resuming; a
    second one ends it at once.
    """

    run: str | None = None
    """The identity of the run, where a folder may hold the checkpoints of several."""

    is_shared: bool | None = None
    """Whether its folder may be that of other runs as well; by default, if the user named it."""

    points: "ResumePoints | None" = None

    stop: "StopRequest | None" = None

    resumable: tuple[int, Path] | None = None
    """The last step that was saved with all that a run needs to be resumed, and where."""

    has_warned = False
    """Whether the user knows that the monitored metric is not there."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.is_shared is None:
            self.is_shared = self.dirpath is not None
        super().setup(trainer, pl_module, stage)
        self.written: dict[str, None] = {}  # and not deleted, in their order
        write_whole_files(trainer)
        self.files = files_of(trainer)
        if stage != "fit":
            return
        for policy in (self, *others_than(self, trainer)):
            refuse_filename(policy)
        # its files say how far the run is, so all that others do after a step must be done before
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=lambda callback: callback is self))
        if is_remote(self.dirpath):
            return  # `resume` looks on this machine only
        assert self.dirpath is not None
        name = f"{RESUME}-{self.run[:8]}" if self.is_shared and self.run is not None else RESUME
        self.points = ResumePoints(Path(self.dirpath) / trainer.strategy.broadcast(name), self)
        if trainer.is_global_zero:
            for folder in (Path(self.dirpath), self.points.folder):
                for path in folder.glob(partial(folder / "*.ckpt").name):  # of a process that was killed
                    delete(path)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # before a validation that is made up for lets other callbacks save
        if not trainer.strategy.restore_checkpoint_after_setup:
            self.catch_up(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.strategy.restore_checkpoint_after_setup:
            self.catch_up(trainer)
        self.keep_newest("on_train_start", trainer, pl_module)
        # processes of a distributed run may be at different steps; signals to a stack are for all its fits
        is_alone = trainer.world_size == 1 and not getattr(pl_module, "is_in_stack", False)
        if is_alone and not is_trial_run(trainer):
            self.stop = StopRequest(saves=self.points is not None)
            self.stop.listen(signal.SIGTERM if trainer.received_sigterm else None)

    def catch_up(self, trainer: Trainer) -> None:
        """Completes the work on checkpoint files of a process that was killed after it had written one."""
        if trainer.ckpt_path is None or self.points is None:
            return
        resumed, kept = Path(trainer.ckpt_path), self.kept()
        _, step = run_and_step(resumed)
        if trainer.is_global_zero:
            for path in self.written.keys() - kept:
                if self._should_remove_checkpoint(trainer, path, str(resumed)):
                    delete(Path(path))
            self.delete_later_ones(trainer, step)
        self.written = {path: None for path in self.written if path in kept}
        if self.written:
            self.relink(trainer, Path(next(reversed(self.written))))
        if resumed.absolute().parent == self.points.folder.absolute():
            self.points._last_global_step_saved = step
        elif str(resumed.absolute()) in self.written:
            self.resumable = step, resumed

    def kept(self) -> set[str]:
        """The checkpoints that the options keep, of those that were written."""
        if self.save_top_k == -1:
            return set(self.written)
        return {self.best_model_path, self.last_model_path, *self.best_k_models}

    def delete_later_ones(self, trainer: Trainer, since: int) -> None:
        """Deletes what other callbacks wrote after the checkpoint that the run goes on from: they will write it again,
        and would number it."""
        others = others_than(self, trainer) if self.run is not None else []
        known = {path for c in others for path in (c.best_model_path, c.last_model_path, *c.best_k_models)}
        patterns = {(Path(c.dirpath), pattern) for c in others if c.dirpath is not None for pattern in patterns_of(c)}
        for folder, pattern in patterns:
            for path in folder.glob(pattern):
                run, step = run_and_step(path)
                ours = str(path) in self.kept() | known or path.name.startswith(PRE_UPSCALE)
                if run == self.run and step >= since and not ours and not path.is_symlink():
                    delete(path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, self._every_n_train_steps
        is_idle = self._train_time_interval is None and (every < 1 or step % every != 0)
        if step != trainer.max_steps and not is_idle:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.keep_newest("on_train_batch_end", trainer, pl_module, outputs, batch, batch_idx)
        if step != trainer.max_steps:
            self.stop_if_asked(trainer)
        self.files.raise_error()

    def stop_if_asked(self, trainer: Trainer) -> None:
        """Ends a run that a signal asks to end, with a checkpoint for resuming, unless its folder is remote."""
        if self.stop is None or self.stop.number is None or accumulates(trainer):
            return
        if self.points is not None:
            if self.points._last_global_step_saved != trainer.global_step:
                self.points.save(trainer)
            self.relink(trainer, self.points.path_of(trainer))
        self.files.wait()
        self.stop.obey()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.resumable = None  # it may be of the middle of a step
        if self.stop is not None:
            self.stop.end()
            if self.stop.is_urgent:
                files_of(trainer).give_up()
        try:
            files_of(trainer).wait()
        except Exception as error:  # the exception that ends the run is told; Lightning has still to end it
            rank_zero_warn(f"a checkpoint was not written ({type(error).__name__}: {error})")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self.stop is not None:
            self.stop.end()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self.keep_newest("on_validation_end", trainer, pl_module)
        # others are logged in training, maybe later; the user should not have to wait for a checkpoint that is due
        if not trainer.sanity_checking and not (self.monitor or "").startswith("train"):
            self.lacks_metric(trainer)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.global_step != trainer.max_steps:
            self.stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.keep_newest("on_train_epoch_end", trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_trial_run(trainer) or trainer.global_step == 0:
            return
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        if self._last_global_step_saved == trainer.global_step:
            self._save_last_checkpoint(trainer, candidates)
        elif self.save_last:  # the last step, even if it is not among the best
            path = Path(self.format_checkpoint_name(candidates, self.CHECKPOINT_NAME_LAST))
            self._save_checkpoint(trainer, str(self.free_path(path, trainer)))
        if self.points is not None:
            self.points.save(trainer)
        self.files.wait()
        missing = self.missing_metric(trainer)
        if self.current_score is None and missing is not None:
            raise UserError(f"{missing}. The last step is saved in {self.dirpath}")

    def missing_metric(self, trainer: Trainer) -> str | None:
        """Says that the metric of the best checkpoints was not logged, though there was a validation; else None."""
        is_measured = self.save_top_k != 0 and trainer.fit_loop.epoch_loop.val_loop._has_run
        if self.monitor is None or not is_measured or self.monitor in self._monitor_candidates(trainer):
            return None
        there = ", ".join(sorted(trainer.callback_metrics)) or "none"
        return f"checkpoint.monitor: {self.monitor} was not logged up to step {trainer.global_step}; there are {there}"

    def lacks_metric(self, trainer: Trainer) -> bool:
        """Whether that metric is missing. Warns once, and waits: it may be logged at some steps only."""
        missing = self.missing_metric(trainer)
        if missing is not None and not self.has_warned:
            self.has_warned = True
            rank_zero_warn(f"{missing}. No checkpoint is kept as the best yet", stacklevel=2)
        return missing is not None

    def keep_newest(self, hook: str, trainer: Trainer, *arguments: Any) -> None:
        """Keeps what the options saved for resuming as well; if they saved nothing, saves when their triggers fire."""
        points, step = self.points, trainer.global_step
        if points is None or accumulates(trainer):  # no checkpoint holds the gradients so far
            return
        if self.resumable_at(step) is not None and points._last_global_step_saved != step:
            points.save(trainer)
        else:
            getattr(points, hook)(trainer, *arguments)

    def resumable_at(self, step: int) -> Path | None:
        """The checkpoint of a step, if this has written one from which a run can be resumed."""
        return self.resumable[1] if self.resumable is not None and self.resumable[0] == step else None

    def relink(self, trainer: Trainer, path: Path) -> None:
        """Makes the link to the last checkpoint point to this one, as it does once that is saved."""
        if self.save_last and not self.last_model_path:
            candidates = self._monitor_candidates(trainer)
            self.last_model_path = self.format_checkpoint_name(candidates, self.CHECKPOINT_NAME_LAST)
        if self.save_last == "link":
            self._link_checkpoint(trainer, str(path), self.last_model_path)

    # --- its state

    def state_dict(self) -> dict[str, Any]:
        progress = {  # what Lightning does not save, but a run that is resumed must know
            "written": list(self.written),
            "last_step": self._last_global_step_saved,
            "last_path": self._last_checkpoint_saved,
            "is_deferred": self._defer_save_until_validation,
        }
        return {**super().state_dict(), "progress": progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state even if the folder of the run was moved or renamed."""
        state = in_folder(state_dict, str(self.dirpath))
        super().load_state_dict(state)
        progress = state["progress"]
        self.written = dict.fromkeys(progress["written"])
        self._last_global_step_saved, last = progress["last_step"], progress["last_path"]
        # a run that goes on in a new folder has none there
        self._last_checkpoint_saved = last if last and Path(last).exists() else ""
        self._defer_save_until_validation = progress["is_deferred"]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lets the user's own checkpoint callbacks continue with their files if the folder of the run was moved, or is
        named from another place: Lightning would forget which are the best."""
        here = trainer.ckpt_path is not None and self.dirpath is not None
        if not here or not Path(str(trainer.ckpt_path)).resolve().is_relative_to(Path(str(self.dirpath)).resolve()):
            return  # the run goes on in a new folder, where they have no files
        for callback in others_than(self, trainer):
            state, new = checkpoint["callbacks"].get(callback.state_key), str(callback.dirpath)
            if state is not None and state.get("dirpath") not in (None, new) and Path(new).is_dir():
                checkpoint["callbacks"][callback.state_key] = in_folder(state, new)

    # --- files

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not self.lacks_metric(trainer):  # Lightning would end the run
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if is_remote(filepath):
            super()._save_checkpoint(trainer, filepath)
            return
        # before, because the checkpoint holds all of these
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath
        self._defer_save_until_validation = False
        path = Path(filepath)
        if trainer.is_global_zero and path.is_dir():
            delete(path)  # its files have other names, by which they must not change
        trainer.strategy.barrier()
        self.written[filepath] = None
        with files_of(trainer).deferring():
            super()._save_checkpoint(trainer, filepath)
        if not self.save_weights_only and not accumulates(trainer):
            self.resumable = trainer.global_step, path

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Removes the checkpoint that the run was resumed from, too: or every interruption would leave one."""
        if is_remote(previous):
            return super()._should_remove_checkpoint(trainer, previous, current)
        assert self.dirpath is not None
        return Path(previous) != Path(current) and Path(self.dirpath).absolute() in Path(previous).absolute().parents

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        remove = super()._remove_checkpoint
        files_of(trainer).later(lambda: remove(trainer, filepath))
        self.written.pop(filepath, None)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        path, link = Path(filepath), Path(linkpath)
        if trainer.is_global_zero and path.absolute() != link.absolute():
            files_of(trainer).later(lambda: replace_link(path, link))
        trainer.strategy.barrier()

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Finds the newest undamaged checkpoint of this run, for `ckpt_path="last"`."""
        folder = self.dirpath or run_folder(trainer)
        if folder is None or is_remote(folder):
            return super()._find_last_checkpoints(trainer)
        own = Path(folder) if self.dirpath else Path(folder) / "checkpoints"
        # none of the first kind, if it was killed before it had linked its first checkpoint
        found = list(own.glob(f"{RESUME}*/step=*.ckpt")) or [path for path in own.glob("*.ckpt") if path.exists()]
        for path in sorted(found, key=lambda path: (step_of(path), run_and_step(path)[1]), reverse=True):
            problem = damage_at(path) if peek(path) is not None else "it cannot be read"
            if problem is None:
                os.utime(path)  # Lightning takes what was modified last; other callbacks may have files of other runs
                return {str(path)}
            rank_zero_warn(f"{path} is damaged ({problem}): the run goes on from the checkpoint before it")
        return set()

    def file_exists(self, filepath: Any, trainer: Trainer) -> bool:
        """Whether a file must not be overwritten, because it is not of this run."""
        if is_remote(filepath):
            return super().file_exists(filepath, trainer)
        if filepath in self.written or filepath == self.last_model_path:
            return False  # its own, which may be changing
        path = Path(filepath)
        foreign = path.exists() and run_and_step(path)[0] not in ((self.run,) if self.is_shared else (self.run, None))
        return bool(trainer.strategy.broadcast(foreign))

    def free_path(self, path: Path, trainer: Trainer) -> Path:
        """The path, with a number if there is a file of another run."""
        free, number = path, 0
        while self.file_exists(free, trainer):
            number += 1
            free = path.with_stem(f"{path.stem}-v{number}")
        return free


class ResumePoints(ModelCheckpoint):
    """The newest checkpoints of a run, in a separate folder; written when the triggers of a RunCheckpoint fire.

    That handles its files first: the last checkpoint of a run counts only once it is in this folder.
    """

    def __init__(self, folder: Path, policy: RunCheckpoint) -> None:
        super().__init__(
            dirpath=folder,
            every_n_train_steps=policy._every_n_train_steps,
            every_n_epochs=policy._every_n_epochs,
            train_time_interval=policy._train_time_interval,
            save_on_train_epoch_end=policy._save_on_train_epoch_end,
        )
        self.folder = folder
        self.policy = policy

    def path_of(self, trainer: Trainer) -> Path:
        return self.folder / f"step={trainer.global_step}.ckpt"

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        path, same, files = self.path_of(trainer), self.policy.resumable_at(trainer.global_step), files_of(trainer)
        self._last_global_step_saved = trainer.global_step
        self._last_time_checked = time.monotonic()
        if trainer.is_global_zero:
            files.later(lambda: self.leave_newest(but=path))
            if same is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                files.later(lambda: link(same, path))
        if same is None:
            with files.deferring():
                trainer.save_checkpoint(path)
        else:
            trainer.strategy.barrier()

    def leave_newest(self, but: Path) -> None:
        """Deletes the checkpoints that are not among the newest with this one, and those after it."""
        there = [path for path in self.folder.glob("step=*.ckpt") if path != but]
        older = sorted((path for path in there if step_of(path) < step_of(but)), key=step_of, reverse=True)
        for path in set(there).difference(older[: KEPT - 1]):
            delete(path)


def refuse_filename(policy: ModelCheckpoint) -> None:
    """Raises a UserError for a name from which no file can be made, such as one with half a pair of braces."""
    key = "checkpoint" if isinstance(policy, RunCheckpoint) else f"trainer.callbacks: {type(policy).__name__}"
    if is_remote(policy.filename or ""):
        raise UserError(f"{key}.filename = {policy.filename}: give a name; the folder is dirpath")
    try:
        policy.format_checkpoint_name({})
    except (ValueError, LookupError, AttributeError) as error:
        raise UserError(f"{key}.filename = {policy.filename}: {error}; name metrics as {{step}}") from error


def others_than(policy: ModelCheckpoint, trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in callbacks_in(trainer, ModelCheckpoint) if callback is not policy]


def patterns_of(callback: ModelCheckpoint) -> list[str]:
    """Where its files are in its folder: a name such as {val/loss} makes folders."""
    return ["*/" * level + "*.ckpt" for level in range((callback.filename or "").count("/") + 1)]


def in_folder(state: dict[str, Any], new: str) -> dict[str, Any]:
    """The state of a ModelCheckpoint whose folder, and with it all paths in that, is now `new`."""
    old = state["dirpath"]

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {moved(key): moved(each) for key, each in value.items()}
        if isinstance(value, list):
            return [moved(each) for each in value]
        is_inside = isinstance(value, str) and Path(value).is_relative_to(old)
        return str(Path(new) / Path(value).relative_to(old)) if is_inside else value

    return {**moved(state), "dirpath": new}


def link(path: Path, other: Path) -> None:
    """Gives a checkpoint a second name; on a file system without hard links, a copy."""
    new = partial(other)
    delete(new)
    if path.is_dir():
        shutil.copytree(path, new, copy_function=_link_file)
        delete(other)
    else:
        _link_file(str(path), str(new))
    new.replace(other)
    sync_folder(other.parent)


def _link_file(path: str, other: str) -> None:
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def step_of(path: Path) -> int:
    digits = path.stem.removeprefix("step=")
    return int(digits) if digits.isdigit() else -1


def replace_link(path: Path, link: Path) -> None:
    """Links to a checkpoint, if it is there, in one operation: a process that is killed in it leaves the old link."""
    if not path.exists():
        return
    if link.is_dir() and not link.is_symlink():
        delete(link)
    new = partial(link)
    delete(new)
    new.symlink_to(os.path.relpath(path, link.parent))
    new.replace(link)


# --- signals

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class StopRequest:
    """Notes the first signal that asks this process to end; the second one raises an exception wherever it is."""

    def __init__(self, *, saves: bool) -> None:
        """`saves` is whether the run then ends with a checkpoint."""
        self.number: int | None = None
        self._saves = saves
        self.is_urgent = False
        """Whether a second signal came."""
        self._before: dict[int, Any] = {}
        self._process = 0

    def listen(self, noted: int | None = None) -> None:
        """Begins to listen, in the main thread, for signals that are not ignored; `noted` is one that came before."""
        self.number = noted
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in WORDS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)

    def end(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # Lightning ends its own, which came before, first
                signal.signal(number, handler)
        self._before.clear()

    def obey(self) -> None:
        """Raises what ends a run by the signal that was noted."""
        number = self.number
        self.end()
        raise KeyboardInterrupt if number == signal.SIGINT else SIGTERMException

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of a data loader, which Ctrl-C reaches too: its parent decides
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.number is not None:
            self.number, self.is_urgent = number, True
            self.obey()
        self.number = number
        word = WORDS[signal.Signals(number)]
        ends = "the run ends after this step" + ", with a checkpoint" * self._saves
        with suppress(OSError):  # the terminal may be gone
            print(f"{word}: {ends}; again, and it ends at once", file=sys.stderr)
