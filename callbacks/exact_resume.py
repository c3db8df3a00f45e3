"""Exact resuming: does what Lightning omits when a run is resumed."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from mupscale.callbacks.data_position import DataPosition, rng_state, set_rng_state
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.data_files import interpreting
from mupscale.models._lightning import callbacks_of, set_callbacks, update_callback_metrics
from mupscale.models._lightning_resume import finish_loaded_step, loader_states_in, logged_state, restore_logged
from mupscale.models.checkpoint import RUN_KEY


class ExactResume(Callback):
    """Makes a resumed run continue exactly as if it had not been interrupted.

    This holds for checkpoints written at the start or the end of a batch, a validation or an epoch.

    A checkpoint is often written before its step is complete. Lightning omits the rest of that step in the resumed run
    (validation, plateau schedulers, the end of the epoch); this callback catches up on it.

    Its saved state: for every rank, the random number generators, its place in the training data, and what `self.log`
    has collected in the epoch; the metrics that schedulers and callbacks monitor; and whether the run is finished.
    """

    def __init__(self) -> None:
        self.run: dict[str, Any] | None = None  # the identity and configuration of the run, if a command started it
        self.finished = False
        self.failed = False
        self._attached_to: Trainer | None = None
        self._loaded: dict[str, Any] | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._data: DataPosition | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._attached_to = trainer
        self.finished = self.failed = False
        self._data = DataPosition(trainer) if stage == "fit" else None
        # after on_train_start of all other callbacks, because it validates, but before those that save
        order = lambda c: (isinstance(c, Checkpoint), isinstance(c, UpscaleCallback), c is self)  # noqa: E731
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=order))

    def state_dict(self) -> dict[str, Any]:
        trainer = self._attached_to
        assert trainer is not None
        place = None if self._data is None else self._data.state()
        state = rng_state(trainer.strategy.root_device)
        generators = [{**state, "data": place, "logged": logged_state(trainer)}]
        if trainer.world_size > 1:
            generators *= trainer.world_size
            torch.distributed.all_gather_object(generators, generators[0])
        metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        return {
            "generators": generators,
            "metrics": metrics,
            "should_stop": trainer.should_stop,
            "finished": self.finished,
            "failed": self.failed,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.run is not None:
            checkpoint[RUN_KEY] = self.run

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with interpreting("ExactResume in the checkpoint"):
            self._loaded = {key: state_dict[key] for key in ("should_stop", "finished")}
            self._loaded["generators"] = [dict(generators) for generators in state_dict["generators"]]
            self._loaded["metrics"] = {name: torch.as_tensor(value) for name, value in state_dict["metrics"].items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loader_states = loader_states_in(checkpoint)
        for callback in callbacks_of(trainer):
            if isinstance(callback, ModelCheckpoint):
                callback.current_score = checkpoint["callbacks"].get(callback.state_key, {}).get("current_score")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is not None:
            if trainer.global_rank < len(self._loaded["generators"]):
                generators = self._loaded["generators"][trainer.global_rank]
                assert self._data is not None
                self._data.restore(generators.get("data"), self._loader_states)
                with interpreting("ExactResume in the checkpoint"):
                    set_rng_state(generators, pl_module.device)
                if "logged" in generators:
                    restore_logged(trainer, generators["logged"])
            metrics = {name: value.to(pl_module.device) for name, value in self._loaded["metrics"].items()}
            update_callback_metrics(trainer, metrics)
            trainer.should_stop = self._loaded["should_stop"] and not self._loaded["finished"]
            self._loaded = None
            finish_loaded_step(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failed = True  # what is saved from here on may be of the middle of a step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finished = True
