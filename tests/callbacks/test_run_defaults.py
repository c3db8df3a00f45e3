"""A plain `Trainer` with `run_settings` logs, saves and resumes as the command line does, whatever the module is."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import kill_and_repeat
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_modules import EXAMPLES, Autoencoder, rows
from logged import curves
from programs import run_in_fork
from run_ends import differences
from torch.utils.data import DataLoader, TensorDataset

from mupscale import AdditiveNoise
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.run_defaults import run_settings
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
    settings = run_settings(folder, swap, save_every=5, enable_progress_bar=False, log_every_n_steps=2, **options)
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


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> None:
    """Starts the script, and ends it by Ctrl-C after a step."""
    training_step = Autoencoder.training_step

    def interrupted(self: Autoencoder, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return training_step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Autoencoder, "training_step", interrupted)
        with pytest.raises(SystemExit):
            script(folder, **options)


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "overwritten": lambda content: content[:-3000] + bytes(100) + content[-2900:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(8, monkeypatch, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/resume/step=8.ckpt"
    left = DAMAGE[damage](newest.read_bytes())
    newest.unlink()
    if left is not None:
        newest.write_bytes(left)
    with nullcontext() if left is None else pytest.warns(UserWarning, match=r"step=8.ckpt is damaged"):
        again = script(tmp_path / "run")
    assert Path(str(again.trainer.ckpt_path)).name == "step=5.ckpt"
    script(tmp_path / "wanted")
    assert list(differences(outcome(tmp_path / "run"), outcome(tmp_path / "wanted"))) == []


def test_a_run_does_not_take_up_another_run_whose_checkpoint_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs may have the folder of a logger, or of a ModelCheckpoint, in common."""
    shared = lambda: {"callbacks": ModelCheckpoint(tmp_path / "shared", save_last=True, every_n_train_steps=1)}  # noqa: E731
    interrupt_at(3, monkeypatch, tmp_path / "run", **shared())
    interrupt_at(6, monkeypatch, tmp_path / "other", **shared())
    assert script(tmp_path / "run", **shared()).trainer.ckpt_path == str(
        tmp_path / "run/checkpoints/resume/step=3.ckpt"
    )


@pytest.mark.slow
def test_checkpoints_that_a_user_keeps_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """A run that is killed writes those after its newest checkpoint again."""
    own = lambda name: {"callbacks": ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=3, save_top_k=-1)}  # noqa: E731
    training_step = Autoencoder.training_step

    def killed(self: Autoencoder, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, batch, batch_idx)

    def begun() -> None:
        Autoencoder.training_step = killed
        script(tmp_path / "run", **own("own"))

    assert run_in_fork(begun) == -signal.SIGKILL
    script(tmp_path / "run", **own("own"))
    assert {path.name for path in (tmp_path / "own").iterdir()} == {
        f"step={step}.ckpt" for step in range(3, STEPS + 1, 3)
    }


class Validated(Autoencoder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", Autoencoder.training_step(self, batch, batch_idx))


def test_a_run_that_was_stopped_early_stays_so_when_its_script_starts_again(tmp_path: Path) -> None:
    """Unless it is to be longer."""
    ends = []
    for steps in (40, 40, 50):
        stop = EarlyStopping("val/loss", patience=1, min_delta=10, check_on_train_epoch_end=False)
        settings = run_settings(tmp_path / "run", stop, enable_progress_bar=False, val_check_interval=3)
        trainer = Trainer(accelerator="cpu", precision="64-true", max_steps=steps, **settings)
        data = DataLoader(TensorDataset(*rows("points", 8 * 6)), 8)
        trainer.fit(Validated(), data, data, ckpt_path="last")
        ends.append(trainer.global_step)
    assert ends == [6, 6, 9]


def test_no_checkpoint_for_resuming_is_of_an_open_accumulation_window(tmp_path: Path) -> None:
    """It would lose the gradients so far; those that the user's options keep are written all the same."""
    own = RunCheckpoint(tmp_path / "run/checkpoints", "{step}", every_n_epochs=1, monitor="val/loss", save_top_k=-1)
    validation = {"val_check_interval": 4, "check_val_every_n_epoch": None, "accumulate_grad_batches": 3}
    settings = run_settings(tmp_path / "run", own, enable_progress_bar=False, **validation)
    trainer = Trainer(accelerator="cpu", precision="64-true", max_steps=6, **settings)
    data = DataLoader(TensorDataset(*rows("points", 8 * 24)), 8)
    trainer.fit(Validated(), data, data)
    folder = tmp_path / "run/checkpoints"
    assert {path.name for path in folder.glob("step=*.ckpt")} == {f"step={step}.ckpt" for step in (1, 2, 4, 5, 6)}
    assert {path.name for path in folder.glob("resume*/*")} == {"step=4.ckpt", "step=6.ckpt"}


def test_a_new_run_does_not_start_in_the_folder_of_another(tmp_path: Path) -> None:
    script(tmp_path / "run")
    trainer = Trainer(accelerator="cpu", max_steps=6, **run_settings(tmp_path / "run", enable_progress_bar=False))
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
    options, run = OPTIONS[name], tmp_path / "run"
    interrupt_at(3, monkeypatch, run, **options(tmp_path))
    point = run / "checkpoints/resume/step=3.ckpt"
    assert point.exists()
    assert f"stopped at step 3. The newest checkpoint is {point}. Start the same script" in capsys.readouterr().err
    again = script(run, **options(tmp_path))
    assert Path(str(again.trainer.ckpt_path)).resolve().parent.is_relative_to(run)
    names = sorted(path.name for path in (run / "checkpoints/resume").iterdir())
    assert names == ["step=20.ckpt", f"step={STEPS}.ckpt"], "the newest two: one may be damaged"
    wanted = script(tmp_path / "wanted")
    for key, value in wanted.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
