"""resume goes on with the run in a folder, and with no other; what it cannot do it refuses, and touches nothing."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import refused, small, upscale
from extensions import Crash, Crashed
from logged import curves, table
from paths import contents
from programs import start_fork, wait_for_fork, wait_until
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.commands.checkpoints import FolderLock, checkpoints_of, newest_checkpoint

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "no_crash_left")

CRASH = {"class_path": "extensions.Crash"}


@pytest.fixture
def no_crash_left() -> Iterator[None]:
    yield
    Crash.at = -1


def config(path: Path, *callbacks: dict[str, Any], model: str = "MLP", **trainer: Any) -> str:
    """A run of 12 steps with a checkpoint every second one, which a test can let crash."""
    small(path, CRASH, *callbacks, max_steps=12, val_check_interval=3, enable_progress_bar=False, **trainer)
    content = yaml.safe_load(path.read_text())
    content["model"]["class_path"] = model
    content["checkpoint"]["every_n_train_steps"] = 2
    path.write_text(yaml.safe_dump(content))
    return str(path)


def crash(step: int, *arguments: str) -> None:
    """Runs a command that ends before a step."""
    Crash.at = step
    with pytest.raises(Crashed):
        main(list(arguments))
    Crash.at = -1


def end(folder: str | Path) -> dict[str, Any]:
    path, checkpoint = newest_checkpoint(Path(folder))
    assert path is not None
    assert checkpoint["global_step"] == 12
    return checkpoint


def assert_same_end(ours: str | Path, theirs: str | Path) -> None:
    mine, other = end(ours)["state_dict"], end(theirs)["state_dict"]
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in other)


# --- the network


@pytest.mark.slow
def test_what_configure_model_does_is_done_again(tmp_path: Path) -> None:
    path = config(tmp_path / "c.yaml", upscale(4, 16), model="extensions.FrozenMLP")
    main(["fit", "--config", path])
    crash(7, "fit", "--config", path)
    main(["resume", "runs/default/version_1"])
    assert_same_end("runs/default/version_1", "runs/default/version_0")
    ours, theirs = (curves(Path("runs/default") / name)["train/loss"] for name in ("version_1", "version_0"))
    assert ours == theirs
    first = next(name for name in end("runs/default/version_0")["state_dict"])
    before = torch.load("runs/default/version_0/checkpoints/pre-upscale-4.ckpt", weights_only=True)["state_dict"]
    start = torch.load("runs/default/version_1/checkpoints/pre-upscale-4.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(before[first], start[first])
    wide = end("runs/default/version_1")
    crash(9, "fit", "--config", path)  # a third time: frozen weights are the same after the swap and at the end
    swapped = newest_checkpoint(Path("runs/default/version_2"))[1]["state_dict"]
    assert torch.equal(swapped[first], wide["state_dict"][first])


# --- overrides


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of which nine steps are done, the configuration beside it."""
    folder = tmp_path_factory.mktemp("crashed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        crash(9, "fit", "--config", config(folder / "c.yaml", upscale(4, 16), upscale(10, 32)))
    return folder


@pytest.fixture
def half_a_run(crashed: Path, tmp_path: Path) -> Path:
    shutil.copytree(crashed, tmp_path, symlinks=True, dirs_exist_ok=True)
    return Path("runs/default/version_0")


def test_a_checkpoint_that_is_kept_twice_is_stored_once(crashed: Path) -> None:
    checkpoints = crashed / "runs/default/version_0/checkpoints"
    kept, point = next(checkpoints.glob("*step=8.ckpt")), checkpoints / "resume/step=8.ckpt"
    assert kept.samefile(point)


OVERRIDES = {
    "--model.optimizer.lr=0.5": "model.optimizer.lr is 0.01 in the run and 0.5 here",
    "--data.seed=7": "data.seed",
    "--trainer.logger=false": "trainer.logger",
    "--callback_args={UpscaleCallback: {lr: 0.5}}": "UpscaleCallback",
    "--ckpt_path=other.ckpt": "--ckpt_path",
}
"""What has no effect in a run that goes on, and what is said of it."""


@pytest.mark.slow
@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides_without_effect_are_refused_by_name(half_a_run: Path, override: str) -> None:
    before = contents(half_a_run)
    assert OVERRIDES[override] in refused("resume", str(half_a_run), override)
    assert contents(half_a_run) == before
    assert [path.name for path in half_a_run.parent.iterdir()] == ["version_0"]


@pytest.mark.slow
def test_overrides_that_take_effect(half_a_run: Path, tmp_path: Path) -> None:
    later = [CRASH, upscale(4, 16), upscale(11, 48), {"class_path": "extensions.Marker"}]
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump({"trainer": {"callbacks": later}}))
    main(["resume", str(half_a_run), "--config", str(more), "--trainer.max_steps=14", "--trainer.limit_val_batches=2"])
    _, checkpoint = newest_checkpoint(half_a_run)
    assert (checkpoint["global_step"], checkpoint["hyper_parameters"]["width"]) == (14, 48)
    assert yaml.safe_load((half_a_run / "config.yaml").read_text())["trainer"]["max_steps"] == 14


@pytest.mark.slow
def test_fit_from_a_checkpoint_keeps_what_it_decides(half_a_run: Path, tmp_path: Path) -> None:
    path, _ = newest_checkpoint(half_a_run)
    command = ["fit", "--config", str(tmp_path / "c.yaml"), "--ckpt_path", str(path)]
    assert "model.optimizer.lr" in refused(*command, "--model.optimizer.lr=0.5")
    assert not Path("runs/default/version_1").exists()
    main(command)
    assert end("runs/default/version_1")["hyper_parameters"]["width"] == 32


# --- folders


@pytest.mark.slow
def test_what_a_run_has_outside_of_its_folder_is_continued_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (("TensorBoardLogger", "runs"), ("CSVLogger", "tables"))
    loggers = [{"class_path": kind, "init_args": {"save_dir": name, "name": "mine"}} for kind, name in names]
    command = ["fit", "--config", config(tmp_path / "c.yaml", logger=loggers), "--checkpoint.dirpath=~/elsewhere"]
    Path("tables/mine/version_0").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    crash(7, *command)
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    main(["resume", "../runs/mine/version_0"])
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before | {tmp_path / "other"}
    rows = [row for row in table(tmp_path / "tables/mine/version_1") if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert end("../runs/mine/version_0")["global_step"] == 12


@pytest.mark.slow
def test_other_checkpoint_callbacks_continue_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [
        {"monitor": "val/loss", "every_n_train_steps": 3, "filename": "{step}-{val/loss:.3f}", "dirpath": "mine"},
        {"monitor": "train/loss", "every_n_train_steps": 1, "filename": "train-{step}"},
    ]
    callbacks = [{"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 2, **each}} for each in own]
    for name in ("half", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "half")
    crash(7, "fit", "--config", config(tmp_path / "c.yaml", *callbacks, upscale(4, 16)))
    monkeypatch.chdir(tmp_path / "other")
    run = Path("../half/runs/default/version_0")
    main(["resume", str(run)])
    states = [state for key, state in end(run)["callbacks"].items() if key.startswith("ModelCheckpoint")]
    files = [Path("../half/mine").rglob("*.ckpt"), (run / "checkpoints").glob("train-*.ckpt")]
    for state, kept in zip(states, files, strict=True):
        assert {Path(path).resolve() for path in state["best_k_models"]} == {path.resolve() for path in kept}
        assert float(state["best_model_score"]) == pytest.approx(min(loss for _, loss in curves(run)[state["monitor"]]))
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_two_runs_with_one_folder_for_checkpoints(tmp_path: Path) -> None:
    paths = [config(tmp_path / name, upscale(4, width)) for name, width in (("a", 16), ("b", 24))]
    for path in paths:
        main(["fit", "--config", path])
    shared = ["--checkpoint.dirpath=shared"]
    for step, path in zip((7, 11), paths, strict=True):
        crash(step, "fit", "--config", path, *shared)
    for run, straight in ((2, 0), (3, 1)):
        main(["resume", f"runs/default/version_{run}"])
        assert_same_end(f"runs/default/version_{run}", f"runs/default/version_{straight}")
    assert len(list(Path("shared").glob("resume-*"))) == 2
    assert len(list(Path("shared").glob("pre-upscale-4*.ckpt"))) == 2


@pytest.mark.slow
def test_runs_without_a_logger_are_apart(tmp_path: Path) -> None:
    path = config(tmp_path / "c.txt")
    main(["fit", "--config", path])  # with a logger
    place = Path("mine")
    for step in (5, 7):
        crash(step, "fit", "--config", path, "--trainer.logger=false", "--trainer.default_root_dir=mine")
    assert newest_checkpoint(place)[1]["global_step"] == 4
    assert newest_checkpoint(place / "version_0")[1]["global_step"] == 6
    before = contents(place / "version_0")
    main(["resume", str(place)])
    assert contents(place / "version_0") == before
    assert_same_end(place, "runs/default/version_0")


@pytest.mark.slow
def test_a_configuration_of_the_users_own_is_not_overwritten(tmp_path: Path) -> None:
    path = Path(config(Path("config.yaml")))
    before = path.read_text()
    main(["fit", "--config", str(path), "--trainer.logger=false"])
    assert path.read_text() == before
    assert end("version_0")


def test_fast_dev_run_leaves_nothing_behind(tmp_path: Path) -> None:
    path = config(tmp_path / "c.yaml", upscale(1, 16))
    before = {file.name for file in Path().iterdir()}
    main(["fit", "--config", path, "--trainer.fast_dev_run=3"])
    assert {file.name for file in Path().iterdir()} == before


# --- one writer


@contextmanager
def written_by_another(folder: Path) -> Iterator[int]:
    """A process that writes to the folder of a run, and is killed at the end."""

    def hold() -> None:
        claim = FolderLock(folder)
        claim.begin()
        Path("ready").touch()
        signal.pause()

    process = start_fork(hold)
    try:
        wait_until(Path("ready").exists)
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        wait_for_fork(process)


@pytest.mark.slow
def test_a_live_run_is_left_alone(half_a_run: Path, tmp_path: Path) -> None:
    with written_by_another(half_a_run) as process:
        before = contents(Path("runs"))
        by = f"is in use: process {process}"
        assert by in refused("resume", str(half_a_run))
        fit = ["fit", "--config", str(tmp_path / "c.yaml")]
        assert by in refused(*fit, "--trainer.logger.version=version_0")
        assert contents(Path("runs")) == before
        main(fit)  # which has a folder of its own
        assert Path("runs/default/version_1/config.yaml").exists()
    main(["resume", str(half_a_run)])  # the lock has died with its process
    assert end(half_a_run)


@pytest.mark.slow
def test_a_folder_for_checkpoints_has_one_writer(tmp_path: Path) -> None:
    path = config(tmp_path / "c.yaml")
    with written_by_another(Path("shared")):
        assert "shared is in use" in refused("fit", "--config", path, "--checkpoint.dirpath=shared")
    assert not Path("runs").exists()


# --- identity


@pytest.mark.slow
def test_the_identity_of_a_run_survives_lost_files(half_a_run: Path) -> None:
    assert json.loads((half_a_run / "run.json").read_text()).keys() == {"id", "steps", "steps_per_epoch"}
    path, checkpoint = newest_checkpoint(half_a_run)
    assert checkpoint["global_step"] == 8
    for name in ("run.json", "run.lock"):
        (half_a_run / name).write_bytes(b"\xff\x00\x80")
        assert newest_checkpoint(half_a_run)[0] == path
    message = refused("fit", "--config", "c.yaml", "--trainer.logger.version=version_0")
    assert "version_0 has a run already" in message
    foreign = half_a_run / "checkpoints" / "resume" / "step=24.ckpt"
    torch.save({**checkpoint, "mupscale_run": {**checkpoint["mupscale_run"], "id": "other"}}, foreign)
    message = refused("resume", str(half_a_run))
    assert "run.json is missing or damaged, and there are checkpoints of 2 runs" in message
    assert str(foreign) in message
    foreign.unlink()
    main(["resume", str(half_a_run)])
    after = json.loads((half_a_run / "run.json").read_text())
    assert after == {"id": checkpoint["mupscale_run"]["id"], "steps": 12, "steps_per_epoch": 6}
    assert end(half_a_run)["mupscale_run"]["id"] == after["id"]


# --- damage


@pytest.mark.slow
@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
def test_the_one_before_a_damaged_or_missing_checkpoint_is_taken(
    is_missing: bool, half_a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["fit", "--config", str(tmp_path / "c.yaml")]
    main(fit)
    newest, checkpoint = newest_checkpoint(half_a_run)
    assert newest is not None
    assert checkpoint["global_step"] == 8
    whole = newest.read_bytes()
    at = len(whole) // 2
    for path in half_a_run.rglob("*step=8.ckpt"):  # two names of one file, until a folder is copied
        path.write_bytes(whole[:at] + bytes(255 - byte for byte in whole[at : at + 64]) + whole[at + 64 :])
        if is_missing:
            path.unlink()
    damage = f"{newest} is damaged"
    assert is_missing or damage in refused(*fit, f"--ckpt_path={newest}")
    capsys.readouterr()
    main(["resume", str(half_a_run)])
    output = capsys.readouterr().out
    assert (damage in output) != is_missing
    assert "resuming from runs/default/version_0/checkpoints/resume/step=6.ckpt" in output
    assert_same_end(half_a_run, "runs/default/version_1")


def test_every_damaged_byte_of_the_weights_is_found(half_a_run: Path) -> None:
    newest, _ = newest_checkpoint(half_a_run)
    assert newest is not None
    assert newest.parent.name == "resume"
    whole = newest.read_bytes()
    state = torch.load(newest, weights_only=True)["state_dict"]
    for tensor in state.values():
        at = whole.index(tensor.numpy().tobytes())
        newest.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert newest_checkpoint(half_a_run)[0] != newest
    newest.write_bytes(whole)
    assert newest_checkpoint(half_a_run)[0] == newest


# --- what the policy of the user keeps

POLICIES = {
    "monitor": ["--checkpoint.monitor=val/loss", "--checkpoint.mode=max"],
    "nothing": ["--checkpoint.save_top_k=0", "--checkpoint.save_last=false"],
    "at some steps": ["--checkpoint.monitor=train/loss", "--trainer.log_every_n_steps=5"],
    "never measured": ["--checkpoint.monitor=val/loss", "--trainer.limit_val_batches=0"],
}


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key", "ignore:checkpoint.monitor")
@pytest.mark.parametrize("name", slow_except(POLICIES, kept=["monitor", "nothing"]))
def test_no_policy_loses_the_newest_checkpoint(tmp_path: Path, name: str) -> None:
    policy = POLICIES[name]
    path = config(tmp_path / "c.yaml", upscale(4, 16))
    main(["fit", "--config", path, *policy])
    crash(9, "fit", "--config", path, *policy)
    run = Path("runs/default/version_1")
    newest, checkpoint = newest_checkpoint(run)
    assert newest is not None
    assert checkpoint["global_step"] == 8
    main(["resume", str(run)])
    assert_same_end(run, "runs/default/version_0")
    names = [
        {str(p.relative_to(folder)) for p in checkpoints_of(folder)} for folder in (run, run.with_name("version_0"))
    ]
    assert names[0] == names[1]


def test_the_best_checkpoint_waits_for_a_metric_that_is_logged_at_some_steps_only(tmp_path: Path) -> None:
    path = config(tmp_path / "c.yaml")
    with pytest.warns(UserWarning, match=r"train/loss was not logged up to step 3; there are val/accuracy, val/loss\."):
        main(["fit", "--config", path, "--checkpoint.monitor=train/loss", "--trainer.log_every_n_steps=5"])
    checkpoints = Path("runs/default/version_0/checkpoints")
    policy = torch.load(checkpoints / "last.ckpt", weights_only=True)["callbacks"]
    best = next(state for key, state in policy.items() if key.startswith("RunCheckpoint"))
    logged = [loss for _, loss in curves(checkpoints.parent)["train/loss"]]
    assert float(best["best_model_score"]) == pytest.approx(min(logged))
    assert Path(best["best_model_path"]).exists()


def test_a_metric_that_is_never_logged_is_named_early_and_costs_no_checkpoint(tmp_path: Path) -> None:
    options = ["--config", config(tmp_path / "c.yaml"), "--checkpoint.every_n_train_steps=100"]
    with pytest.warns(UserWarning, match=r"^checkpoint.monitor: val/los was not logged up to step 3; there are .*\."):
        message = refused("fit", *options, "--checkpoint.monitor=val/los")
    assert "checkpoint.monitor: val/los was not logged" in message
    assert "there are lr-AdamW, train/loss, val/accuracy, val/loss" in message
    assert end("runs/default/version_0")["global_step"] == 12
