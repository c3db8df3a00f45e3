"""A run that is killed again and again, and one resumed from its every step, end as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from logged import curves, table
from program_server import Server, environment

from mupscale.__main__ import main
from mupscale.commands.resume import newest_checkpoint

pytestmark = pytest.mark.slow

KILLS = 24
FIRST_SWAP, SECOND_SWAP, STEPS = 107, 210, 320  # 30 batches an epoch: in the middle of one, and between two

CONFIG = f"""
seed_everything: 3
trainer:
  accelerator: cpu
  max_steps: {STEPS}
  log_every_n_steps: 1
  val_check_interval: 7
  check_val_every_n_epoch: null
  limit_val_batches: 2
  enable_progress_bar: false
  logger: {{init_args: {{save_dir: FOLDER, name: run}}}}
  callbacks:
    - class_path: UpscaleCallback
      init_args:
        at_step: {FIRST_SWAP}
        width: 48
        noise: {{class_path: mupscale.AdditiveNoise, init_args: {{std: 0.1}}}}
    - class_path: UpscaleCallback
      init_args:
        at_step: {SECOND_SWAP}
        width: 96
        noise: {{class_path: mupscale.AdditiveNoise, init_args: {{std: 0.1}}}}
model:
  class_path: interrupted.DropoutMLP
  init_args:
    width: 16
    base_width: 16
    optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 0.003}}}}
    lr_scheduler: {{class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {{T_max: {STEPS}}}}}
data: {{class_path: Covertype, init_args: {{batch_size: 200}}}}
checkpoint: {{every_n_train_steps: 5}}
"""


def written(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(CONFIG.replace("FOLDER", str(folder)))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.process.communicate()


@pytest.fixture(scope="module")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    server.run("fit", "--config", str(written(folder, "config.yaml")))
    return folder / "run" / "version_0"


def assert_same_run(run: Path, expected: Path) -> None:
    ours, theirs = (newest_checkpoint(folder)[1] for folder in (run, expected))
    assert ours["global_step"] == theirs["global_step"]
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, tensor in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], tensor), name
    for mine, other in zip(ours["optimizer_states"], theirs["optimizer_states"], strict=True):
        for index, state in other["state"].items():
            assert all(torch.equal(mine["state"][index][key], value) for key, value in state.items())
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    assert ours["epoch"] == theirs["epoch"]
    drawn, wanted = curves(run), curves(expected)
    assert drawn.keys() == wanted.keys()
    for tag, points in wanted.items():
        if tag != "config/text_summary":  # which names the folder
            assert drawn[tag] == points, tag


def newest_step(run: Path) -> int:
    return newest_checkpoint(run)[1].get("global_step", 0)


class Moments:
    """When to kill a run: at random, while a checkpoint is written, and before, in and after its swaps."""

    def __init__(self, run: Path, temporary: Path) -> None:
        self.run, self.temporary = run, temporary
        self.chance = random.Random(0)
        self.in_swap = {FIRST_SWAP: 3, SECOND_SWAP: 3}

    def wait(self, pid: int, kill: int, step: int) -> None:
        swap = next((at for at, left in self.in_swap.items() if left and step <= at <= step + 20), None)
        if swap is not None:
            self.in_swap[swap] -= 1
            # its checkpoint is there, or the run that goes on from it has begun to log
            path, logged = self.run / "checkpoints" / f"pre-upscale-{swap}.ckpt", self.logged()
            self.until(pid, lambda: path.exists() and (step < swap or self.logged() - logged != set()))
        elif kill % 5 == 4:
            self.until(pid, lambda: any(self.temporary.iterdir()) or self.saved() > step)
        else:
            goal = step + self.chance.randint(1, 2 * (STEPS - step) // (KILLS + 1 - kill))
            self.until(pid, lambda: self.saved() >= min(goal, STEPS - 10))
        time.sleep(self.chance.choice([0.0, 0.005, 0.02, 0.04]))

    def until(self, pid: int, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end
            os.kill(pid, 0)  # it must not have ended
            time.sleep(0.0005)

    def saved(self) -> int:
        return max((int(path.stem.rpartition("=")[2]) for path in self.run.glob("checkpoints/epoch=*.ckpt")), default=0)

    def logged(self) -> set[Path]:
        return set(self.run.glob("events.*"))


def test_kill_many_times(server: Server, uninterrupted: Path, tmp_path: Path) -> None:
    config = str(written(tmp_path, "config.yaml"))
    run, temporary = tmp_path / "run" / "version_0", server.log.parent / "tmp"
    moments, steps = Moments(run, temporary), []
    for kill in range(KILLS):
        arguments = ["resume", str(run)] if kill else ["fit", "--config", config]
        step = newest_step(run) if kill else 0
        if kill in (0, 9):
            command, quiet = [sys.executable, "-m", "mupscale", *arguments], subprocess.DEVNULL
            with subprocess.Popen(command, env=environment(tmp_path), stdout=quiet, stderr=quiet) as process:
                moments.wait(process.pid, kill, step)
                process.kill()
        else:
            pid = server.start(*arguments)
            moments.wait(pid, kill, step)
            os.kill(pid, signal.SIGKILL)
            assert server.answer() == -signal.SIGKILL
        steps.append(newest_step(run))
        for leftover in temporary.iterdir():
            leftover.unlink()
        if kill % 3 == 0:  # what a full disk, or a copy across file systems, leaves of a checkpoint
            content = next(run.glob("checkpoints/epoch=*.ckpt")).read_bytes()
            (run / "checkpoints" / "torn.ckpt").write_bytes(content[: moments.chance.randrange(len(content))])
    print("killed after the checkpoints of steps", steps)
    assert steps == sorted(steps)
    assert min(steps) < FIRST_SWAP
    assert max(steps) > SECOND_SWAP
    server.run("resume", str(run))
    assert_same_run(run, uninterrupted)
    server.run("resume", str(run))  # finished: nothing happens
    assert_same_run(run, uninterrupted)


EVERY_STEP = """
seed_everything: 3
trainer:
  accelerator: cpu
  {limits}
  limit_train_batches: 4
  limit_val_batches: 1
  log_every_n_steps: 3             # so that resuming falls into a window
  enable_progress_bar: false
  logger:
    - {{class_path: TensorBoardLogger, init_args: {{save_dir: FOLDER, name: run}}}}
    - {{class_path: CSVLogger, init_args: {{save_dir: FOLDER, name: run, version: 0, flush_logs_every_n_steps: 2}}}}
  callbacks:
    - {{class_path: interrupted.SaveAtEveryHook, init_args: {{folder: FOLDER/hooks}}}}
    - {{class_path: EarlyStopping, init_args: {{monitor: val/loss, patience: 3, min_delta: 10}}}}
    - class_path: UpscaleCallback
      init_args: {{at_step: {swap}, width: 8, noise: {{class_path: mupscale.AdditiveNoise, init_args: {{std: 0.1}}}}}}
model:
  class_path: interrupted.DropoutMLP
  init_args:
    width: 4
    base_width: 4
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.1, momentum: 0.9}}}}
    lr_scheduler:
      class_path: lightning.pytorch.cli.ReduceLROnPlateau
      init_args: {{monitor: val/loss, factor: 0.5, patience: 0, threshold: 10}}
data: {{class_path: Covertype, init_args: {{batch_size: 500}}}}
checkpoint: {{every_n_train_steps: 1, save_top_k: -1, save_last: false}}
"""


@pytest.mark.parametrize(
    ("limits", "swap"),
    [
        ("max_steps: 10, val_check_interval: 2, check_val_every_n_epoch: null", 6),
        ("max_steps: 9, val_check_interval: 3, check_val_every_n_epoch: null", 4),
        ("max_epochs: 2", 4),
    ],
)
def test_resume_from_every_checkpoint(limits: str, swap: int, tmp_path: Path) -> None:
    text = EVERY_STEP.format(limits=limits.replace(", ", "\n  "), swap=swap)
    (tmp_path / "config.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    main(["fit", "--config", str(tmp_path / "config.yaml")])
    run = tmp_path / "run" / "version_0"
    checkpoints = sorted([*(tmp_path / "hooks").glob("*.ckpt"), *run.rglob("*.ckpt")])
    assert len(checkpoints) > 10
    for checkpoint in checkpoints:
        copy = tmp_path / "copies" / checkpoint.stem
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.ckpt"))
        (copy / "checkpoints").mkdir(exist_ok=True)
        shutil.copy(checkpoint, copy / "checkpoints")
        print(checkpoint)
        main(["resume", str(copy)])
        assert_same_run(copy, run)
        assert table(copy) == table(run)
