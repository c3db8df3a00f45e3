"""Programs and forks that tests start: each has a limit of time, and none of their processes outlives its test."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from paths import SUPPORT

LIMIT = 240
"""Seconds after which a program or a fork has failed."""

SHARED_CODE = {"PYTHONPATH": str(SUPPORT)}
"""Variables of a program that imports modules beside this one."""


def run_program(
    *arguments: Any, status: int | None = 0, limit: float = LIMIT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end, which must have the status; None: any status."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_program(*arguments, **{**streams, **options}) as process:
        printed, errors = process.communicate(timeout=limit)
    assert status in (None, process.returncode), f"{printed or ''}"[-3000:] + f"{errors or ''}"[-6000:]
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


@contextmanager
def start_program(
    *arguments: Any, variables: dict[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Python with these arguments, as a process that is killed at the end; `variables` are added to its environment."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(
        command, text=True, start_new_session=True, env={**os.environ, **(variables or {})}, **options
    )
    try:
        yield process
    finally:
        kill_with_children(process)


def kill_with_children(process: subprocess.Popen[str]) -> None:
    """Kills a process that `start_program` or the like started in a session of its own, and all that it started."""
    children = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:  # those in sessions of their own
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.__exit__(None, None, None)  # waits, and closes the pipes


def run_in_fork(work: Callable[[], object], output: Path | None = None, limit: int = LIMIT) -> int:
    """Calls a function in a fork of this process; its exit status, negative for a signal.

    It is 1 after an exception, which is printed. `output`: a file to which all that it prints is added.
    """
    return wait_for_fork(start_fork(work, output, limit))


def start_fork(work: Callable[[], object], output: Path | None = None, limit: int = LIMIT) -> int:
    """The process of a fork that calls a function, as `run_in_fork` does, and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _finish(work, output, limit)
    return pid


def wait_for_fork(pid: int) -> int:
    """The exit status of a fork, negative for a signal."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _finish(work: Callable[[], object], output: Path | None, limit: int) -> None:
    """Ends this process with a function."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit)  # a fork that hangs ends by itself
        if output is not None:
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            sys.stdout, sys.stderr = (os.fdopen(os.dup2(log, number), "w", 1, closefd=False) for number in (1, 2))
        work()
        status = 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        status = 1 if isinstance(exit.code, str) else exit.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_until(condition: Callable[[], Any], log: Path | None = None) -> Any:
    """What a function returns, once that is true; fails after LIMIT seconds, with the end of a log."""
    end = time.monotonic() + LIMIT
    while not (answer := condition()):
        assert time.monotonic() < end, log and log.read_text()[-3000:]
        time.sleep(0.01)
    return answer
