"""Jobs in several processes of this machine, on its GPUs in turn.

Each process has a pipe to the driver. If the driver dies, the pipe closes and the process ends; if a process dies, the
driver sees it by the pipe and gives its job to another one.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from mupscale.commands.lab.driver import Ending, Job, failed_words
from mupscale.commands.lab.run import set_aside, without_announcements
from mupscale.commands.mistakes import keeps_tracebacks, line_about
from mupscale.commands.process import (
    EXIT_CODE,
    Terminated,
    end_now,
    interruptions,
    lenient_output,
    on_sigterm,
    raise_for,
)
from mupscale.errors import UserError

PATIENCE = 5.0
"""Seconds that a worker has to end before it is killed. Either way its runs can be resumed."""


class Worker:
    """A process that makes jobs, in a session of its own, so that Ctrl-C reaches only the driver, which stops it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.job: Job | None = None

    def submit(self, job: Job) -> None:
        self.job = job
        with suppress(OSError):  # of a worker that has died, which `answer` finds
            self.connection.send_bytes(pickle.dumps(job))

    def answer(self) -> Ending:
        """How its job ended. Raises a UserError if a run failed."""
        job, self.job = self.job, None
        assert job is not None
        try:
            ending = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            number = -code if code < 0 else code - 128 if code in (EXIT_CODE, 128 + signal.SIGINT) else 0
            cause = f"signal {number}" if number else f"exit status {code}"
            return Ending(job, death=f"its process died ({cause})")
        if isinstance(ending, Ending):
            return ending
        raise UserError(ending or failed_words(job))


class Workers:
    """Makes as many jobs at a time as there are workers. They are started as they are needed."""

    def __init__(self, slots: int, gpus: list[str], seen: list[int]) -> None:
        """`slots` workers use the `gpus` in turn, or the CPU; `seen` are the signals that ask this process to end."""
        self.slots, self._gpus, self._seen = slots, gpus, seen
        self._workers: dict[int, Worker] = {}

    @property
    def has_room(self) -> bool:
        return sum(worker.job is not None for worker in self._workers.values()) < self.slots

    def submit(self, job: Job) -> None:
        busy = [index for index, worker in self._workers.items() if worker.job is not None]
        free = next(index for index in range(self.slots) if index not in busy)
        if free not in self._workers:
            threads = max(1, (os.cpu_count() or 1) // self.slots)
            environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
            if self._gpus:
                environment["CUDA_VISIBLE_DEVICES"] = self._gpus[free % len(self._gpus)]
            self._workers[free] = Worker(environment)
        self._workers[free].submit(job)

    def wait(self) -> list[Ending]:
        raise_for(self._seen)
        busy = {index: worker for index, worker in self._workers.items() if worker.job is not None}
        ready = wait([worker.connection for worker in busy.values()], timeout=0.1)
        answer = []
        for index, worker in busy.items():
            if worker.connection in ready:
                answer.append(worker.answer())
                if answer[-1].death:
                    del self._workers[index]
        return answer

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.process.terminate()
        until = time.monotonic() + PATIENCE
        for worker in self._workers.values():
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.connection.close()


@contextmanager
def workers(slots: int, gpus: list[str]) -> Iterator[Workers]:
    with interruptions() as seen:
        answer = Workers(slots, gpus, seen)
        try:
            yield answer
        finally:
            answer.stop()


# --- in a worker


def main() -> None:
    with lenient_output():
        try:
            with on_sigterm(end_now), without_announcements():
                serve(Connection(int(sys.argv[1])))
        except Terminated:
            sys.exit(EXIT_CODE)


def serve(connection: Connection) -> None:
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=receive, args=(connection, requests), daemon=True).start()
    set_aside()
    while True:
        connection.send(carry_out(pickle.loads(requests.get())))


def receive(connection: Connection, requests: "SimpleQueue[bytes]") -> None:
    """Passes requests on; ends this process, as SIGTERM does, once the driver has ended."""
    try:
        while True:
            requests.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def carry_out(job: Job) -> Ending | str | None:
    """Makes a job; how it ended, or a line about the error that ended it: None if the error itself is printed."""
    try:
        return job.carry_out()
    except Exception as error:
        line = None if keeps_tracebacks() else line_about(error)
        if line is None:
            traceback.print_exc()
        return line


if __name__ == "__main__":
    main()
