"""One run: claims its folder, writes its files, and says in one line how it ended before its time, and how to go on."""

import itertools
import json
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mupscale.atomic import write_durably
from mupscale.callbacks.curves import Curves, NonFiniteLoss
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.tensorboard import delete_logs
from mupscale.callbacks.upscale import swaps_of
from mupscale.commands.checkpoints import (
    FILES,
    RESULT,
    RUN,
    FolderLock,
    FolderLocked,
    Leftovers,
    checkpoints_of_run,
    newest_checkpoint,
    read_run,
    write_run,
)
from mupscale.commands.config import Config, dump
from mupscale.commands.mistakes import DiskFull, full_disk
from mupscale.commands.process import EXIT_CODE, Terminated, command_line, on_sigterm_in_a_thread, refuse_output_folder
from mupscale.errors import UserError
from mupscale.models._lightning import (
    callbacks_in,
    callbacks_of,
    forget_version,
    is_remote,
    is_trial_run,
    profiler_of,
    run_folder,
)
from mupscale.models.base import doubled
from mupscale.models.checkpoint import SAVED, load_checkpoint, non_finite_in, run_in, size_of

# --- the files of a run


class RunStart:
    """Finds and claims the folders of a run. `resumed` is the folder of a run to continue."""

    def __init__(self, resumed: Path | None) -> None:
        self.resumed = resumed
        self.leftovers = Leftovers()
        self._claims: list[FolderLock] = []

    def folder_without_logger(self, root: str | None) -> Path:
        """A folder for a run without a logger: the root itself, or version_0 and so on in it, whichever is free."""
        if self.resumed is not None:
            return self.resumed
        place = Path(root or ".").absolute()
        if getattr(rank_zero_only, "rank", 0) != 0:
            return place  # that of the first rank is taken
        refuse_output_folder("trainer.default_root_dir", place)
        numbered = (place / f"version_{number}" for number in itertools.count())
        return self._claim_first(itertools.chain([place], numbered), has_logs=False, takes_next=True)

    def claim(self, trainer: Trainer, *, takes_next: bool) -> dict[str, Any]:
        """Claims the run's folder, and that of its checkpoints; returns the identity of the run and its folder.

        A logger that `takes_next` finds its version itself: where another process was faster, it looks again.
        """
        if not self._claims:
            self._claim_first(_folders_of_logger(trainer), has_logs=bool(trainer.loggers), takes_next=takes_next)
        folder = self._claims[0].folder
        identity = read_run(folder).get("id") if self.resumed is not None else uuid.uuid4().hex
        if identity is None:  # its run.json is lost
            identity = run_in(newest_checkpoint(folder)[1]).get("id") or uuid.uuid4().hex
        self._claims[0].begin()
        write_run(folder, id=identity)
        for policy in callbacks_in(trainer, RunCheckpoint):
            policy.run = identity
            self._claim_checkpoints(policy.dirpath, folder)
        return {"id": identity, "folder": str(folder.resolve())}

    def release(self) -> None:
        for claim in reversed(self._claims):
            claim.release()

    def _claim_first(self, folders: Iterable[Path], *, has_logs: bool, takes_next: bool) -> Path:
        """Claims the first folder that a run may have; with `takes_next`, others are passed over."""
        for folder in folders:
            leftovers = Leftovers()
            leftovers.watch(folder, () if has_logs or not folder.exists() else FILES)
            try:
                claim = FolderLock(folder)
            except FolderLocked:
                if not takes_next:
                    raise
                continue
            if self.resumed is not None or _is_free(folder, is_named=not takes_next):
                self._claims.append(claim)
                self.leftovers = leftovers  # only now: what appeared before may be another process's
                return folder
            claim.release()
            if not takes_next:
                raise UserError(
                    f"trainer.logger: {folder} has a run already; to continue it: python -m mupscale resume {folder}"
                )
        raise AssertionError

    def _claim_checkpoints(self, dirpath: Any, folder: Path) -> None:
        if dirpath is None or is_remote(dirpath) or Path(dirpath).resolve() == folder.resolve():
            return
        refuse_output_folder("checkpoint.dirpath", Path(dirpath))
        claim = FolderLock(Path(dirpath))
        self._claims.append(claim)
        claim.begin()


def _folders_of_logger(trainer: Trainer) -> Iterator[Path]:
    while True:
        folder = run_folder(trainer)
        assert folder is not None
        refuse_output_folder("trainer.logger.save_dir", folder)
        yield folder
        logger = trainer.loggers[0]
        assert isinstance(logger, TensorBoardLogger | CSVLogger)
        forget_version(logger)


def _is_free(folder: Path, *, is_named: bool) -> bool:
    """Whether a new run may have a folder: an attempt that died before its first checkpoint is none.

    A folder that the user named may hold other files.
    """
    has_config = (folder / "config.yaml").exists()
    if is_named:
        return not has_config or newest_checkpoint(folder)[0] is None
    if (folder / RUN).exists():
        return newest_checkpoint(folder)[0] is None
    return not has_config and not (folder / "checkpoints").exists()


# --- what it writes, and says at its end

PATIENCE = 5.0
"""Seconds that a process of a distributed run waits for the first one to end them all."""


class RunJournal(Callback):
    """Writes the files of a run, and says in one line where it stands if it ends before its time, and how to go on.

        journal = RunJournal(resumed=False)
        with journal.explained():
            trainer = Trainer(callbacks=[journal])
            journal.attach(trainer)
            trainer.fit(module)

    The files are config.yaml, which is in TensorBoard, too, run.json with the length of the run, and result.json with
    what came of it. Its saved state: the metrics of the last validation, and its step.

    Ctrl-C and SIGTERM end a fit after its step (`RunCheckpoint`), and anything else at once. A fit on several processes
    ends at once, because each of them may be at another step: what it wrote is whole at any time.
    """

    state_key = "ResultFile"

    def __init__(self, *, resumed: bool) -> None:
        self.resumed = resumed
        self.config: Config = {}
        self.validation: dict[str, float] = {}
        self.validated_at: int | None = None
        self.trainer: Trainer | None = None
        self.folder: Path | None = None
        """The folder of the run, if it has one."""
        self.has_begun = self.has_stepped = False
        """Whether the run processes batches, and whether it has processed one."""
        self._writes = False
        self._is_around = False
        self._contexts = ExitStack()

    def state_dict(self) -> dict[str, Any]:
        return {"validation": dict(self.validation), "validated_at": self.validated_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validation = dict(state_dict["validation"])
        self.validated_at = state_dict["validated_at"]

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = None if is_trial_run(trainer) else run_folder(trainer)
        self._writes = trainer.is_global_zero
        if stage != "fit" or self.folder is None or not self._writes:
            return
        path = self.folder / "config.yaml"
        if path.exists() and not self.resumed:
            # An attempt died before its first checkpoint. Its curves would lie under those of this run.
            delete_logs(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"# lightning.pytorch=={lightning.__version__}\n{dump(self.config)}"
        write_durably(path, text.encode())
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not self.resumed:
                logger.experiment.add_text("config", f"```yaml\n{text}\n```")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.folder is None or not self._writes:
            return
        (self.folder / RESULT).unlink(missing_ok=True)  # of a run that is continued beyond its end
        total, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        write_run(
            self.folder,
            steps=int(total) if math.isfinite(total) else None,
            steps_per_epoch=math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self.validation = {name: float(value) for name, value in metrics.items() if name.startswith("val/")}
            self.validated_at = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes result.json before the last checkpoint, after which a killed run has nothing left to do."""
        if self.folder is not None and self._writes and not is_trial(trainer):  # `lab` writes that of a trial
            write_result(self.folder, self.numbers(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero and not is_trial(trainer):
            # here, because Lightning ends the process itself
            print(f"interrupted; {self.resume_hint()}", file=sys.stderr, flush=True)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    on_sanity_check_start = on_train_epoch_start = _begin
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _begin

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = False  # next Lightning looks at the options of the training itself

    def _step(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.has_stepped = self.has_stepped or not trainer.sanity_checking

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _step

    def numbers(self, trainer: Trainer) -> dict[str, Any]:
        """What result.json holds of a fit that has ended."""
        size = size_of(trainer.lightning_module)
        spent = next((curves.spent for curves in callbacks_in(trainer, Curves)), {})
        growths = [swap.summary for swap in swaps_of(trainer)]
        return {
            "steps": trainer.global_step,
            **({"width": None} if size is None else size._asdict()),
            **{name: amount for name, amount in spent.items() if math.isfinite(amount)},
            "validation": self.validation,
            "validated_at": self.validated_at,
            "growths": sorted(filter(None, growths), key=lambda growth: growth["step"]),
        }

    # --- around the run

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the exceptions that end a run into Terminated, KeyboardInterrupt or UserError with one line."""
        self._is_around = True
        with self._contexts:
            try:
                with self._profiler_ended():
                    yield
            except (SIGTERMException, Terminated) as error:
                self._end_other_processes()
                raise Terminated(self.resume_hint()) from error
            except KeyboardInterrupt as interrupt:
                raise KeyboardInterrupt(self.resume_hint()) from interrupt
            except NonFiniteLoss as error:
                self._end_other_processes()
                raise UserError(f"{error}, and the run stopped there. {self._finite_checkpoint(error.step)}") from error
            except Exception as error:
                problem = full_disk(error, self._places())
                if problem is None:
                    raise
                self._end_other_processes()
                raise DiskFull(f"{problem}; {self.resume_hint('make space there, then go on')}") from error

    def attach(self, trainer: Trainer) -> None:
        """Names the trainer of the run. SIGTERM ends a run on several processes whatever they wait for."""
        self.trainer = trainer
        if trainer.world_size > 1 and self._is_around:
            self._contexts.enter_context(on_sigterm_in_a_thread(self._exit_at_once))

    def resume_hint(self, way_on: str = "go on") -> str:
        """Where the run stands and how to go on, without a collective operation."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn not in (None, "fit"):
            return "run the same command again"
        module = trainer.lightning_module  # None before the fit begins
        size = None if module is None else size_of(module)
        where = f"the run is at step {trainer.global_step}{'' if size is None else f', {size}'}"
        if is_trial(trainer):
            return f"{where}; {way_on}: run the same command again"
        found = next(iter(self._checkpoints()), None)
        if found is None:
            return f"{where}, with no checkpoint yet; start again with the same command"
        path, step = found[0], found[1]["global_step"]
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{where}; the newest checkpoint is {path} of step {step}; {way_on}: {self._command(path)}"

    # --- parts

    def _exit_at_once(self) -> None:
        """Ends this process of a distributed run, from whichever thread."""
        trainer = self.trainer
        assert trainer is not None
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and trainer.local_rank > 0:
            os.kill(os.getppid(), signal.SIGTERM)  # it ends all of them, and prints the line
            time.sleep(PATIENCE)
        elif trainer.is_global_zero:
            print(f"terminated; {self.resume_hint()}", file=sys.stderr, flush=True)
            self._end_other_processes()
        os._exit(EXIT_CODE)

    @contextmanager
    def _profiler_ended(self) -> Iterator[None]:
        """Ends the profiler of a run that fails: torch's crashes the process if it is left to the garbage collector."""
        try:
            yield
        except BaseException:
            if self.trainer is not None:
                profiler_of(self.trainer).teardown(None)
            raise

    def _end_other_processes(self) -> None:
        """Kills the processes that Lightning has started for other devices: they would wait for this one."""
        launcher = None if self.trainer is None else self.trainer.strategy.launcher
        for process in getattr(launcher, "procs", ()):
            process.kill()

    def _finite_checkpoint(self, bad_step: int) -> str:
        """Names the last checkpoint with finite weights, and how to go on from it."""
        newer: list[str] = []
        for path, checkpoint in self._checkpoints():
            step = checkpoint["global_step"]
            if is_finite(path, step, bad_step):
                first = f"delete {', '.join(newer)}, which has NaN, and " if newer else ""
                return (
                    f"The last checkpoint with finite weights is {path} of step {step}; {first}go on: "
                    + self._command(path)
                )
            newer.append(str(path))
        return "There is no checkpoint with finite weights: start again, with a smaller learning rate, say"

    def _checkpoints(self) -> list[tuple[Path, dict[str, Any]]]:
        return [] if self.folder is None else checkpoints_of_run(self.folder)

    def _command(self, path: Path) -> str:
        if self.folder is not None and (self.folder / "config.yaml").is_file():
            return f"python -m mupscale resume {self.folder}"
        return f"the same command with --ckpt_path {path}"

    def _places(self) -> list[Path]:
        callbacks = [] if self.trainer is None else self.trainer.checkpoint_callbacks
        folders = [self.folder, *(getattr(callback, "dirpath", None) for callback in callbacks)]
        return [Path(folder) for folder in folders if folder is not None] or [Path()]


def is_trial(trainer: Trainer) -> bool:
    """Whether a run is a trial of a sweep; by name, because other runs do not load that file."""
    return any(type(callback).__name__ == "TrialMetric" for callback in callbacks_of(trainer))


def write_result(folder: Path, numbers: dict[str, Any]) -> None:
    """Writes result.json whole. JSON has no NaN and no infinity: they are written as texts."""
    text = json.dumps(_spell_out(numbers), indent=1, allow_nan=False) + "\n"
    write_durably(folder / RESULT, text.encode())


def _spell_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spell_out(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_spell_out(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_finite(path: Path, step: int, bad_step: int) -> bool:
    """Whether a checkpoint has finite weights; of a sharded one that is known if its own step had a finite loss."""
    if path.is_dir():
        return step < bad_step
    try:
        return non_finite_in(load_checkpoint(path)) is None
    except UserError:
        return False


# --- what can be done with its result

WITHOUT_A_LOG = ("--trainer.logger", "false")
"""An evaluation that is logged would have the folder, and take the number, of a run."""


def after_fit(trainer: Trainer, module: LightningModule, folder: Path) -> list[str]:
    """How to evaluate and to widen the last checkpoint of a run, and where the model itself is."""
    named = getattr(trainer.checkpoint_callback, "last_model_path", "")
    checkpoint = Path(named) if named else next((path for path, _ in checkpoints_of_run(folder)), None)
    if checkpoint is None or not checkpoint.exists():
        return []
    lines = []
    if any(trainer.num_val_batches) and (folder / "config.yaml").is_file():
        words = ["validate", "--config", folder / "config.yaml", "--ckpt_path", checkpoint, *WITHOUT_A_LOG]
        lines.append(f"  evaluate: {command_line(*words)}")
    size = size_of(module)
    if size is not None and type(module).__module__.startswith("mupscale."):
        width = doubled(size.width)
        widths = width if isinstance(width, list) else [width]
        # not in the folder, where `resume` would take it for a checkpoint of the run
        named = folder if folder.name not in ("", "..") else folder.resolve()
        out = named.with_name(f"{named.name}-wide-{'-'.join(map(str, widths))}.ckpt")
        lines.append(f"  grow further: {command_line('upscale', checkpoint, '--width', *widths, '--out', out)}")
    if (folder / SAVED / "config.json").is_file():
        lines.append(f"  for from_pretrained of transformers: {folder / SAVED}")
    return lines
