"""The start of a run: finds its folder, claims it, and writes the first files."""

import itertools
import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from mupscale.atomic import write_durably
from mupscale.callbacks import log_files
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.commands.arguments import refuse_output_folder
from mupscale.commands.checkpoints import identity_of, newest_checkpoint
from mupscale.commands.run_folder import LOCK, RUN, Claim, Leftovers, Taken, write_run
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_of, forget_version, is_remote, is_trial_run


class RunStart:
    """Finds and claims the folders of a run. `resumed` is the folder of a run to continue."""

    def __init__(self, resumed: Path | None) -> None:
        self.resumed = resumed
        self.leftovers = Leftovers()
        self._claims: list[Claim] = []

    def folder_without_logger(self, root: str | None) -> Path:
        """A folder for a run without a logger: the root itself, or version_0 and so on in it, whichever is free."""
        if self.resumed is not None:
            return self.resumed
        place = Path(root or ".").absolute()
        if getattr(rank_zero_only, "rank", 0) != 0:
            return place  # that of the first rank is taken
        refuse_output_folder("trainer.default_root_dir", place)
        for folder in itertools.chain([place], (place / f"version_{number}" for number in itertools.count())):
            # an attempt that died before its first checkpoint is none
            is_attempt = (folder / RUN).exists() and newest_checkpoint(folder)[0] is None
            if not is_attempt and any((folder / name).exists() for name in ("config.yaml", "checkpoints", RUN, LOCK)):
                continue
            leftovers = Leftovers()
            if not folder.exists():
                leftovers.watch(folder)
            try:
                self._claims.append(Claim(folder))
            except Taken:
                continue
            self.leftovers = leftovers
            return folder
        raise AssertionError

    def claim(self, trainer: Trainer, *, takes_next: bool) -> dict[str, Any]:
        """Claims the run's folder, and that of its checkpoints; returns the identity of the run and its folder.

        A logger that `takes_next` finds its version itself: where another process was faster, it looks again.
        """
        folder = self._claims[0].folder if self._claims else self._claimed(trainer, takes_next)
        identity = (None if self.resumed is None else identity_of(self.resumed)) or uuid.uuid4().hex
        self._claims[0].begin()
        write_run(folder, id=identity)
        for policy in callbacks_of(trainer):
            if isinstance(policy, RunCheckpoint):
                policy.run = identity
                self._claim_checkpoints(policy.dirpath, folder)
        return {"id": identity, "folder": str(folder.resolve())}

    def release(self) -> None:
        for claim in reversed(self._claims):
            claim.release()

    def _claimed(self, trainer: Trainer, takes_next: bool) -> Path:
        while True:
            folder = log_files.folder(trainer, trainer.log_dir)
            assert folder is not None
            refuse_output_folder("trainer.logger.save_dir", folder)
            leftovers = Leftovers()
            if trainer.loggers:
                leftovers.watch(folder)
            try:
                claim = Claim(folder)
            except Taken:
                if not takes_next:
                    raise
            else:
                has_run = self.resumed is None and (folder / "config.yaml").exists()
                if not has_run or (not takes_next and newest_checkpoint(folder)[0] is None):
                    self._claims.append(claim)
                    self.leftovers = leftovers  # only now: what appeared before may be another process's
                    return folder
                claim.release()
                if not takes_next:
                    raise UserError(
                        f"trainer.logger: {folder} has a run already; to continue it: "
                        f"python -m mupscale resume {folder}"
                    )
            logger = trainer.loggers[0]
            assert isinstance(logger, TensorBoardLogger | CSVLogger)
            forget_version(logger)

    def _claim_checkpoints(self, dirpath: Any, folder: Path) -> None:
        if dirpath is None or is_remote(dirpath) or Path(dirpath).resolve() == folder.resolve():
            return
        refuse_output_folder("checkpoint.dirpath", Path(dirpath))
        claim = Claim(Path(dirpath))
        self._claims.append(claim)
        claim.begin()


class SaveConfig(Callback):
    """Saves config.yaml in the run's folder, and its text in TensorBoard. A run that is resumed has both already."""

    def __init__(self, text: str, resumed: bool) -> None:
        self.text = text
        self.resumed = resumed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # all ranks must ask for it together, and only the first one saves
        folder = log_files.folder(trainer, log_dir)
        if stage != "fit" or folder is None or is_trial_run(trainer) or not trainer.is_global_zero:
            return
        path = folder / "config.yaml"
        if path.exists() and not self.resumed:
            # An attempt died before its first checkpoint. Its curves would lie under those of this run.
            log_files.delete(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, self.text.encode())
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not self.resumed:
                logger.experiment.add_text("config", f"```yaml\n{self.text}\n```")
