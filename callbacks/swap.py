"""The batches that a method learns from in a run, and callbacks of Lightning that do not work beside a growth."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from mupscale._torch import without_iterator
from mupscale.errors import UserError
from mupscale.models._lightning import datamodule_of, on_device


class RefusedSwap(UserError, RuntimeError):
    """A growth that fails because of what the user gave: the module, its optimizers and rates, the noise."""


class OwnBatches:
    """The training batches of a run, on its device, from a separate loader. `iter` begins with the next epoch.

    The loader is a new one from `train_dataloader` of the data module or the model. A loader that was passed to `fit`
    is copied.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        refuse_many_loaders("OwnBatches", trainer)
        self._trainer = trainer
        data = datamodule_of(trainer)
        source = data if data is not None and is_overridden("train_dataloader", data) else module
        if is_overridden("train_dataloader", source):
            self._loader = source.train_dataloader()
        else:
            self._loader = copy.copy(trainer.train_dataloader)
        if isinstance(self._loader, DataLoader):
            self._loader = without_iterator(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield on_device(self._trainer, batch)

    @contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Puts the random generators back that the loader shares with the run's."""
        states = [(generator, generator.get_state()) for generator in generators_of([self._loader])]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


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


def refuse_many_loaders(what: str, trainer: Trainer) -> None:
    if isinstance(trainer.train_dataloader, dict | list | tuple):
        raise UserError(f"{what}: the run has several training data loaders. Give one")


# --- Lightning's callbacks that do not work in a run that grows

ABSOLUTE = "it sets absolute learning rates, which erases muP scaling, and its average does not grow with the network"

CALLBACKS: dict[type[Callback], tuple[str, str]] = {
    StochasticWeightAveraging: (ABSOLUTE, "use EMAWeightAveraging, whose average grows with the network"),
    ModelPruning: ("its masks have the shapes of the network before a growth", "prune the finished model"),
    BaseFinetuning: (
        "it adds parameter groups to an optimizer whose groups a growth splits",
        "set requires_grad in the module's configure_model; a callback of your own may change it at any step",
    ),
    LearningRateFinder: (
        "it tries learning rates at one size, on a module that grows",
        "find the learning rate in a Trainer without UpscaleCallback, or by python -m mupscale sweep",
    ),
    BatchSizeFinder: (
        "it chooses the batch size at the narrow width, and a resumed run might choose another one",
        "set data.batch_size",
    ),
    SpikeDetection: ("Lightning cannot load its state, so the run could not be resumed", "--stop_on_nan"),
}
"""Classes, why they do not work, and the remedy."""


def refuse_callbacks(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        for kind, (reason, remedy) in CALLBACKS.items():
            if isinstance(callback, kind):
                raise UserError(f"trainer.callbacks: {type(callback).__name__} does not work here: {reason}; {remedy}")
