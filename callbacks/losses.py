"""The losses of a training step without its effects, and what is measured by them: the loss around a growth, FLOPs."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mupscale._torch import is_compiled_in_place
from mupscale.checks.precision import WithoutDropout
from mupscale.checks.real_step import StepWatch
from mupscale.checks.recording import generators_kept, held_values, leaves_of, map_leaves, put_back, state_kept
from mupscale.errors import UserError
from mupscale.models._lightning import attach_trainer, replace_attributes
from mupscale.models.base import without_log
from mupscale.widening.modules import dropout_of

ModuleCall = Callable[[Any, Any], Any]
"""What is compared of a module and a batch, in the place of its losses."""


def losses_of_step(
    trainer: Trainer, module: Any, batch: Any, batch_idx: int = 0, call: ModuleCall | None = None
) -> list[Tensor]:
    """What `training_step` returns or, under manual optimization, gives to `self.manual_backward`.

    Nothing is logged, and no optimizer makes a step. `module` is that of the run, or one like it.
    """
    batch = map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
    quiet = copy.copy(trainer)
    quiet.loggers = [DummyLogger()]
    losses: list[Any] = []
    name, instead = type(module).__name__, "call=, a function of the module and a batch that returns what it computes"
    with attach_trainer(module, quiet), without_log(module), _idle(module, losses):
        if call is not None:
            return [call(module, batch)]
        taken = inspect.signature(module.training_step).parameters
        if "dataloader_iter" in taken:
            raise UserError(
                f"{name}.training_step takes dataloader_iter, which has no batch to compare on. Give {instead}"
            )
        takes_number = len(taken) > 1 or any(each.kind is each.VAR_POSITIONAL for each in taken.values())
        returned = module.training_step(*[batch, batch_idx][: 1 + takes_number])
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if losses or isinstance(loss, Tensor):
        return losses or [loss]
    if module.automatic_optimization:
        raise UserError(f"{name}.training_step returned no loss, so nothing can be compared. Give {instead}")
    raise UserError(
        f"{name}.training_step gives no loss to self.manual_backward, so nothing can be compared. Use "
        f"self.manual_backward(loss) in place of loss.backward(), or give {instead}"
    )


class IdleOptimizer:
    """An optimizer, or a schedule, whose steps do nothing but call their closure."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.param_groups = [dict(group) for group in getattr(real, "param_groups", ())]

    def __getattr__(self, name: str) -> Any:
        return _call_closure if name in ("step", "zero_grad", "toggle_model") else getattr(self._real, name)


def _call_closure(*arguments: Any, closure: Any = None, **_: Any) -> Any:
    closure = next(filter(callable, arguments), closure)
    return nullcontext() if closure is None else closure()


def _idle(module: LightningModule, losses: list[Any]) -> AbstractContextManager[None]:
    """Manual optimization does nothing meanwhile; the losses of its backward passes are in the list."""
    trainer = module.trainer
    optimizers = [IdleOptimizer(each) for each in trainer.optimizers]
    schedules = [IdleOptimizer(config.scheduler) for config in trainer.lr_scheduler_configs]
    idle: dict[str, Any] = {
        "optimizers": lambda use_pl_optimizer=True: optimizers[0] if len(optimizers) == 1 else optimizers,
        "lr_schedulers": lambda: schedules[0] if len(schedules) == 1 else schedules or None,
        "manual_backward": lambda loss, *_, **__: losses.append(loss),
        "toggled_optimizer": lambda optimizer: nullcontext(),
        **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer", "clip_gradients"), lambda *_, **__: None),
    }
    return replace_attributes(module, idle)


@contextmanager
def effects_undone(module: LightningModule) -> Iterator[None]:
    """Undoes what a module writes meanwhile: random numbers, attributes, buffers, and weights.

    A `training_step` may move weights itself, as those of a momentum encoder. Sharded weights are left as they are.
    """
    parameters = [] if module.device_mesh is not None else list(module.parameters())
    held, watch = held_values(parameters, {id(parameter) for parameter in parameters}), StepWatch((), {})
    with generators_kept([module.device]), state_kept(module.modules()):
        try:
            with watch if parameters else nullcontext():
                yield
        finally:
            watch.undo()
            put_back(held)


class Measured(NamedTuple):
    """The loss of a batch over all ranks."""

    loss: Tensor
    random_state: Tensor
    """The state of torch's generator after it: two networks that draw equally many numbers end with the same."""


def measure_loss(trainer: Trainer, module: LightningModule, batch: Any, call: ModuleCall | None) -> Measured:
    """The loss of a batch without dropout, leaving what the module holds and the random numbers of the run alone."""
    on_gpu = module.device.type == "cuda"
    precision = trainer.precision_plugin.forward_context()
    with effects_undone(module), precision, run_eagerly(module), WithoutDropout():
        for part in module.modules():
            part.training = part.training and not dropout_of(part)
        losses = losses_of_step(trainer, module, batch, call=call)
        loss = torch.stack([loss.detach().double().sum() for loss in losses]).sum()
        value = trainer.strategy.reduce(loss, reduce_op="mean")
        random_state = torch.cuda.get_rng_state(module.device) if on_gpu else torch.get_rng_state()
    reshard_(module)
    return Measured(value, random_state)


def reshard_(module: LightningModule) -> None:
    """Shards parameters again that FSDP2 keeps whole after a pass without a backward one, such as a validation."""
    for part in module.modules():
        reshard: Any = getattr(part, "reshard", None)
        if reshard is not None:
            reshard()


def count_flops(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> float:
    """Floating-point operations of a forward and backward pass: counted in a step without effects, on the device.

    A module that can do so without a step has a method `training_flops(batch)`.
    """
    own = getattr(module, "training_flops", None)
    if callable(own):
        return float(own(batch))
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        with (
            effects_undone(module),
            torch.enable_grad(),
            run_eagerly(module),
            trainer.precision_plugin.forward_context(),
            FlopCounterMode(display=False) as counter,
        ):
            losses = losses_of_step(trainer, module, batch, batch_idx)
            torch.autograd.grad([loss.sum() for loss in losses], parameters, allow_unused=True)
    except Exception as error:  # whatever a module does
        raise UserError(f"the FLOPs of {type(module).__name__} cannot be counted ({error})") from error
    return float(counter.get_total_flops())


def run_eagerly(module: LightningModule) -> AbstractContextManager[Any]:
    """Switches a compiled network to eager execution, for what is not worth compiling for."""
    is_compiled = any(map(is_compiled_in_place, module.modules()))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def first_samples(batch: Any, count: int) -> Any:
    """The same structure with the first samples of all tensors that are as long as the batch."""
    sizes = [len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.ndim]

    def cut(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == sizes[0] else leaf

    return map_leaves(cut, batch)
