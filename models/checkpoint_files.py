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

HEAD_START = 0.03
"""Seconds before the thread begins to write. After a copy the device is idle, and one thread at a time runs Python:
first the training launches so many steps that the device is busy while the thread runs for some milliseconds."""

ON_DEVICE = 1 / 8
"""The share of a GPU's unused memory that a copy may take there, until the thread has it on the host. That takes a
thousandth of the time of a copy to the host, for which the device would have to wait."""

SMALL = 2**24
"""Bytes for which there is always room. To ask how much memory is free takes longer than to copy them."""

JOINED = 2**20
"""Bytes of the largest tensors that are copied together."""

JOINABLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8})
"""Of these types; `torch.cat` does not know all others."""

CONSTANTS = frozenset({int, float, str, bool, bytes, type(None)})
"""Types of values that nothing can change."""

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
        copied = CheckpointCopy(checkpoint) if self._defers else None
        if copied is None or not has_room(copied.tensors):
            self.wait()
            self._save(map_leaves(alone, checkpoint), path, storage_options)
            return
        if self._copies == AT_ONCE:
            self.go_on()
        with self._lock:
            self._lock.wait_for(lambda: self._copies < AT_ONCE)
        self.raise_error()
        copied.take()
        with self._lock:
            self._copies += 1

        def save() -> None:
            assert copied is not None
            copied.finish()  # the memory of the GPU is free before the file is written
            self._save(copied.content, path, storage_options)

        def forget() -> None:
            nonlocal copied
            copied = None
            with self._lock:
                self._copies -= 1
                self._lock.notify_all()

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


class CheckpointCopy:
    """A copy of a checkpoint, which nothing changes. Its tensors share what they shared; they are on the host.

    The tensors of `content` are empty at first. `take` copies the memory of the `tensors`, which may change from then
    on, and `finish`, in any thread, fills `content`. Small tensors are copied together: with a call for each, a small
    network would wait for several steps.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.tensors: list[Tensor] = []
        """Those of the checkpoint whose memory is to be copied; all other objects copy themselves, at once."""
        self._made: list[Tensor] = []
        self._places: list[tuple[Address, int, torch.Size, tuple[int, ...], bool]] = []
        """Of each tensor that was made: where in which memory it is, and whether it has a gradient."""
        self._copies: list[tuple[list[tuple[Address, int]], Tensor]] = []
        """Whose memory a copy holds, with the numbers of bytes, one after another."""
        self._is_there: torch.cuda.Event | None = None
        self._memo: dict[int, Any] = {}
        self.content = map_leaves(self._copy, checkpoint)
        self._memo.clear()

    def _copy(self, leaf: Any) -> Any:
        if not is_copied(leaf):
            return copy.deepcopy(leaf, self._memo)
        made = self._memo.get(id(leaf))
        if made is None:
            made = self._memo[id(leaf)] = torch.empty(0, dtype=leaf.dtype, device="cpu")
            self.tensors.append(leaf)
            self._made.append(made)
        return made

    @torch.no_grad()
    def take(self) -> None:
        """Copies the tensors: on a GPU with room for that, without waiting for it, and otherwise to the host."""
        groups: dict[Any, list[tuple[Address, Tensor]]] = {}
        known: set[Address] = set()
        for tensor in map(alone, self.tensors):
            storage, device = tensor.untyped_storage(), tensor.device
            size, address = storage.nbytes(), (device, storage.data_ptr())
            self._places.append((address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.requires_grad))
            if address not in known:
                known.add(address)
                memory = tensor.as_strided((size // tensor.itemsize,), (1,), 0)
                is_small = size <= JOINED and tensor.dtype in JOINABLE
                groups.setdefault((device, tensor.dtype) if is_small else address, []).append((address, memory))
        memories = [[memory for _, memory in group] for group in groups.values()]
        on_host = not fits_on_device(self.tensors)
        try:
            copies = [joined(parts, on_host=on_host) for parts in memories]
        except torch.OutOfMemoryError:  # where less is left than is small
            copies = [joined(parts, on_host=True) for parts in memories]
        for group, copied in zip(groups.values(), copies, strict=True):
            self._copies.append(([(address, memory.nbytes) for address, memory in group], copied))
        gpu = next((copied.device for copied in copies if copied.is_cuda), None)
        self._is_there = None if gpu is None else torch.cuda.current_stream(gpu).record_event()
        self.tensors.clear()

    def finish(self) -> None:
        """Fills `content`, beside what the GPU has to do since `take`."""
        hosted = [copied for _, copied in self._copies]
        if self._is_there is not None:
            stream = THREAD.stream(next(copied.device for copied in hosted if copied.is_cuda))
            with torch.cuda.stream(stream):
                self._is_there.synchronize()
                hosted = [copied.cpu() for copied in hosted]
                stream.synchronize()
        storages: dict[Address, torch.UntypedStorage] = {}
        for (sizes, _), copied in zip(self._copies, hosted, strict=True):
            # a file has all of a tensor's storage, so each gets one of its own, without another copy
            memory, start = copied.view(torch.uint8).numpy(), 0
            for address, size in sizes:
                storages[address] = torch.from_numpy(memory[start : start + size]).untyped_storage()
                start += size
        self._copies.clear()
        for made, (address, *place, requires_grad) in zip(self._made, self._places, strict=True):
            made.set_(storages[address], *place).requires_grad_(requires_grad)


Address = tuple[torch.device, int]
"""Of the memory of a tensor."""


def joined(parts: list[Tensor], *, on_host: bool) -> Tensor:
    """Vectors one after another, in other memory."""
    if len(parts) == 1:
        return parts[0].to("cpu" if on_host else None, copy=True)
    return torch.cat([part.cpu() for part in parts] if on_host else parts)


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
