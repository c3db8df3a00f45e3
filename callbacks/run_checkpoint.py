"""The checkpoints of a run."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from mupscale.models._lightning import OpenCheckpoint, is_trial_run


class RunCheckpoint(OpenCheckpoint):
    """A ModelCheckpoint that also saves at the end of a run, and survives interruptions and moves.

    The last step is saved when the run is over, not before: a validation that is still to come must not be lost with a
    process that dies in it, and a run that has this checkpoint is finished.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != trainer.max_steps:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_trial_run(trainer) or trainer.global_step == 0:
            return
        self.save_now(trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The folder of the run may have been moved, or may be named in another way."""
        old, new = state_dict["dirpath"], self.dirpath

        def moved(path: str) -> str:
            return (
                str(Path(str(new)) / Path(path).relative_to(old)) if path and Path(path).is_relative_to(old) else path
            )

        paths = {key: moved(state_dict[key]) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
        best = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "best_k_models": best, "dirpath": new})

    def removes(self, previous: Path, current: Path) -> bool:
        """Also the one the run was resumed from, once there is a newer one: or every interruption would leave one
        behind."""
        assert self.dirpath is not None
        return previous != current and Path(self.dirpath).absolute() in previous.absolute().parents
