"""Compiles the network that a growth will make before it is needed, in another process.

The process fills torch's caches of compiled code on disk. The first step after the growth finds its kernels there, and
only traces the network: a second, in the place of ten or more. If anything goes wrong in it, that step compiles.
"""

import copyreg
import ctypes
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from mupscale._torch import is_compiled_in_place, tree_map
from mupscale.checks.recording import generators_kept
from mupscale.models._lightning import make_alike
from mupscale.models.base import Growable
from mupscale.models.checkpoint import Size

PROGRAM = """
import sys
request = sys.stdin.buffer.read()
from mupscale import _torchmetrics
_torchmetrics.install()
from mupscale.callbacks.compile_ahead import compile_request
compile_request(request)
"""

SHARE = 0.5
"""The share of the memory of a GPU that is free, at the beginning, that the process may use."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""

NICE = 10
"""The process gives way to the run, by so much."""


def memory_format(name: str) -> torch.memory_format:
    """By its name, such as `torch.contiguous_format`."""
    answer = getattr(torch, name.removeprefix("torch."))
    assert isinstance(answer, torch.memory_format)
    return answer


# torch finds its compiled code by a hash of pickled objects, and Python pickles a memory format with the name of the
# first module in this process that has an attribute `torch`: another process has another one
copyreg.pickle(torch.memory_format, lambda value: (memory_format, (str(value),)))


def pays_ahead(trainer: Trainer, module: Growable) -> bool:
    """Whether a run should compile ahead: if it is compiled on one GPU, beside which the host has time."""
    is_compiled = module.hparams["compile"] and not module.is_in_stack
    return is_compiled and trainer.world_size == 1 and module.device.type == "cuda"


@dataclass(frozen=True)
class Request:
    """One step of a module, still without its network, at a size."""

    module: Growable
    size: Size
    batch: Any
    """On the CPU."""
    device: torch.device
    memory: int
    """The bytes of a GPU that it may use."""
    precision: Precision
    matmul_precision: str
    cudnn_benchmark: bool
    is_deterministic: bool

    def perform(self) -> None:
        """Compiles a forward and a backward pass."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.memory / total), self.device)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.use_deterministic_algorithms(self.is_deterministic)
        with self.precision.module_init_context():
            net = self.module.rebuild(*self.size, meta=True)
        keep_one_of_each(net)
        net.to_empty(device=self.device)
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.zero_()
        self.module.to(self.device)
        batch = tree_map(lambda value: value.to(self.device) if isinstance(value, Tensor) else value, self.batch)
        with self.precision.train_step_context(), torch.enable_grad():
            loss = self.module.loss(batch)
        loss.backward()


class CompileAhead:
    """The process that compiles a module at a size for batches like this one."""

    def __init__(self, trainer: Trainer, module: Growable, size: Size, batch: Any) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = io.BytesIO()
        try:
            request = pickle.dumps(_request(trainer, module, size, batch))
        except Exception:  # a class without a name, say; each raises its own kind
            return
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  `end` closes it
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # Ctrl-C is for the run, which ends this
            )
            assert self._process.stdin is not None
            self._process.stdin.write(request)
            self._process.stdin.close()
        except OSError:  # no room for a file or a process, or it has ended already
            self.end()

    @property
    def is_ready(self) -> bool:
        """Whether the process has compiled all that it was to compile."""
        return self._process is not None and self._process.poll() == 0

    @property
    def failure(self) -> str | None:
        """The last line of the process, if it has failed; None if it runs, is ready, or was not started."""
        if self._process is None or self._process.poll() in (None, 0):
            return None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "without a word")

    def wait(self, seconds: float) -> None:
        """Returns once the process has ended, or after some time."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def end(self) -> None:
        """Ends the process, ready or not, and so frees its memory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._errors.close()


def _request(trainer: Trainer, module: Growable, size: Size, batch: Any) -> Request:
    with generators_kept([]):
        alike = make_alike(module, {"init_from": None})
    assert isinstance(alike, Growable)
    alike.optimizer_callable, alike.lr_scheduler_callable = torch.optim.SGD, None  # of no use, and maybe not to pickle
    return Request(
        alike,
        size,
        tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, batch),
        module.device,
        int(SHARE * torch.cuda.mem_get_info(module.device)[0]) if module.device.type == "cuda" else 0,
        trainer.precision_plugin,
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


def compile_request(request: bytes) -> None:
    """Does what a `CompileAhead` asks for; in its process."""
    os.nice(NICE)
    end_with_parent()
    asked: Request = pickle.loads(request)
    asked.perform()


def end_with_parent() -> None:
    """Ends this process when a run that is killed cannot; on Linux."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_one_of_each(net: nn.Module) -> None:
    """Leaves one of the parts of a list that are compiled one by one, and share one compilation: it saves memory."""
    for part in list(net.modules()):
        if isinstance(part, nn.Sequential | nn.ModuleList) and part and all(map(is_compiled_in_place, part)):
            seen = set()
            for index, child in reversed(list(enumerate(part))):
                kind = type(child), tuple((name, p.shape) for name, p in child.named_parameters())
                if kind in seen:
                    del part[index]
                seen.add(kind)
