"""The curves of a run: against steps, against samples or tokens seen, and against training FLOPs; and its throughput."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from mupscale.models.base import WidthScalable
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

_AXES = {"samples": 1, "flops": 10**9}
"""What the further axes count, and in which unit: samples (or tokens), and 10⁹ floating-point operations."""

_PEAK_BF16 = {"h200": 989.4e12}
"""Dense bfloat16 FLOP/s of devices that Lightning does not know."""


class Curves(Callback):
    """Logs loss, width and throughput every `trainer.log_every_n_steps` optimizer steps, on every logger.

    In TensorBoard the sub-runs `by_samples` and `by_flops` hold the same curves with samples (tokens) seen, and 10⁹ training FLOPs, on
    the horizontal axis, so that a run that grew can be compared fairly with one from scratch.

    A step's values are written before its checkpoint is, and flushed with it, so an interrupted run that is resumed from the
    checkpoint shows the curve of an uninterrupted one: what was logged after the checkpoint is purged.

    Saved: samples seen and FLOPs spent.
    """

    def __init__(self) -> None:
        self.spent = {"samples": 0.0, "flops": 0.0}
        self._window: list[Tensor] = []
        self._flops: dict[Any, float] = {}
        self._writers: dict[str, SummaryWriter] = {}
        self._purge_step: int | None = None
        self._mark = (0.0, 0, 0.0, 0.0)
        self._peak: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"spent": dict(self.spent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.spent = dict(state_dict["spent"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A resumed run drops what it had logged after its checkpoint."""
        if trainer.state.fn != "fit":
            return
        self._purge_step = checkpoint["global_step"]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger._kwargs["purge_step"] = self._purge_step
                if logger._experiment is not None:
                    logger._experiment.close()
                    logger._experiment = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = peak_flops(pl_module.device)
        self._mark = time.perf_counter(), trainer.global_step, self.spent["samples"], self.spent["flops"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, WidthScalable)
        self.spent["samples"] += pl_module.batch_size(batch) * trainer.world_size
        self.spent["flops"] += self._batch_flops(pl_module, batch) * trainer.world_size
        assert pl_module.train_loss is not None
        self._window.append(pl_module.train_loss)
        if trainer.global_step == self._mark[1] or not stepped(trainer):
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:
            loss = trainer.strategy.reduce(torch.stack(self._window).mean(), reduce_op="mean")
            values = {"train/loss": float(loss), "width": width_number(pl_module.width), **self._throughput(trainer)}
            step = trainer.global_step - 1  # the step whose loss this is, counted from 0
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
            self._log_by_cost(trainer, {"train/loss": values["train/loss"], "width": values["width"]})
        self._window.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
            self._log_by_cost(trainer, metrics)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for writer in self._writers.values():
            writer.flush()
        for logger in trainer.loggers:
            flush = getattr(logger.experiment, "flush", None)
            if flush is not None:
                flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _throughput(self, trainer: Trainer) -> dict[str, float]:
        now, step, samples, flops = self._mark
        self._mark = time.perf_counter(), trainer.global_step, self.spent["samples"], self.spent["flops"]
        seconds = max(self._mark[0] - now, 1e-9)
        rate = (self._mark[3] - flops) / seconds / trainer.world_size
        values = {
            "throughput/steps_per_second": (self._mark[1] - step) / seconds,
            "throughput/samples_per_second": (self._mark[2] - samples) / seconds,
            "throughput/tflops_per_device": rate / 1e12,
        }
        if self._peak:
            values["throughput/fraction_of_peak"] = rate / self._peak
        return values

    def _batch_flops(self, module: WidthScalable, batch: Any) -> float:
        key = str(module.width), module.batch_size(batch)
        if key not in self._flops:
            self._flops[key] = module.training_flops(batch)
        return self._flops[key]

    def _log_by_cost(self, trainer: Trainer, values: dict[str, float]) -> None:
        if not trainer.is_global_zero:
            return
        folder = next((logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)), None)
        if folder is None:
            return
        for axis, unit in _AXES.items():
            at = int(self.spent[axis] / unit)
            if axis not in self._writers:
                purge = at if self._purge_step is not None else None
                self._writers[axis] = SummaryWriter(Path(folder) / f"by_{axis}", purge_step=purge)
            for name, value in values.items():
                self._writers[axis].add_scalar(name, value, at)


def stepped(trainer: Trainer) -> bool:
    """Whether the batch that just ended was the last of its accumulation window."""
    return not trainer.fit_loop._should_accumulate()


def width_number(width: int | list[int]) -> float:
    return float(max(width) if isinstance(width, list) else width)


def peak_flops(device: torch.device) -> float | None:
    """The dense bfloat16 peak of a GPU in FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = next((peak for part, peak in _PEAK_BF16.items() if part in name), None)
    return known or get_available_flops(device, torch.bfloat16)
