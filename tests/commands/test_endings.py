"""How runs end before their time: exit codes, one line that says where the run stands, and how to go on."""

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import LR, small, upscale
from lightning.pytorch import Trainer
from program_server import CORE_ONLY, environment
from programs import start_program, wait_until
from signals import signalled_before
from slow_saves import save_in_background
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.callbacks import growth_schedule
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.run_defaults import Summary
from mupscale.commands import cli
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.datamodules.covertype import Covertype
from mupscale.models.checkpoint import non_finite_in
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def ended(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """The exit code of a command line, and the last line of its standard error."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    code = exit.value.code
    lines = capfd.readouterr().err.strip().splitlines()
    if isinstance(code, str):  # which python prints, and exits with 1
        return 1, code
    return code, lines[-1] if lines else ""


FAILED_GROWTHS = {
    "a diverged run": ("--model.optimizer.lr=1e308", "has NaN or infinite entries"),
    "half precision": ("--trainer.precision=16-true", "has NaN or infinite entries"),
    "noise beyond float32": ("--trainer.callbacks.init_args.noise.init_args.std=1e308", "it is too large for"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the training loss is (nan|inf)")
@pytest.mark.parametrize("name", FAILED_GROWTHS)
def test_a_growth_that_fails_is_one_line_with_the_way_back(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    option, problem = FAILED_GROWTHS[name]
    config = small(tmp_path / "c.yaml", upscale(5, 16))
    code, line = ended(capfd, "fit", "--config", config, option, "--trainer.enable_progress_bar=false")
    assert (code, len(line.splitlines())) == (1, 1)
    assert line.startswith("error: the growth to width 16 at step 5 failed: ")
    assert problem in line
    assert line.endswith("is saved in runs/default/version_0/checkpoints/pre-upscale-5.ckpt")


@pytest.mark.slow
def test_no_trial_keeps_the_network_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of a signal that outlived its run would hold the trainer, and through it all that was trained."""
    trainers: list[weakref.ref[Trainer]] = []
    alive: list[int] = []

    def count(data: Covertype, stage: str) -> None:
        gc.collect()
        alive.append(sum(trainer() is not None for trainer in trainers))
        assert data.trainer is not None
        trainers.append(weakref.ref(data.trainer))

    monkeypatch.setattr(Covertype, "teardown", count)
    config = small(tmp_path / "c.yaml", enable_progress_bar=False, max_steps=6)
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.01,0.02,0.03", "--out", "o", "--stack", "off"])
    assert alive == [0, 0, 0]


MOMENTS: dict[str, tuple[Any, str, int, int, int]] = {
    "parsing": (cli, "import_classes", 0, 0, 0),
    "set-up": (Covertype, "setup", 0, 0, 0),
    "the first batch": (Summary, "on_train_start", 0, 0, 0),
    "a batch": (Curves, "on_train_batch_end", 8, 8, 8),
    "the swap": (growth_schedule, "grow", 10, 11, 11),
    "checkpointing": (Curves, "on_save_checkpoint", 10, 10, 10),
}
"""A function that the signal comes before, the step from which on it does, the step at which the run then ends, and the
step of its newest checkpoint."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["parsing", "the first batch", "the swap", "checkpointing"])
def test_sigterm_ends_with_143_and_says_how_to_go_on(
    moment: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    owner, name, step, at, saved = MOMENTS[moment]
    config = small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False)
    with signalled_before(owner, name, signal.SIGTERM, step):
        code, line = ended(capfd, "fit", "--config", config)
    assert code == 143
    assert line.startswith("terminated; ")
    run = Path("runs/default/version_0")
    if moment == "parsing":
        assert line == "terminated; run the same command again"
    elif not saved:
        assert line.endswith(
            f"the run is at step {at}, width 8, with no checkpoint yet; start again with the same command"
        )
    else:
        width = 16 if at > 10 else 8
        assert f"the run is at step {at}, width {width}; the newest checkpoint is {run}/checkpoints/" in line
        assert line.endswith(f" of step {saved}; go on: python -m mupscale resume {run}")
        main(["resume", str(run)])
        assert newest_checkpoint(run)[1]["global_step"] == 20


@pytest.mark.slow
def test_a_run_that_is_stopped_waits_for_the_checkpoint_in_the_background(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False)
    save_in_background(monkeypatch, 0.2)
    with signalled_before(Curves, "on_train_batch_end", signal.SIGTERM, 8):
        code, line = ended(capfd, "fit", "--config", config)
    assert code == 143
    run = Path("runs/default/version_0")
    assert f"the newest checkpoint is {run}/checkpoints/resume/step=8.ckpt of step 8; go on" in line
    assert (run / "checkpoints" / "last.ckpt").resolve().name == "step=8.ckpt"


@pytest.mark.parametrize("name", ["on_train_batch_end", "on_train_end"])
def test_a_run_that_is_asked_to_end_in_its_last_step_finishes(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "c.yaml", enable_progress_bar=False)
    with signalled_before(Curves, name, signal.SIGTERM, 20):
        main(["fit", "--config", config])
    assert "the run ends after this step, with a checkpoint" in capfd.readouterr().err
    assert newest_checkpoint(Path("runs/default/version_0"))[1]["global_step"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("number", slow_except([signal.SIGINT, signal.SIGTERM], kept=[signal.SIGTERM]))
def test_a_run_that_is_stopped_in_a_step_goes_on_from_there_and_a_second_signal_ends_it_at_once(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False)
    main(["fit", "--config", config])
    wanted = newest_checkpoint(Path("runs/default/version_0"))[1]["state_dict"]
    training_step = MLP.training_step
    for step, again, saved in ((3, False, 3), (7, True, 5), (12, False, 12)):
        with pytest.MonkeyPatch.context() as patch:

            def signalled(self: MLP, batch: Any, index: int, step: int = step, again: bool = again) -> Any:
                for _ in range((1 + again) * (self.trainer.global_step == step - 1)):
                    os.kill(os.getpid(), number)
                return training_step(self, batch, index)

            patch.setattr(MLP, "training_step", signalled)
            code, line = ended(capfd, "fit", "--config", config)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores further ones
        assert code == (1 if number == signal.SIGINT else 143)
        run = max(Path("runs/default").iterdir())
        assert f"the run is at step {step - again}" in line
        assert f" of step {saved}; go on: python -m mupscale resume {run}" in line
        main(["resume", str(run)])
        assert_same(newest_checkpoint(run)[1]["state_dict"], wanted)


def assert_same(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("moment", "saved"), [("parsing", None), ("set-up", 0), ("a batch", 8)])
def test_ctrl_c_says_how_to_go_on(
    moment: str, saved: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    owner, name, step, *_ = MOMENTS[moment]
    config = small(tmp_path / "c.yaml", enable_progress_bar=False)
    with signalled_before(owner, name, signal.SIGINT, step):
        code, line = ended(capfd, "fit", "--config", config)
    assert code == 1
    assert line.startswith("interrupted; ")
    assert ("start again with the same command" in line) == (saved == 0)
    assert ("go on: python -m mupscale resume runs/default/version_0" in line) == (saved == 8)


# --- losses that are not finite


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes the loss of one step NaN, and with it the weights after it, in the first run that takes it."""
    loss, poisoned_steps = MLP.training_step, []

    def poisoned(self: MLP, batch: Any, batch_idx: int) -> Any:
        if self.global_step == step and not poisoned_steps:
            poisoned_steps.append(step)
            batch = [batch[0] * float("nan"), *batch[1:]]
        return loss(self, batch, batch_idx)

    monkeypatch.setattr(MLP, "training_step", poisoned)


@pytest.mark.parametrize("interval", [1, 0])
def test_a_nan_loss_warns_once_with_its_step(interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "c.yaml", enable_progress_bar=False, log_every_n_steps=interval)
    poison(monkeypatch, 13)
    with pytest.warns(UserWarning, match="is not finite|training loss") as caught:
        main(["fit", "--config", config])
    said = [str(each.message) for each in caught if "training loss" in str(each.message)]
    assert said == [
        "the training loss is nan at step 13 (the first step is 0), width 8. --stop_on_nan ends a run there"
    ]


@pytest.mark.parametrize(("bad", "interval", "every", "saved"), [(13, 10, 5, 10), (18, 100, 100, None)])
def test_stop_on_nan_ends_the_run_and_names_the_last_finite_checkpoint(
    bad: int,
    interval: int,
    every: int,
    saved: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False, log_every_n_steps=interval)
    poison(monkeypatch, bad)
    flag = "--stop-on-nan" if interval == 10 else "--stop_on_nan"
    code, line = ended(capfd, "fit", "--config", config, flag, "--checkpoint.every_n_train_steps", str(every))
    assert code == 1
    width = 8 if bad < 10 else 16
    assert f"the training loss is nan at step {bad} (the first step is 0), width {width}, and the run stopped" in line
    run = Path("runs/default/version_0")
    if saved is None and bad < 10:
        assert "There is no checkpoint with finite weights" in line
    else:
        assert f" of step {saved or 10}; go on: python -m mupscale resume {run}" in line
    step, content = newest_checkpoint(run)[0], newest_checkpoint(run)[1]
    assert step is None or non_finite_in(content) is None


@pytest.mark.slow
def test_a_checkpoint_with_nan_weights_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gradient of step 9 overflows, and its loss does not: the weights of the checkpoint after it are NaN."""
    optimizer_step, steps = MLP.optimizer_step, []

    def overflow(self: MLP, *arguments: Any, **named: Any) -> None:
        optimizer_step(self, *arguments, **named)
        steps.append(self.net)
        if len(steps) == 10:
            torch.nn.init.constant_(next(self.parameters()), float("nan"))

    monkeypatch.setattr(MLP, "optimizer_step", overflow)
    config = small(tmp_path / "c.yaml", enable_progress_bar=False)
    code, line = ended(capfd, "fit", "--config", config, "--stop_on_nan")
    assert code == 1
    assert "the training loss is nan at step 10 " in line
    assert "step=5.ckpt of step 5; delete runs/default/version_0/checkpoints/" in line
    assert "step=10.ckpt, which has NaN, and go on: python -m mupscale resume runs/default/version_0" in line


# --- several processes


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_sigterm_ends_all_processes_of_a_run(tmp_path: Path) -> None:
    """It reaches the second one, which passes it on to the first one, which ends all of them."""
    config = small(tmp_path / "c.yaml", enable_progress_bar=False, max_steps=100_000, devices=2, strategy="ddp")
    command = ["-m", "mupscale", "fit", "--config", config, "--trainer.logger.save_dir", tmp_path]
    run, log = tmp_path / "default" / "version_0", tmp_path / "log.txt"
    variables = environment(tmp_path) | CORE_ONLY
    with log.open("w") as stream, start_program(*command, variables=variables, stderr=stream) as process:
        wait_until(lambda: process.poll() is not None or any(run.glob("checkpoints/resume/*.ckpt")))
        others = children(process.pid)
        assert others, log.read_text()
        os.kill(others[0], signal.SIGTERM)
        assert process.wait(60) == 143
        wait_until(lambda: not any(map(is_running, others)))
    line = log.read_text().strip().splitlines()[-1]
    assert line.startswith("terminated; the run is at step ")
    assert line.endswith(f"go on: python -m mupscale resume {run}")
