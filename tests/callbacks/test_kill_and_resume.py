"""A run resumed from its every checkpoint ends as if nothing had happened; tests/test_attack.py kills runs."""

import shutil
from pathlib import Path

import pytest
import torch
from logged import curves, table

from mupscale.__main__ import main
from mupscale.commands.resume import newest_checkpoint

pytestmark = pytest.mark.slow


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
        pytest.param(
            "max_steps: 9, val_check_interval: 3, check_val_every_n_epoch: null", 4, marks=pytest.mark.exhaustive
        ),
        pytest.param("max_epochs: 2", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_resume_from_every_checkpoint(limits: str, swap: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    text = EVERY_STEP.format(limits=limits.replace(", ", "\n  "), swap=swap)
    (tmp_path / "config.yaml").write_text(text.replace("FOLDER", str(tmp_path)))
    main(["fit", "--config", str(tmp_path / "config.yaml")])
    run = tmp_path / "run" / "version_0"
    checkpoints = sorted([*(tmp_path / "hooks").glob("*.ckpt"), *run.rglob("*.ckpt")])
    assert len(checkpoints) > 10
    every = 1 if pytestconfig.getoption("--all") else 3
    for checkpoint in checkpoints[::every]:
        copy = tmp_path / "copies" / checkpoint.stem
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.ckpt"))
        (copy / "checkpoints").mkdir(exist_ok=True)
        shutil.copy(checkpoint, copy / "checkpoints")
        print(checkpoint)
        main(["resume", str(copy)])
        assert_same_run(copy, run)
        assert table(copy) == table(run)
