"""Batches of tensors that are already on the training device, and what the data modules have in common."""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Thread
from typing import Any, ClassVar, Protocol, Self

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from mupscale.data_files import interpreting
from mupscale.errors import UserError, refuse_unless_whole

LONG = 10_000
"""Rows of an epoch whose plan takes long enough to be drawn by a thread while the epoch before it is trained on."""


class Entries(Protocol):
    """A tensor with one entry for each place in an epoch's order, or what gives parts of such a tensor."""

    def __getitem__(self, places: slice, /) -> Tensor: ...


Plan = tuple[Entries, ...]
"""The order of an epoch's rows, and the `_augmentation_draws` of each place in it."""

JointPlan = tuple[Callable[[slice], Tensor], ...]
"""Order and chances of several loaders: give their entries at some places, one loader after another."""


class ResidentLoader:
    """A loader of batches that are the same for any number of ranks, and resumable at any batch.

    `batch_size` is the global batch. Every rank draws the same order of rows, a function of `seed` and the epoch alone,
    and rank r of N takes the r-th contiguous share of each global batch. Without `drop_last` the last batch may be
    ragged: its shares then differ by at most one row, and every rank still gets as many batches as the others. That is
    exact for sums over rows (evaluation), not for the mean of per-rank means (training), so training needs
    `drop_last=True`.

    A batch is a tuple with one part of each tensor, or a bare tensor when there is only one. It is a copy: writing to
    it leaves the resident data alone.

    `iter` starts the next epoch if the current one was drawn from, and otherwise changes nothing, because Lightning
    calls it more often than it draws. All iterators of one loader share its position. `state_dict` holds epoch and
    position, with what the order depends on; `load_state_dict` refuses a state of other data or another order, and the
    next `iter` continues with the very next batch, on any number of ranks.

    `batch_at` gives any batch by its epoch and position, and leaves the loader where it is; `go_to` goes there.

    A subclass that makes batches differently overrides `_batch`, `_augmentation_draws` if it needs random numbers for
    them, and `_made_of` if its batches depend on more than the tensors. It sets `_rows_stand_alone` if `_batch` makes
    each row of a batch by itself.
    """

    batch_sampler = None  # Lightning reads it from whatever has a `sampler`
    _rows_stand_alone: ClassVar[bool] = True
    """Whether the batches of several loaders may be made as one. A subclass does not inherit it."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        source: Any = None,
    ) -> None:
        """`source` is what the tensors are a part of: others share it as long as a loader holds it."""
        sizes = [len(tensor) for tensor in tensors]
        if not sizes or len(set(sizes)) > 1:
            raise UserError(f"tensors must be one or more of equal length, got lengths {sizes}")
        if not 0 <= rank < world_size:
            raise UserError(f"rank must lie in 0..{world_size - 1} for world_size={world_size}, got {rank}")
        if batch_size < 1 or batch_size % world_size:
            raise UserError(
                f"batch_size={batch_size}, the global batch, must be a positive multiple of the {world_size} ranks"
            )
        rows = sizes[0]
        ragged = 0 if drop_last else rows % batch_size
        if rows < (batch_size if drop_last else 1):
            raise UserError(f"batch_size={batch_size} leaves no batch of {rows} rows: choose a smaller one")
        if 0 < ragged < world_size:
            raise UserError(
                f"batch_size={batch_size} leaves {ragged} of {rows} rows for the last batch, "
                f"too few for {world_size} ranks: choose another batch_size, or drop_last"
            )
        self.tensors, self.rank, self.world_size, self.source = tensors, rank, world_size, source
        self._rows, self._batch_size, self._seed, self._shuffle = rows, batch_size, seed, shuffle
        self._order_depends_on: dict[str, int | bool | str] = {
            "rows": rows,
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        self._batches = (rows + bool(ragged) * (batch_size - ragged)) // batch_size
        self.epoch = self.position = 0  # how many batches of the epoch were drawn
        self._drawn_from = False
        self._epoch_of_run = 0
        self._last: tuple[int, Plan] | None = None
        """The plan that was used last, with its epoch."""
        self._ahead: PlanDrawing | None = None
        self._joint: tuple[Any, JointPlan] | None = None
        """The last plan of several loaders that was used, with its epoch and their `order`s."""

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        if self._drawn_from or self.position == len(self):
            self.go_to(self.epoch + 1, 0)
        return self._draw()

    @property
    def sampler(self) -> Self:
        """The loader itself: Lightning calls `loader.sampler.set_epoch` before each epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of `epoch` of the run; inside that epoch already, or beyond it, stays where it is.

        Beside a longer loader this one begins again within an epoch of the run, and so is ahead of it. The state alone
        is not enough: Lightning does not load it from a checkpoint written after an epoch's end, and under
        `limit_train_batches` the loader cannot see that an epoch has ended.
        """
        if epoch > self.epoch or epoch < self._epoch_of_run:  # the latter in another run
            self.go_to(epoch, 0)
        self._epoch_of_run = epoch

    def go_to(self, epoch: int, position: int) -> None:
        """Leaves the loader as if the first `position` batches of `epoch` had been drawn one by one."""
        if not 0 <= position <= len(self):
            raise IndexError(f"there is no position {position} of epoch {epoch}: an epoch has {len(self)} batches")
        self.epoch, self.position, self._drawn_from = epoch, position, position > 0

    def batch_at(self, epoch: int, position: int) -> Any:
        """The batch that iteration yields at this position, from 0 on, of this epoch. Does not move the loader."""
        share = self._share_of(position)
        return _unpacked(self._batch(*(entries[share] for entries in self._plan_of(epoch))))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other tensors, and draws its plans itself."""
        own = {"_last": None, "_ahead": None, "_joint": None}
        return {name: value for name, value in (vars(self) | own).items() if name != "order"}

    @cached_property
    def order(self) -> tuple[Any, ...]:
        """Equal if loaders that exist yield the same batches at the same place; the seed, if it matters, is last."""
        arguments = tuple((name, value) for name, value in self._order_depends_on.items() if name != "seed")
        depends_on_seed = self._shuffle or bool(self._augmentation_draws(0, torch.Generator()))
        seed = self._seed if depends_on_seed else None
        return type(self), self._made_of(), arguments, self.rank, self.world_size, seed

    def state_dict(self) -> dict[str, int | bool | str]:
        place = {"epoch": self.epoch, "position": self.position, "epoch_of_run": self._epoch_of_run}
        return {**self._order_depends_on, **place}

    def load_state_dict(self, state_dict: dict[str, int | bool | str]) -> None:
        with interpreting("the data order in the checkpoint"):
            for name, ours in self._order_depends_on.items():
                if state_dict.get(name) != ours:
                    raise UserError(
                        f"the checkpoint's data order has {name}={state_dict.get(name)}, this run's loader {name}="
                        f"{ours}: resume with the {name} of the interrupted run"
                    )
            self.go_to(int(state_dict["epoch"]), int(state_dict["position"]))
            self._epoch_of_run = int(state_dict["epoch_of_run"])
        self._drawn_from = False

    def _draw(self) -> Iterator[Any]:
        # the state is read at every step, not kept in this frame: Lightning sets the epoch after it has called iter
        while self.position < len(self):
            epoch, position = self.epoch, self.position
            # before the batch is used: a checkpoint written in its training step must count it as seen
            self.position += 1
            self._drawn_from = True
            yield self.batch_at(epoch, position)

    def _batch(self, rows: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)

    def _augmentation_draws(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The random numbers of an epoch beside its order: tensors with one entry for each place in the order."""
        return ()

    def _share_of(self, position: int) -> slice:
        """The places in the epoch's order of this rank's share of the global batch at `position`."""
        if not 0 <= position < len(self):
            raise IndexError(f"there is no batch {position}: an epoch has {len(self)} batches")
        start = position * self._batch_size
        size = min(self._batch_size, self._rows - start)
        first, last = (size * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return slice(start + first, start + last)

    def _made_of(self) -> tuple[Hashable, ...]:
        """What batches depend on beside the class and the arguments of this class: objects by their identity."""
        return tuple(id(tensor) for tensor in self.tensors)

    def _generator(self, epoch: int) -> torch.Generator:
        """All random numbers of an epoch are drawn from it, in the order of `_new_plan`."""
        # drawn on the CPU, so that an epoch is the same on every type of device; a hash, so that epoch 1 of seed 0 is
        # not epoch 0 of seed 1
        digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def _plan_of(self, epoch: int) -> Plan:
        if self._last is None or self._last[0] != epoch:
            with torch.inference_mode(False):  # a validation may be the first to ask
                self._last = epoch, self._new_plan(epoch)
        return self._last[1]

    def _new_plan(self, epoch: int) -> Plan:
        """The plan of an epoch on the device of the data. That of the next epoch is drawn meanwhile."""
        plan, ahead = None, self._ahead
        if ahead is not None and ahead.epoch == epoch:
            ahead.join()
            plan = ahead.plan
        if plan is None:
            plan = self._draw_plan(epoch)
        if self._rows >= LONG and (self._shuffle or len(plan) > 1):
            with suppress(RuntimeError):  # where no thread can be started, it is drawn when it is needed
                self._ahead = PlanDrawing(self, epoch + 1)
        # from pinned memory, the host does not wait for the steps under way
        return tuple(entries.to(self.tensors[0].device, non_blocking=entries.is_pinned()) for entries in plan)

    def _draw_plan(self, epoch: int) -> tuple[Tensor, ...]:
        """Order and chances of an epoch on the CPU; for a GPU, in pinned memory."""
        generator, rows = self._generator(epoch), self._rows
        order = torch.randperm(rows, generator=generator) if self._shuffle else torch.arange(rows)
        plan = order, *self._augmentation_draws(rows, generator)
        return tuple(entries.pin_memory() for entries in plan) if self.tensors[0].is_cuda else plan

    def _joint_plan(self, loaders: Sequence["ResidentLoader"], epoch: int) -> JointPlan | None:
        """The plan of `loaders`, of which this is the first; None if one call of `_batch` cannot make their batches."""
        key = epoch, [loader.order for loader in loaders]
        if self._joint is not None and self._joint[0] == key:
            return self._joint[1]
        if not vars(type(self)).get("_rows_stand_alone") or any(order[:-1] != self.order[:-1] for order in key[1]):
            return None
        distinct = {loader.order: loader for loader in loaders}
        plans = {order: loader._plan_of(epoch) for order, loader in distinct.items()}
        plan = tuple(map(join_entries, zip(*(plans[order] for order in key[1]), strict=True)))
        self._joint = key, plan
        return plan


class PlanDrawing(Thread):
    """Draws the plan of an epoch: half a million rows take 7 ms, and a small network 0.3 ms a step.

    A program waits for it at its end. In a process that was forked meanwhile, `plan` stays None.
    """

    def __init__(self, loader: ResidentLoader, epoch: int) -> None:
        super().__init__()
        self._loader, self.epoch = loader, epoch
        self.plan: tuple[Tensor, ...] | None = None
        self.start()

    def run(self) -> None:
        with suppress(Exception):  # the loader then draws it again, and an error is its own
            self.plan = self._loader._draw_plan(self.epoch)
        del self._loader  # or each would hold the other


def join_entries(parts: tuple[Entries, ...]) -> Callable[[slice], Tensor]:
    """Gives the entries of several loaders at some places, one loader after another."""
    if not all(isinstance(part, Tensor) for part in parts):
        return lambda places: torch.cat([part[places] for part in parts])
    together = torch.stack(parts)  # type: ignore[arg-type]
    return lambda places: together[:, places].flatten()


def joint_batch(loaders: Sequence[ResidentLoader], epoch: int, position: int) -> Any:
    """The batches of several loaders at one position of one epoch, with a leading axis: [loaders, rows, ...].

    The loaders are of one class and share their tensors. Ours make the batches of all loaders by the operations of one
    batch; the plan of an epoch is made once.
    """
    first = loaders[0]
    plan = first._joint_plan(loaders, epoch)
    if plan is None:
        batches = [loader.batch_at(epoch, position) for loader in loaders]
        if isinstance(batches[0], Tensor):
            return torch.stack(batches)
        return tuple(torch.stack(parts) for parts in zip(*batches, strict=True))
    share = first._share_of(position)
    parts = first._batch(*(entries_at(share) for entries_at in plan))
    return _unpacked(tuple(part.unflatten(0, (len(loaders), -1)) for part in parts))


def _unpacked(parts: tuple[Tensor, ...]) -> Any:
    """A batch of these parts; of one part alone, a bare tensor."""
    return parts if len(parts) > 1 else parts[0]


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
            self._order_seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # that of `seed_everything`
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
        """The arguments of the model that the trainer trains; none without a trainer."""
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


@dataclass(eq=False)
class TensorSplit:
    """Tensors with as many rows each, to train on and held-out ones; labels are the last of each."""

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    table: Tensor | None = None
    """What they are normalised with in each batch."""


class TensorData(SeededData):
    """Data of a number of classes that lies on the training device."""

    inputs: ClassVar[int | None] = None
    """The features of a row, if a model may have them as an argument."""
    classes: ClassVar[int]
    _data: TensorSplit

    def refuse_model(self, arguments: Mapping[str, Any]) -> None:
        name, inputs, outputs = type(self).__name__, self.inputs, arguments.get("outputs", self.classes)
        if inputs is not None and arguments.get("inputs", inputs) != inputs:
            raise UserError(f"model.inputs = {arguments['inputs']}: for {name} set model.inputs: {inputs}")
        if outputs < self.classes:
            raise UserError(f"model.outputs = {outputs}: for {name} set model.outputs: {self.classes}")

    def train_dataloader(self) -> ResidentLoader:
        return self._loader(self._data.train, training=True)

    def val_dataloader(self) -> ResidentLoader:
        return self._loader(self._data.held_out, training=False)

    def predict_dataloader(self) -> ResidentLoader:
        return self._loader(self._data.held_out[:-1], training=False)

    def _loader(self, tensors: tuple[Tensor, ...], *, training: bool) -> ResidentLoader:
        return ResidentLoader(tensors, self.batch_size, **self.loader_options(training=training))

    def loader_options(self, *, training: bool) -> dict[str, Any]:
        own = {"shuffle": training and self.shuffles, "source": self._data}
        return {**own, **super().loader_options(training=training)}


def ranks(trainer: Trainer | None) -> dict[str, int]:
    """The `rank` and `world_size` of a loader in this process."""
    # not global_rank: under tensor parallelism several ranks share their data
    shares = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {"rank": 0, "num_replicas": 1}
    return {"rank": shares["rank"], "world_size": shares["num_replicas"]}
