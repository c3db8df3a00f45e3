"""Exact resuming: what Lightning omits when a run is resumed, and its place in the training data and random numbers.

Uses private names of Lightning's loops, as `models/_lightning.py` does of others; see tests/test_seams.py.
"""

import copy
import math
import random
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import Metric

from mupscale._torch import tree_map
from mupscale.callbacks.swap import generators_of
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.data_files import interpreting
from mupscale.models._lightning import callbacks_in, callbacks_of, place_in_data, set_callbacks, update_callback_metrics
from mupscale.models.checkpoint import RUN_KEY

LOG_ARGUMENTS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute",
)  # fmt: skip
"""Arguments of `self.log` that Lightning keeps, apart from the reduction."""

REDUCTIONS: dict[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    "sum": sum,
    "min": min,
    "max": max,
}
"""What `self.log` takes as `reduce_fx`."""


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
        self.attached_to: Trainer | None = None
        self.loaded: dict[str, Any] | None = None
        self.loader_states: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.attached_to = trainer
        self.finished = self.failed = False
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
            self.loaded = {key: state_dict[key] for key in ("should_stop", "finished")}
            self.loaded["generators"] = [dict(generators) for generators in state_dict["generators"]]
            self.loaded["metrics"] = {name: torch.as_tensor(value) for name, value in state_dict["metrics"].items()}

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
                if "logged" in generators:
                    restore_logged(trainer, generators["logged"])
            metrics = {name: value.to(pl_module.device) for name, value in self.loaded["metrics"].items()}
            update_callback_metrics(trainer, metrics)
            trainer.should_stop = self.loaded["should_stop"] and not self.loaded["finished"]
            self.loaded = None
            finish_loaded_step(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failed = True  # what is saved from here on may be of the middle of a step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finished = True


# --- the training data of a run


class TrainingData(CombinedLoader):
    """The training loaders of a run, and its place in them.

    Loaders with `state_dict` and `load_state_dict` save it themselves. For others, such as a plain `DataLoader`, it is
    the state of the random numbers before the epoch. A resumed run begins the epoch in that state, and draws the
    batches that were used a second time, in vain.

    If Lightning does not know how many batches there are, it fetches one ahead, which no step has got when a checkpoint
    is written. It is fetched again, with the random numbers that it was made of. The states of the loaders are those
    before that batch.
    """

    trainer: Trainer
    is_sized = False
    states_before: list[dict[str, Any]]
    begin: dict[str, Any] | None = None
    """The random numbers before the epoch."""
    ahead: dict[str, Any] | None = None
    """Those before a batch that is fetched ahead."""

    def __iter__(self) -> Any:
        self.begin = None if all(isinstance(loader, _Stateful) for loader in self.flattened) else self.numbers()
        super().__iter__()
        self.is_sized = sized_len(self) is not None
        return self

    def __next__(self) -> Any:
        if not self.is_sized:
            self.states_before = copy.deepcopy(super()._state_dicts())
            self.ahead = self.numbers()
        return super().__next__()

    @property
    def is_ahead(self) -> bool:
        """Whether a batch was fetched that no step has got yet."""
        return bool(getattr(self.trainer.fit_loop._data_fetcher, "batches", []))

    def place(self) -> dict[str, Any]:
        """As tensors and primitives."""
        return {"begin": self.begin, "ahead": self.ahead if self.is_ahead else None, "own": self.own_numbers()}

    def go_to(self, place: dict[str, Any], loader_states: list[dict[str, Any]]) -> None:
        """Continues at a place that was saved. Leaves the global random numbers in any state."""
        self.warn_of_workers()
        begin, taken = place["begin"], place_in_data(self.trainer).position
        if is_between_epochs(self.trainer):
            if self.is_sized and loader_states:
                self.end_epoch(loader_states)
            else:
                self._load_state_dicts(loader_states)
        elif begin is None:
            if not self.is_sized:
                self._load_state_dicts(loader_states)
                self.set_numbers(place["ahead"])
                self.draw_again(0, None)
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
            self.set_numbers(begin)
            self.draw_again(taken, place["ahead"])
        self.begin = begin
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

    def draw_again(self, count: int, ahead: dict[str, Any] | None) -> None:
        """Begins the epoch again, and draws batches in vain; the last of them with the random numbers `ahead`."""
        fetcher = self.fetcher
        iter(fetcher)
        for index in range(count):
            if index == count - 1:
                self.set_numbers(ahead)
            next(fetcher)
        fetcher.fetched = 0  # the loop adds those of the loaded progress

    @property
    def fetcher(self) -> Any:
        return self.trainer.fit_loop._data_fetcher

    def numbers(self) -> dict[str, Any]:
        return {**rng_state(self.trainer.strategy.root_device), "own": self.own_numbers()}

    def set_numbers(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            set_rng_state(state, self.trainer.strategy.root_device)
            self.set_own_numbers(state["own"])

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


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether the next batch of a run, which may have been loaded just now, is the first of an epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


# --- random numbers


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the global random number generators, as tensors and primitives."""
    version, internal, gauss = random.getstate()
    generator = np.random.get_state(legacy=True)
    assert isinstance(generator, tuple)
    name, keys, position, has_gauss, cached = generator
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, torch.from_numpy(np.array(internal, dtype=np.int64)), gauss],  # torch.tensor takes long
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


# --- the step of a checkpoint


def finish_loaded_step(trainer: Trainer) -> None:
    """Finishes the step in which the loaded checkpoint was written, and leaves the loops between two steps."""
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
            log_epoch(trainer)
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
            log_step(trainer)
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
        log_epoch(trainer)
        fit.epoch_progress.increment_completed()
        fit.reset_restart_stage()
    elif fit.restarted_on_epoch_start:
        fit.epoch_progress.current.ready += 1  # Lightning takes it back, but does not count it again
    elif not loop.restarted_on_last:
        return
    # a new epoch begins: the loop of batches must not restart in the old one
    loop.restarting = False
    loop.reset_restart_stage()


# --- what `self.log` has logged


def logged_state(trainer: Trainer) -> dict[str, Any]:
    """What `self.log` has collected in this epoch of training, and metric objects of the module, for a checkpoint."""
    values = [
        {
            "arguments": {
                **{name: getattr(metric.meta, name) for name in LOG_ARGUMENTS},
                "sync_dist": metric.meta.sync.should,
                "rank_zero_only": metric.meta.sync.rank_zero_only,
            },
            "reduction": next(name for name, function in REDUCTIONS.items() if function is metric.meta.reduce_fx),
            "value": metric.value if metric.is_tensor else None,  # else an object, among the metrics of the module
            "count": getattr(metric, "cumulated_batch_size", None),
            "of_step": metric._forward_cache,
            "is_reset": metric.has_reset,
        }
        for metric in trainer.fit_loop.epoch_loop._results.values()
        if metric.meta.sync.group is None
    ]
    # at the end of a validation its metrics are not reset yet; the resumed run does not repeat it
    validated = {id(metric.value) for metric in trainer.fit_loop.epoch_loop.val_loop._results.values()}
    metrics = {
        name: {"state": metric.metric_state, "updates": metric.update_count}
        for name, metric in trainer.lightning_module.named_modules()
        if isinstance(metric, Metric) and metric.update_called and id(metric) not in validated
    }
    return {"values": values, "metrics": metrics}


def restore_logged(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restores what `logged_state` returned."""
    module, results = trainer.lightning_module, trainer.fit_loop.epoch_loop._results
    objects = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for saved in tree_map(lambda x: x.to(module.device) if isinstance(x, Tensor) else x, state["values"]):
        arguments, value, count = saved["arguments"], saved["value"], saved["count"]
        if value is None and arguments["metric_attribute"] not in objects:
            continue  # the code of the model has changed
        results.log(
            value=objects[arguments["metric_attribute"]] if value is None else value,
            reduce_fx=REDUCTIONS[saved["reduction"]],
            sync_dist_fn=trainer.strategy.reduce,
            batch_size=1,
            **arguments,
        )
        metric = results[f"{arguments['fx']}.{arguments['name']}"]
        metric._forward_cache, metric.has_reset = saved["of_step"], saved["is_reset"]
        if value is not None:
            metric.value = value
        if count is not None:
            metric.cumulated_batch_size = count
    for name in objects.keys() & state["metrics"].keys():
        own, saved = objects[name], state["metrics"][name]
        for key in own.metric_state:
            setattr(own, key, saved["state"][key])
        own._update_count = saved["updates"]
        own.to(module.device)
    done: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    # as the loop sets it: None before the first batch of an epoch, True in it, False later
    first = None if is_between_epochs(trainer) or not done.processed else done.processed == 1
    trainer._logger_connector._first_loop_iter = first


def log_step(trainer: Trainer) -> None:
    """Logs what was collected in the batch in whose end a checkpoint was written, as Lightning does after it."""
    connector = trainer._logger_connector
    if trainer.fit_loop.epoch_loop._results:
        connector._first_loop_iter = trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1
        connector.on_batch_end()
        connector.update_train_step_metrics()


def log_epoch(trainer: Trainer) -> None:
    """Logs what was collected in the epoch in whose end a checkpoint was written, as Lightning does after it."""
    fit, connector = trainer.fit_loop, trainer._logger_connector
    epochs: Any = fit.epoch_progress.current
    counted, epochs.completed = epochs.completed, epochs.processed - 1
    connector.epoch_end_reached()
    connector.on_epoch_end()
    fit.epoch_loop._batches_that_stepped -= 1
    connector.update_train_epoch_metrics()
    fit.epoch_loop._batches_that_stepped += 1
    epochs.completed = counted
