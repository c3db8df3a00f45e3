"""Compilation of the wide network before it is needed: what the first wide step finds, and when the process ends."""

import errno
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from tiny_modules import gpt2, mlp, rows
from torch import nn
from torch._dynamo.utils import counters
from training_runs import quiet_trainer

from mupscale.callbacks import compile_ahead, growth_schedule, upscale
from mupscale.callbacks.compile_ahead import keep_one_of_each, start_compiling
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import Growable
from mupscale.models.gpt2 import GPT2, GPT2Net


def fit(module: Growable, folder: Path, steps: int, *callbacks: Callback) -> None:
    trainer = quiet_trainer(max_steps=steps, limit_val_batches=0, default_root_dir=folder, callbacks=list(callbacks))
    loader = ResidentLoader(rows(module, 16, torch.float32), 2, shuffle=False, drop_last=True)
    trainer.fit(module, loader, loader)


class Compilations(Callback):
    """What torch's caches of compiled graphs had and lacked in each step; before a growth, waits for its process."""

    def __init__(self) -> None:
        self.hits: dict[int, int] = {}
        self.misses: dict[int, int] = {}
        self.codes: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        counters.clear()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self.hits[step], self.misses[step] = (counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
        swap = upscale.swaps_of(trainer)[0]
        if swap.at_step == step and swap.schedule.ahead is not None:
            self.codes.append(swap.schedule.ahead.wait(300))


@pytest.mark.slow
@pytest.mark.exhaustive  # the code generator takes a minute
def test_the_first_wide_step_finds_its_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(growth_schedule, "should_precompile", lambda trainer, module: True)
    torch.compiler.reset()
    found = Compilations()
    fit(mlp(compile=True), tmp_path, 4, UpscaleCallback(2, 16, noise=None), found)
    assert found.codes == [0]
    assert found.misses == {1: 2, 2: 0, 3: 0, 4: 0}, "forth and back"
    assert found.hits == {1: 0, 2: 0, 3: 2, 4: 0}


class Watching(Callback):
    """Notes the process' exit status after each step, None while it runs; may end the run by an error."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.codes = fails, []
        self.processes: list[Any] = []

    def start(self, *arguments: Any) -> Any:
        self.processes.append(start_compiling(*arguments))
        return self.processes[-1]

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.codes += [process.poll() for process in self.processes]
        if self.fails and self.codes:
            raise RuntimeError("the run fails")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["the growth", "an exception"])
def test_the_process_ends_with_the_growth_or_the_run(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = Watching(fails)
    monkeypatch.setattr(compile_ahead, "PROGRAM", "import sys, time; sys.stdin.buffer.read(); time.sleep(600)")
    monkeypatch.setattr(compile_ahead, "start_compiling", watching.start)
    monkeypatch.setattr(growth_schedule, "should_precompile", lambda trainer, module: True)
    with pytest.raises(RuntimeError, match="the run fails") if fails else nullcontext():
        fit(gpt2(), tmp_path, 4, UpscaleCallback(3, 16, noise=None), watching)
    # of three steps: it begins after the first one, which takes the memory that the run needs
    assert watching.codes == [None, None, -9][: 1 if fails else 3]
    assert [process.returncode for process in watching.processes] == [-9]


def test_without_room_for_a_process_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(growth_schedule, "should_precompile", lambda trainer, module: True)
    module = gpt2()
    fit(module, tmp_path, 3, UpscaleCallback(2, 16, noise=None))
    assert module.width == 16


def test_what_cannot_be_pickled_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(GPT2):
        """A class that another process cannot import."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("no process")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    module = Local(8, base_width=4, layers=1, heads=2, vocabulary=11, context=8)
    trainer = Trainer(accelerator="cpu", logger=False)
    assert start_compiling(trainer, module, module.make_twin({}), torch.zeros(2, 9)) is None


def test_one_block_of_each_kind_stays() -> None:
    net = GPT2Net(8, layers=3, heads=2, vocabulary=11, context=8)
    keep_one_of_each(net)
    assert len(net.blocks) == 3, "not compiled one by one"
    for block in net.blocks:
        block.compile()
    net.blocks.append(nn.Linear(8, 8))
    net.blocks[3].compile()
    keep_one_of_each(net)
    assert [type(part).__name__ for part in net.blocks] == ["Block", "Linear"]
