"""The work of a training step, counted rather than timed, so that it cannot grow unseen where there is no GPU.

What a CPU dispatches stands for what a GPU launches: optimizers are the fused ones, as they are there.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from dispatched import LiveBytes, Operations
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from observed_fits import capture_on_cpu
from tiers import slow_except
from tiny_modules import gpt2, mlp, resnet, rows
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from training_runs import AtEnds

import mupscale
from mupscale.callbacks import curves, run_defaults
from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.growth_schedule import GrowthSchedule
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import default_callbacks
from mupscale.cuda_graph import step_kind
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models import checkpoint_files
from mupscale.models.base import Growable
from mupscale.models.checkpoint_files import CheckpointFiles
from mupscale.models.gpt2 import GPT2

LOG_EVERY = 10
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)
cosine = partial(CosineAnnealingLR, T_max=1000)


def fit(
    module: Growable,
    folder: Path,
    *callbacks: Callback,
    steps: int = 25,
    batches: int = 100,
    saver: RunCheckpoint | None = None,
    **settings: Any,
) -> Trainer:
    """A run with everything on that a run has by default."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        log_every_n_steps=LOG_EVERY,
        logger=TensorBoardLogger(folder),
        enable_model_summary=False,
        callbacks=[
            *default_callbacks([]),
            saver or RunCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=500),
            *callbacks,
        ],
        **settings,
    )
    train, val = (
        ResidentLoader(rows(module, count, torch.float32), 8, shuffle=False, drop_last=True)
        for count in (8 * batches, 16)
    )
    trainer.fit(module, train, val)
    return trainer


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the progress bar, which is drawn by the clock."""
    monkeypatch.setattr(run_defaults.time, "monotonic", lambda: 100.0)


# --- kernels and waits


WAITS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
}
"""What a host can only know once the device is done."""

MODELS: dict[str, tuple[Callable[..., Growable], dict[str, Any], int]] = {
    # the batch 2, forward 8, the loss 5 (2 of them Lightning's, 1 the sum for the curves), backward 19, clipping 9, a
    # fused step and its counters for 3 groups 6
    "mlp": (partial(mlp, optimizer=ADAMW), {"gradient_clip_val": 1.0}, 49),
    # 20 convolutions and 20 norms, forth and back, 80, the norms' counters 20, ReLUs 34, residuals 16, casts to and
    # from bfloat16 47, the batch 2, the mean over positions, the readout and the loss 17, one fused step for all 62
    # parameters
    "resnet18": (partial(resnet, optimizer=SGD), {"precision": "bf16-mixed"}, 217),
    # matmuls 27 with 9 sums over biases, casts 39, norms 10, attention 4, GELU 4, residuals 11, the rest embeddings and
    # the loss; clipping 8, steps for 2 groups 4
    "gpt2": (partial(gpt2, optimizer=ADAMW), {"precision": "bf16-mixed", "gradient_clip_val": 1.0}, 142),
}
"""Modules, settings, and how many kernels a step is at most."""


def operations(model: str, folder: Path) -> list[Counter[str]]:
    """Those of every step between the first and the second that log."""
    make, settings, _ = MODELS[model]
    counting = Operations()
    with counting:
        fit(make(lr_scheduler=cosine), folder, CapturedSteps(), AtEnds(counting.begin), **settings)
    return [counting.by_step[step] for step in range(LOG_EVERY, 2 * LOG_EVERY - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_a_step(model: str, tmp_path: Path) -> None:
    steps = operations(model, tmp_path)
    assert all(step == steps[0] for step in steps), "every step does the same"
    assert not WAITS & steps[0].keys(), "the host waits for the device"
    assert steps[0].total() <= MODELS[model][2], steps[0]


def test_a_logging_step_waits_once(tmp_path: Path) -> None:
    counting = Operations()
    with counting:
        fit(mlp(optimizer=ADAMW), tmp_path, CapturedSteps(), AtEnds(counting.begin))
    waits = {step: sum(found[name] for name in WAITS) for step, found in counting.by_step.items() if 0 < step < 24}
    assert {step for step, count in waits.items() if count} == {LOG_EVERY - 1, 2 * LOG_EVERY - 1}
    assert max(waits.values()) == 1


def clipping(layers: int) -> Counter[str]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    model(torch.ones(1, 4)).sum().backward()
    counting = Operations()
    with counting:
        mupscale.clip_grad_norm_(model, 0.1)
    return counting.by_step[0]


def test_clipping_is_a_few_kernels_for_any_number_of_parameters() -> None:
    # norms, their factors, one vector of them, its norm, four for the coefficient, and the gradients by it
    assert clipping(1).total() == clipping(100).total() == 9
    assert not WAITS & clipping(100).keys()


# --- the host


class Done:
    """A captured step, replayed in no time."""

    def __init__(self, gradients: Any, optimizer: Any, batch: Any) -> None:
        self.kind = step_kind(batch, optimizer)
        self.loss = torch.tensor(1.0)

    def takes(self, batch: Any) -> bool:
        return True

    def __call__(self, batch: Any) -> Tensor:
        return self.loss


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    """Yields a function that returns how many functions Python has called since."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(None)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """CapturedSteps takes the CPU for a GPU, on which a captured step takes no time."""
    capture_on_cpu(monkeypatch, Done)


def python_calls(folder: Path, *callbacks: Callback) -> float:
    """Functions that Python calls for a step, from one log to the next."""
    counts: dict[int, int] = {}
    with counted_calls() as calls:
        watch = AtEnds(lambda trainer, _: counts.update({trainer.global_step: calls()}))
        watch.needs_every_step = False
        fit(mlp(optimizer=ADAMW, lr_scheduler=cosine), folder, *callbacks, watch, steps=2 * LOG_EVERY + 1)
    return (counts[2 * LOG_EVERY] - counts[LOG_EVERY]) / LOG_EVERY


@pytest.mark.usefixtures("captures")
def test_a_block_of_captured_steps_calls_few_functions(tmp_path: Path) -> None:
    """Two batches of Lightning's loop take the ten steps from one log to the next."""
    lightning = python_calls(tmp_path / "lightning", CapturedSteps())
    captured = python_calls(tmp_path / "captured", CapturedSteps(cuda_graph=True))
    assert captured < 0.4 * lightning


@pytest.mark.usefixtures("captures")
def test_events_call_few_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training waits for: 2,200 calls for a checkpoint that a thread writes, 255 for a log."""
    monkeypatch.setattr(checkpoint_files, "pays_in_background", lambda trainer: True)
    counts: dict[str, int] = {}

    def counted(hook: Any, name: str) -> Callable[..., None]:
        def call(self: Callback, trainer: Trainer, *arguments: Any) -> None:
            before = calls()
            hook(self, trainer, *arguments)
            counts[f"{name} {trainer.global_step}"] = calls() - before

        return call

    monkeypatch.setattr(RunCheckpoint, "on_train_batch_end", counted(RunCheckpoint.on_train_batch_end, "checkpoint"))
    monkeypatch.setattr(Curves, "on_train_batch_end", counted(Curves.on_train_batch_end, "log"))
    with counted_calls() as calls:
        saver = RunCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=15, save_last="link")
        fit(mlp(optimizer=ADAMW), tmp_path, CapturedSteps(cuda_graph=True), saver=saver, steps=41)
    assert counts["checkpoint 30"] < 2500
    assert counts["log 20"] < 260


# --- a swap


@pytest.mark.parametrize("validates", [False, True])
def test_files_and_flops_wait_for_the_first_wide_step(
    validates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a validation before the swap, which may be long, does not delay the checkpoint."""
    seen: list[str] = []
    is_writing = threading.Event()

    def write(*arguments: Any, function: Any = CheckpointFiles._save) -> None:
        seen.append("write")
        is_writing.set()
        function(*arguments)

    def count(*arguments: Any, function: Any = curves.count_flops) -> float:
        seen.append("count")
        return function(*arguments)

    def swap(*arguments: Any, function: Any = GrowthSchedule._grow) -> None:
        is_writing.wait(60 if validates else 3 * checkpoint_files.HEAD_START)  # a thread that is not held would begin
        seen.append("swap")
        function(*arguments)

    monkeypatch.setattr(CheckpointFiles, "_save", write)
    monkeypatch.setattr(GrowthSchedule, "_grow", swap)
    monkeypatch.setattr(curves, "count_flops", count)
    monkeypatch.setattr(checkpoint_files, "pays_in_background", lambda trainer: True)
    watch = AtEnds(lambda trainer, _: seen.append(f"end {trainer.global_step}"))
    settings = {"val_check_interval": 3} if validates else {}
    fit(mlp(optimizer=ADAMW), tmp_path, UpscaleCallback(3, 16, noise=None), watch, CapturedSteps(), steps=5, **settings)
    first, last = seen.index("end 3"), seen.index("end 4")
    assert seen[first : last + 1] == ["end 3", *["write"] * validates, "swap", "end 4"]
    assert sorted(seen[last:]) == ["count", "end 4", "end 5", *["write"] * (2 - validates)], "and the last checkpoint"
    assert list(tmp_path.glob("**/pre-upscale-3.ckpt"))


def test_the_calls_of_a_swap_grow_no_faster_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = GrowthSchedule._grow
    counts: dict[int, int] = {}

    def counted(self: GrowthSchedule, swap: UpscaleCallback, batch: Any) -> None:
        with counted_calls() as calls:
            grow(self, swap, batch)
            counts[self.module.hparams["layers"]] = calls()

    monkeypatch.setattr(GrowthSchedule, "_grow", counted)
    for layers in (2, 4, 8):
        module = GPT2(8, base_width=8, layers=layers, heads=2, vocabulary=11, context=8, optimizer=ADAMW)
        fit(module, tmp_path / str(layers), UpscaleCallback(2, 16, noise=None), steps=3)
    assert counts[8] - counts[4] <= 2.1 * (counts[4] - counts[2])


# --- memory


def footprint(trainer: Trainer) -> int:
    """Weights and optimizer state."""
    state = [value for held in trainer.optimizers[0].state.values() for value in held.values()]
    return sum(tensor.nbytes for tensor in (*trainer.lightning_module.net.parameters(), *state))


class Weighed:
    """Weighs what is alive before, in and after a swap."""

    def __init__(self, live: LiveBytes, grow: Callable[..., None]) -> None:
        self.live, self.grow = live, grow

    def __call__(self, schedule: GrowthSchedule, swap: UpscaleCallback, batch: Any) -> None:
        net: Any = schedule.module.net
        things = net, *net.modules(), *net.parameters()
        self.narrow = [weakref.ref(thing) for thing in things]
        self.before, self.live.peak = self.live.now, self.live.now
        del net, things
        self.grow(schedule, swap, batch)
        self.after, self.peak, self.footprint = self.live.now, self.live.peak, footprint(schedule.trainer)


@pytest.mark.parametrize("precision", slow_except(["32-true", "bf16-mixed"], "32-true"))
def test_a_swap_peaks_at_the_final_footprint_and_leaves_nothing_behind(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """38 MB, so that a megabyte's largest weight and the smaller things do not show; autocast's copies of all weights
    would.
    """
    live = LiveBytes()
    swap = Weighed(live, GrowthSchedule._grow)
    monkeypatch.setattr(GrowthSchedule, "_grow", lambda *arguments: swap(*arguments))
    module = GPT2(128, base_width=8, layers=4, heads=4, vocabulary=11, context=8, optimizer=ADAMW)
    with live:
        fit(module, tmp_path, CapturedSteps(), UpscaleCallback(2, 256, noise=None), steps=3, precision=precision)
    assert swap.before > 0.3 * swap.footprint, "narrow weights, moments and gradients"
    assert swap.peak <= 1.05 * swap.footprint
    assert swap.after <= 1.005 * swap.footprint  # and the data
    assert [thing() for thing in swap.narrow if thing() is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", slow_except(MODELS, kept=["mlp"]))
def test_memory_does_not_grow(model: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    last = 1100 if pytestconfig.getoption("--all") else 300
    make, settings, _ = MODELS[model]
    live, seen = LiveBytes(), {}
    watch = AtEnds(lambda trainer, _: seen.update({trainer.global_step: live.now}))
    with live:
        fit(make(lr_scheduler=cosine), tmp_path, CapturedSteps(), watch, steps=last + 1, batches=20, **settings)
    assert seen[100] == seen[last] > 0
    assert seen[101] == seen[last + 1]
