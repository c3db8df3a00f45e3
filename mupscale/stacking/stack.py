"""Stacked models: their tensors share memory, and one step updates all of them.

Each model and each optimizer remains usable. Its parameters, buffers and state become views of tensors with a leading
axis, one entry for each model, so a checkpoint, a validation or an upscale of one model needs no copies. Only the step
is shared.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from mupscale._torch import step_hooks, tree_leaves, tree_map
from mupscale.cuda_graph import StaticBatch, capturing
from mupscale.errors import UserError
from mupscale.methods.ligo import Called
from mupscale.stacking.adjustments import StackedClip
from mupscale.stacking.compiled import Compiled
from mupscale.stacking.dropout import StackedDropout
from mupscale.stacking.optimizers import StackedOptimizer, stacked_kind, stacked_optimizer

Losses = Callable[[dict[str, Tensor], dict[str, Tensor], Any, bool], Tensor]
"""The losses of all models on a batch, by their parameters and buffers, stacked by name. The flag says whether one
batch is for all of them; otherwise its tensors have a leading axis too."""


Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which losses are computed, such as one of `torch.autocast`."""

MaxNorm = Tensor | float | None
"""The norm that gradients are clipped to: a number, or one for each model; None if they are not."""

Scoring = Callable[[nn.Module, Any], dict[str, Tensor]]
"""What is measured of a model on a batch, by name."""


class Stack:
    """Models of one architecture that are trained together.

    stack = Stack(models, optimizers, lambda model, batch: model.loss(batch))
    losses = stack.step(batch)

    Attributes:
        seeds: One for each model: its dropout masks in the next step depend on it. Copy new ones into it before each
            step, as by `stack.seeds.copy_(mixed(seeds_of_runs, global_step))`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loss: Callable[[nn.Module, Any], Tensor],
        losses: Losses | None = None,
        *,
        compiled: bool = False,
        fused: bool | None = None,
    ) -> None:
        """
        Args:
            models: Of one architecture and width, on one device.
            optimizers: One for each, of one class; their numbers may differ.
            loss: The loss of one model on a batch.
            losses: The losses of all of them, where there is a faster way than `torch.vmap` of `loss`.
            compiled: Compile the losses and the update of the weights with `torch.compile`.
            fused: Compile the update of the weights, or not; by default as the losses.
        """
        refuse_unlike(models, optimizers)
        self.models, self.optimizers = list(models), list(optimizers)
        self.parameters = {name: _joined(tensors) for name, tensors in _by_name(models, "named_parameters").items()}
        self.buffers = {name: _joined(tensors) for name, tensors in _by_name(models, "named_buffers").items()}
        self.trained = [name for name, parameter in models[0].named_parameters() if parameter.requires_grad]
        for name in self.trained:
            self.parameters[name].requires_grad_()
        trained = {name: self.parameters[name] for name in self.trained}
        self.optimizer: StackedOptimizer = stacked_optimizer(
            trained, models, optimizers, compiled=compiled if fused is None else fused
        )
        self.clip = StackedClip(models, trained)
        device = next(iter(self.parameters.values())).device
        self.seeds = torch.zeros(len(models), dtype=torch.int64, device=device)
        self._losses = losses or mapped(models[0], loss, self.seeds, compiled=compiled)
        if losses is not None and compiled:
            self._losses = Compiled(losses, "the losses of a stack")

    def step(
        self, batch: Any, *, shared: bool = True, max_norm: MaxNorm = None, context: Context = nullcontext
    ) -> Tensor:
        """Takes a step of every model; returns the losses before it.

        Learning rates and other hyperparameters are read from the optimizers. The gradients of each model are clipped
        by their width-invariant norm.
        """
        self.optimizer.read_numbers()
        return self.advance(batch, shared=shared, max_norm=max_norm, context=context)

    def advance(
        self, batch: Any, *, shared: bool = True, max_norm: MaxNorm = None, context: Context = nullcontext
    ) -> Tensor:
        """Takes a step with the hyperparameters that were read last.

        Reading those of 100 models takes longer than a small step. Call `stack.optimizer.read_numbers()` if any may
        have changed, or `read_rates()` if only learning rates have.
        """
        with context():
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

    def measure(self, batch: Any, *, shared: bool = True) -> Tensor:
        """The losses of all models on a batch, leaving the buffers as they are."""
        with torch.no_grad():
            buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
            return self._losses(self.parameters, buffers, batch, shared)

    def evaluate(self, function: Scoring, batch: Any, *, shared: bool = True) -> dict[str, Tensor]:
        """What the function measures of each model on a batch, with all modules in eval mode; no weight changes.

        stack.evaluate(lambda model, batch: {"loss": model.loss(batch)}, batch)["loss"]     # one for each model

        The models have their modes back afterwards.
        """
        with torch.no_grad(), _evaluating(self.models[0]):
            return mapped(self.models[0], function, self.seeds)(self.parameters, self.buffers, batch, shared)

    def changing(self) -> list[Tensor]:
        """All tensors that a step changes."""
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        counts = [self.optimizer.steps, self.optimizer.begun]
        return [*self.parameters.values(), *self.buffers.values(), *states, *counts]


def mapped(
    model: nn.Module, function: Callable[[nn.Module, Any], Any], seeds: Tensor, *, compiled: bool = False
) -> Callable[[dict[str, Tensor], dict[str, Tensor], Any, bool], Any]:
    """What a function, such as the loss, is for all models, by `torch.vmap`.

    Dropout depends on the seeds, one for each model. A function that draws other random numbers is refused.
    """

    def single(parameters: dict[str, Tensor], buffers: dict[str, Tensor], seed: Tensor, batch: Any) -> Any:
        with StackedDropout(seed):
            return torch.func.functional_call(caller, ({**prefixed(parameters), **prefixed(buffers)},), (batch,))

    def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    def each(parameters: dict[str, Tensor], buffers: dict[str, Tensor], seeds: Tensor, batch: Any, shared: bool) -> Any:
        in_dims = (0, 0, 0, None if shared else 0)
        return torch.vmap(single, in_dims=in_dims, randomness="error")(parameters, buffers, seeds, batch)

    def all_of_them(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any, shared: bool) -> Any:
        with sdpa_kernel(SDPBackend.MATH):  # other kernels of attention cannot be mapped
            return run(parameters, buffers, seeds, batch, shared)

    caller = Called(model, function)
    run = Compiled(each, "the losses of a stack") if compiled else each
    return all_of_them


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def refuse_unlike(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raises a UserError if these cannot take their steps together, with what differs."""
    if not models or len(models) != len(optimizers):
        raise UserError(f"a stack needs an optimizer for each model, got {len(models)} and {len(optimizers)}")
    if any(step_hooks(optimizer) for optimizer in optimizers):
        raise UserError("the optimizer has hooks of its steps, which a stack cannot call")
    first = signature(models[0])
    for index, model in enumerate(models):
        other = signature(model)
        if other == first:
            continue
        odd = next(name for name in {**first, **other} if first.get(name) != other.get(name))
        here, there = (" ".join(map(str, parts.get(odd, ["missing"]))) for parts in (first, other))
        raise UserError(
            f"models that stack are of one architecture and width; {odd} is {here} in the first and {there} in number "
            f"{index}"
        )


def signature(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What models of one stack have in common: names, shapes, precisions and devices, and what is trained."""
    parts: dict[str, tuple[Any, ...]] = {"the class": (type(model).__name__,)}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        parts[name] = (tuple(tensor.shape), tensor.dtype, str(tensor.device), *(["frozen"] if frozen else []))
    parts["the mode"] = tuple(module.training for module in model.modules())
    return parts


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


WARM_UP_STEPS = 3
"""Calls before a capture, in which kernels are compiled and chosen. Their effects are undone."""


class Captured:
    """A function of a batch, captured once and replayed for every further batch of the same kind."""

    def __init__(
        self, function: Callable[[Any], Any], batch: Any, device: torch.device, what: str, state: Sequence[Tensor] = ()
    ) -> None:
        """`what` the function does, in words; the tensors of `state`, which it changes, are as before afterwards."""
        self._function = function  # held, with the memory that the graph reads
        self._inputs = StaticBatch(batch, device)
        stream, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        kept = [tensor.detach().cpu() for tensor in state]  # the device may have no room for copies
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                function(self._inputs.batch)
        stream.wait_stream(side)
        with torch.no_grad():
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        del kept
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, what):
            self._answer = function(self._inputs.batch)

    def __call__(self, batch: Any) -> Any:
        """What the function returns of a batch of the right kind; the next call overwrites it. Nothing waits."""
        self._inputs.fill(batch)
        self._graph.replay()
        return self._answer


class CapturedStack(Captured):
    """A step of a stack on a CUDA device.

    step = CapturedStack(stack, batch)
    for batch in batches:
        stack.optimizer.read_rates()
        losses = step(batch)

    Learning rates and the other numbers, the seeds of the stack, and `max_norm` where it is a tensor are read from
    memory on the device, so they may change between steps. What else a step depends on, such as the modes of
    the models, is part of the graph. Holds its gradients and activations for as long as it lives.
    """

    def __init__(
        self, stack: Stack, batch: Any, *, shared: bool = True, max_norm: MaxNorm = None, context: Context = nullcontext
    ) -> None:
        """The arguments are those of `Stack.step`. No step has been taken afterwards."""
        stack.optimizer.begin()

        def step(batch: Any) -> Tensor:
            return stack.advance(batch, shared=shared, max_norm=max_norm, context=context)

        super().__init__(step, batch, stack.seeds.device, "a step of a stack", stack.changing())

    def __call__(self, batch: Any) -> Tensor:
        """Takes the step on a batch of the right kind; the losses before it, on the device. Nothing waits."""
        return super().__call__(batch).clone()


def captured_scores(stack: Stack, function: Scoring, batch: Any, *, shared: bool, context: Context) -> Captured:
    """What a function measures of all models of a stack (`Stack.evaluate`)."""

    def evaluate(batch: Any) -> dict[str, Tensor]:
        with context():
            return stack.evaluate(function, batch, shared=shared)

    return Captured(evaluate, batch, stack.seeds.device, "a validation of a stack")


WORKSPACE = 0.01
"""The extra memory of kernels as a share of their operands, for example for partial sums over many rows."""


def bytes_per_model(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    losses: Losses | None = None,
    amsgrad: bool = False,
    grown: bool = False,
) -> int:
    """An upper estimate of the memory that one more model of a stack takes at the peak of a step, in bytes.

    It has the weights, their gradients, the optimizer's state, what autograd saves, and temporaries of the backward
    pass and of the update. Losses are computed with tensors that have shapes only. Each model has a batch of its own:
    with one for all of them, or with `torch.autocast`, a step takes less. If models of the stack are `grown`, or will
    be, their updates may need masks, or other units.
    """
    moments = stacked_kind(optimizer_class).moments + amsgrad
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fixed = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    weights = _bytes(trained)
    saved, largest_saved = saved_per_model(model, loss, batch, losses)
    # the gradients that enter and leave an operation; with kernels of its own a GPU was found to hold one more
    backward = saved + (2 if losses is None else 3) * largest_saved
    largest = max((parameter.nbytes for parameter in trained), default=0)
    update = weights + (5 if grown else 2) * largest  # clipped gradients, and the temporaries of one weight
    masks = sum(parameter.numel() for parameter in trained) if grown else 0
    again = moments * weights if grown else 0  # where all are stacked anew, they are there twice, without gradients
    others = _bytes([*model.buffers(), *fixed, *_tensors(batch)])
    return int((1 + WORKSPACE) * (others + masks + weights * (2 + moments) + max(backward, update, again)))


def saved_per_model(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, losses: Losses | None = None
) -> tuple[int, int]:
    """The bytes that autograd saves for the backward pass of one more model, and those of the largest tensor."""
    seeds = torch.zeros(3, dtype=torch.int64, device="meta")

    def measured(count: int) -> dict[int, int]:
        run = losses or mapped(model, loss, seeds[:count])
        parameters = {name: _stacked(tensor, count) for name, tensor in model.named_parameters()}
        buffers = {name: _stacked(tensor, count) for name, tensor in model.named_buffers()}
        inputs = tree_map(lambda leaf: _stacked(leaf, count) if isinstance(leaf, Tensor) else leaf, batch)
        given = (*parameters.values(), *buffers.values(), *_tensors(inputs))
        known = {id(tensor.untyped_storage()) for tensor in given}
        found: dict[int, Any] = {}  # storages by id; they are held, so that no other gets it

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in known:
                found[id(storage)] = storage
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
            result = run(parameters, buffers, inputs, False)
        del result
        return {key: storage.nbytes() for key, storage in found.items()}

    two, three = measured(2), measured(3)
    return sum(three.values()) - sum(two.values()), -(-max(three.values(), default=0) // 3)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _stacked(tensor: Tensor, count: int) -> Tensor:
    made = torch.empty(count, *tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)
