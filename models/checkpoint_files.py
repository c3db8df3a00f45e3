"""Checkpoint files that are whole at any time, and that are written while the training goes on."""

import copy
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
from mupscale.device_memory import free_bytes
from mupscale.models._lightning import is_remote
from mupscale.models.checkpoint import load_checkpoint

AT_ONCE = 2
"""Copies of checkpoints in memory: one is being written, and one waits for it."""

HEAD_START = 0.01
"""Seconds before the thread begins to write. After a copy the device is idle, and one thread at a time runs Python:
first the training launches its next steps."""

PINNED = 1 / 8
"""The share of the host's free memory up to which a copy is made in pinned memory: that is fast to copy to, slow to
allocate, and kept for the next copy."""

CONSTANTS = (int, float, str, bool, bytes, type(None))

Operation = Callable[[], None]

Waiting = queue.Queue[tuple[Operation, Operation] | None]
"""What a thread has to do, each with what is to be called afterwards; None at the end."""


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder, then renames it. Reads sharded checkpoints too.

    Lightning uses the system's folder for temporary files, which may be small or on another file system.

    `in_background`, checkpoints are copied to the memory of the host, and a thread writes, links and deletes files, in
    the order in which it was asked to. So what is on disk is always what was there without it, some steps earlier, and
    a process that is killed leaves whole files. Training waits if one copy is being written and another one waits, at
    the end of a fit, and after an exception. An error of the thread ends the run at the end of the step; what it had
    still to do is dropped.
    """

    in_background = False

    def __init__(self) -> None:
        self._waiting: Waiting | None = None
        self._lock = threading.Condition()
        self._copies = 0
        self._spare: list[list[Tensor]] = []
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
        with self._lock:
            self._lock.wait_for(lambda: self._copies < AT_ONCE)
        self.raise_error()
        buffers = self._spare.pop() if self._spare else []
        copied = copy_to_host(checkpoint, tensors, buffers)
        with self._lock:
            self._copies += 1

        def forget() -> None:
            with self._lock:
                self._copies -= 1
                self._spare += [buffers] if buffers else []
                self._lock.notify()

        def save() -> None:
            time.sleep(HEAD_START)
            self._save(copied, path, storage_options)

        self.later(save, forget)

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
        if self._waiting is None:
            self._waiting = queue.Queue()
            # a daemon: a second Ctrl-C ends the process at once
            threading.Thread(target=self._work, args=(self._waiting,), daemon=True, name="checkpoints").start()
        self._waiting.put((operation, end))

    def wait(self) -> None:
        """Returns once all files are written; raises the error of the thread."""
        if self._waiting is not None and not self._is_given_up:
            self._waiting.join()
        self.raise_error()

    def give_up(self) -> None:
        """Drops what was not begun, and waits for nothing any more: the process is to end at once."""
        self._is_given_up = True

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_error(self) -> None:
        """Raises the error of the thread, once."""
        if self._failure is not None and self._waiting is not None:
            self._waiting.join()  # until all that was to follow is dropped: it may delete older checkpoints
        error, self._failure = self._failure, None
        if error is not None:
            raise error

    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            self._spare.clear()
            if self._waiting is not None:
                self._waiting.put(None)
                self._waiting = None

    def _work(self, waiting: Waiting) -> None:
        while (asked := waiting.get()) is not None:
            operation, end = asked
            try:
                if self._failure is None and not self._is_given_up:
                    operation()
            except BaseException as error:
                self._failure = error
            del asked, operation  # the copy that they hold
            end()
            waiting.task_done()


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
    """The tensors of a checkpoint whose memory `copy_to_host` copies; all other objects copy themselves."""
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) if is_copied(leaf) else None, checkpoint)
    return found


def copy_to_host(checkpoint: Any, tensors: list[Tensor], buffers: list[Tensor]) -> Any:
    """A copy of a checkpoint in the memory of the host, which nothing changes; its tensors share what they shared.

    Args:
        checkpoint: What is copied.
        tensors: Its `copied_tensors`.
        buffers: Memory of an earlier copy, which is used again; what is pinned of the new copy is left there.
    """
    whole = {id(tensor): alone(tensor) for tensor in tensors}
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in whole.values()}
    size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    kept = sum(buffer.numel() for buffer in buffers)
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    is_pinned = on_gpu and (size <= kept or size <= PINNED * free_bytes(torch.device("cpu")))
    free = {buffer.numel(): [b for b in buffers if b.numel() == buffer.numel()] for buffer in buffers}
    buffers.clear()
    copies: dict[int, Tensor] = {}
    for address, tensor in storages.items():
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        known = free.get(source.numel())
        copies[address] = known.pop() if known else torch.empty(source.numel(), dtype=torch.uint8, pin_memory=is_pinned)
        copies[address].copy_(source, non_blocking=is_pinned)
    if is_pinned:
        buffers.extend(copies.values())
        torch.cuda.synchronize()
    memo: dict[int, Any] = {}
    for key, tensor in whole.items():
        storage = copies[tensor.untyped_storage().data_ptr()].untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        memo[key] = torch.empty(0, dtype=tensor.dtype).set_(storage, *place).requires_grad_(tensor.requires_grad)
    return map_leaves(lambda leaf: leaf if type(leaf) in CONSTANTS else copy.deepcopy(leaf, memo), checkpoint)


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
    return 2 * sum(tensor.nbytes for tensor in tensors) <= free_bytes(torch.device("cpu"))
