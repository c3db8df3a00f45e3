"""The curves of a run against steps, samples or tokens, and training FLOPs; and its throughput."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from mupscale.callbacks.strides import Strides, steps_to
from mupscale.callbacks.tensorboard import log_lengths, log_scalars, tag_in, truncate_logs
from mupscale.errors import UserError
from mupscale.flops import LOGGED
from mupscale.models._lightning import accumulates, is_logged_in_training, log_interval, update_callback_metrics
from mupscale.models.base import Growable, returned_loss, samples_in, tensors_in
from mupscale.models.checkpoint import Width
from mupscale.models.quiet_step import count_flops

_AXES = {"samples": 1, "flops": LOGGED}
"""What the further axes count, and in which unit: samples (or tokens), and 10⁶ floating-point operations."""

_PEAK_BF16 = {"h200": 989.4e12}
"""Dense bfloat16 FLOP/s of devices that Lightning does not know."""


_MOST_RECENT = 1000
"""Batches after which a run that does not log looks at its losses."""


class Curves(Strides):
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
        self._is_bad = False
        self._lacks_loss = False

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
        return {"spent": dict(self.spent), "sum": float(self._sum), "count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._spent, self._uncounted = dict(state_dict["spent"]), None
        self._sum, self._count = no_loss() + state_dict["sum"], state_dict["count"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
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
        if not (pl_module.automatic_optimization or isinstance(pl_module, Growable)):  # it need not return a loss
            # of this object only: steps with such a hook are neither captured nor stacked
            self.on_before_backward = self._add_backward  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = peak_flops(pl_module.device)
        self._step = trainer.global_step
        self._mark = time.perf_counter(), trainer.global_step, self.spent["samples"], self.spent["flops"]

    def _add_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._backward = self._backward + loss.detach()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._count_rest()  # before the module grows

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        spent, kind = self.spent, flops_kind(pl_module, batch)
        spent["samples"] += samples_of(pl_module, batch) * trainer.world_size
        if isinstance(pl_module, Growable) and kind not in self._flops:
            # takes a while: the first step after a growth does not wait for it
            self._uncounted = partial(self._batch_flops, trainer, pl_module, batch, batch_idx, kind)
        else:
            spent["flops"] += self._batch_flops(trainer, pl_module, batch, batch_idx, kind)
        loss = self._loss_of_step(pl_module, outputs)
        if loss is not None:
            self._sum = self._sum + loss
            self._count += 1
            self._recent.append((self._step, width_of(pl_module), loss))
        self._step = trainer.global_step
        if (
            trainer.global_step != self._mark[1]
            and not accumulates(trainer)
            and log_interval(trainer)
            and trainer.global_step % log_interval(trainer) == 0
        ):
            self._log(trainer, pl_module)
        elif len(self._recent) >= _MOST_RECENT or (loss is not None and self._sees_bad_loss(trainer, loss)):
            self._check(trainer, pl_module)

    def stride(self, trainer: Trainer, step: int) -> float:
        every = log_interval(trainer)
        return steps_to(every, step) if every else _MOST_RECENT

    def on_steps(self, trainer: Trainer, pl_module: LightningModule, batch: Any, losses: Sequence[float]) -> None:
        spent, kind = self.spent, flops_kind(pl_module, batch)
        spent["samples"] += samples_of(pl_module, batch) * len(losses)
        spent["flops"] += self._batch_flops(trainer, pl_module, batch, 0, kind) * len(losses)
        total = float(self._sum)
        for loss in losses:
            total += loss
        self._sum = no_loss() + total
        self._count += len(losses)
        if not all(map(math.isfinite, losses)):
            for step, loss in enumerate(losses, self._step):
                self._recent.append((step, width_of(pl_module), torch.tensor(loss, dtype=torch.float64)))
        self._step = trainer.global_step
        if log_interval(trainer) and trainer.global_step % log_interval(trainer) == 0:
            self._log(trainer, pl_module)
        else:
            self._check(trainer, pl_module)

    def on_scores(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = {
                name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")
            }
            self._log_by_cost(trainer, metrics)

    def _loss_of_step(self, module: LightningModule, outputs: Any) -> Tensor | None:
        """The loss of a batch; without one, the sum of those that manual optimization gave to its backward passes."""
        if isinstance(module, Growable):
            return module.loss_of_step(outputs)
        backward, self._backward = self._backward, 0.0
        loss = returned_loss(module, outputs)
        return backward if loss is None and isinstance(backward, Tensor) else loss

    def _log(self, trainer: Trainer, module: LightningModule) -> None:
        values = {}
        if isinstance(module, Growable):
            values["width"] = width_number(module.width)
            layers = module.size.layers
            if layers is not None:
                values["layers"] = float(sum(layers) if isinstance(layers, list) else layers)
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
                "logged. Return the loss, or set self.train_loss",
                stacklevel=2,
            )
        throughput = self._throughput(trainer)
        step = trainer.global_step - 1  # the step whose loss this is, counted from 0
        for logger in trainer.loggers:
            logger.log_metrics({**values, **throughput}, step=step)
        self._log_by_cost(trainer, values)

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

    def _throughput(self, trainer: Trainer) -> dict[str, float]:
        now, step, samples, flops = self._mark
        self._mark = time.perf_counter(), trainer.global_step, self.spent["samples"], self.spent["flops"]
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
        """Of all ranks. NaN if they cannot be counted; the sum of all is NaN from then on."""
        if math.isnan(self._spent["flops"]):
            return math.nan
        if kind not in self._flops:
            try:
                if isinstance(module, Growable):
                    self._flops[kind] = module.training_flops(batch)
                else:
                    self._flops[kind] = count_flops(trainer, module, batch, batch_idx)
            except UserError as error:
                rank_zero_warn(f"the run has no curves against FLOPs: {error}", stacklevel=2)
                return math.nan
        return self._flops[kind] * trainer.world_size

    def _log_by_cost(self, trainer: Trainer, values: dict[str, float]) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):  # other loggers want one axis for all
                for axis, unit in _AXES.items():
                    if math.isnan(self.spent[axis]):
                        continue
                    tagged = {tag_in(logger, f"by_{axis}/{name}"): value for name, value in values.items()}
                    log_scalars(logger, tagged, int(self.spent[axis] / unit))


def no_loss() -> Tensor:
    """The sum of no losses: on the host, in float64, so that adding them one by one or many at once is the same."""
    return torch.zeros((), dtype=torch.float64)


class NonFiniteLoss(UserError):
    """Stops a run because its training loss is NaN or infinite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def first_bad(recent: Sequence[tuple[int, Width | None, Tensor]]) -> tuple[int, Width | None, float] | None:
    """Of losses on their device, the step, the width and the loss of the first that is not finite; waits for it."""
    losses = torch.stack([loss.float() for _, _, loss in recent]).tolist() if recent else []
    rows = zip(recent, losses, strict=True)
    return next(((step, width, loss) for (step, width, _), loss in rows if not math.isfinite(loss)), None)


def describe_loss(bad: tuple[int, Width | None, float]) -> str:
    step, width, loss = bad
    at_width = "" if width is None else f", width {width}"
    return f"the training loss is {loss} at step {step} (the first step is 0){at_width}"


def flops_kind(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """Equal for batches that take equally many operations: the size of the module, and the shapes."""
    is_ours = isinstance(module, Growable)
    size = str(module.size) if is_ours else str(sum(parameter.numel() for parameter in module.parameters()))
    return size, samples_of(module, batch), *(tensor.shape for tensor in tensors_in(batch))


def samples_of(module: LightningModule, batch: Any) -> int:
    own = getattr(module, "batch_size", None)  # which `samples_in` asks for where there is no tensor
    return own(batch) if callable(own) else samples_in(module, batch)


def width_of(module: LightningModule) -> Width | None:
    return module.width if isinstance(module, Growable) else None


def width_number(width: int | list[int]) -> float:
    return float(max(width) if isinstance(width, list) else width)


def peak_flops(device: torch.device) -> float | None:
    """The dense bfloat16 peak of a GPU in FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = next((peak for part, peak in _PEAK_BF16.items() if part in name), None)
    return known or get_available_flops(device, torch.bfloat16)
