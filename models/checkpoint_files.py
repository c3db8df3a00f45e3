"""Checkpoint files that are whole at any time, and that are written while the training goes on."""

import copy
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
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

HEAD_START = 0.03
"""Seconds before the thread begins to write. After a copy the device is idle, and one thread at a time runs Python:
first the training launches so many steps that the device is busy while the thread runs for some milliseconds."""

ON_DEVICE = 1 / 8
"""The share of a GPU's unused memory that a copy may take there, until the thread has it on the host. That takes a
thousandth of the time of a copy to the host, for which the device would have to wait."""

SMALL = 2**24
"""Bytes for which there is always room. To ask how much memory is free takes longer than to copy them."""

CONSTANTS = frozenset({int, float, str, bool, bytes, type(None)})
"""Types of values that nothing can change."""

Operation = Callable[[], None]


MAY_BEGIN = threading.Event()
MAY_BEGIN.set()


@cache
def executor() -> ThreadPoolExecutor:
    """Does things to files one after another, in one thread for all runs of this process."""
    return ThreadPoolExecutor(1, "checkpoints")


@cache
def copy_stream(gpu: torch.device) -> torch.cuda.Stream:
    """The stream of all copies to the host: torch gives streams out in turn, in the end that of a capture."""
    return torch.cuda.Stream(gpu)


os.register_at_fork(after_in_child=executor.cache_clear)  # a process that was forked has no threads


class CheckpointFiles(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder, then renames it. Reads sharded checkpoints too.

    Lightning uses the system's folder for temporary files, which may be small or on another file system.

    `in_background`, checkpoints are copied in memory, and a thread writes, links and deletes files, in the order in
    which it was asked to. (Lightning's AsyncCheckpointIO deletes files at once, and so before it has written them.) So
    what is on disk is always what was there without it, some steps earlier, and a process that is killed leaves whole
    files. Training waits if one copy is being written and another one waits, at the end of a fit, and after an
    exception. Between `hold` and `go_on` the thread begins nothing, unless training waits for it. An error of the
    thread ends the run at the end of the step; what it had still to do is dropped.
    """

    in_background = False

    def __init__(self) -> None:
        self._under_way: deque[Future[None]] = deque()
        """What the thread was asked to do, in its order; what is done stays until somebody asks for errors."""
        self._writes: deque[Future[None]] = deque(maxlen=AT_ONCE)
        """The last of them that write copies."""
        self._has_failed = self._defers = self._is_given_up = False

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if not is_remote(path) and Path(path).is_dir():
            return load_checkpoint(path)
        return super().load_checkpoint(path, *arguments, **options)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        tensors = tensors_in(checkpoint) if self._defers else None
        if tensors is None or not has_room(tensors):
            self.wait()
            self._save(map_leaves(own_storage, checkpoint), path, storage_options)
            return
        if len(self._writes) == AT_ONCE and not self._writes[0].done():
            self.go_on()
            wait([self._writes[0]])
        self.raise_error()
        content = copy_checkpoint(checkpoint, tensors)
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        is_there = None if gpu is None else torch.cuda.current_stream(gpu).record_event()

        def save() -> None:
            nonlocal content
            if is_there is not None:  # beside what the GPU has to do since; its memory is free before the file is there
                with torch.cuda.stream(copy_stream(gpu)):
                    is_there.synchronize()
                    content = map_tensors(Tensor.cpu, content)
            self._save(content, path, storage_options)

        self.later(save)
        self._writes.append(self._under_way[-1])

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

    def later(self, operation: Operation) -> None:
        """Does something to files after all before; at once if not `in_background`."""
        if not self.in_background:
            operation()
            return
        is_first = all(before.done() for before in self._under_way)
        self._under_way.append(executor().submit(self._carry_out, operation, is_first))

    def _carry_out(self, operation: Operation, is_first: bool) -> None:
        if is_first:
            time.sleep(HEAD_START)
        MAY_BEGIN.wait()
        if self._has_failed or self._is_given_up:
            return
        try:
            operation()
        except BaseException:
            self._has_failed = True
            raise

    def hold(self) -> None:
        """Lets the thread begin nothing: one thread at a time runs Python, and the run has more urgent things to do."""
        MAY_BEGIN.clear()

    def go_on(self) -> None:
        """Ends a `hold`."""
        MAY_BEGIN.set()

    def wait(self) -> None:
        """Returns once all files are written; raises the error of the thread."""
        if not self._is_given_up:
            self.go_on()
            wait(self._under_way)
        self.raise_error()

    def give_up(self) -> None:
        """Drops what was not begun, and waits for nothing any more: the process is to end at once."""
        self._is_given_up = True
        self.go_on()

    def raise_error(self) -> None:
        """Raises the error of the thread, if there is one, once all that was to follow is dropped: it may delete older
        checkpoints."""
        while self._under_way and self._under_way[0].done():
            error = self._under_way.popleft().exception()
            if error is not None:
                self.go_on()
                wait(self._under_way)
                self._under_way.clear()
                self._has_failed = False
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
    """Returns what writes the checkpoints of a run, or one without work where that is a plugin of the user."""
    files = trainer.strategy.checkpoint_io
    return files if isinstance(files, CheckpointFiles) else CheckpointFiles()


def is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def own_storage(value: Any) -> Any:
    """A tensor with its own memory: torch would save the whole stack with a model of a stack."""
    return value.clone() if isinstance(value, Tensor) and is_part(value) else value


def copy_checkpoint(checkpoint: Any, tensors: list[Tensor]) -> Any:
    """A copy of a checkpoint with these tensors, which nothing changes: on their device if that has room for it, which
    no step waits for, else on the host."""
    if fits_on_device(tensors):
        with suppress(torch.OutOfMemoryError):  # where less is left than is small
            return map_tensors(torch.clone, checkpoint)
    return map_tensors(lambda tensor: tensor.cpu() if tensor.is_cuda else tensor.clone(), checkpoint)


@torch.no_grad()
def map_tensors(function: Callable[[Tensor], Tensor], checkpoint: Any) -> Any:
    """A deep copy whose tensors lie in what a function makes of the memory of theirs; they share what they shared."""
    memories: dict[tuple[torch.device, int], Tensor] = {}
    memo: dict[int, Any] = {}

    def map_leaf(leaf: Any) -> Any:
        if not is_copied(leaf):
            return copy.deepcopy(leaf, memo)
        if is_part(leaf):
            return function(leaf).requires_grad_(leaf.requires_grad)
        address = leaf.device, leaf.untyped_storage().data_ptr()
        if address not in memories:
            # bytes: to copy a tensor lets other threads run Python, to copy a storage does not
            memory = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.untyped_storage())
            memories[address] = function(memory)
        made = torch.empty(0, dtype=leaf.dtype, device=memories[address].device)
        made.set_(memories[address].untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())
        return made.requires_grad_(leaf.requires_grad)

    return map_leaves(map_leaf, checkpoint)


def tensors_in(checkpoint: Any) -> list[Tensor]:
    """The tensors whose memory `map_tensors` copies; all other objects copy themselves."""
    found: list[Tensor] = []
    map_leaves(lambda leaf: found.append(leaf) if is_copied(leaf) else None, checkpoint)
    return found


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of plain dicts, lists and tuples, with what the function makes of all else but constants.

    torch's `tree_map` takes ten times as long, which a small network waits for. Most of a checkpoint is constants, so
    this calls nothing for them.
    """
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        made = kind()
        for key, inner in value.items():
            made[key] = inner if type(inner) in CONSTANTS else map_leaves(function, inner)
        if kind is OrderedDict:
            vars(made).update(vars(value))  # the versions of a network's modules
        return made
    if kind is list or kind is tuple:
        return kind([inner if type(inner) in CONSTANTS else map_leaves(function, inner) for inner in value])
    return function(value)


def is_copied(value: Any) -> bool:
    is_plain = type(value) is Tensor and not vars(value) and value.layout == torch.strided
    is_odd = is_plain and (value.is_quantized or value.is_conj() or value.is_neg())
    return is_plain and not is_odd and (value.is_cuda or value.is_cpu)


def has_room(tensors: list[Tensor]) -> bool:
    """Whether the host can hold a copy of these tensors: it may take half of the memory that is free."""
    needed = 2 * bytes_of(tensors)
    return needed <= SMALL or needed <= free_bytes(torch.device("cpu"))


def fits_on_device(tensors: list[Tensor]) -> bool:
    """Whether a copy of these tensors may lie beside them for a while; tensors of the host always may."""
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    needed = bytes_of(on_gpu)
    return needed <= SMALL or needed <= ON_DEVICE * unreserved_bytes(on_gpu[0].device)


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
