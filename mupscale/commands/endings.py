"""How a run ends before its time: by SIGTERM, Ctrl-C, a full disk, or a loss that is not finite; in one line each."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mupscale.callbacks.curves import NonFiniteLoss
from mupscale.callbacks.strides import Strides
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.commands.mistakes import DiskFull, full_disk
from mupscale.commands.process import EXIT_CODE, Terminated, on_sigterm, on_sigterm_in_a_thread
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_in, profiler_of, run_folder
from mupscale.models.base import Growable
from mupscale.models.checkpoint import load_checkpoint, non_finite_in

PATIENCE = 5.0
"""Seconds that a process of a distributed run waits for the first one to end them all."""


class RunTrainer(Trainer):
    """A Trainer that records the checkpoints it writes."""

    saved: tuple[tuple[int, Path], ...] = ()
    """Each with its step, the oldest first; older ones may have been deleted since."""

    def save_checkpoint(
        self, filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        super().save_checkpoint(filepath, weights_only, storage_options)
        if not weights_only:
            self.saved = (*self.saved[-99:], (self.global_step, Path(filepath)))


class Ending(Strides):
    """Says in one line where a run stands that ends before its time, and how to go on.

        ending = Ending()
        with ending.explained():
            trainer = RunTrainer(callbacks=[ending])
            ending.attach(trainer)
            trainer.fit(module)

    Ctrl-C and SIGTERM end a fit after its step (`RunCheckpoint`), and anything else at once. A fit on several processes
    ends at once, because each of them may be at another step: what it wrote is whole at any time.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.folder: Path | None = None
        self.trains = False
        self.received_sigterm = False
        self.has_begun = self.has_stepped = False
        """Whether the run processes batches, and whether it has processed one."""
        self._first_step = 0
        self._is_around = False
        self._contexts = ExitStack()

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = run_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trains = True
        self._first_step = trainer.global_step

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.trains = False
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero and not self._is_trial():
            # here, because Lightning ends the process itself
            print(f"interrupted; {self.standing()}", file=sys.stderr, flush=True)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    on_sanity_check_start = on_train_epoch_start = _begin
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _begin

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = False  # next Lightning looks at the options of the training itself

    def _step(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.has_stepped = self.has_stepped or not trainer.sanity_checking

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _step

    def free_steps(self, trainer: Trainer, pl_module: LightningModule) -> float:
        return math.inf if self.has_stepped else 0

    # --- around the run

    @contextmanager
    def explained(self, *, handles_signals: bool = True) -> Iterator[None]:
        """Turns the exceptions that end a run into Terminated, KeyboardInterrupt or UserError with one line."""
        self._is_around = True
        signals = on_sigterm(self._on_sigterm) if handles_signals else nullcontext()
        with self._contexts, signals, _quiet_writers():
            try:
                with self._profiler_ended():
                    yield
            except (SIGTERMException, Terminated) as error:
                self._end_other_processes()
                raise Terminated(self.standing()) from error
            except KeyboardInterrupt as interrupt:
                raise KeyboardInterrupt(self.standing()) from interrupt
            except NonFiniteLoss as error:
                self._end_other_processes()
                raise UserError(f"{error}, and the run stopped there. {self._finite_checkpoint(error.step)}") from error
            except Exception as error:
                problem = full_disk(error, self._places())
                if problem is None:
                    raise
                self._end_other_processes()
                raise DiskFull(f"{problem}; {self.standing('make space there, then go on')}") from error
            if self.received_sigterm:
                raise Terminated(self.standing())

    def attach(self, trainer: Trainer) -> None:
        """Names the trainer of the run. SIGTERM ends a run on several processes whatever they wait for."""
        self.trainer = trainer
        if trainer.world_size > 1 and self._is_around:
            self._contexts.enter_context(on_sigterm_in_a_thread(self._exit_at_once))

    def standing(self, way_on: str = "go on") -> str:
        """Where the run stands and how to go on, without a collective operation."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn not in (None, "fit"):
            return "run the same command again"
        module = trainer.lightning_module
        size = f", {module.size}" if isinstance(module, Growable) else ""
        where = f"the run is at step {trainer.global_step}{size}"
        if self._is_trial():
            return f"{where}; {way_on}: run the same command again"
        saved = self.checkpoints()
        if not saved:
            return f"{where}, with no checkpoint yet; start again with the same command"
        step, path = saved[0]
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{where}; the newest checkpoint is {path} of step {step}; {way_on}: {self._command(path)}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """The checkpoints on disk that this run has written, or was resumed from; the newest first."""
        assert self.trainer is not None
        saved = list(reversed(getattr(self.trainer, "saved", ())))
        if self.trainer.ckpt_path:
            saved.append((self._first_step, Path(str(self.trainer.ckpt_path))))
        return [(step, path) for step, path in saved if path.exists()]

    # --- parts

    def _on_sigterm(self) -> None:
        self.received_sigterm = True
        if not self.trains:
            raise Terminated

    def _exit_at_once(self) -> None:
        """Ends this process of a distributed run, from whichever thread."""
        trainer = self.trainer
        assert trainer is not None
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and trainer.local_rank > 0:
            os.kill(os.getppid(), signal.SIGTERM)  # it ends all of them, and prints the line
            time.sleep(PATIENCE)
        elif trainer.is_global_zero:
            print(f"terminated; {self.standing()}", file=sys.stderr, flush=True)
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
        saved = self.checkpoints()
        for index, (step, path) in enumerate(saved):
            if is_finite(path, step, bad_step):
                newer = ", ".join(str(other) for _, other in saved[:index])
                first = f"delete {newer}, which has NaN, and " if newer else ""
                return (
                    f"The last checkpoint with finite weights is {path} of step {step}; {first}go on: "
                    + self._command(path)
                )
        return "There is no checkpoint with finite weights: start again, with a smaller learning rate, say"

    def _command(self, path: Path) -> str:
        if self.folder is not None and (self.folder / "config.yaml").is_file():
            return f"python -m mupscale resume {self.folder}"
        return f"the same command with --ckpt_path {path}"

    def _is_trial(self) -> bool:
        return self.trainer is not None and bool(callbacks_in(self.trainer, TrialMetric))

    def _places(self) -> list[Path]:
        callbacks = [] if self.trainer is None else self.trainer.checkpoint_callbacks
        folders = [self.folder, *(getattr(callback, "dirpath", None) for callback in callbacks)]
        return [Path(folder) for folder in folders if folder is not None] or [Path()]


def is_finite(path: Path, step: int, bad_step: int) -> bool:
    """Whether a checkpoint has finite weights; of a sharded one that is known if its own step had a finite loss."""
    if path.is_dir():
        return step < bad_step
    try:
        return non_finite_in(load_checkpoint(path)) is None
    except UserError:
        return False


@contextmanager
def _quiet_writers() -> Iterator[None]:
    """Drops the traceback of a thread that writes events: the run meets the same error when it next logs."""
    before = threading.excepthook

    def hook(arguments: Any) -> None:
        writes_events = getattr(arguments.thread, "__module__", "").startswith("tensorboard.")
        if not writes_events and (arguments.exc_value is None or full_disk(arguments.exc_value) is None):
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
