"""Checkpoint files that are whole at any time, and that are written while the training goes on."""

import copy
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from mupscale.atomic import durably
from mupscale.device_memory import free_bytes, unreserved_bytes
from mupscale.models._lightning import is_remote
from mupscale.models.checkpoint import load_checkpoint

AT_ONCE = 2
"""Copies of checkpoints in memory: one is being written, and one waits for it."""

HEAD_START = 0.01
"""Seconds before the thread begins to write. After a copy the device is idle, and one thread at a time runs Python:
first the training launches its next steps."""

ON_DEVICE = 1 / 8
"""The share of a GPU's unused memory that a copy may take there, until the thread has it on the host. That takes a
thousandth of the time of a copy to the host, for which the device would have to wait."""

SMALL = 2**24
"""Bytes for which the host always has room. To ask how much of its memory is free takes longer than to copy them."""

CONSTANTS = (int, float, str, bool, bytes, type(None))

Operation = Callable[[], None]


class FileThread:
    """Does things to files one after another, for all runs of this process.

    One thread at a time runs Python: with a thread for each run of a stack, the one that trains would hardly run.
    """

    def __init__(self) -> None:
        self.may_begin = threading.Event()
        self.may_begin.set()
        self._waiting: queue.Queue[Operation] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def stream(self, gpu: torch.device) -> torch.cuda.Stream:
        """One for all copies to the host: torch gives them out in turn, in the end that of a capture."""
        if self._stream is None or self._stream.device != gpu:
            self._stream = torch.cuda.Stream(gpu)
        return self._stream

    def do(self, operation: Operation) -> None:
        """After all before. The operation raises no exception."""
        with self._lock:
            if self._thread is None:
                # a daemon: a second Ctrl-C ends the process at once
                thread = threading.Thread(target=self._work, args=(self._waiting,), daemon=True, name="checkpoints")
                thread.start()
                self._thread = thread
            self._waiting.put(operation)

    def _work(self, waiting: queue.Queue[Operation]) -> None:
        while True:
            try:
                operation = waiting.get_nowait()
            except queue.Empty:
                operation = waiting.get()
                time.sleep(HEAD_START)
            self.may_begin.wait()
            operation()
            del operation  # and what it holds


THREAD = FileThread()
os.register_at_fork(after_in_child=THREAD.__init__)  # type: ignore[misc]  # a process that was forked has no threads


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder, then renames it. Reads sharded checkpoints too.

    Lightning uses the system's folder for temporary files, which may be small or on another file system.

    `in_background`, checkpoints are copied in memory, and a thread writes, links and deletes files, in the order in
    which it was asked to. So what is on disk is always what was there without it, some steps earlier, and
    a process that is killed leaves whole files. Training waits if one copy is being written and another one waits, at
    the end of a fit, and after an exception. Between `hold` and `go_on` the thread begins nothing, unless training
    waits for it. An error of the thread ends the run at the end of the step; what it had still to do is dropped.
    """

    in_background = False

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._asked = 0
        """How many operations the thread has still to do."""
        self._copies = 0
        self._failure: BaseException | None = None
        self._defers = self._is_given_up = False

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if not is_remote(path) and Path(path).is_dir():
            return load_checkpoint(path)
        return super().load_checkpoint(path, *arguments, **options)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        tensors = copied_tensors(checkpoint) if self._defers else []
        if not self._defers or not has_room(tensors):
            self.wait()
            self._save(map_leaves(alone, checkpoint), path, storage_options)
            return
        if self._copies == AT_ONCE:
            self.go_on()
        with self._lock:
            self._lock.wait_for(lambda: self._copies < AT_ONCE)
        self.raise_error()
        copied = copy_tensors(checkpoint, tensors, None if fits_on_device(tensors) else torch.device("cpu"))
        is_there = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors) else None
        if is_there is not None:
            is_there.record()
        with self._lock:
            self._copies += 1

        def save() -> None:
            nonlocal copied
            copied = self._on_host(copied, is_there)  # the memory of the GPU is free before the file is written
            self._save(copied, path, storage_options)

        def forget() -> None:
            nonlocal copied
            copied = None
            with self._lock:
                self._copies -= 1
                self._lock.notify_all()

        self.later(save, forget)

    def _on_host(self, checkpoint: Any, is_there: torch.cuda.Event | None) -> Any:
        """A copy in the memory of the host, made beside what the GPU does once an event is there."""
        tensors = copied_tensors(checkpoint)
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if gpu is None or is_there is None:
            return checkpoint
        stream = THREAD.stream(gpu)
        with torch.cuda.stream(stream):
            is_there.synchronize()
            copied = copy_tensors(checkpoint, tensors, torch.device("cpu"))
            stream.synchronize()
        return copied

    def _save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if storage_options is not None or is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with durably(Path(path)) as stream:
            torch.save(checkpoint, stream)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Meanwhile, `save_checkpoint` returns before the file is there, if this is `in_background`."""
        self._defers = self.in_background
        try:
            yield
        finally:
            self._defers = False

    def later(self, operation: Operation, end: Operation = lambda: None) -> None:
        """Does something to files after all before, then calls `end`, in any case; at once if not `in_background`."""
        if not self.in_background:
            operation()
            return
        with self._lock:  # which the thread takes before it counts down
            self._asked += 1
            try:
                THREAD.do(lambda: self._carry_out(operation, end))
            except BaseException:
                self._asked -= 1
                raise

    def _carry_out(self, operation: Operation, end: Operation) -> None:
        try:
            if self._failure is None and not self._is_given_up:
                operation()
        except BaseException as error:
            self._failure = error
        end()
        with self._lock:
            self._asked -= 1
            self._lock.notify_all()

    def hold(self) -> None:
        """Lets the thread begin nothing: one thread at a time runs Python, and the run has more urgent things to do."""
        THREAD.may_begin.clear()

    def go_on(self) -> None:
        """Ends a `hold`."""
        THREAD.may_begin.set()

    def wait(self) -> None:
        """Returns once all files are written; raises the error of the thread."""
        if not self._is_given_up:
            self._wait_for_all()
        self.raise_error()

    def _wait_for_all(self) -> None:
        self.go_on()
        with self._lock:
            self._lock.wait_for(lambda: self._asked == 0)

    def give_up(self) -> None:
        """Drops what was not begun, and waits for nothing any more: the process is to end at once."""
        self._is_given_up = True
        self.go_on()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_error(self) -> None:
        if self._failure is not None:
            self._wait_for_all()  # until all that was to follow is dropped: it may delete older checkpoints
        error, self._failure = self._failure, None
        if error is not None:
            raise error

    def teardown(self) -> None:
        self.wait()


def write_whole_files(trainer: Trainer) -> None:
    """Makes a trainer write its checkpoints by `CheckpointFiles`, unless it was given a plugin that writes them."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = CheckpointFiles()
    if isinstance(trainer.strategy.checkpoint_io, CheckpointFiles):
        trainer.strategy.checkpoint_io.in_background = pays_in_background(trainer)


def pays_in_background(trainer: Trainer) -> bool:
    """Whether to write checkpoints while training: on one GPU, unless a logger looks at each file at once."""
    does_nothing = Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint
    is_seen = any(type(logger).after_save_checkpoint not in does_nothing for logger in trainer.loggers)
    return trainer.world_size == 1 and trainer.strategy.root_device.type == "cuda" and not is_seen


def files_of(trainer: Trainer) -> CheckpointFiles:
    """What writes the checkpoints of a run; if that is a plugin of the user, one that has nothing to write."""
    files = trainer.strategy.checkpoint_io
    return files if isinstance(files, CheckpointFiles) else CheckpointFiles()


def alone(value: Any) -> Any:
    """A tensor with its own memory: torch would save the whole stack with a model of a stack."""
    is_part = isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_part else value


def copied_tensors(checkpoint: Any) -> list[Tensor]:
    """The tensors of a checkpoint whose memory `copy_tensors` copies; all other objects copy themselves."""
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) if is_copied(leaf) else None, checkpoint)
    return found


def copy_tensors(checkpoint: Any, tensors: list[Tensor], device: torch.device | None) -> Any:
    """A copy of a checkpoint, which nothing changes; its tensors share what they shared.

    Args:
        checkpoint: What is copied.
        tensors: Its `copied_tensors`.
        device: Where the copies are; by default where the tensors are.
    """
    whole = {id(tensor): alone(tensor) for tensor in tensors}
    copies: dict[tuple[torch.device, int], Tensor] = {}
    for tensor in whole.values():
        if address_of(tensor) not in copies:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            copies[address_of(tensor)] = source.to(device or source.device, copy=True)
    memo: dict[int, Any] = {}
    for key, tensor in whole.items():
        copied = copies[address_of(tensor)]
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        made = torch.empty(0, dtype=tensor.dtype, device=copied.device).set_(copied.untyped_storage(), *place)
        memo[key] = made.requires_grad_(tensor.requires_grad)
    return map_leaves(lambda leaf: leaf if type(leaf) in CONSTANTS else copy.deepcopy(leaf, memo), checkpoint)


def address_of(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of plain dicts, lists and tuples, with what the function makes of everything else.

    torch's `tree_map` takes ten times as long, which a small network waits for.
    """
    if type(value) is dict:
        return {key: map_leaves(function, inner) for key, inner in value.items()}
    if type(value) is OrderedDict:
        made = OrderedDict((key, map_leaves(function, inner)) for key, inner in value.items())
        vars(made).update(vars(value))  # the versions of a network's modules
        return made
    if type(value) in (list, tuple):
        return type(value)(map_leaves(function, inner) for inner in value)
    return function(value)


def is_copied(value: Any) -> bool:
    is_plain = type(value) is Tensor and not vars(value) and value.layout == torch.strided
    is_odd = is_plain and (value.is_quantized or value.is_conj() or value.is_neg())
    return is_plain and not is_odd and value.device.type in ("cpu", "cuda")


def has_room(tensors: list[Tensor]) -> bool:
    """Whether the host can hold a copy of these tensors: it may take half of the memory that is free."""
    needed = 2 * bytes_of(tensors)
    return needed <= SMALL or needed <= free_bytes(torch.device("cpu"))


def fits_on_device(tensors: list[Tensor]) -> bool:
    """Whether a copy of these tensors may lie beside them for a while; tensors of the host always may."""
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    return not on_gpu or bytes_of(on_gpu) <= ON_DEVICE * unreserved_bytes(on_gpu[0].device)


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
