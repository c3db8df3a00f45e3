"""The metric of a trial in a sweep, and when a trial is stopped early."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from mupscale.callbacks.curves import Curves
from mupscale.callbacks.strides import Strides, steps_to
from mupscale.callbacks.upscale import swaps_of
from mupscale.errors import UserError
from mupscale.methods.noise import SignalNoise, save_constants
from mupscale.models._lightning import accumulates, callbacks_in, steps_before_validation, validates
from mupscale.models.base import Growable, init_contexts, without_log

DIVERGED = 10
"""How many times the loss of an untrained network, or of the network just after a swap, counts as divergence."""

PATIENCE = 5
"""Checks in a row that must find it there. A check looks at the mean over a hundredth of the run."""


SAVED = (
    "sum", "count", "window", "diverged",
    "_strikes", "_recent", "_recent_count", "_reference", "_size", "_logged",
)  # fmt: skip
"""The attributes of a TrialMetric that are its saved state."""


class TrialMetric(Strides):
    """Computes the metric of a trial, stops a trial that diverges, and records constants of signal-normalised noise.

    A trial has diverged if its loss is not finite, or stays above ten times the loss of an untrained network and above
    the loss just after a swap. A high loss alone does not stop a trial: with good noise levels it often starts far
    higher than with bad ones.

    Noise constants are written to `noise-<step>.json` in the run's folder, which `RecordedNoise` reads.

    Its saved state: the sums so far, and whether the trial has diverged.
    """

    progress: ClassVar[Callable[[int, int, float], None] | None] = None
    """Told, a hundred times a run, the step, how many there are, and the mean loss of late."""

    def __init__(self, metric: str = "last_epoch") -> None:
        """
        Args:
            metric: `last_epoch` or `last_N%` is the mean training loss over the last epoch, or over the last N % of the
                steps. Any other name is that of a logged metric, such as val/loss; its last value counts.
        """
        self.metric = metric
        self.diverged = False
        self.sum: Tensor | float = 0.0
        self.count = 0
        self.window = 0
        self._steps = 0
        self._recent: Tensor | float = 0.0
        self._recent_count = 0
        self._strikes = 0
        self._reference = 0.0
        self._size: str | None = None
        self._logged: float | None = None
        self._validated: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        values = {name.lstrip("_"): getattr(self, name) for name in SAVED}
        return {key: float(value) if isinstance(value, Tensor) else value for key, value in values.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in SAVED:
            setattr(self, name, state_dict[name.lstrip("_")])

    @property
    def value(self) -> float:
        """The metric of a run that is over; infinite if it diverged."""
        if self.diverged:
            return math.inf
        value = self._logged if window_of(self.metric) is None else float(self.sum) / self.count
        assert value is not None
        return value if math.isfinite(value) else math.inf

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError(
                f"trainer.devices: a trial of a sweep runs on one device, got {trainer.world_size}; start more "
                "processes"
            )
        for curves in callbacks_in(trainer, Curves):
            curves.watches = False  # a trial whose loss is not finite has a result: it diverged

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated |= trainer.callback_metrics.keys()  # which Lightning forgets after the sanity check
        if self.metric.startswith("val/"):
            self._look_up(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A misspelt metric is reported after one epoch: what is logged at all is logged in every epoch."""
        known = trainer.current_epoch > 0 and (self._validated or not trainer.enable_validation)
        if known and window_of(self.metric) is None and self.metric not in self._validated:
            self._look_up(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total) or total <= 0:
            raise UserError(
                f"trainer.max_steps, trainer.max_epochs: a trial must end, got {trainer.max_steps}, "
                f"{trainer.max_epochs}"
            )
        self._steps = int(total)
        share = window_of(self.metric)
        if share == "epoch":
            self.window = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            if self.window > self._steps:
                raise UserError(
                    f"metric last_epoch: an epoch has {self.window} steps, but the run has {self._steps}; "
                    "use last_2%, or raise trainer.max_steps"
                )
        elif isinstance(share, float):
            self.window = math.ceil(share * self._steps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Growable)
        if self._size is None:
            self._reference = untrained_loss(trainer, pl_module, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Growable)
        loss, has_stepped = pl_module.loss_of_step(outputs), not accumulates(trainer)
        if loss is not None:
            loss = loss.double()
            # the step that this batch belongs to, counted from 0
            self._add(trainer.global_step - has_stepped, loss)
        if str(pl_module.size) != self._size:  # the first batch, or the first after a swap
            self._size = str(pl_module.size)
            if loss is not None and math.isfinite(loss):
                self._reference = max(self._reference, float(loss))
            self._save_noise(trainer)
        if not accumulates(trainer) and (
            trainer.global_step % self._interval == 0 or trainer.global_step == self._steps
        ):
            self._check(trainer)
        if any(swap.is_due(trainer, pl_module) for swap in swaps_of(trainer)):
            self._check_before_swap(trainer, pl_module)

    def free_steps(self, trainer: Trainer, pl_module: LightningModule) -> float:
        assert isinstance(pl_module, Growable)
        if str(pl_module.size) != self._size:  # the first step of a size
            return 0
        is_known = window_of(self.metric) is not None or self.metric in trainer.callback_metrics
        return math.inf if is_known or validates(trainer) else steps_before_validation(trainer)

    def stride(self, trainer: Trainer, step: int) -> float:
        return steps_to(self._interval, step)

    def on_steps(self, trainer: Trainer, pl_module: LightningModule, batch: Any, losses: Sequence[float]) -> None:
        self.sum, self._recent = float(self.sum), float(self._recent)
        for step, loss in enumerate(losses, trainer.global_step - len(losses)):
            self._add(step, loss)
        if trainer.global_step % self._interval == 0:
            self._check(trainer)

    def on_scores(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)
        if window_of(self.metric) is None:
            self._look_up(trainer)

    @property
    def _interval(self) -> int:
        return max(5, self._steps // 100)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.diverged:
            return
        if window_of(self.metric) is None:
            self._logged = self._look_up(trainer)
        elif trainer.global_step < self._steps:
            raise UserError(
                f"metric {self.metric}: the run ended at step {trainer.global_step}, but was to have {self._steps}"
            )
        elif self.count == 0:
            raise UserError(
                f"metric {self.metric}: {type(pl_module).__name__}.training_step returned no loss in the last "
                f"{self.window} steps. Return the loss, or set self.train_loss"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            raise exception  # Ctrl-C ends the whole sweep; Lightning would turn it into an exit of this run

    # --- parts

    def _add(self, step: int, loss: Tensor | float) -> None:
        if step >= self._steps - self.window:
            self.sum = self.sum + loss
            self.count += 1
        self._recent = self._recent + loss
        self._recent_count += 1

    def _check(self, trainer: Trainer) -> None:
        """Waits for the device, a hundred times a run."""
        if self._recent_count == 0:  # training_step returned no loss
            return
        mean = float(self._recent) / self._recent_count
        self._recent, self._recent_count = 0.0, 0
        self._strikes = self._strikes + 1 if mean > DIVERGED * self._reference else 0
        if not math.isfinite(mean) or self._strikes == PATIENCE:
            self._stop(trainer)
        if TrialMetric.progress is not None:
            TrialMetric.progress(trainer.global_step, self._steps, mean)

    def _check_before_swap(self, trainer: Trainer, module: Growable) -> None:
        """What is not finite cannot be widened, and the next check may come too late."""
        if not math.isfinite(self._recent) or not all(bool(p.isfinite().all()) for p in module.parameters()):
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        self.diverged = True
        trainer.should_stop = True
        # which are for runs that may yet get better
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def _look_up(self, trainer: Trainer) -> float:
        metrics = trainer.callback_metrics
        if self.metric not in metrics:
            raise UserError(
                f"metric {self.metric} is never logged by the model. Use last_epoch or last_2% (training loss)"
                f"{', or a logged one: ' + ', '.join(sorted(metrics)) if metrics else ''}"
            )
        return float(metrics[self.metric])

    def _save_noise(self, trainer: Trainer) -> None:
        for swap in swaps_of(trainer):
            if isinstance(swap.noise, SignalNoise) and swap.constants:
                assert trainer.log_dir is not None
                path = Path(trainer.log_dir) / f"noise-{swap.at_step}.json"
                save_constants(swap.constants, path, swap.noise.centred)


def window_of(metric: str) -> float | str | None:
    """The share of the run's last steps that a metric averages over, or "epoch"; None for a logged metric."""
    if metric == "last_epoch":
        return "epoch"
    percent = re.fullmatch(r"last_(\d+(?:\.\d+)?)%", metric)
    if percent is None:
        return None
    share = float(percent[1]) / 100
    if not 0 < share <= 1:
        raise UserError(f"metric {metric}: the share must be above 0 and at most 100 %")
    return share


@torch.no_grad()
def untrained_loss(trainer: Trainer, module: Growable, batch: Any) -> float:
    """The loss of a new network on a batch; 0 if a module with its own training_step cannot compute it like this."""
    net = module.net
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.random.fork_rng(devices), init_contexts(trainer), trainer.precision_plugin.forward_context():
        module.net = module.network(*module.size).to(module.device)
        try:
            with without_log(module):
                return float(module.loss(batch))
        except Exception:
            if type(module).training_step is Growable.training_step:
                raise
            return 0.0
        finally:
            module.net = net
