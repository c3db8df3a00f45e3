"""A plain `Trainer` with `run_settings` logs, saves and resumes as the command line does, whatever the module is."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import kill_and_repeat
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_modules import EXAMPLES, Autoencoder, rows
from logged import curves
from programs import run_in_fork
from run_ends import differences
from torch.utils.data import DataLoader, TensorDataset

from mupscale import AdditiveNoise
from mupscale.callbacks.plain import run_settings
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.models.checkpoint import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")

STEPS, GROWS_AT = 24, 12


def script(folder: Path, name: str = "autoencoder", **options: Any) -> LightningModule:
    """What a user runs, the first time and again after an interruption."""
    example = EXAMPLES[name]
    seed_everything(0, verbose=False)
    module = example.make()
    swap = UpscaleCallback(GROWS_AT, noise=AdditiveNoise(0.1), **example.growth)
    settings = run_settings(folder, swap, save_every=5, progress_bar=False, log_every_n_steps=2, **options)
    trainer = Trainer(accelerator="cpu", precision="64-true", max_steps=STEPS, **settings)
    data = DataLoader(TensorDataset(*rows(example.kind, 8 * 7)), 8, shuffle=True)
    trainer.fit(module, data, ckpt_path="last")
    return module


@pytest.mark.parametrize("name", ["autoencoder", "GAN"])
def test_curves_have_the_tags_of_the_command_line(name: str, tmp_path: Path) -> None:
    script(tmp_path / "run", name)
    drawn = curves(tmp_path / "run")
    assert [step for step, _ in drawn["train/loss"]] == list(range(1, STEPS, 2))
    assert [step for step, _ in drawn["x_growth/loss_before"]] == [GROWS_AT]
    assert {"x_axis_samples/train/loss", "x_axis_flops/train/loss", "x_epoch"} <= drawn.keys()
    assert any(tag.startswith("x_lr/") for tag in drawn)
    samples = [step for step, _ in drawn["x_axis_samples/train/loss"]]
    batches_per_step = 0.5 if name == "GAN" else 1  # which has two optimizers
    assert samples == [int(8 * batches_per_step * step) for step in range(2, STEPS + 1, 2)]


def outcome(folder: Path) -> dict[str, Any]:
    """The curves of a run, and the weights and optimizer states at its end."""
    last = load_checkpoint(folder / f"checkpoints/step={STEPS}.ckpt")
    return {"curves": curves(folder), **{key: last[key] for key in ("state_dict", "optimizer_states")}}


@pytest.mark.slow
def test_a_script_that_is_killed_goes_on_with_the_last_checkpoint(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    kills = 20 if pytestconfig.getoption("--all") else 5
    assert kill_and_repeat(script, tmp_path, kills, outcome) > 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_is_stopped_goes_on_where_it_stood(number: int, tmp_path: Path) -> None:
    training_step = Autoencoder.training_step

    def signalled(self: Autoencoder, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), number)
        return training_step(self, batch, batch_idx)

    def stopped() -> None:
        Autoencoder.training_step = signalled
        script(tmp_path / "run")

    assert run_in_fork(lambda: script(tmp_path / "wanted")) == 0
    assert run_in_fork(stopped) == (1 if number == signal.SIGINT else 0)  # Lightning raises a SystemExit for SIGTERM
    folder = tmp_path / "run/checkpoints"
    assert load_checkpoint(folder / "last.ckpt")["global_step"] == 3  # before the first checkpoint that is due
    assert run_in_fork(lambda: script(tmp_path / "run")) == 0
    assert list(differences(outcome(tmp_path / "run"), outcome(tmp_path / "wanted"))) == []


def test_a_new_run_does_not_start_in_the_folder_of_another(tmp_path: Path) -> None:
    script(tmp_path / "run")
    trainer = Trainer(accelerator="cpu", max_steps=6, **run_settings(tmp_path / "run", progress_bar=False))
    data = DataLoader(TensorDataset(*rows("points", 8)), 8)
    with pytest.raises(UserError, match=r'has the checkpoints of a run .*ckpt_path="last"'):
        trainer.fit(Autoencoder(), data)


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a ModelCheckpoint": lambda other: {"callbacks": ModelCheckpoint(other / "own", every_n_train_steps=4)},
    "one in the same folder": lambda other: {"callbacks": [ModelCheckpoint(filename="{step}", save_last=True)]},
    "another logger": lambda other: {"logger": CSVLogger(other, version=0), "max_epochs": -1},
    "no logger": lambda other: {"logger": False, "enable_checkpointing": True},
}


@pytest.mark.filterwarnings("ignore:Experiment logs directory", "ignore:Checkpoint directory")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_run_keeps_its_checkpoints_in_its_folder_whatever_the_user_adds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training_step, options, run = Autoencoder.training_step, OPTIONS[name], tmp_path / "run"

    def interrupted(self: Autoencoder, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Autoencoder, "training_step", interrupted)
    with pytest.raises(SystemExit):
        script(run, **options(tmp_path))
    point = run / "checkpoints/resume/step=3.ckpt"
    assert point.exists()
    assert f"stopped at step 3. The newest checkpoint is {point}. Start the same script" in capsys.readouterr().err
    monkeypatch.setattr(Autoencoder, "training_step", training_step)
    again = script(run, **options(tmp_path))
    assert Path(str(again.trainer.ckpt_path)).resolve().parent.is_relative_to(run)
    names = sorted(path.name for path in (run / "checkpoints/resume").iterdir())
    assert names == ["step=20.ckpt", f"step={STEPS}.ckpt"], "the newest two: one may be damaged"
    wanted = script(tmp_path / "wanted")
    for key, value in wanted.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
