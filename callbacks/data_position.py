"""Where a run is in its training data and its random numbers, and how a resumed run gets there again."""

import random
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from mupscale.models._lightning_loop import place_in_data
from mupscale.models._lightning_resume import (
    TrainingData,
    end_epoch,
    is_between_epochs,
    restart_batches,
    saves_its_state,
    training_data,
    watch_training_data,
)


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


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that data loaders and their samplers were given, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        for holder in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
