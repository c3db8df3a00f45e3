"""Functions around the step of an optimizer."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from mupscale._torch import step_hooks

_AROUND = "_mupscale_around_step"
"""Attribute of an optimizer: its pairs of functions by key, and the handles of the two hooks that call them."""


def around_step(optimizer: Optimizer, key: str, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Calls `enter` before each step of `optimizer`, once its gradients are there, and `leave` after it.

    With several pairs, the last to enter is the first to leave. `leave_alone` removes a pair by its key. Hooks are not
    part of an optimizer's state.
    """
    if _AROUND not in optimizer.__dict__:
        pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
        optimizer.__dict__[_AROUND] = pairs, _registered(optimizer, pairs)
    optimizer.__dict__[_AROUND][0][key] = enter, leave


def leave_alone(optimizer: Optimizer, key: str) -> None:
    """Removes the pair that an earlier `around_step` left under this key."""
    pairs, handles = optimizer.__dict__.get(_AROUND, ({}, ()))
    pairs.pop(key, None)
    if not pairs and handles:
        for handle in handles:
            handle.remove()
        del optimizer.__dict__[_AROUND]


def has_other_hooks(optimizer: Optimizer, *keys: str) -> bool:
    """Whether something is called around the steps of `optimizer`, besides the pairs with these keys."""
    pairs, handles = optimizer.__dict__.get(_AROUND, ({}, ()))
    return not pairs.keys() <= set(keys) or step_hooks(optimizer) > len(handles)


def _registered(optimizer: Optimizer, pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]]) -> Any:
    def enter_all() -> None:
        for enter, _ in pairs.values():
            enter()

    def leave_all(*_: Any) -> None:
        for _enter, leave in reversed(pairs.values()):
            leave()

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is None:
            enter_all()
            return args, kwargs

        def closure_then_enter() -> Any:  # the closure computes the gradients, so it must see the weights as they are
            loss = closure()
            enter_all()
            return loss

        return args[:1], {**kwargs, "closure": closure_then_enter}

    return optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(leave_all)
