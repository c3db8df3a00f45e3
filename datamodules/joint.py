"""The data of many trials that train together: batches with a leading axis, one entry for each trial."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule

from mupscale.datamodules.resident import ResidentLoader, joint_batch
from mupscale.errors import UserError
from mupscale.seeds import seeded


class JointLoader:
    """The batches of several loaders, one for each trial, with a leading axis. It resumes at any batch, as they do."""

    has_own_batches = True
    """Whether a batch has one entry for each trial, and is not for all of them."""
    batch_sampler = None  # Lightning reads it from whatever has a `sampler`

    def __init__(self, loaders: Sequence[ResidentLoader]) -> None:
        self.loaders = list(loaders)

    def __len__(self) -> int:
        return len(self.loaders[0])

    @property
    def sampler(self) -> "JointLoader":
        return self

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        first = self.loaders[0]
        iter(first)  # goes to the next epoch, if this one was drawn from
        while first.position < len(first):
            epoch, position = first.epoch, first.position
            for loader in self.loaders:
                loader.go_to(epoch, position + 1)
            yield joint_batch(self.loaders, epoch, position)

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [loader.state_dict() for loader in self.loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader, own in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(own)


class JointData(LightningDataModule):
    """The data modules of several trials as one. Where all have the same batches in the same order, these are shared.

    JointData([Covertype(200), Covertype(200)], seeds=[1, 2])
    """

    def __init__(self, parts: Sequence[LightningDataModule], seeds: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.seeds = list(parts), list(seeds)

    def prepare_data(self) -> None:
        for part in self.parts:
            part.prepare_data()

    def setup(self, stage: str) -> None:
        for part, seed in zip(self.parts, self.seeds, strict=True):
            part.trainer = self.trainer
            with seeded(seed):
                part.setup(stage)

    def teardown(self, stage: str) -> None:
        for part in self.parts:
            part.teardown(stage)

    def train_dataloader(self) -> Any:
        return self._joined("train_dataloader")

    def val_dataloader(self) -> Any:
        return self._joined("val_dataloader")

    def _joined(self, method: str) -> Any:
        loaders = [getattr(part, method)() for part in self.parts]
        first = loaders[0]
        odd = next((loader for loader in loaders if not isinstance(loader, ResidentLoader)), None)
        if odd is not None:
            raise UserError(f"data: {type(odd).__name__} gives no batch by its position, which trials that train "
                            "together need")  # fmt: skip
        return first if all(loader.order == first.order for loader in loaders) else JointLoader(loaders)
