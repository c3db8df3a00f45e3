"""Signals that a process gets at a certain moment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.pytorch import Trainer


@contextmanager
def signalled_before(owner: Any, name: str, number: int, step: int = 0, call: int = 1) -> Iterator[None]:
    """Sends a signal to this process before a call of a function: the so-manieth of those from a step on."""
    function, calls = getattr(owner, name), []

    def signalled(*arguments: Any, **named: Any) -> Any:
        trainer = next((argument for argument in arguments if isinstance(argument, Trainer)), None)
        if trainer is None or trainer.global_step >= step:
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), number)
        return function(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, signalled)
        yield
    assert len(calls) >= call
