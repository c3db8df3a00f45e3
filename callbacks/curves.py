"""The curves of a run against steps, samples or tokens, and training FLOPs; and its throughput."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from mupscale.callbacks.captured_steps import has_foreign_hooks
from mupscale.callbacks.losses import count_flops
from mupscale.callbacks.tensorboard import log_lengths, log_scalars, tag_in, truncate_logs
from mupscale.errors import UserError
from mupscale.flops import LOGGED
from mupscale.models._lightning import (
    accumulates,
    callbacks_of,
    is_logged_in_training,
    log_interval,
    logs_this_step,
    rates_of,
    steps_logged,
    update_callback_metrics,
)
from mupscale.models.base import returned_loss, samples_in, tensors_in
from mupscale.models.checkpoint import Size, Width, size_of

_AXES = {"samples": 1, "flops": LOGGED}
"""What the further axes count, and in which unit: samples (or tokens), and 10⁶ floating-point operations."""

_PEAK_BF16 = {"h200": 989.4e12}
"""Dense bfloat16 FLOP/s of devices that Lightning does not know."""


_MOST_RECENT = 1000
"""Batches after which a run that does not log looks at its losses."""


class Curves(Callback):
    """Logs loss, width and throughput every `trainer.log_every_n_steps` optimizer steps, on every logger.

    The logged loss is the mean over the steps since the last log; losses of single steps vary with the batch. Other
    callbacks can monitor it as `train/loss`.

    In TensorBoard the groups `x_axis_samples` and `x_axis_flops` show the same curves with samples (tokens) seen, and
    10⁶ training FLOPs, on the horizontal axis, so that a run that grew can be compared fairly with one from scratch.
    Under Lightning's own TensorBoardLogger these groups are `by_samples` and `by_flops`. If the FLOPs of a batch cannot
    be counted, a warning gives the reason, and the run has no curves against FLOPs from then on.

    A resumed run truncates its event files and CSV tables to their lengths at the checkpoint. So its curves are those
    of an uninterrupted run.

    A NaN or infinite loss is reported when the loss is logged and before a checkpoint is written, with the step at
    which it first occurred.

    Its saved state: samples seen, FLOPs spent (NaN if they cannot be counted), the sum of the losses since the last
    log, and the lengths of the files.
    """

    def __init__(self, stop_on_nan: bool = False) -> None:
        """
        Args:
            stop_on_nan: Stop with an error if the training loss is NaN or infinite; by default, only warn.
        """
        self.stop_on_nan = stop_on_nan
        self.watches = True
        self._spent = {"samples": 0.0, "flops": 0.0}
        self._uncounted: Callable[[], float] | None = None
        """Counts the FLOPs of the last batch, if that was left for later."""
        self._sum = no_loss()
        self._count = 0
        self._flops: dict[Any, float] = {}
        self._mark = (0.0, 0, 0.0, 0.0)
        self._peak: float | None = None
        self._backward: Tensor | float = 0.0
        self._recent: list[tuple[int, Width | None, Tensor]] = []  # since the last check: launches no kernel
        self._step = 0
        self.loss: Tensor | None = None
        """The loss of the last batch."""
        self._is_bad = False
        self._lacks_loss = False
        self._late: LateLog | None = None
        self._may_be_late = False

    @property
    def spent(self) -> dict[str, float]:
        """Samples seen and FLOPs spent."""
        self._count_rest()
        return self._spent

    def _count_rest(self) -> None:
        if self._uncounted is not None:
            count, self._uncounted = self._uncounted, None
            self._spent["flops"] += count()

    def state_dict(self) -> dict[str, Any]:
        total = self._sum if isinstance(self._sum, Tensor) and self._sum.is_cuda else float(self._sum)
        late = None if self._late is None else self._late.state_dict()
        return {"spent": dict(self.spent), "sum": total, "count": self._count, "late": late}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._spent, self._uncounted = dict(state_dict["spent"]), None
        self._sum, self._count = no_loss() + float(state_dict["sum"]), state_dict["count"]
        self._late = None if state_dict.get("late") is None else LateLog(**state_dict["late"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.stop_on_nan:
            self._write_late(trainer)
        if self.stop_on_nan or not self._may_be_late:  # to wait for the device would take longer than to save
            self._check(trainer, pl_module)
        if trainer.world_size > 1 and self._count:
            # that of all ranks: the number of them may be another one when the run is resumed
            checkpoint["callbacks"][self.state_key]["sum"] = self._mean(trainer, pl_module) * self._count
        for logger in trainer.loggers:
            # a logger of one's own may have no such thing
            getattr(getattr(logger, "experiment", None), "flush", logger.save)()
        if trainer.is_global_zero:
            checkpoint["callbacks"][self.state_key] |= log_lengths(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            truncate_logs(trainer, checkpoint["callbacks"].get(self.state_key, {}))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not pl_module.automatic_optimization:  # it need not return a loss
            # of this object only: steps with such a hook are neither captured nor stacked
            self.on_before_backward = self._add_backward  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = peak_flops(pl_module.device)
        self._step = trainer.global_step
        self._may_be_late = pl_module.device.type == "cuda" and trainer.world_size == 1 and not is_awaited(trainer)
        self._mark = time.perf_counter(), trainer.global_step, self.spent["samples"], self.spent["flops"]

    def _add_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._backward = self._backward + loss.detach()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._count_rest()  # before the module grows

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write_late(trainer)
        losses = losses_of_block(outputs)
        steps = 1 if losses is None else len(losses)
        spent, size, samples = self.spent, size_of(pl_module), samples_of(pl_module, batch)
        kind = flops_kind((str(size), count_parameters(pl_module, trainer.optimizers)), samples, batch)
        spent["samples"] += samples * steps * trainer.world_size
        if kind not in self._flops and steps == 1:  # takes a while: the first step after a growth does not wait for it
            self._uncounted = partial(self._batch_flops, trainer, pl_module, batch, batch_idx, kind)
        else:
            spent["flops"] += self._batch_flops(trainer, pl_module, batch, batch_idx, kind) * steps
        loss = self.loss = self._loss_of_step(pl_module, outputs)
        taken = loss if losses is None else losses
        if taken is not None:
            self._sum = self._sum + (taken if losses is None else losses.double().sum())
            self._count += steps
            self._recent.append((self._step, None if size is None else size.width, taken))
        self._step = trainer.global_step
        if (
            trainer.global_step != self._mark[1]
            and not accumulates(trainer)
            and log_interval(trainer)
            and trainer.global_step % log_interval(trainer) == 0
        ):
            self._log(trainer, pl_module, size)
        elif len(self._recent) >= _MOST_RECENT or (loss is not None and self._sees_bad_loss(trainer, loss)):
            self._check(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_late(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_late(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_late(trainer)
        self._check(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = {
                name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")
            }
            log_by_cost(trainer.loggers, metrics, self.spent)

    def _loss_of_step(self, module: LightningModule, outputs: Any) -> Tensor | None:
        """The loss of a batch; without one, the sum of those that manual optimization gave to its backward passes."""
        backward, self._backward = self._backward, 0.0
        loss = returned_loss(module, outputs)
        return backward if loss is None and isinstance(backward, Tensor) else loss

    def _log(self, trainer: Trainer, module: LightningModule, size: Size | None) -> None:
        values: dict[str, float] = {}
        if size is not None:
            values["width"] = width_number(size.width)
            if size.layers is not None:
                values["layers"] = float(sum(size.layers) if isinstance(size.layers, list) else size.layers)
        if self._count and self._may_be_late:
            mean = self._sum / self._count
            self._late = LateLog(trainer.global_step, values, dict(self.spent), mean, self._recent)
            self._sum, self._count, self._recent = no_loss(), 0, []
            return
        if self._count:
            loss = self._mean(trainer, module)
            self._report(trainer, loss)
            self._sum, self._count = no_loss(), 0
            values = {"train/loss": loss, **values}
            if not is_logged_in_training(trainer, "train/loss"):
                update_callback_metrics(trainer, {"train/loss": torch.tensor(loss)})
        elif not self._lacks_loss:
            self._lacks_loss = True
            rank_zero_warn(
                f"{type(module).__name__}.training_step returned no loss since the last log: train/loss is not "
                "logged. Return the loss",
                stacklevel=2,
            )
        self._write(trainer, values, trainer.global_step, self.spent)

    def _write_late(self, trainer: Trainer) -> None:
        """Writes the log that waits for its loss."""
        if self._late is None:
            return
        late, self._late = self._late, None
        loss = late.arrived()
        recent, self._recent = self._recent, late.recent
        self._report(trainer, loss)
        self._recent = recent
        update_callback_metrics(trainer, {"train/loss": torch.tensor(loss)})
        self._write(trainer, {"train/loss": loss, **late.values}, late.step, late.spent)

    def _write(self, trainer: Trainer, values: dict[str, float], step: int, spent: dict[str, float]) -> None:
        throughput = self._throughput(trainer, step, spent)
        for logger in trainer.loggers:
            # the step whose loss this is, counted from 0
            logger.log_metrics({**values, **throughput}, step=step - 1)
        log_by_cost(trainer.loggers, values, spent)

    def _sees_bad_loss(self, trainer: Trainer, loss: Tensor) -> bool:
        """Whether a loss is not finite, where that can be seen without waiting for a device or for other processes."""
        can_see = loss.device.type == "cpu" and loss.dtype in (torch.float32, torch.float64) and trainer.world_size == 1
        return can_see and not math.isfinite(loss.numpy())  # which reads memory, and calls no operation of torch

    def _mean(self, trainer: Trainer, module: LightningModule) -> float:
        """The mean loss since the last time, over all ranks; waits for the device."""
        mean = self._sum / self._count
        if trainer.world_size == 1:
            return float(mean)
        return float(trainer.strategy.reduce(torch.as_tensor(mean, device=module.device), reduce_op="mean"))

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        if self.watches and self._count:
            self._report(trainer, self._mean(trainer, module))

    def _report(self, trainer: Trainer, mean: float) -> None:
        """Reports the first loss that is not finite, once; `mean` is that of all ranks since the last time."""
        was_bad, self._is_bad = self._is_bad, not math.isfinite(mean)
        if self.watches and self._is_bad and not was_bad:
            found = first_bad(self._recent)
            if trainer.world_size > 1:
                ranks: list[Any] = [None] * trainer.world_size
                torch.distributed.all_gather_object(ranks, found)
                found = min((each for each in ranks if each is not None), key=lambda each: each[0], default=None)
            # otherwise it is in what a checkpoint held, or the sum is too large for its precision
            if found is not None and self.stop_on_nan:
                raise NonFiniteLoss(describe_loss(found), found[0])
            if found is not None:
                rank_zero_warn(f"{describe_loss(found)}. --stop_on_nan ends a run there", stacklevel=2)
        self._recent.clear()

    def _throughput(self, trainer: Trainer, now_at: int, spent: dict[str, float]) -> dict[str, float]:
        now, step, samples, flops = self._mark
        self._mark = time.perf_counter(), now_at, spent["samples"], spent["flops"]
        seconds = max(self._mark[0] - now, 1e-9)
        rate = (self._mark[3] - flops) / seconds / trainer.world_size
        values = {
            "throughput/steps_per_second": (self._mark[1] - step) / seconds,
            "throughput/samples_per_second": (self._mark[2] - samples) / seconds,
        }
        if not math.isnan(rate):
            values["throughput/tflops_per_device"] = rate / 1e12
            if self._peak:
                values["throughput/fraction_of_peak"] = rate / self._peak
        return values

    def _batch_flops(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, kind: tuple[Any, ...]
    ) -> float:
        """Counts the FLOPs of a batch on all ranks; NaN if that fails, as the sum of all is from then on."""
        if math.isnan(self._spent["flops"]):
            return math.nan
        if kind not in self._flops:
            try:
                self._flops[kind] = count_flops(trainer, module, batch, batch_idx)
            except UserError as error:
                rank_zero_warn(f"the run has no curves against FLOPs: {error}", stacklevel=2)
                return math.nan
        return self._flops[kind] * trainer.world_size


class RateMonitor(LearningRateMonitor):
    """A LearningRateMonitor that keeps rates on the host: a copy to a GPU would wait for its steps under way."""

    _names: tuple[Any, list[str]] | None = None
    """An optimizer, and the names of the rates of its groups."""

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if self.logging_interval == "epoch" or not logs_this_step(trainer):
            return
        rates = self._rates(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(rates, step=steps_logged(trainer))
        update_callback_metrics(trainer, {name: torch.tensor(rate) for name, rate in rates.items()})

    def _rates(self, trainer: Trainer) -> dict[str, float]:
        optimizer = trainer.optimizers[0]
        if self._names is None or self._names[0] is not optimizer:
            self._names = optimizer, list(rates_of(self, trainer))
        names = self._names[1]
        if len(trainer.optimizers) > 1 or len(names) != len(optimizer.param_groups):
            return rates_of(self, trainer)
        return dict(zip(names, (float(group["lr"]) for group in optimizer.param_groups), strict=True))


def log_by_cost(loggers: Sequence[Logger], values: dict[str, float], spent: dict[str, float]) -> None:
    """Logs values against samples and FLOPs, where loggers have further axes."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):  # other loggers want one axis for all
            for axis, unit in _AXES.items():
                if math.isnan(spent[axis]):
                    continue
                tagged = {tag_in(logger, f"by_{axis}/{name}"): value for name, value in values.items()}
                log_scalars(logger, tagged, int(spent[axis] / unit))


@dataclass
class LateLog:
    """Holds the values to log of a step whose mean loss is being copied from the device while further steps begin.

    To wait for it would leave the device without work until the next step is launched.
    """

    step: int
    values: dict[str, float]
    spent: dict[str, float]
    loss: Tensor
    recent: list[tuple[int, Width | None, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._copy = self.loss
        self._event: torch.cuda.Event | None = None
        if self.loss.is_cuda:
            self._copy = torch.empty(self.loss.shape, dtype=self.loss.dtype, pin_memory=True)
            self._copy.copy_(self.loss, non_blocking=True)
            self._event = torch.cuda.current_stream(self.loss.device).record_event()

    def arrived(self) -> float:
        """Returns the loss; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._copy)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "values": dict(self.values), "spent": dict(self.spent), "loss": self.loss}


def is_awaited(trainer: Trainer) -> bool:
    """Whether something may look at `train/loss` right after the step whose log it is in."""
    names = (getattr(callback, name, None) for callback in callbacks_of(trainer) for name in ("monitor", "filename"))
    return has_foreign_hooks(trainer) or any("train/" in str(name) for name in names)


def losses_of_block(outputs: Any) -> Tensor | None:
    """The losses of the steps of a block of captured steps; None of a single step."""
    return outputs.get("losses") if isinstance(outputs, dict) else None


def no_loss() -> Tensor:
    """The sum of no losses: on the host, in float64, so that adding them one by one or many at once is the same."""
    return torch.zeros((), dtype=torch.float64)


class NonFiniteLoss(UserError):
    """Stops a run because its training loss is NaN or infinite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def first_bad(recent: Sequence[tuple[int, Width | None, Tensor]]) -> tuple[int, Width | None, float] | None:
    """Finds the first loss that is not finite: its step, width and value. Waits for the device."""
    losses = torch.cat([loss.float().reshape(-1) for _, _, loss in recent]).tolist() if recent else []
    steps = ((step + index, width) for step, width, loss in recent for index in range(loss.numel()))
    rows = zip(steps, losses, strict=True)
    return next(((step, width, loss) for (step, width), loss in rows if not math.isfinite(loss)), None)


def describe_loss(bad: tuple[int, Width | None, float]) -> str:
    step, width, loss = bad
    at_width = "" if width is None else f", width {width}"
    return f"the training loss is {loss} at step {step} (the first step is 0){at_width}"


def flops_kind(size: Hashable, samples: int, batch: Any) -> tuple[Any, ...]:
    """Equal for batches that take equally many operations: the size of the module, and the shapes."""
    return size, samples, *(tensor.shape for tensor in tensors_in(batch))


def count_parameters(module: LightningModule, optimizers: Sequence[Optimizer]) -> int:
    """Counts what the optimizers train, which grows with the module: to walk a module takes many calls at every step.

    Without optimizers it is walked.
    """
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return sum(map(Tensor.numel, chain.from_iterable(groups or [module.parameters()])))


def samples_of(module: LightningModule, batch: Any) -> int:
    own = getattr(module, "batch_size", None)  # which `samples_in` asks for where there is no tensor
    return own(batch) if callable(own) else samples_in(module, batch)


def width_number(width: int | list[int]) -> float:
    return float(max(width) if isinstance(width, list) else width)


def peak_flops(device: torch.device) -> float | None:
    """The dense bfloat16 peak of a GPU in FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = next((peak for part, peak in _PEAK_BF16.items() if part in name), None)
    return known or get_available_flops(device, torch.bfloat16)
