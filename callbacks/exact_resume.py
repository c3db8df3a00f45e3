"""Exact resuming: what Lightning omits when a run is resumed, and its place in the training data and random numbers.

Uses private names of Lightning's loops, as `models/_lightning.py` does of others; see tests/test_seams.py.
"""

import copy
import math
import random
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from mupscale.callbacks.swap import generators_of
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.data_files import interpreting
from mupscale.models._lightning import (
    accumulates,
    callbacks_in,
    callbacks_of,
    logs_this_step,
    place_in_data,
    set_callbacks,
    update_callback_metrics,
)
from mupscale.models.checkpoint import RUN_KEY

OWN_HOOK = "on_train_batch_end"
"""The hook of a module that Lightning runs after those of all callbacks."""


def do_nothing(*_: Any) -> None:
    """Stands for a hook that has run."""


class ExactResume(Callback):
    """Makes a resumed run continue exactly as if it had not been interrupted.

    This holds for checkpoints written at the start or the end of a batch, a validation or an epoch.

    A checkpoint is often written before its step is complete. Lightning omits the rest of that step in the resumed run
    (validation, plateau schedulers, the end of the epoch); this callback catches up on it. The module's own
    `on_train_batch_end`, which may move a teacher, runs before a checkpoint is written, and not after all callbacks.

    Its saved state: for every rank, the random number generators and its place in the training data; what `self.log`
    has still to log of a step or an epoch; the metrics that schedulers and callbacks monitor; whether the run is
    finished, and how long it was to be: one that was stopped early stays so, unless that is changed.
    """

    def __init__(self) -> None:
        self.run: dict[str, Any] | None = None  # the identity and configuration of the run, if a command started it
        self.finished = False
        self.failed = False
        self.attached_to: Trainer | None = None
        self.loaded: dict[str, Any] | None = None
        self.loader_states: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.attached_to = trainer
        self.finished = self.failed = False
        if isinstance(trainer.precision_plugin, DoublePrecision):
            pl_module.double()  # Lightning does so after it has loaded the weights, which were rounded then
        if stage == "fit":
            source = trainer.fit_loop._data_source
            trainer.fit_loop._data_source = watched = TrainingDataSource(source.instance, source.name)
            watched.trainer = trainer
        # after on_train_start of all other callbacks, because it validates, but before those that save
        order = lambda c: (isinstance(c, Checkpoint), isinstance(c, UpscaleCallback), c is self)  # noqa: E731
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=order))

    def state_dict(self) -> dict[str, Any]:
        trainer = self.attached_to
        assert trainer is not None
        data, state = training_data(trainer), rng_state(trainer.strategy.root_device)
        place = None if data is None else data.place()
        generators = [{**state, "data": place}]
        if trainer.world_size > 1:
            generators *= trainer.world_size
            torch.distributed.all_gather_object(generators, generators[0])
        return {
            "generators": generators,
            "metrics": on_host(trainer.callback_metrics),
            "to_log": on_host(values_to_log(trainer)),
            "should_stop": trainer.should_stop,
            "finished": self.finished,
            "length": length_of(trainer),
            "failed": self.failed,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.run is not None:
            checkpoint[RUN_KEY] = self.run

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with interpreting("ExactResume in the checkpoint"):
            self.loaded = {key: state_dict[key] for key in ("should_stop", "finished", "length")}
            self.loaded["generators"] = [dict(generators) for generators in state_dict["generators"]]
            for key in ("metrics", "to_log"):
                self.loaded[key] = {name: torch.as_tensor(value) for name, value in state_dict[key].items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        self.loader_states = loops.get("state_dict", {}).get("combined_loader", [])
        for callback in callbacks_in(trainer, ModelCheckpoint):
            callback.current_score = checkpoint["callbacks"].get(callback.state_key, {}).get("current_score")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.loaded is not None:
            if trainer.global_rank < len(self.loaded["generators"]):
                generators = self.loaded["generators"][trainer.global_rank]
                data, place = training_data(trainer), generators.get("data")
                if data is not None and place is not None:  # an older version has none
                    data.go_to(place, self.loader_states)
                with interpreting("ExactResume in the checkpoint"):
                    set_rng_state(generators, pl_module.device)
            metrics = {name: value.to(pl_module.device) for name, value in self.loaded["metrics"].items()}
            update_callback_metrics(trainer, metrics)
            goes_beyond = self.loaded["finished"] and self.loaded["length"] != length_of(trainer)
            trainer.should_stop = self.loaded["should_stop"] and not goes_beyond
            to_log, self.loaded = self.loaded["to_log"], None
            finish_loaded_step(trainer, to_log)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        vars(pl_module).pop(OWN_HOOK, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_overridden(OWN_HOOK, pl_module):
            pl_module.on_train_batch_end(outputs, batch, batch_idx)
            vars(pl_module)[OWN_HOOK] = do_nothing  # until the next batch

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop(OWN_HOOK, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failed = True  # what is saved from here on may be of the middle of a step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finished = True


# --- the training data of a run


class TrainingData(CombinedLoader):
    """The training loaders of a run, and its place in them.

    Loaders with `state_dict` and `load_state_dict` save it themselves. For others, such as a plain `DataLoader`, it is
    the state of the random numbers before the epoch, which begins as under Lightning. After its first batch, the others
    are made of random numbers that nothing else draws. A resumed run begins the epoch in the same state, and draws the
    batches that were used a second time, in vain.

    If Lightning does not know how many batches there are, it fetches one ahead, which no step has got when a checkpoint
    is written. It is fetched again. The states of loaders that have one, and the random numbers of which these make a
    batch, are those before that batch.
    """

    trainer: Trainer
    is_sized = False
    states_before: list[dict[str, Any]]
    begin: dict[str, Any] | None = None
    """The random numbers, also of the loaders' own generators, before the epoch, if loaders have no state."""
    numbers: "OwnNumbers | nullcontext[None]" = nullcontext()
    again: dict[str, Any] | None = None
    """The `begin` of the epoch that is begun again next."""
    ahead: dict[str, Any] | None = None
    """The random numbers before a batch that is fetched ahead, if loaders have a state."""
    drawn = 0
    """The batches since `begin`. Lightning counts from zero in a run that is extended in the middle of an epoch."""

    def __iter__(self) -> Any:
        self.begin, self.again, self.drawn = self.again, None, 0
        if self.begin is not None:
            with interpreting("ExactResume in the checkpoint"):
                set_rng_state(self.begin["host"], torch.device("cpu"))
        elif not all(isinstance(loader, _Stateful) for loader in self.flattened):
            self.begin = {"host": rng_state(torch.device("cpu")), "own": self.own_numbers()}
        self.numbers = nullcontext()
        super().__iter__()
        self.is_sized = sized_len(self) is not None
        return self

    def __next__(self) -> Any:
        if not self.is_sized:
            self.states_before = copy.deepcopy(super()._state_dicts())
            self.ahead = None if self.begin else rng_state(self.trainer.strategy.root_device)
        with self.numbers:
            batch = super().__next__()
        if self.begin is not None and isinstance(self.numbers, nullcontext):  # samplers have drawn their order
            self.numbers = OwnNumbers()
        self.drawn += 1
        return batch

    @property
    def is_ahead(self) -> bool:
        """Whether a batch was fetched that no step has got yet."""
        return bool(getattr(self.trainer.fit_loop._data_fetcher, "batches", []))

    def place(self) -> dict[str, Any]:
        """Returns its place as tensors and primitives."""
        ahead = self.ahead if self.is_ahead else None
        return {"begin": self.begin, "ahead": ahead, "own": self.own_numbers(), "drawn": self.drawn - self.is_ahead}

    def go_to(self, place: dict[str, Any], loader_states: list[dict[str, Any]]) -> None:
        """Continues at a place that was saved. Leaves the global random numbers in any state."""
        self.warn_of_workers()
        begin, taken = place["begin"], place["drawn"]
        if is_between_epochs(self.trainer):
            if self.is_sized and loader_states:
                self.end_epoch(loader_states)
            else:
                self._load_state_dicts(loader_states)
        elif begin is None:
            if not self.is_sized:
                self._load_state_dicts(loader_states)
                if place["ahead"] is not None:
                    set_rng_state(place["ahead"], self.trainer.strategy.root_device)
                self.draw_again(0)
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
            self.again = begin
            self.set_own_numbers(begin["own"])
            self.draw_again(taken)
        self.begin, self.drawn = begin, taken + self.is_ahead
        self.set_own_numbers(place["own"])

    def end_epoch(self, states: list[dict[str, Any]]) -> None:
        """Loads the states of loaders whose batches of an epoch were all taken; the next `iter` begins the next epoch.

        Some loaders begin it by themselves. Others continue the old epoch, which has no batch left, but Lightning does
        not exhaust an iterator of known length. A limit may leave batches, which must not be lost.
        """
        self._load_state_dicts(states)
        iter(self.fetcher)
        limits: Any = self.limits
        is_whole = all(sized_len(loader) == limit for loader, limit in zip(self.flattened, limits, strict=True))
        if is_whole and len(set(limits)) == 1:
            with suppress(StopIteration):
                next(self)
                self._load_state_dicts(states)  # that batch was of the next epoch

    def draw_again(self, count: int) -> None:
        """Begins the epoch again, and draws batches in vain."""
        fetcher = self.fetcher
        iter(fetcher)
        for _ in range(count):
            next(fetcher)
        fetcher.fetched = 0  # the loop adds those of the loaded progress

    @property
    def fetcher(self) -> Any:
        return self.trainer.fit_loop._data_fetcher

    def own_numbers(self) -> list[Tensor]:
        return [generator.get_state() for generator in generators_of(self.flattened)]

    def set_own_numbers(self, states: list[Any]) -> None:
        for generator, state in zip(generators_of(self.flattened), states, strict=False):
            generator.set_state(state.cpu())

    def warn_of_workers(self) -> None:
        stay = any(getattr(loader, "persistent_workers", False) for loader in self.flattened)
        if stay and place_in_data(self.trainer).epoch > 0:
            rank_zero_warn(
                "the training data has persistent_workers, whose random numbers are not saved: if they draw any, as "
                "for augmentation, batches differ from those of an uninterrupted run. Use persistent_workers=False",
                stacklevel=2,
            )

    def _state_dicts(self) -> list[dict[str, Any]]:
        return self.states_before if self.is_ahead else super()._state_dicts()


class TrainingDataSource(_DataLoaderSource):
    """Where a trainer gets its training loaders from, as `TrainingData`."""

    trainer: Trainer

    def dataloader(self) -> Any:
        trainer = self.trainer
        if trainer.ckpt_path is not None and trainer.num_sanity_val_steps > 0 and trainer.enable_validation:
            # as the sanity check does, which is not repeated: the data may be made of random numbers
            with isolate_rng():
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.setup_data()
                trainer.training = True
        given = super().dataloader()
        known = isinstance(given, CombinedLoader)
        answer = TrainingData(given.iterables, given._mode) if known else TrainingData(given, "max_size_cycle")
        answer.trainer = trainer
        return answer


def training_data(trainer: Trainer) -> TrainingData | None:
    loader = trainer.fit_loop._combined_loader
    return loader if isinstance(loader, TrainingData) else None


def length_of(trainer: Trainer) -> list[int | None]:
    return [trainer.max_steps, trainer.max_epochs]


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether the next batch of a run, which may have been loaded just now, is the first of an epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


# --- random numbers


class OwnNumbers:
    """The global random numbers of the host are these meanwhile, and then those of before.

    They follow from those that there are when this is made, but are others.
    """

    def __init__(self) -> None:
        with isolate_rng(include_cuda=False):
            seed = int(torch.randint(2**32, ()))
            torch.random.default_generator.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            self.states = self.get()

    @staticmethod
    def get() -> tuple[Any, ...]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    def swap(self, *_: object) -> None:
        (of_torch, of_numpy, of_python), self.states = self.states, self.get()
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    __enter__ = __exit__ = swap


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the global random number generators, as tensors and primitives."""
    of_numpy: Any = np.random.get_state()
    name, keys, *rest = of_numpy
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))


# --- the step of a checkpoint


def finish_loaded_step(trainer: Trainer, to_log: dict[str, Tensor]) -> None:
    """Finishes the step in which the loaded checkpoint was written, and leaves the loops between two steps.

    `to_log` is what `values_to_log` returned at that moment.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    # or plateau schedulers are passed over at the end of this epoch, for want of the metrics restored here
    fit._restarting = False
    if is_between_epochs(trainer):
        fit._resuming_from_checkpoint = False  # or the next epoch would take the iterators made for this one
    # it makes iterators over the validation data, which may draw random numbers
    advance = loop.val_loop.increment_progress_to_evaluation_end
    loop.val_loop.increment_progress_to_evaluation_end = isolate_rng()(advance)  # type: ignore[method-assign]
    if not loop.restarting or loop.val_loop.restarted_mid_evaluation:
        if fit.resumed_on_epoch_end:
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            log_epoch(trainer, to_log)
        return
    if fit.restarted_mid_epoch and (loop.restarted_on_train_batch_end or loop.restarted_on_last):
        # as at the end of a validation, if it was written before, at the end of the batch
        validated = loop.restarted_on_last
        if not validated:
            loop.batch_progress.increment_completed()
            if loop.batch_progress.is_last_batch:
                epochs: Any = fit.epoch_progress
                for count in (epochs.total, epochs.current):  # Lightning has counted it as over
                    count.processed -= 1
                    count.completed -= 1
            if not accumulates(trainer) and logs_this_step(trainer):
                trainer._logger_connector.log_metrics(to_log)
        loop.reset_restart_stage()
        loop.val_loop.restarting = False
        loop._skip_next_val = validated
        assert fit._data_fetcher is not None
        loop.on_advance_end(fit._data_fetcher)
        if not loop.batch_progress.is_last_batch and not (trainer.should_stop and fit._can_stop_early):
            loop._batches_that_stepped -= 1  # the loop will count it when it restarts
            batches = max(loop.val_loop.max_batches, default=0)
            if loop._should_check_val_fx(fit._data_fetcher) and math.isfinite(batches):
                loop.val_loop.batch_progress.total.increment_by(-int(batches))  # and the batches of this validation
            return
        fit.on_advance_end()
        fit.reset_restart_stage()
    elif fit.restarted_on_epoch_end:
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        log_epoch(trainer, to_log)
        fit.epoch_progress.increment_completed()
        fit.reset_restart_stage()
    elif fit.restarted_on_epoch_start:
        fit.epoch_progress.current.ready += 1  # Lightning takes it back, but does not count it again
    elif not loop.restarted_on_last:
        return
    # a new epoch begins: the loop of batches must not restart in the old one
    loop.restarting = False
    loop.reset_restart_stage()


# --- what `self.log` has still to log


def values_to_log(trainer: Trainer) -> dict[str, Any]:
    """The values of `self.log` that Lightning logs after the hooks at the end of a step, or of an epoch."""
    if not trainer.training:
        return {}  # those of the step are logged before a validation
    of_step = trainer._logger_connector._first_loop_iter is not None
    return trainer.fit_loop.epoch_loop._results.metrics(of_step)["log"]


def on_host(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).detach().cpu() for name, value in values.items()}


def log_epoch(trainer: Trainer, values: dict[str, Tensor]) -> None:
    """Logs the values of the epoch in whose end a checkpoint was written, as Lightning does after it."""
    fit: Any = trainer.fit_loop
    if values:
        step = values.pop("step", fit.epoch_loop._batches_that_stepped - 1)
        trainer._logger_connector.log_metrics({"epoch": fit.epoch_progress.current.processed - 1, **values}, int(step))
