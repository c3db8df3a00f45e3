"""What Lightning omits when a run is resumed. Uses private names, as `_lightning.py` does; see tests/test_seams.py."""

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import Metric

from mupscale._torch import tree_map

LOG_ARGUMENTS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)
"""Arguments of `self.log` that Lightning keeps, apart from the reduction."""

REDUCTIONS: dict[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    "sum": sum,
    "min": min,
    "max": max,
}
"""What `self.log` takes as `reduce_fx`."""


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


# --- the training data of a run


class TrainingData(CombinedLoader):
    """The training loaders of a run, with `before_epoch`, and `before_batch` if Lightning fetches one batch ahead.

    It does so where the number of batches is not known. The states of the loaders are those before that batch.
    """

    trainer: Trainer
    is_sized = False
    states_before: list[dict[str, Any]]
    before_epoch: Callable[["TrainingData"], None]
    before_batch: Callable[["TrainingData"], None]

    def __iter__(self) -> Any:
        self.before_epoch(self)
        super().__iter__()
        self.is_sized = sized_len(self) is not None
        return self

    def __next__(self) -> Any:
        if not self.is_sized:
            self.states_before = copy.deepcopy(super()._state_dicts())
            self.before_batch(self)
        return super().__next__()

    @property
    def is_ahead(self) -> bool:
        """Whether a batch was fetched that no step has got yet."""
        return bool(getattr(self.trainer.fit_loop._data_fetcher, "batches", []))

    def load(self, states: list[dict[str, Any]]) -> None:
        self._load_state_dicts(states)

    def _state_dicts(self) -> list[dict[str, Any]]:
        return self.states_before if self.is_ahead else super()._state_dicts()


class TrainingDataSource(_DataLoaderSource):
    """Where a trainer gets its training loaders from, as `TrainingData` with these attributes."""

    attributes: dict[str, Any]

    def dataloader(self) -> Any:
        trainer = self.attributes["trainer"]
        if trainer.ckpt_path is not None and trainer.num_sanity_val_steps > 0 and trainer.enable_validation:
            # as the sanity check does, which is not repeated: the data may be made of random numbers
            with isolate_rng():
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.setup_data()
                trainer.training = True
        given = super().dataloader()
        known = isinstance(given, CombinedLoader)
        answer = TrainingData(given.iterables, given._mode) if known else TrainingData(given, "max_size_cycle")
        vars(answer).update(self.attributes)
        return answer


def watch_training_data(trainer: Trainer, before_epoch: Any, before_batch: Any) -> None:
    """Makes a trainer call these functions with its `TrainingData`."""
    source = trainer.fit_loop._data_source
    trainer.fit_loop._data_source = watched = TrainingDataSource(source.instance, source.name)
    watched.attributes = {"trainer": trainer, "before_epoch": before_epoch, "before_batch": before_batch}


def saves_its_state(loader: Any) -> bool:
    """Whether Lightning saves the state of a loader."""
    return isinstance(loader, _Stateful)


def training_data(trainer: Trainer) -> TrainingData | None:
    loader = trainer.fit_loop._combined_loader
    return loader if isinstance(loader, TrainingData) else None


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether the next batch of a run, which may have been loaded just now, is the first of an epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def loader_states_in(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of the training loaders in a checkpoint."""
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    return cast(list[dict[str, Any]], loops.get("state_dict", {}).get("combined_loader", []))


def end_epoch(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Loads the states of loaders whose batches of an epoch were all taken; the next `iter` begins the next epoch.

    Some loaders begin it by themselves. Others continue the old epoch, which has no batch left, but Lightning does not
    exhaust an iterator of known length. A limit may leave batches, which must not be lost.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    data = fetcher.combined_loader
    data._load_state_dicts(states)
    iter(fetcher)
    limits: Any = data.limits
    is_whole = all(sized_len(loader) == limit for loader, limit in zip(data.flattened, limits, strict=True))
    if is_whole and len(set(limits)) == 1:
        with suppress(StopIteration):
            next(data)
            data._load_state_dicts(states)  # that batch was of the next epoch


def restart_batches(trainer: Trainer, skipped: int = 0, before_last: Callable[[], None] | None = None) -> None:
    """Iterates over training batches again, and draws `skipped` in vain; `before_last` is called before the last."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    iter(fetcher)
    for index in range(skipped):
        if index == skipped - 1 and before_last is not None:
            before_last()
        next(fetcher)
    fetcher.fetched = 0  # the loop adds those of the loaded progress
