"""Captured steps on a GPU: the run is that without them; nothing leaks, and the host does not wait."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interrupted import DropoutMLP
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from training_runs import AtEnds, quiet_trainer

import mupscale
from mupscale.callbacks import captured_steps
from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import default_callbacks
from mupscale.cuda_graph import CapturedStep
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import Growable
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded, use of fork",  # a DataLoader with workers
        "ignore:Synchronization debug mode is a prototype:UserWarning",
    ),
]


def mlp(width: int = 32, kind: type[MLP] = MLP, **arguments: Any) -> MLP:
    return kind(width, **{"base_width": 8, "inputs": 6, "outputs": 3, "optimizer": ADAMW, **arguments})


def resnet(**arguments: Any) -> ResNet18:
    return ResNet18(8, base_width=8, outputs=3, **arguments)


def gpt2(**arguments: Any) -> GPT2:
    return GPT2(128, base_width=32, layers=2, heads=2, vocabulary=64, context=32, **arguments)


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=1e-2)


def cosine(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 50)))


def rows(module: Growable, count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    if isinstance(module, GPT2):
        return ((torch.randint(64, (count, 1), generator=generator) + torch.arange(33)) % 64,)
    shape = (3, 16, 16) if isinstance(module, ResNet18) else (6,)
    x = torch.randn(count, *shape, generator=generator)
    return x, x.flatten(1)[:, :3].argmax(1)


def resident(tensors: tuple[Tensor, ...], batch_size: int = 8, shuffle: bool = True) -> ResidentLoader:
    return ResidentLoader(tuple(tensor.cuda() for tensor in tensors), batch_size, shuffle=shuffle)


def fit(module: Growable, folder: Path, *callbacks: Callback, steps: int = 40, count: int = 80, **settings: Any) -> Any:
    """A run on the GPU: its losses, and what else `watch` saw after every step."""
    seed_everything(1, verbose=False)
    loader, watch = settings.pop("loader", resident), settings.pop("watch", lambda trainer, module: None)
    losses, seen = torch.zeros(steps, device="cuda"), []

    def look(trainer: Trainer, module: Any) -> None:
        losses[trainer.global_step - 1].copy_(module.train_loss)  # without waiting for it
        seen.append(watch(trainer, module))

    trainer = quiet_trainer(
        accelerator="gpu", max_steps=steps, num_sanity_val_steps=0, default_root_dir=folder,
        callbacks=[*callbacks, AtEnds(look)], **settings,
    )  # fmt: skip
    trainer.fit(module, loader(rows(module, count)), resident(rows(module, 16)))
    return SimpleNamespace(module=module, trainer=trainer, losses=losses.double().cpu(), seen=seen)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each graph that is captured is replayed; the graphs themselves are not held."""
    replays: list[int] = []

    class Counted(CapturedStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.index = len(replays)
            replays.append(0)

        def __call__(self, batch: Any) -> Tensor:
            replays[self.index] += 1
            return super().__call__(batch)

    monkeypatch.setattr(captured_steps, "CapturedStep", Counted)
    return replays


def gap(ours: Any, theirs: Any) -> float:
    assert len(ours.losses) == len(theirs.losses)
    return float(((ours.losses - theirs.losses) / theirs.losses).abs().max())


RUNS: dict[str, tuple[Callable[..., Growable], dict[str, Any], int | None, float]] = {
    # fused kernels read a learning rate from memory in float32, and nothing else is different; bfloat16 may show the
    # order of sums
    "adamw, cosine, clipping and a swap": (partial(mlp, lr_scheduler=cosine), {"gradient_clip_val": 0.5}, 64, 1e-6),
    "sgd with momentum": (partial(mlp, optimizer=SGD, lr_scheduler=cosine), {}, None, 1e-6),
    "sgd and a swap": (partial(mlp, optimizer=SGD), {}, 64, 1e-6),
    "clipping by value": (mlp, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, None, 1e-6),
    "resnet18 in bf16": (partial(resnet, optimizer=SGD, lr_scheduler=cosine), {"precision": "bf16-mixed"}, 16, 1e-3),
    "gpt2 in bf16": (partial(gpt2, optimizer=ADAMW), {"precision": "bf16-mixed", "gradient_clip_val": 1.0}, None, 1e-3),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_captured_run_is_the_run(
    name: str, graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings, width, tolerance = RUNS[name]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    growth = partial(UpscaleCallback, 20, width, noise=mupscale.AdditiveNoise(0.1)) if width else None
    theirs, fast, captured = (
        fit(make(), tmp_path, *([growth()] if growth else []), *extra, **settings)
        for extra in ([], [CapturedSteps()], [CapturedSteps(cuda_graph=True)])
    )
    assert graphs == ([17, 17] if width else [37]), "three steps before each are not captured"
    assert theirs.losses.std() > 0.01, "something must happen"
    assert torch.equal(fast.losses, theirs.losses) or tolerance == 1e-3
    assert gap(fast, theirs) <= tolerance
    assert gap(captured, theirs) <= tolerance
    for ours, other in zip(captured.module.state_dict().values(), theirs.module.state_dict().values(), strict=True):
        assert ours.shape == other.shape
    if name.startswith("resnet18"):
        convolutions = [part for part in captured.module.net.modules() if isinstance(part, nn.Conv2d)]
        assert all(part.weight.is_contiguous(memory_format=torch.channels_last) for part in convolutions)
        counters = [
            part.num_batches_tracked.item()
            for part in captured.module.net.modules()
            if isinstance(part, nn.BatchNorm2d)
        ]
        assert set(counters) == {40}
    (optimizer,) = captured.trainer.optimizers
    assert all(isinstance(group["lr"], float) for group in optimizer.param_groups)
    assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} <= {40.0}


def weights(trainer: Trainer, module: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.net.parameters()]).cpu()


def test_learning_rates_are_read_at_every_step(graphs: list[int], tmp_path: Path) -> None:
    module = mlp(lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: float(not 10 <= step < 20)))
    run = fit(module, tmp_path, CapturedSteps(cuda_graph=True), steps=30, watch=weights)
    assert graphs == [27]
    for step in range(30):  # counted from 0; `seen[n]` is what step n left
        assert torch.equal(run.seen[step], run.seen[step - 1]) == (10 <= step < 20)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_from_the_host(workers: int, graphs: list[int], tmp_path: Path) -> None:
    def loader(tensors: tuple[Tensor, ...]) -> Any:
        """A thread pins a worker's batches, also while a step is captured."""
        in_workers: Any = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(TensorDataset(*tensors), 8, pin_memory=True, **in_workers)

    theirs, ours = (
        fit(mlp(), tmp_path, *extra, loader=loader, steps=20) for extra in ([], [CapturedSteps(cuda_graph=True)])
    )
    assert graphs == [17]
    assert gap(ours, theirs) <= 1e-6


def test_dropout_draws_what_it_would_have_drawn(graphs: list[int], tmp_path: Path) -> None:
    theirs, ours = (
        fit(mlp(64, DropoutMLP), tmp_path, *extra, steps=20) for extra in ([], [CapturedSteps(cuda_graph=True)])
    )
    assert graphs == [17]
    assert gap(ours, theirs) <= 1e-6


# --- memory and waits


def allocated(trainer: Trainer, module: Any) -> int:
    if trainer.global_step % 50 == 0:
        gc.collect()
    return torch.cuda.memory_allocated()


def test_memory_does_not_grow_over_300_replays(graphs: list[int], tmp_path: Path) -> None:
    run = fit(mlp(64), tmp_path, CapturedSteps(cuda_graph=True), steps=351, count=8 * 400, watch=allocated)
    assert graphs == [348]
    assert run.seen[349] == run.seen[49]


def test_nothing_of_a_captured_narrow_network_is_left(graphs: list[int], tmp_path: Path) -> None:
    """A swap to width 2048, against a run that had it from the start."""
    narrow: list[weakref.ref[Any]] = []

    def watch(trainer: Trainer, module: Any) -> tuple[int, int]:
        if trainer.global_step == 5:
            narrow.extend(weakref.ref(thing) for thing in (module.net, *module.net.parameters()))
        return allocated(trainer, module), sum(thing() is not None for thing in narrow)

    make = partial(mlp, base_width=64, lr_scheduler=cosine)
    wide = fit(make(2048), tmp_path, CapturedSteps(cuda_graph=True), steps=50, watch=allocated).seen[-1]
    gc.collect()
    run = fit(
        make(1024),
        tmp_path,
        CapturedSteps(cuda_graph=True),
        UpscaleCallback(20, 2048, noise=None),
        steps=50,
        watch=watch,
    )
    assert graphs == [47, 17, 27]
    assert wide > 100e6
    assert [alive for _, alive in run.seen][18:] == [9, 9] + [0] * 30
    assert run.seen[-1][0] <= 1.02 * wide


@pytest.fixture
def waiting_is_an_error() -> Iterator[Callable[[Trainer, Any], None]]:
    """To be called after every step: forbids the host to wait for the device, from step 12 to 18."""

    def switch(trainer: Trainer, module: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if 11 <= trainer.global_step < 18 else "default")

    yield switch
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("model", ["mlp", "resnet", "gpt2"])
def test_the_host_does_not_wait_between_two_steps_that_log(
    model: str, cuda_graph: bool, waiting_is_an_error: Callable[[Trainer, Any], None], graphs: list[int], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": "32-true" if model == "mlp" else "bf16-mixed", "gradient_clip_val": 1.0}
    defaults = default_callbacks([], progress_bar=False)
    run = fit(
        {"mlp": mlp, "resnet": resnet, "gpt2": gpt2}[model](optimizer=ADAMW, lr_scheduler=cosine),
        tmp_path,
        *defaults,
        CapturedSteps(cuda_graph=cuda_graph),
        logger=TensorBoardLogger(tmp_path),
        log_every_n_steps=10,
        steps=25,
        count=8 * 40,
        watch=waiting_is_an_error,
        **settings,
    )
    assert graphs == ([22] if cuda_graph else [])
    assert run.trainer.global_step == 25
