"""Compiles the network that a growth will make before it is needed, in another process.

The process fills torch's caches of compiled code on disk. The first step after the growth finds its kernels there, and
only traces the network: a second, in the place of ten or more. If anything goes wrong in it, that step compiles.
"""

import copy
import ctypes
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from mupscale._torch import is_compiled_in_place, tree_map
from mupscale.models.base import without_log
from mupscale.widening.write import parameters_on_meta

PROGRAM = """
import sys
request = sys.stdin.buffer.read()
from mupscale.callbacks.compile_ahead import compile_request
compile_request(request)
"""

SHARE = 0.5
"""The share of the memory of a GPU that is free, at the beginning, that the process may use."""

PR_SET_PDEATHSIG = 1
"""An option of Linux's prctl: the signal that a process gets when its parent ends."""

NICE = 10
"""The process gives way to the run, by so much."""


def start_compiling(
    trainer: Trainer, module: LightningModule, alike: LightningModule, batch: Any
) -> subprocess.Popen[bytes] | None:
    """A process that compiles `alike`, the coming module without its network; None if it cannot be started."""
    try:
        precision = copy.copy(trainer.precision_plugin)
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(precision).pop(name, None)  # it has the module of the run
        request = {
            "module": alike,
            "batch": tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, batch),
            "device": module.device,
            "memory": int(SHARE * torch.cuda.mem_get_info(module.device)[0]) if module.device.type == "cuda" else 0,
            "precision": precision,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        sent = pickle.dumps(request)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C is for the run, which ends this
        )
    except Exception:  # a class without a name, say, or no room for a process: each raises its own kind
        return None
    assert process.stdin is not None
    with suppress(OSError):  # it may have ended already
        process.stdin.write(sent)
        process.stdin.close()
    return process


def compile_request(request: bytes) -> None:
    """Does what `start_compiling` asks for; in its process, which ends with its parent, on Linux."""
    os.nice(NICE)
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    compile_step(**pickle.loads(request))


def compile_step(
    module: LightningModule,
    batch: Any,
    device: torch.device,
    memory: int,
    precision: Precision,
    matmul_precision: str,
    cudnn_benchmark: bool,
    is_deterministic: bool,
) -> None:
    """Compiles a forward and a backward pass of a module, still without its network, in so many bytes of a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.use_deterministic_algorithms(is_deterministic)
    with precision.module_init_context(), parameters_on_meta():
        module.configure_model()
    keep_one_of_each(module)
    module.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
    with precision.train_step_context(), torch.enable_grad(), without_log(module):
        returned: Any = module.training_step(batch, 0)
    loss = returned["loss"] if isinstance(returned, dict) else returned
    loss.backward()


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
