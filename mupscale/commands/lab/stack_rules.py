"""Which fits can be stacked, and which of their steps need no hooks."""

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from mupscale.callbacks.fast_loop import why_single
from mupscale.callbacks.step_blocks import has_step_hooks
from mupscale.callbacks.strides import Strides, strides_of
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_of
from mupscale.models._lightning_loop import (
    epochs_are_plain,
    steps_before_the_end,
    steps_before_validation,
    training_loader,
    validates,
    validation_loader,
)
from mupscale.models.base import Growable
from mupscale.stacking.around import has_unknown_hooks
from mupscale.stacking.optimizers import KINDS

OF_EPOCHS = (
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip


class Apart(UserError):
    """A fit cannot be stacked with others; the message is the reason."""


def free_steps(trainer: Trainer) -> float:
    """How many of the next steps of a fit need no hooks, validations and ends of epochs among them."""
    module = trainer.lightning_module
    if trainer.should_stop:
        return 0  # it continues until min_epochs or min_steps
    if training_loader(trainer) is None or has_step_hooks(trainer):
        return 0
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, Strides)]
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
    if has_unknown_hooks(optimizers[0]):
        return "the optimizer has hooks of its steps, which a stack cannot call"
    return None
