"""One training step of a LightningModule without its effects: the losses that it would train on."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mupscale._torch import is_compiled_in_place
from mupscale.checks.recording import generators_kept, map_leaves, state_kept
from mupscale.errors import UserError
from mupscale.models._lightning import attach_trainer, replace_attributes
from mupscale.models.base import without_log

ModuleCall = Callable[[Any, Any], Any]
"""What is compared of a module and a batch."""


class QuietStep:
    """The losses of a training step on one batch, of the module of a run or of copies of it.

    They are what `training_step` returns, or under manual optimization what it gives to `self.manual_backward`.
    Nothing is logged, and no optimizer makes a step.
    """

    def __init__(self, trainer: Trainer, batch: Any, batch_idx: int, call: ModuleCall | None = None) -> None:
        self.trainer, self.batch, self.batch_idx, self.call = trainer, batch, batch_idx, call

    def __call__(self, module: Any) -> list[Tensor]:
        batch = map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, self.batch)
        losses: list[Any] = []
        with attach_trainer(module, QuietTrainer(self.trainer)), without_log(module), _idle(module, losses):
            if self.call is not None:
                return [self.call(module, batch)]
            returned = module.training_step(*self._arguments(module, batch))
        if losses:
            return losses
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        if isinstance(loss, Tensor):
            return [loss]
        name = type(module).__name__
        if module.automatic_optimization:
            raise UserError(
                f"UpscaleCallback: {name}.training_step returned no loss, so nothing can be compared. Give call=, a "
                "function of the module and a batch that returns what the module computes"
            )
        raise UserError(
            f"UpscaleCallback: {name}.training_step gives no loss to self.manual_backward, so nothing can be compared. "
            "Use self.manual_backward(loss) in place of loss.backward(), or give call=, a function of the module and a "
            "batch that returns what the module computes"
        )

    def total(self, module: LightningModule) -> Tensor:
        return torch.stack([loss.detach().double().sum() for loss in self(module)]).sum()

    def _arguments(self, module: LightningModule, batch: Any) -> list[Any]:
        """What `training_step` gets from Lightning: the batch and, if it takes a second argument, its number."""
        taken = inspect.signature(type(module).training_step).parameters
        if "dataloader_iter" in taken:
            raise UserError(
                f"UpscaleCallback: {type(module).__name__}.training_step takes dataloader_iter, which has no batch to "
                "compare on. Take (batch, batch_idx), or give call=, a function of the module and a batch"
            )
        takes_number = len(taken) > 2 or any(each.kind is each.VAR_POSITIONAL for each in taken.values())
        return [batch, self.batch_idx] if takes_number else [batch]


def count_flops(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> float:
    """Floating-point operations of a forward and backward pass of a module, counted in a step without effects."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        with (
            generators_kept([module.device]),
            state_kept(module.modules()),
            torch.enable_grad(),
            run_eagerly(module),
            trainer.precision_plugin.forward_context(),
            FlopCounterMode(display=False) as counter,
        ):
            losses = QuietStep(trainer, batch, batch_idx)(module)
            torch.autograd.grad([loss.sum() for loss in losses], parameters, allow_unused=True)
    except Exception as error:  # whatever a module does
        raise UserError(f"the FLOPs of {type(module).__name__} cannot be counted ({error})") from error
    return float(counter.get_total_flops())


def run_eagerly(module: LightningModule) -> AbstractContextManager[Any]:
    """Switches a compiled network to eager execution, for what is not worth compiling for."""
    is_compiled = any(map(is_compiled_in_place, module.modules()))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


class QuietTrainer:
    """A trainer, but for its loggers, which write nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._real = trainer
        self.logger = DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class IdleOptimizer:
    """An optimizer, or a schedule, whose steps do nothing but call their closure."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.param_groups = [dict(group) for group in getattr(real, "param_groups", ())]

    def step(self, *arguments: Any, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        closure = next((each for each in arguments if callable(each)), closure)
        return None if closure is None else closure()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def toggle_model(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _idle(module: LightningModule, losses: list[Any]) -> AbstractContextManager[None]:
    """Manual optimization does nothing meanwhile; the losses of its backward passes are in the list."""
    trainer = module.trainer
    optimizers, schedules = trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]
    idle: dict[str, Any] = {
        "optimizers": lambda use_pl_optimizer=True: _one_or_all([IdleOptimizer(each) for each in optimizers]),
        "lr_schedulers": lambda: _one_or_all([IdleOptimizer(each) for each in schedules]) if schedules else None,
        "manual_backward": lambda loss, *_, **__: losses.append(loss),
        "toggled_optimizer": lambda optimizer: nullcontext(),
        **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer", "clip_gradients"), lambda *_, **__: None),
    }
    return replace_attributes(module, idle)


def _one_or_all(things: list[Any]) -> Any:
    return things[0] if len(things) == 1 else things
