"""Jobs that take turns in one process: each has its own thread, and one runs at a time.

A job that calls `wait` passes a request and pauses until its next turn. Each job has its own random numbers, standard
output, and seed in the environment.
"""

import os
import random
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

_CURRENT: ContextVar["FitThread | None"] = ContextVar("fit_thread", default=None)

_ENVIRONMENT = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def current_fit_thread() -> "FitThread | None":
    """The job whose thread this is; None in any other thread."""
    return _CURRENT.get()


class FitThread:
    """A job in a thread, which runs only during its turn."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job = job
        self._thread = threading.Thread(target=self._run, daemon=True, name="fit")
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._own = ProcessState()
        self._answer: Any = None
        self._raised: BaseException | None = None
        self.request: Any = None
        """What it waits for."""
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def turn(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Runs it until it waits again or ends. Its `wait` returns `answer`, or raises `error`.

        An exception in the caller's thread, such as KeyboardInterrupt, is raised once the job waits.
        """
        others = ProcessState()
        self._own.enter()
        self.request, self._answer, self._raised = None, answer, error
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        interruption: BaseException | None = None
        while True:
            try:
                self._back.acquire()
                break
            except BaseException as exception:
                interruption = exception
        if self.request is None:
            self._thread.join()
        self._own = ProcessState()
        others.enter()
        if interruption is not None:
            raise interruption

    def wait(self, request: Any) -> Any:
        """Called by the job, in its thread: ends its turn with a request, and returns the answer."""
        self.request = request
        self._back.release()
        self._go.acquire()
        if self._raised is not None:
            raise self._raised
        return self._answer

    def _run(self) -> None:
        _CURRENT.set(self)
        try:
            self.result = self._job()
        except BaseException as error:
            self.error = error
        finally:
            self.request = None
            self._back.release()


class ProcessState:
    """The process-wide state that each job has for itself, as it is when this object is made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state() if is_used else None
        self._environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
        self._streams = sys.stdout, sys.stderr

    def enter(self) -> None:
        """Sets the process to this state."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.stdout, sys.stderr = self._streams
