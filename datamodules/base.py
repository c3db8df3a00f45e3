"""What the data modules have in common: a seed of the order, checks of the model, and loaders of resident tensors."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from mupscale.arguments import refuse_unless_whole
from mupscale.datamodules.resident import ResidentLoader
from mupscale.errors import UserError


class SeededData(LightningDataModule):
    """Data whose batches follow from a seed: its own, or that of the run."""

    def __init__(self, batch_size: int, seed: int | None) -> None:
        super().__init__()
        refuse_unless_whole("data.batch_size", batch_size)
        if seed is not None:
            refuse_unless_whole("data.seed", seed, least=0)
        self.batch_size = batch_size
        self.seed = seed
        self._order_seed = seed

    def setup(self, stage: str | None = None) -> None:
        self.refuse_model(self.model_arguments)
        if self._order_seed is None:
            self._order_seed = seed_of_run()
        self.load(self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu"))
        if stage == "fit":
            self.train_dataloader()  # refuses a batch size that does not fit the data before a run begins

    @abstractmethod
    def refuse_model(self, arguments: Mapping[str, Any]) -> None:
        """Raises a UserError if a model with these arguments does not fit the data."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Makes the data ready for a training device, unless it is already."""

    @property
    def model_arguments(self) -> Mapping[str, Any]:
        """Those of the model that the trainer trains; none without a trainer."""
        return getattr(getattr(self.trainer, "lightning_module", None), "hparams", {})

    @property
    def shuffles(self) -> bool:
        """Whether training batches come in random order: not under `overfit_batches`, for which Lightning can switch
        off the shuffling of its own loaders only."""
        return self.trainer is None or not self.trainer.overfit_batches  # type: ignore[attr-defined]

    def loader_options(self, *, training: bool) -> dict[str, Any]:
        """The arguments of a loader that say which batches this process draws."""
        return {"drop_last": training, "seed": self._order_seed, **ranks(self.trainer)}

    def test_dataloader(self) -> Any:
        return self.val_dataloader()


class TensorData(SeededData):
    """Data that lies on the training device: rows to train on, and held-out rows; labels are the last tensor."""

    _train: tuple[Tensor, Tensor] | None = None
    _held_out: tuple[Tensor, Tensor] | None = None

    def train_dataloader(self) -> ResidentLoader:
        assert self._train is not None
        return self._loader(self._train, training=True)

    def val_dataloader(self) -> ResidentLoader:
        assert self._held_out is not None
        return self._loader(self._held_out, training=False)

    def predict_dataloader(self) -> ResidentLoader:
        assert self._held_out is not None
        return self._loader(self._held_out[:1], training=False)

    def _loader(self, tensors: tuple[Tensor, ...], *, training: bool) -> ResidentLoader:
        return ResidentLoader(tensors, self.batch_size, **self.loader_options(training=training))

    def loader_options(self, *, training: bool) -> dict[str, Any]:
        return {"shuffle": training and self.shuffles, **super().loader_options(training=training)}

    def is_on(self, device: torch.device) -> bool:
        return self._train is not None and self._train[0].device == device


def seed_of_run() -> int:
    """The seed of the run, which `seed_everything` puts into the environment of all its processes; without one, 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def refuse_unfit_model(data: str, arguments: Mapping[str, Any], inputs: int | None, classes: int) -> None:
    """Raises a UserError if a model's arguments `inputs` and `outputs`, where it has them, do not fit the data."""
    if inputs is not None and arguments.get("inputs", inputs) != inputs:
        raise UserError(
            f"model.inputs = {arguments['inputs']}: {data} has {inputs} features; set model.inputs: {inputs}"
        )
    if arguments.get("outputs", classes) < classes:
        raise UserError(
            f"model.outputs = {arguments['outputs']}: {data} has {classes} classes; set model.outputs: {classes}"
        )


def ranks(trainer: Trainer | None) -> dict[str, int]:
    """The `rank` and `world_size` of a loader in this process."""
    # not global_rank: under tensor parallelism several ranks share their data
    shares = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {"rank": 0, "num_replicas": 1}
    return {"rank": shares["rank"], "world_size": shares["num_replicas"]}
