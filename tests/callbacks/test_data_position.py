"""A run continues with the very next batch, whatever its training data is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extensions import Dropping
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from tiny_modules import ADAMW, rows
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training_runs import Checkpoints, quiet_trainer

from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")

BATCHES = 4
"""Of eight rows each, in an epoch."""


def data() -> tuple[Tensor, ...]:
    return rows(Dropping(8, 4, 6, 3), 8 * BATCHES, torch.float32)


class Noisy(Dataset[Any]):
    """Draws random numbers for every row."""

    def __init__(self) -> None:
        self.tensors = data()

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index] + 0.1 * torch.randn(6), self.tensors[1][index]


class Stream(IterableDataset[Any]):
    """Has no length, and an order of its own in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        noisy = Noisy()
        for index in torch.randperm(len(noisy)).tolist():
            yield noisy[index]


class Buffered(IterableDataset[Any]):
    """Shuffles as it goes: draws a random number for every row."""

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for row in zip(*data(), strict=True):
            held.append(row)
            if len(held) > 9:
                yield held.pop(int(torch.randint(len(held), ())))
        yield from held


class Stateful:
    """Has a state, and no length: at the end of an epoch its iterator is exhausted."""

    def __init__(self) -> None:
        self.epoch, self.position, self.is_loaded = 0, 0, False

    def __iter__(self) -> Iterator[Any]:
        if not self.is_loaded:
            self.start()
        self.is_loaded = False
        order = torch.randperm(8 * BATCHES, generator=torch.Generator().manual_seed(self.epoch)).split(8)
        while self.position < BATCHES:
            self.position += 1
            yield tuple(tensor[order[self.position - 1]] for tensor in data())
        self.end()

    def start(self) -> None:
        self.position = 0

    def end(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position, self.is_loaded = state["epoch"], state["position"], True


class Sized(Stateful):
    """Has a length: Lightning does not exhaust its iterators."""

    def __len__(self) -> int:
        return BATCHES

    def start(self) -> None:
        self.epoch, self.position = self.epoch + (self.position > 0), 0

    def end(self) -> None:
        pass


class Drawn(LightningDataModule):
    """Draws its data where it makes its loaders."""

    def train_dataloader(self) -> Any:
        return self.loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(shuffle=False)

    def loader(self, shuffle: bool) -> Any:
        inputs = torch.randn(8 * BATCHES, 6)
        return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), 8, shuffle=shuffle)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(TensorDataset(*data()), 8, shuffle=True),
    "augmented": lambda: DataLoader(Noisy(), 8, shuffle=True),
    "own generator": lambda: DataLoader(
        TensorDataset(*data()), 8, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "stream": lambda: DataLoader(Stream(), 8),
    "shuffled as it goes": lambda: DataLoader(Buffered(), 8),
    "two, the shorter one again and again": lambda: [DataLoader(Noisy(), size, shuffle=True) for size in (4, 16)],
    "two with a state": lambda: [ResidentLoader(data(), size, shuffle=True) for size in (4, 16)],
    "stateful": Stateful,
    "stateful with a length": Sized,
    "drawn": Drawn,
}


def fitted(
    loader: Any, folder: Path, resumed: int | None = None, kind: type[Dropping] = Dropping, **settings: Any
) -> dict[str, Tensor]:
    """The weights and the last validation of ten steps, which depend on all random numbers; it grows at step 6."""
    seed_everything(0, verbose=False)
    model = (OfAll if isinstance(loader, list) else kind)(8, 4, 6, 3, optimizer=ADAMW)
    callbacks = [ExactResume(), UpscaleCallback(6, 16, noise=None), *([Checkpoints(folder)] if resumed is None else [])]
    settings = {"max_steps": 10, "val_check_interval": 3, "check_val_every_n_epoch": None, **settings}
    trainer = quiet_trainer(
        default_root_dir=folder, callbacks=callbacks, enable_checkpointing=resumed is None, **settings
    )
    has_none = isinstance(loader, Drawn) or kind is Unvalidated
    validation = None if has_none else DataLoader(TensorDataset(*data()), 16)
    trainer.fit(model, loader, validation, ckpt_path=None if resumed is None else folder / f"step={resumed}.ckpt")
    return {**model.state_dict(), **trainer.callback_metrics}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_the_next_batch_is_that_of_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    expected = fitted(LOADERS[name](), tmp_path)
    for step in (3, 4, 7):  # before a validation, at the end of an epoch, and after the growth
        found = fitted(LOADERS[name](), tmp_path, step)
        assert all(torch.equal(found[key], expected[key]) for key in expected), step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shuffled", "stateful", "stateful with a length"])
def test_an_epoch_after_one_that_is_over(name: str, tmp_path: Path) -> None:
    limits = {"max_steps": -1, "max_epochs": 3, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    expected = fitted(LOADERS[name](), tmp_path, **limits)
    found = fitted(LOADERS[name](), tmp_path, 4, **limits)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Unvalidated(Dropping):
    """Has a `validation_step`, but no data for it."""


class OfAll(Dropping):
    """Takes the mean loss of the batches of several loaders."""

    def loss(self, batch: Any) -> Tensor:
        batches = [batch] if isinstance(batch[0], Tensor) else batch
        return torch.stack([super(OfAll, self).loss(each) for each in batches]).mean()


MIXED = "data loaders with and without state_dict: the batches after this resume"
PERSISTENT = "persistent_workers, whose random numbers are not saved"


def with_workers() -> Any:
    return DataLoader(TensorDataset(*data()), 8, num_workers=1, persistent_workers=True)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("several", "step", "said"), [(lambda: [LOADERS["shuffled"](), Sized()], 2, MIXED), (with_workers, 5, PERSISTENT)]
)
def test_what_cannot_be_continued_exactly_is_told(
    several: Callable[[], Any], step: int, said: str, tmp_path: Path
) -> None:
    fitted(several(), tmp_path, max_steps=7)
    with pytest.warns(UserWarning, match=said):
        fitted(several(), tmp_path, step, max_steps=7)


class Seen(Callback):
    """The number of each batch that a step has had."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.numbers.append(int(batch[2][0]))


def test_a_run_that_is_extended_twice_within_an_epoch_sees_each_batch_once(tmp_path: Path) -> None:
    """Lightning ends an epoch at `max_steps`, and counts its batches from zero in the run that goes on."""
    batches = 12
    tensors = rows(Dropping(8, 4, 6, 3), 8 * batches, torch.float32)
    numbered = TensorDataset(*tensors, torch.arange(8 * batches) // 8)
    ckpt, numbers = None, []
    for steps in (5, 7, 14):
        seen = Seen()
        trainer = quiet_trainer(
            max_steps=steps, callbacks=[UpscaleCallback(3, 16, noise=None), ExactResume(), seen], limit_val_batches=0
        )
        trainer.fit(NumberedMLP(8, 4, inputs=6, outputs=3), DataLoader(numbered, 8), ckpt_path=ckpt)
        ckpt = tmp_path / f"{steps}.ckpt"
        trainer.save_checkpoint(ckpt)
        numbers += seen.numbers
    assert numbers == [*range(batches), 0, 1]


class NumberedMLP(MLP):
    """Its batches have a third part, their number."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:2])
