"""Models that train side by side: their tensors lie in one memory, and one step moves all of them.

Each model and each optimizer stays what it was. Its parameters, buffers and state become views of tensors with a
leading axis, one entry for each model; so a checkpoint, a validation or an upscale of a single one needs nothing to be
copied. Only the step is shared.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.stacking.clip import StackedClip
from mupscale.stacking.optimizers import StackedOptimizer, stacked_optimizer
from mupscale.widening.width_table import merged_table

Losses = Callable[[dict[str, Tensor], dict[str, Tensor], Any, bool], Tensor]
"""The losses of all models on a batch, by their parameters and buffers, stacked by name. The flag says whether one
batch is for all of them; otherwise its tensors have a leading axis too."""


class Stack:
    """Models of one architecture that take their steps together.

    stack = Stack(models, optimizers, lambda model, batch: model.loss(batch))
    losses = stack.step(batch)
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loss: Callable[[nn.Module, Any], Tensor],
        losses: Losses | None = None,
    ) -> None:
        """
        Args:
            models: Of one architecture and width, on one device.
            optimizers: One for each, of one class; their numbers may differ.
            loss: The loss of one model on a batch.
            losses: The losses of all of them, where there is a faster way than `torch.vmap` of `loss`.
        """
        refuse_unlike(models, optimizers)
        self.models, self.optimizers = list(models), list(optimizers)
        self.parameters = {name: _joined(tensors) for name, tensors in _by_name(models, "named_parameters").items()}
        self.buffers = {name: _joined(tensors) for name, tensors in _by_name(models, "named_buffers").items()}
        self.trained = [name for name, parameter in models[0].named_parameters() if parameter.requires_grad]
        for name in self.trained:
            self.parameters[name].requires_grad_()
        trained = {name: self.parameters[name] for name in self.trained}
        self.optimizer: StackedOptimizer = stacked_optimizer(trained, models, optimizers)
        self.clip = StackedClip(models[0], self.trained)
        self._losses = losses or mapped(models[0], loss)

    def __len__(self) -> int:
        return len(self.models)

    def step(self, batch: Any, *, shared: bool = True, max_norm: Tensor | float | None = None) -> Tensor:
        """Takes a step of every model; returns the losses before it.

        Learning rates and the like are read from the optimizers, as they are now. Gradients are clipped to
        `max_norm`, a number or one for each model, by the width-invariant norm of each.
        """
        losses = self.losses(batch, shared=shared)
        weights = [self.parameters[name] for name in self.trained]
        gradients: Sequence[Tensor | None] = torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        with torch.no_grad():
            if max_norm is not None:
                gradients = self.clip(gradients, max_norm)
            self.optimizer.step(gradients)
        return losses.detach()

    def losses(self, batch: Any, *, shared: bool = True) -> Tensor:
        """The losses of all models on a batch: one for all, or with a leading axis one for each."""
        return self._losses(self.parameters, self.buffers, batch, shared)


def mapped(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> Losses:
    """The losses of all models by `torch.vmap`; random numbers, as of dropout, are each model's own."""

    def single(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
        return torch.func.functional_call(caller, ({**prefixed(parameters), **prefixed(buffers)},), (batch,))

    def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    def all_of_them(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any, shared: bool) -> Tensor:
        each = torch.vmap(single, in_dims=(0, 0, None if shared else 0), randomness="different")
        with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
            return each(parameters, buffers, batch)

    on_cpu = next(model.parameters()).device.type == "cpu"  # where other kernels of attention cannot be mapped
    caller = _Loss(model, loss)
    return all_of_them


class _Loss(nn.Module):
    """A loss as the call of a module, which `functional_call` can make with other tensors."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def refuse_unlike(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """UserError if these cannot take their steps together, with what differs."""
    if not models or len(models) != len(optimizers):
        raise UserError(f"a stack needs an optimizer for each model, got {len(models)} and {len(optimizers)}")
    first = signature(models[0])
    for index, model in enumerate(models):
        if any(width.relative for width in merged_table(model).values()):
            raise UserError("a model does not stack where pieces of one parameter grew by different factors")
        other = signature(model)
        if other == first:
            continue
        odd = next(name for name in {**first, **other} if first.get(name) != other.get(name))
        raise UserError(
            f"models that stack are of one architecture and width; {odd} is {_text(first.get(odd))} in the first and "
            f"{_text(other.get(odd))} in number {index}"
        )


def signature(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What models of one stack have in common: names, shapes, precisions and devices, and what is trained."""
    parts: dict[str, tuple[Any, ...]] = {"the class": (type(model).__name__,)}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        parts[name] = (tuple(tensor.shape), tensor.dtype, str(tensor.device), *(["frozen"] if frozen else []))
    parts["the mode"] = tuple(module.training for module in model.modules())
    return parts


def _text(parts: tuple[Any, ...] | None) -> str:
    return "missing" if parts is None else " ".join(str(part) for part in parts)


def _by_name(models: Sequence[nn.Module], method: str) -> dict[str, list[Tensor]]:
    """The tensors of all models by name; a tied one has one name."""
    found: dict[str, list[Tensor]] = {}
    for model in models:
        for name, tensor in getattr(model, method)():
            found.setdefault(name, []).append(tensor)
    return found


def _joined(tensors: list[Tensor]) -> Tensor:
    """One tensor with all of these, which become views of it."""
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, stacked.unbind(), strict=True):
        tensor.data = part
    return stacked
