"""Checkpoints that a thread writes: copies that nothing changes, the order of files, waits, and errors."""

import concurrent.futures
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from mupscale.callbacks.tensorboard import LossFirstLogger
from mupscale.models import checkpoint_files
from mupscale.models.checkpoint_files import AT_ONCE, CheckpointFiles, copy_checkpoint, map_tensors, tensors_in


class Uploading(TensorBoardLogger):
    """A logger that looks at every file."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...


class HeldFiles(CheckpointFiles):
    """One in the background whose thread waits before each file until `go` is set; `written` has their names."""

    in_background = True

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.written: list[str] = []

    def _save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        self.begun.release()
        assert self.go.wait(60)
        super()._save(checkpoint, path, storage_options)
        self.written.append(Path(path).name)

    def save(self, value: Tensor, path: Path) -> None:
        with self.deferring():
            self.save_checkpoint({"value": value}, path)


@pytest.fixture
def files() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.go.set()
    held.teardown()


def value_in(path: Path) -> list[float]:
    return torch.load(path, weights_only=True)["value"].tolist()


def test_a_file_has_the_values_of_the_moment_it_was_asked_for(files: HeldFiles, tmp_path: Path) -> None:
    weight = torch.ones(2)
    files.save(weight, tmp_path / "a.ckpt")
    weight += 1
    assert list(tmp_path.iterdir()) == []
    files.go.set()
    files.wait()
    assert value_in(tmp_path / "a.ckpt") == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_operations_keep_their_order(files: HeldFiles, tmp_path: Path) -> None:
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    old.touch()
    seen: list[bool] = []
    files.save(torch.ones(1), new)
    files.later(lambda: seen.append(new.exists() and old.exists()))
    files.later(old.unlink)
    assert files.begun.acquire(timeout=60)
    assert old.exists(), "the new one is not whole yet"
    files.go.set()
    files.wait()
    assert seen == [True]
    assert not old.exists()


def test_saving_waits_for_all_but_one(files: HeldFiles, tmp_path: Path) -> None:
    for index in range(AT_ONCE):
        files.save(torch.ones(1), tmp_path / f"{index}.ckpt")
    timer = threading.Timer(0.05, files.go.set)
    timer.start()
    files.save(torch.ones(1), tmp_path / "last.ckpt")
    assert files.written[:1] == ["0.ckpt"], "at most two copies are in memory"
    files.wait()
    assert files.written == [*(f"{index}.ckpt" for index in range(AT_ONCE)), "last.ckpt"]


def test_a_held_thread_begins_nothing_until_something_waits_for_it(files: HeldFiles, tmp_path: Path) -> None:
    files.go.set()
    files.hold()
    files.save(torch.ones(1), tmp_path / "a.ckpt")
    assert not files.begun.acquire(timeout=5 * checkpoint_files.HEAD_START)
    files.go_on()
    assert files.begun.acquire(timeout=60)
    files.hold()
    for index in range(AT_ONCE + 1):  # the last waits for a copy
        files.save(torch.ones(1), tmp_path / f"{index}.ckpt")
    files.hold()
    files.save_checkpoint({"value": torch.ones(1)}, tmp_path / "at once.ckpt")
    files.hold()
    files.save(torch.ones(1), tmp_path / "last.ckpt")
    files.wait()
    assert files.written == ["a.ckpt", "0.ckpt", "1.ckpt", "2.ckpt", "at once.ckpt", "last.ckpt"]
    files.hold()
    files.save(torch.ones(1), tmp_path / "end.ckpt")
    files.teardown()
    assert files.written[-1] == "end.ckpt"


def test_one_thread_writes_the_files_of_all_runs(tmp_path: Path) -> None:
    """In the order in which they were asked for; a run waits for its own."""
    runs = [HeldFiles() for _ in range(3)]
    before = {thread for thread in threading.enumerate() if not thread.name.startswith("checkpoints")}
    for index, files in enumerate(runs):
        files.save(torch.ones(1), tmp_path / f"{index}.ckpt")
    assert len(set(threading.enumerate()) - before) == 1
    runs[0].go.set()
    runs[0].wait()
    assert [files.written for files in runs] == [["0.ckpt"], [], []]
    runs[1].go.set()
    runs[2].go.set()
    runs[2].wait()
    assert runs[1].written == ["1.ckpt"], "it came first"


def test_a_thread_that_cannot_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoint_files.executor.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    files = HeldFiles()
    with pytest.raises(RuntimeError, match="new thread"):
        files.later(lambda: None)
    files.wait()
    checkpoint_files.executor.cache_clear()


def test_a_run_that_is_given_up_holds_no_other_run(files: HeldFiles, tmp_path: Path) -> None:
    other = HeldFiles()
    other.hold()
    other.give_up()
    files.go.set()
    files.save(torch.ones(1), tmp_path / "a.ckpt")
    assert files.begun.acquire(timeout=60)


def test_a_process_that_is_to_end_at_once_waits_for_no_file(files: HeldFiles, tmp_path: Path) -> None:
    files.save(torch.ones(1), tmp_path / "a.ckpt")
    files.save(torch.ones(1), tmp_path / "b.ckpt")
    assert files.begun.acquire(timeout=60)
    files.give_up()
    files.wait()
    assert files.written == []
    files.go.set()
    concurrent.futures.wait(files._under_way)
    assert files.written == ["a.ckpt"], "what was not begun is dropped"


@pytest.mark.parametrize(
    ("logger", "expected"), [(LossFirstLogger, True), (TensorBoardLogger, True), (Uploading, False), (None, True)]
)
def test_runs_of_one_gpu_write_in_the_background(logger: Any, expected: bool, tmp_path: Path) -> None:
    """Unless a logger looks at every file: Lightning's for TensorBoard has the hook, and does nothing in it."""
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    loggers = [] if logger is None else [logger(tmp_path)]
    trainer: Any = SimpleNamespace(loggers=loggers, world_size=1, strategy=strategy)
    assert checkpoint_files.pays_in_background(trainer) == expected
    trainer.world_size = 2
    assert not checkpoint_files.pays_in_background(trainer)


def test_others_find_their_file_when_saving_returns(files: HeldFiles, tmp_path: Path) -> None:
    """Only who asks for it is not waited for: a callback of the user may read what it has saved."""
    files.go.set()
    files.save(torch.ones(1), tmp_path / "a.ckpt")
    files.save_checkpoint({"value": torch.zeros(1)}, tmp_path / "b.ckpt")
    assert files.written == ["a.ckpt", "b.ckpt"]


def test_an_error_is_raised_once_and_nothing_older_is_deleted(
    files: HeldFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    old = tmp_path / "old.ckpt"
    old.touch()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.torch, "save", fail)
        files.save(torch.ones(1), tmp_path / "a.ckpt")
        files.later(old.unlink)
        files.save(torch.ones(1), tmp_path / "b.ckpt")
        files.go.set()
        with pytest.raises(OSError, match="No space left on device"):
            files.wait()
    files.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    files.save(torch.ones(1), tmp_path / "c.ckpt")
    files.save(torch.ones(1), tmp_path / "d.ckpt")
    files.wait()
    assert files.written == ["c.ckpt", "d.ckpt"]


def test_without_room_for_a_copy_the_file_is_written_at_once(
    files: HeldFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.go.set()
    asked: list[Any] = []
    monkeypatch.setattr(checkpoint_files, "free_bytes", lambda device: asked.append(device) or 15)
    files.save(torch.ones(2), tmp_path / "small.ckpt")
    files.wait()
    assert not asked, "it takes longer than the copy"
    monkeypatch.setattr(checkpoint_files, "SMALL", 0)
    files.save(torch.ones(2), tmp_path / "a.ckpt")
    assert files.written == ["small.ckpt", "a.ckpt"]
    assert not files._under_way


def host_copy(checkpoint: Any, change: Callable[[], object] = lambda: None) -> Any:
    """A copy, finished after a change."""
    copy = copy_checkpoint(checkpoint, tensors_in(checkpoint))
    change()
    return map_tensors(Tensor.cpu, copy)


@pytest.mark.parametrize("in_background", [False, True])
def test_the_versions_of_modules_are_kept(in_background: bool, tmp_path: Path) -> None:
    files = CheckpointFiles()
    files.in_background = in_background
    with files.deferring():
        files.save_checkpoint({"state_dict": torch.nn.BatchNorm1d(2).state_dict()}, tmp_path / "a.ckpt")
    files.teardown()
    assert torch.load(tmp_path / "a.ckpt")["state_dict"]._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("fits", [False, True])
def test_a_copy_shares_what_the_checkpoint_shares(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "fits_on_device", lambda tensors: fits)
    table, part = torch.arange(6.0).reshape(2, 3), torch.arange(100.0)[10:12]
    images = torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)
    inner = [1, {"a": 2}]
    checkpoint = OrderedDict(
        tied=table, same=table, turned=table.T, part=part, images=images, inner=inner,
        empty=torch.empty(0, 3), flags=torch.tensor([True, False]), halves=torch.ones(3, dtype=torch.bfloat16),
        again={"tied": table}, more=torch.arange(3, dtype=torch.float64),
    )  # fmt: skip

    def change() -> None:
        table.add_(1)
        part.add_(1)
        images.add_(1)
        inner[1]["a"] = 3

    copy = host_copy(checkpoint, change)
    sharing = copy["same"], copy["turned"], copy["again"]["tied"]
    assert {tensor.untyped_storage().data_ptr() for tensor in sharing} == {copy["tied"].untyped_storage().data_ptr()}
    assert copy["tied"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copy["turned"].stride() == (1, 3)
    assert copy["part"].tolist() == [10, 11]
    assert torch.equal(copy["images"], images - 1)
    assert copy["images"].stride() == images.stride()
    assert copy["inner"] == [1, {"a": 2}]
    assert copy["empty"].shape == (0, 3)
    assert [copy[name].tolist() for name in ("flags", "halves", "more")] == [[True, False], [1, 1, 1], [0, 1, 2]]
    for tensor in (value for value in copy.values() if isinstance(value, torch.Tensor)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a file has nothing of the others"
    assert type(copy) is OrderedDict


def test_without_memory_on_the_device_a_copy_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(checkpoint_files.torch, "clone", clone)
    assert [tensor.tolist() for tensor in host_copy([torch.ones(2), torch.zeros(1)])] == [[1, 1], [0]]


def test_tensors_of_other_kinds_copy_themselves() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    turned = torch.tensor([1 + 2j]).conj()
    copy = host_copy([parameter, turned, {"a": torch.eye(2).to_sparse()}])
    assert type(copy[0]) is torch.nn.Parameter
    assert copy[0] is not parameter
    assert copy[1].tolist() == [1 - 2j]
    assert copy[2]["a"].to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, checkpoint_files.ON_DEVICE])
def test_a_file_has_the_numbers_of_the_moment_it_was_asked_for_on_a_gpu(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are changed while the thread has not begun to copy them to the host."""
    monkeypatch.setattr(checkpoint_files, "ON_DEVICE", share)
    weight, files = torch.zeros(1000, 1000, device="cuda"), CheckpointFiles()
    files.in_background = True
    for step in range(3):
        weight += 1
        with files.deferring():
            files.save_checkpoint({"weight": weight, "tied": weight}, tmp_path / f"{step}.ckpt")
    weight += 1
    files.teardown()
    for step in range(3):
        found = torch.load(tmp_path / f"{step}.ckpt")
        assert (found["weight"] == step + 1).all()
        assert found["weight"].device.type == "cpu"
        assert found["tied"].data_ptr() == found["weight"].data_ptr()
