"""Extra training batches for growth methods that learn; the run's own order of batches does not change."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from mupscale._torch import without_iterator
from mupscale.callbacks.random_states import generators_of
from mupscale.errors import UserError
from mupscale.models._lightning import datamodule_of, on_device


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


def refuse_many_loaders(what: str, trainer: Trainer) -> None:
    """Raises a UserError for a run with several training data loaders."""
    if isinstance(trainer.train_dataloader, dict | list | tuple):
        raise UserError(f"{what}: the run has several training data loaders. Give one")
