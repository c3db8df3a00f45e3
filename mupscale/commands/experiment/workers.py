"""Several processes that work on one experiment, on the devices of this machine."""

import os
import signal
import subprocess
import sys
import time

from mupscale.commands.termination import EXIT_CODE, interruptions, raise_for
from mupscale.errors import UserError

PATIENCE = 5.0
"""Seconds that a worker has to end before it is killed. Either way its run can be resumed."""


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()  # does not start CUDA in this process
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def supervise(arguments: list[str], workers: int, gpus: list[str]) -> None:
    """Runs workers until all are finished, on the GPUs in turn. If one fails, stops the others with a UserError.

    A worker that is killed leaves its run to the others. If this process is killed, the workers continue without it:
    leases in the folder keep two of them from making the same run.
    """
    command = [sys.executable, "-m", "mupscale", "experiment", *arguments, "--workers=1"]
    running: dict[int, subprocess.Popen[bytes]] = {}
    with interruptions() as seen:
        try:
            for index in range(workers):
                # in a session of its own, so that Ctrl-C reaches only this process, which stops the workers
                running[index] = subprocess.Popen(
                    [*command, f"--child={index}/{workers}"],
                    env=environment(index, workers, gpus),
                    start_new_session=True,
                )
            killed = 0
            while running:
                raise_for(seen)
                for index, process in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[index]
                    code = 128 - code if code in (EXIT_CODE, 128 + signal.SIGINT) else code
                    if code > 0:
                        raise UserError(
                            f"worker {index} failed with the error above, and the other workers were stopped; "
                            "fix it, then run the same command again to continue"
                        )
                    if code < 0:
                        killed += 1
                        message = f"worker {index} was killed (signal {-code}); its run is left to the others"
                        print(message, file=sys.stderr, flush=True)
                time.sleep(0.1)
            if killed == workers:
                raise UserError("all workers were killed; run the same command again to continue")
        finally:
            stop(list(running.values()))


def environment(index: int, workers: int, gpus: list[str]) -> dict[str, str]:
    """The environment of a worker: its share of the threads, and its GPU."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    answer = {"OMP_NUM_THREADS": str(threads), **os.environ}
    if gpus:
        answer["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    return answer


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Asks processes to end, and kills those that do not."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
