"""Exact resuming: what Lightning omits when a run is resumed, and its place in the training data and random numbers."""

import random
import warnings
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from mupscale.callbacks.swap import generators_of
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.data_files import interpreting
from mupscale.models._lightning import callbacks_of, set_callbacks, update_callback_metrics
from mupscale.models._lightning_loop import place_in_data
from mupscale.models._lightning_resume import (
    TrainingData,
    end_epoch,
    finish_loaded_step,
    is_between_epochs,
    loader_states_in,
    logged_state,
    restart_batches,
    restore_logged,
    saves_its_state,
    training_data,
    watch_training_data,
)
from mupscale.models.checkpoint import RUN_KEY


class DataPosition:
    """Saves and restores the place of a run in its training data.

    Loaders with `state_dict` and `load_state_dict` save it themselves. For others, such as a plain `DataLoader`, it is
    the state of the random numbers before the epoch. A resumed run begins the epoch in that state, and draws the
    batches that were used a second time, in vain.

    If Lightning does not know how many batches there are, it fetches one ahead, which no step has got when a checkpoint
    is written. It is fetched again, with the random numbers that it was made of.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._begin: dict[str, Any] | None = None
        self._ahead: dict[str, Any] | None = None
        watch_training_data(trainer, self._before_epoch, self._before_batch)

    def state(self) -> dict[str, Any] | None:
        """As tensors and primitives; None before there is data."""
        data = training_data(self._trainer)
        if data is None:
            return None
        own = [generator.get_state() for generator in generators_of(data.flattened)]
        return {"begin": self._begin, "ahead": self._ahead if data.is_ahead else None, "own": own}

    def restore(self, state: dict[str, Any] | None, loader_states: list[dict[str, Any]]) -> None:
        """Leaves the global random numbers in any state."""
        data = training_data(self._trainer)
        if data is None or state is None:  # of an older version
            return
        self._warn_of_workers(data)
        begin, taken = state["begin"], place_in_data(self._trainer).position
        if is_between_epochs(self._trainer):
            if data.is_sized and loader_states:
                end_epoch(self._trainer, loader_states)
            else:
                data.load(loader_states)
        elif begin is None:
            if not data.is_sized:
                data.load(loader_states)
                self._set(data, state["ahead"])
                restart_batches(self._trainer)
        elif loader_states:
            rank_zero_warn(
                "the run has training data loaders with and without state_dict: the batches after this resume differ "
                "from those of an uninterrupted run",
                stacklevel=2,
            )
        else:
            if taken:
                rank_zero_info(f"the training data has no state_dict: {taken} batches of this epoch are drawn again")
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            self._set(data, begin)
            restart_batches(self._trainer, taken, before_last=lambda: self._set(data, state["ahead"]))
        self._begin = begin
        self._set_own(data, state["own"])

    def _before_epoch(self, data: TrainingData) -> None:
        self._begin = None if all(map(saves_its_state, data.flattened)) else self._state(data)

    def _before_batch(self, data: TrainingData) -> None:
        self._ahead = self._state(data)

    def _state(self, data: TrainingData) -> dict[str, Any]:
        own = [generator.get_state() for generator in generators_of(data.flattened)]
        return {**rng_state(self._trainer.strategy.root_device), "own": own}

    def _set(self, data: TrainingData, state: dict[str, Any] | None) -> None:
        if state is not None:
            set_rng_state(state, self._trainer.strategy.root_device)
            self._set_own(data, state["own"])

    def _set_own(self, data: TrainingData, states: list[Any]) -> None:
        for generator, state in zip(generators_of(data.flattened), states, strict=False):
            generator.set_state(state.cpu())

    def _warn_of_workers(self, data: TrainingData) -> None:
        stay = any(getattr(loader, "persistent_workers", False) for loader in data.flattened)
        if stay and place_in_data(self._trainer).epoch > 0:
            rank_zero_warn(
                "the training data has persistent_workers, whose random numbers are not saved: if they draw any, as "
                "for augmentation, batches differ from those of an uninterrupted run. Use persistent_workers=False",
                stacklevel=2,
            )


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
