"""Jobs in several processes of this machine, on its GPUs in turn, by the standard library's process pool.

Every process has a pool of its own, so that the death of one touches no other, and belongs to one GPU.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from mupscale.commands.lab import MOST_DEATHS
from mupscale.commands.lab.jobs import Job
from mupscale.commands.lab.run import Result, prepare_process
from mupscale.commands.process import EXIT_CODE, interruptions, raise_for
from mupscale.errors import UserError

Results = dict[Path, Result]


class Workers:
    """Makes as many jobs at a time as there are workers. They are started as they are needed."""

    def __init__(self, slots: int, gpus: list[str], seen: list[int]) -> None:
        """`slots` workers use the `gpus` in turn, or the CPU; `seen` are the signals that ask this process to end."""
        self.slots, self._gpus, self._seen = slots, gpus, seen
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._context = multiprocessing.get_context("spawn")
        self._theirs, self._ours = self._context.Pipe(duplex=False)

    def make(self, jobs: list[Job]) -> Iterator[Results]:
        left, running, deaths = deque(jobs), dict[Future[Results], tuple[int, Job]](), Counter[str]()
        while left or running:
            free = {*range(self.slots)} - {slot for slot, _ in running.values()}
            for slot, job in [(slot, left.popleft()) for slot in sorted(free)[: len(left)]]:
                running[self._pool(slot).submit(job.carry_out)] = slot, job
            done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            raise_for(self._seen)
            for future in done:
                slot, job = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool as death:
                    self._pools.pop(slot).shutdown()
                    deaths[str(job)] += 1
                    if deaths[str(job)] == MOST_DEATHS:
                        raise UserError(
                            f"{job}: its process died, {MOST_DEATHS} times. If the memory is too small, give a smaller "
                            "--stack or fewer --workers; then run the same command again to continue"
                        ) from death
                    print(f"{job}: its process died; the runs continue", file=sys.stderr, flush=True)
                    left.appendleft(job)

    def stop(self) -> None:
        self._ours.close()  # which ends them at once: their runs can be resumed
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _pool(self, slot: int) -> ProcessPoolExecutor:
        if slot not in self._pools:
            gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
            threads = int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // self.slots)))
            self._pools[slot] = ProcessPoolExecutor(1, self._context, begin, (self._theirs, gpu, threads))
        return self._pools[slot]


@contextmanager
def workers(slots: int, gpus: list[str]) -> Iterator[Workers]:
    with interruptions() as seen:
        answer = Workers(slots, gpus, seen)
        try:
            yield answer
        finally:
            answer.stop()


def begin(driver: Connection, gpu: str | None, threads: int) -> None:
    """Prepares a worker: it takes its GPU and its threads, and ends once the driver has ended."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    def follow() -> None:
        with suppress(EOFError, OSError):
            driver.recv_bytes()
        os._exit(EXIT_CODE)

    torch.set_num_threads(threads)
    prepare_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its workers
    threading.Thread(target=follow, daemon=True).start()
