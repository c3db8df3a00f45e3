"""The metric of a trial in a sweep, and when a trial is stopped early."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from mupscale.callbacks.curves import Curves, losses_of_block
from mupscale.callbacks.upscale import swaps_of
from mupscale.errors import UserError
from mupscale.methods.noise import SignalNoise, save_constants
from mupscale.models._lightning import accumulates, callbacks_in
from mupscale.models.base import Growable, init_contexts, returned_loss, without_log
from mupscale.models.checkpoint import size_of

DIVERGED = 10
"""How many times the loss of an untrained network, or of the network just after a growth, counts as divergence."""

PATIENCE = 5
"""Checks in a row that must find it there. A check looks at the mean over a hundredth of the run."""


@dataclass
class TrialScore:
    """The metric of a trial from its losses, and whether it has diverged. All of it is its saved state.

    A trial has diverged if its loss is not finite, or stays above ten times the loss of an untrained network and above
    the loss just after a growth. A high loss alone does not stop a trial: with good noise levels it often starts far
    higher than with bad ones.
    """

    steps: int = 0
    """The steps of the whole run."""
    window: int = 0
    """The last steps, over which the metric averages; 0 if it is a logged one."""
    sum: Tensor | float = 0.0
    count: int = 0
    recent: Tensor | float = 0.0
    recent_count: int = 0
    strikes: int = 0
    reference: float = 0.0
    size: str | None = None
    """The size of the network whose first loss is among the references."""
    logged: float | None = None
    diverged: bool = False

    @property
    def interval(self) -> int:
        """The steps between two checks, each of which waits for the device."""
        return max(5, self.steps // 100)

    @property
    def value(self) -> float:
        """The metric of a run that is over; infinite if it diverged."""
        if self.diverged:
            return math.inf
        value = float(self.sum) / self.count if self.window else self.logged
        assert value is not None
        return value if math.isfinite(value) else math.inf

    def begin(self, metric: str, trainer: Trainer) -> None:
        """Takes the length of the run. Raises a UserError for a run that does not end, or is shorter than an epoch."""
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total) or total <= 0:
            raise UserError(
                f"trainer.max_steps, max_epochs: a trial must end, got {trainer.max_steps}, {trainer.max_epochs}"
            )
        self.steps = int(total)
        share = window_of(metric)
        if share == "epoch":
            self.window = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            if self.window > self.steps:
                raise UserError(
                    f"metric last_epoch: an epoch has {self.window} steps, the run {self.steps}; use last_2%"
                )
        elif isinstance(share, float):
            self.window = math.ceil(share * self.steps)

    def add(self, step: int, losses: Tensor) -> None:
        """Takes the losses of steps from this one on, counted from 0."""
        counted = losses[max(0, self.steps - self.window - step) :]
        self.sum = self.sum + counted.sum()
        self.count += len(counted)
        self.recent = self.recent + losses.sum()
        self.recent_count += len(losses)

    def begin_size(self, size: str, loss: float | None) -> None:
        """Takes the first loss of a network: that just after a growth may be high."""
        self.size = size
        if loss is not None and math.isfinite(loss):
            self.reference = max(self.reference, loss)

    def check(self) -> float:
        """Looks whether the trial diverges; returns the mean loss since the last look."""
        if self.recent_count == 0:  # training_step returned no loss
            return 0.0
        mean = float(self.recent) / self.recent_count
        self.recent, self.recent_count = 0.0, 0
        self.strikes = self.strikes + 1 if mean > DIVERGED * self.reference else 0
        self.diverged = self.diverged or not math.isfinite(mean) or self.strikes == PATIENCE
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {key: float(value) if isinstance(value, Tensor) else value for key, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class TrialMetric(Callback):
    """Computes the metric of a trial, stops a trial that diverges, and records constants of signal-normalised noise.

    Noise constants are written to `noise-<step>.json` in the run's folder, which `RecordedNoise` reads.

    Its saved state: that of its `score`.
    """

    progress: ClassVar[Callable[[int, int, float], None] | None] = None
    """Called about 100 times per run with the step, the number of steps, and the mean loss since the last call."""

    def __init__(self, metric: str = "last_epoch") -> None:
        """
        Args:
            metric: `last_epoch` or `last_N%` is the mean training loss over the last epoch, or over the last N % of the
                steps. Any other name is that of a logged metric, such as val/loss; its last value counts.
        """
        self.metric = metric
        self.score = TrialScore()
        self._validated: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return self.score.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.score.load_state_dict(state_dict)

    @property
    def value(self) -> float:
        """The metric of a run that is over; infinite if it diverged."""
        return self.score.value

    @property
    def checks_every(self) -> int:
        """The steps between two checks."""
        return self.score.interval

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError(
                f"trainer.devices: a trial runs on one device, got {trainer.world_size}; start more processes"
            )
        for curves in callbacks_in(trainer, Curves):
            curves.watches = False  # a trial whose loss is not finite has a result: it diverged

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated |= trainer.callback_metrics.keys()  # which Lightning forgets after the sanity check
        if self.metric.startswith("val/"):
            look_up(self.metric, trainer.callback_metrics)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A misspelt metric is reported after one epoch: what is logged at all is logged in every epoch."""
        known = trainer.current_epoch > 0 and (self._validated or not trainer.enable_validation)
        if known and window_of(self.metric) is None and self.metric not in self._validated:
            look_up(self.metric, trainer.callback_metrics)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.score.begin(self.metric, trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.score.size is None:
            self.score.reference = untrained_loss(trainer, pl_module, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        score, loss, has_stepped = self.score, returned_loss(pl_module, outputs), not accumulates(trainer)
        block = losses_of_block(outputs)
        if block is not None:
            score.add(trainer.global_step - len(block), block.double())
        elif loss is not None:
            # the step that this batch belongs to, counted from 0
            score.add(trainer.global_step - has_stepped, loss.double().reshape(1))
        size = str(size_of(pl_module))
        if size != score.size:  # the first batch, or the first after a swap
            score.begin_size(size, None if loss is None else float(loss))
            self._save_noise(trainer)
        step = trainer.global_step
        if has_stepped and (step % score.interval == 0 or step == score.steps) and score.recent_count:
            mean = score.check()
            if TrialMetric.progress is not None:
                TrialMetric.progress(step, score.steps, mean)
        if any(swap.is_due(trainer) for swap in swaps_of(trainer)):
            # what is not finite cannot be widened, and the next check may come too late
            is_finite = all(bool(weight.isfinite().all()) for weight in pl_module.parameters())
            score.diverged = score.diverged or not is_finite or not math.isfinite(score.recent)
        if score.diverged:
            trainer.should_stop = True
            # which are for runs that may yet get better
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        score = self.score
        if score.diverged:
            return
        if window_of(self.metric) is None:
            score.logged = look_up(self.metric, trainer.callback_metrics)
        elif trainer.global_step < score.steps:
            raise UserError(f"metric {self.metric}: the run ended at step {trainer.global_step} of {score.steps}")
        elif score.count == 0:
            raise UserError(
                f"metric {self.metric}: {type(pl_module).__name__}.training_step returned no loss in the last "
                f"{score.window} steps. Return the loss"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            raise exception  # Ctrl-C ends the whole sweep; Lightning would turn it into an exit of this run

    # --- parts

    def _save_noise(self, trainer: Trainer) -> None:
        for swap in swaps_of(trainer):
            if isinstance(swap.noise, SignalNoise) and swap.constants:
                assert trainer.log_dir is not None
                path = Path(trainer.log_dir) / f"noise-{swap.at_step}.json"
                save_constants(swap.constants, path, swap.noise.centred)


def look_up(metric: str, logged: Mapping[str, Any]) -> float:
    """The value of a logged metric. Raises a UserError if it is not there."""
    if metric not in logged:
        raise UserError(
            f"metric {metric} is never logged by the model. Use last_epoch or last_2% (training loss)"
            f"{', or a logged one: ' + ', '.join(sorted(logged)) if logged else ''}"
        )
    return float(logged[metric])


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
def untrained_loss(trainer: Trainer, module: Any, batch: Any) -> float:
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
