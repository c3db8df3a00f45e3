"""Functions around the step of an optimizer."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def around_step(optimizer: Optimizer, attribute: str, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Calls `enter` before each step of `optimizer`, once its gradients are there, and `leave` after it.

    The hooks are kept under `attribute`, by which `leave_alone` finds them. They are not part of an optimizer's state.
    """

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is None:
            enter()
            return args, kwargs

        def closure_then_enter() -> Any:  # the closure computes the gradients, so it must see the weights as they are
            loss = closure()
            enter()
            return loss

        return args[:1], {**kwargs, "closure": closure_then_enter}

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: leave())
    optimizer.__dict__[attribute] = handles


def leave_alone(optimizer: Optimizer, attribute: str) -> None:
    """Removes the hooks that an earlier `around_step` left under `attribute`."""
    for handle in optimizer.__dict__.pop(attribute, ()):
        handle.remove()
