"""Exact resuming: does what Lightning omits when a run is resumed."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.models._lightning import callbacks_of, finish_loaded_step, set_callbacks, update_callback_metrics
from mupscale.models.checkpoint import RUN_KEY


class ExactResume(Callback):
    """Makes a resumed run continue exactly as if it had not been interrupted.

    This holds for checkpoints written at the start or the end of a batch, a validation or an epoch.

    A checkpoint is often written before its step is complete. Lightning omits the rest of that step in the resumed run
    (validation, plateau schedulers, the end of the epoch); this callback catches up on it.

    Its saved state: the random number generators of every rank, the metrics that schedulers and callbacks monitor, and
    whether the run is finished.
    """

    def __init__(self) -> None:
        self.run: dict[str, Any] | None = None  # the identity and configuration of the run, if a command started it
        self.finished = False
        self.failed = False
        self._attached_to: Trainer | None = None
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._attached_to = trainer
        self.finished = self.failed = False
        # after on_train_start of all other callbacks, because it validates, but before those that save
        order = lambda c: (isinstance(c, Checkpoint), isinstance(c, UpscaleCallback), c is self)  # noqa: E731
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=order))

    def state_dict(self) -> dict[str, Any]:
        trainer = self._attached_to
        assert trainer is not None
        generators = [rng_state(trainer.strategy.root_device)]
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
        self._loaded = state_dict

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, ModelCheckpoint):
                callback.current_score = checkpoint["callbacks"].get(callback.state_key, {}).get("current_score")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is not None:
            if trainer.global_rank < len(self._loaded["generators"]):
                set_rng_state(self._loaded["generators"][trainer.global_rank], pl_module.device)
            metrics = {name: value.to(pl_module.device) for name, value in self._loaded["metrics"].items()}
            update_callback_metrics(trainer, metrics)
            trainer.should_stop = self._loaded["should_stop"] and not self._loaded["finished"]
            self._loaded = None
            finish_loaded_step(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failed = True  # what is saved from here on may be of the middle of a step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finished = True


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the global random number generators, as tensors and primitives."""
    version, internal, gauss = random.getstate()
    generator = np.random.get_state(legacy=True)
    assert isinstance(generator, tuple)
    name, keys, position, has_gauss, cached = generator
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(integers(internal)), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(integers(keys), dtype=np.uint32), *rest))


def integers(tensor: Tensor) -> list[int]:
    return [int(x) for x in tensor.tolist()]
