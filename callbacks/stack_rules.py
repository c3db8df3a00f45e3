"""Which fits can be stacked, and which of their steps need no hooks."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from mupscale.callbacks.strides import Strides, strides_of
from mupscale.models._lightning import callbacks_of, datamodule_of, detects_anomalies, profiler_of
from mupscale.models._lightning_loop import (
    epochs_are_plain,
    steps_before_the_end,
    steps_before_validation,
    training_loader,
    validates,
    validation_loader,
)
from mupscale.models.base import Growable
from mupscale.stacking.optimizers import KINDS

INSIDE_A_STEP = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "backward", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
"""Hooks of modules and callbacks that a captured step, or one of a stack, cannot call."""

OF_STEPS = ("on_train_batch_start", "on_train_batch_end")

OF_EPOCHS = (
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def free_steps(trainer: Trainer) -> float:
    """How many of the next steps of a fit need no hooks, validations and ends of epochs among them."""
    module = trainer.lightning_module
    if trainer.should_stop:
        return 0  # it continues until min_epochs or min_steps
    if training_loader(trainer) is None or any(is_overridden(hook, module) for hook in OF_STEPS):
        return 0
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, Strides)]
    if any(is_overridden(hook, callback) for hook in OF_STEPS for callback in others):
        return 0
    steps = steps_before_the_end(trainer)
    has_hooks = any(is_overridden(hook, owner) for hook in OF_EPOCHS for owner in (module, *others))
    is_alone = validates(trainer) and not is_scored_jointly(trainer)
    if has_hooks or is_alone or not epochs_are_plain(trainer):
        steps = min(steps, steps_before_validation(trainer))
    return max(0, min([steps, *(callback.free_steps(trainer, module) for callback in strides_of(trainer))]))


def is_scored_jointly(trainer: Trainer) -> bool:
    """Whether validations of many fits can be computed at once: no hook needs their single batches."""
    module = trainer.lightning_module
    hooks = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end")
    owners = [module, *(callback for callback in callbacks_of(trainer) if not isinstance(callback, Strides))]
    return (
        isinstance(module, Growable)
        and module.joint_scores() is not None
        and validation_loader(trainer) is not None
        and not any(is_overridden(hook, module) for hook in ("on_validation_epoch_end", "on_validation_end"))
        and not any(is_overridden(hook, owner) for hook in hooks for owner in owners)
    )


def hook_inside_a_step(trainer: Trainer) -> tuple[str, str] | None:
    """The class and the name of a hook that neither a captured step nor one of a stack calls; None if there is none."""
    owners = [(callback, Callback) for callback in callbacks_of(trainer)]
    for owner, kind in (*owners, (trainer.lightning_module, LightningModule)):
        for hook in INSIDE_A_STEP:
            if hasattr(kind, hook) and is_overridden(hook, owner, kind):
                return type(owner).__name__, hook
    return None


def why_single(trainer: Trainer) -> str | None:
    """Why Lightning must take each step of a fit, so that it is neither captured nor stacked; None if it need not."""
    module, plugin, data = trainer.lightning_module, trainer.precision_plugin, datamodule_of(trainer)
    name = type(module).__name__
    if not isinstance(module, Growable):
        return f"the model is a {name}, not a Growable"
    if type(trainer.strategy) is not SingleDeviceStrategy:
        return "the run has several devices"
    if not module.automatic_optimization:
        return f"{name} has manual optimization"
    if trainer.accumulate_grad_batches != 1:
        return f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, not 1"
    if not isinstance(profiler_of(trainer), PassThroughProfiler):
        return "trainer.profiler needs single steps"
    if detects_anomalies(trainer):
        return "trainer.detect_anomaly needs single steps; set it to false"
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        return "trainer.precision is 16-mixed, which scales each loss; use bf16-mixed"
    for method in ("training_step", "on_train_batch_start", *TRANSFER):
        if getattr(type(module), method) is not getattr(Growable, method):
            return f"{name} overrides {method}"
    if any(is_overridden(hook, data) for hook in TRANSFER):
        return f"{type(data).__name__} has a hook that transfers batches"
    inside = hook_inside_a_step(trainer)
    return None if inside is None else f"{inside[0]} has a hook inside the step, {inside[1]}"


def why_apart(trainer: Trainer) -> str | None:
    """Why a fit cannot be stacked with others; None if it can."""
    module, optimizers = trainer.lightning_module, trainer.optimizers
    reason = why_single(trainer)
    if reason is not None:
        return reason
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        return "trainer.gradient_clip_algorithm is value"
    if type(module).configure_gradient_clipping is not Growable.configure_gradient_clipping:
        return f"{type(module).__name__} overrides configure_gradient_clipping"
    if len(optimizers) != 1 or type(optimizers[0]) not in KINDS:
        names = ", ".join(kind.__name__ for kind in KINDS)
        return f"{type(optimizers[0]).__name__} cannot step many models at once; {names} can"
    return None
