"""A run: its run.json and result.json, the commands it prints at its end, and what is refused or said, never silent."""

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import refused, small, upscale
from extensions import Crash, Crashed
from logged import curves

from mupscale.__main__ import main
from mupscale.commands.checkpoints import refuse_changes
from mupscale.commands.config import apply_point
from mupscale.commands.run import WITHOUT_A_LOG
from mupscale.errors import UserError
from mupscale.models.checkpoint import load_checkpoint

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

RUN = Path("runs/default/version_0")
LAST = RUN / "checkpoints" / "last.ckpt"

# --- run.json and result.json


def read(name: str, run: Path = RUN) -> dict[str, Any]:
    return json.loads((run / name).read_text())


def test_a_fit_writes_its_length_and_its_numbers(tmp_path: Path):
    main(["fit", "--config", small(tmp_path / "c.yaml", upscale(4, 16), enable_progress_bar=False)])
    plan, result = read("run.json"), read("result.json")
    assert (plan["steps"], plan["steps_per_epoch"]) == (20, 6)
    assert (result["steps"], result["width"], result["validated_at"]) == (20, 16, 18)
    logged = {tag: dict(points) for tag, points in curves(RUN).items()}
    assert result["validation"] == {name: pytest.approx(logged[name][17]) for name in ("val/loss", "val/accuracy")}
    (growth,) = result["growths"]
    assert (growth["step"], growth["before"], growth["after"]) == (4, 8, 16)
    assert growth["loss_after"] == pytest.approx(logged["x_growth/loss_after"][4])
    assert result["flops"] == pytest.approx(max(logged["x_axis_flops/train/loss"]) * 1e6, abs=1e6)
    assert result["samples"] == 20 * 1000
    assert "value" not in result


@pytest.mark.slow
def test_a_resumed_fit_has_the_result_of_an_uninterrupted_one(tmp_path: Path):
    """The last validation is before the crash, the growth after it."""
    crash = {"class_path": "extensions.Crash"}
    path = small(tmp_path / "c.yaml", crash, upscale(10, 16), max_steps=11, val_check_interval=6)
    main(["fit", "--config", path])
    Crash.at = 9
    with pytest.raises(Crashed):
        main(["fit", "--config", path])
    Crash.at = -1
    assert not Path("runs/default/version_1/result.json").exists()
    main(["resume", "runs/default/version_1"])
    whole, resumed = read("result.json"), read("result.json", RUN.with_name("version_1"))
    for result in (whole, resumed):
        del result["growths"][0]["seconds"]
    assert whole["validated_at"] == 6
    assert resumed == whole


@pytest.mark.slow
def test_a_run_that_goes_on_beyond_its_end_has_no_result_until_it_ends(tmp_path: Path):
    crash = {"class_path": "extensions.Crash"}
    main(["fit", "--config", small(tmp_path / "c.yaml", crash, max_steps=12)])
    assert read("result.json")["steps"] == 12
    Crash.at = 15
    with pytest.raises(Crashed):
        main(["resume", str(RUN), "--trainer.max_steps=20"])
    Crash.at = -1
    assert not (RUN / "result.json").exists()
    assert read("run.json")["steps"] == 20


# --- the commands that are printed: they run as they are, and only those that apply are there


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The arguments of the commands that a command prints at its end, by what they are for."""
    capsys.readouterr()
    main(list(arguments))
    answer = {}
    for line in capsys.readouterr().out.splitlines():
        purpose, colon, text = line.partition(": ")
        if line.startswith("  ") and colon and text.startswith("python -m mupscale "):
            answer[purpose.strip()] = shlex.split(text)[3:]
    return answer


@pytest.mark.slow
def test_a_run_is_evaluated_and_widened(capsys: pytest.CaptureFixture[str]) -> None:
    config = small(Path("c.yaml"), upscale(10, 16), enable_progress_bar=False)
    commands = printed(capsys, "fit", "--config", config)
    wide = Path("runs/default/version_0-wide-32.ckpt")
    assert commands == {
        "evaluate": ["validate", "--config", f"{RUN}/config.yaml", "--ckpt_path", str(LAST), *WITHOUT_A_LOG],
        "grow further": ["upscale", str(LAST), "--width", "32", "--out", str(wide)],
    }
    main(commands["evaluate"])
    printed(capsys, *commands["grow further"])
    assert load_checkpoint(wide)["hyper_parameters"]["width"] == 32
    assert [path.name for path in RUN.parent.iterdir() if path.is_dir()] == [RUN.name]


@pytest.mark.slow
def test_a_finished_run_goes_on_from_its_folder_for_more_epochs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["fit", "--config", small(Path("c.yaml"), enable_progress_bar=False, max_steps=-1, max_epochs=1)])
    monkeypatch.chdir(RUN)
    capsys.readouterr()
    main(["resume", "."])
    assert "train it for longer: python -m mupscale resume . --trainer.max_epochs N" in capsys.readouterr().out
    wide = printed(capsys, "resume", ".", "--trainer.max_epochs", "2")["grow further"]
    assert Path(wide[-1]).resolve() == Path.cwd().with_name("version_0-wide-16.ckpt")


def test_without_a_checkpoint_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    config = small(Path("c.yaml"), enable_progress_bar=False, fast_dev_run=True)
    assert printed(capsys, "fit", "--config", config) == {}


# --- what would change a run, waste it or keep a folder from use


def of_workers(**arguments: int) -> dict:
    data = {"class_path": "mine.Data", "init_args": {"batch_size": 8, **arguments}}
    return {"seed_everything": 0, "trainer": {"callbacks": None}, "data": data}


def test_another_number_of_workers_is_said() -> None:
    with pytest.warns(UserWarning, match=r"data\.num_workers is 2 in the run and 3 here: random numbers"):
        refuse_changes(of_workers(num_workers=2), of_workers(num_workers=3), 3, same_place=False)
    refuse_changes(of_workers(prefetch_factor=2), of_workers(prefetch_factor=3), 3, same_place=False)


WHOLE: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"max_steps": 12, "logger": True, "callbacks": None},
    "model": {"class_path": "MLP", "init_args": {"width": 8, "compile": False, "optimizer": {"lr": 0.1}}},
    "data": {"class_path": "Covertype", "init_args": {"data_dir": None, "batch_size": 8, "seed": None}},
    "checkpoint": {"every_n_train_steps": 5, "dirpath": None},
    "loop": {"cuda_graph": False},
    "stop_on_nan": False,
}
MAY_CHANGE = ("trainer.max_steps", "checkpoint.every_n_train_steps", "loop.cuda_graph", "stop_on_nan", "model.compile")
MUST_STAY = ("seed_everything", "model.width", "model.optimizer.lr", "data.batch_size", "data.seed")


@pytest.mark.parametrize("key", [*MAY_CHANGE, "data.data_dir", *MUST_STAY, "trainer.logger", "checkpoint.dirpath"])
def test_what_may_change_in_a_run_and_what_stays(key: str) -> None:
    other = apply_point(WHOLE, {key: "another"})
    if key in MUST_STAY:
        with pytest.raises(UserError, match=rf"^{re.escape(key)} is .* and another here\. A continued run keeps"):
            refuse_changes(WHOLE, other, 5, same_place=False)
        return
    refuse_changes(WHOLE, other, 5, same_place=False)
    is_place = key in ("trainer.logger", "checkpoint.dirpath")
    with pytest.raises(UserError, match="A continued run stays in its folder") if is_place else nullcontext():
        refuse_changes(WHOLE, other, 5, same_place=True)


GROWTHS: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "the same": ([upscale(4, 16), upscale(9, 32)], None),
    "later ones": ([upscale(4, 16), upscale(5, 24), upscale(11, 64)], None),
    "further callbacks": ([{"class_path": "mine.Other"}, upscale(4, 16)], None),
    "one too late": ([upscale(3, 12), upscale(4, 16)], "comes too late, the run is at step 5 and was without it"),
    "one less": ([upscale(9, 32)], "which is missing here, or has other arguments"),
    "another width": ([upscale(4, 20)], "comes too late"),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_growths_to_come_may_change_and_those_before_stay(name: str) -> None:
    callbacks, problem = GROWTHS[name]
    there, here = (
        apply_point(WHOLE, {"trainer.callbacks": each}) for each in ([upscale(4, 16), upscale(9, 32)], callbacks)
    )
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        refuse_changes(there, here, 5, same_place=True)


@pytest.mark.slow
def test_a_schedule_that_ends_long_before_the_run_is_said(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", max_steps=10, enable_progress_bar=False)
    decaying, constant = (
        f"--model.lr_scheduler={{class_path: mupscale.schedules.WarmupStableDecay, init_args: {{{arguments}}}}}"
        for arguments in ("steps: 4, decay: 0.5", "")
    )
    words = r"is zero from step 4 on, and the run has 10 steps: the last 6 change nothing"
    with pytest.warns(UserWarning, match=words):
        main(["fit", "--config", config, decaying])
    main(["fit", "--config", config, decaying, "--trainer.max_steps=4", "--trainer.val_check_interval=4"])
    main(["fit", "--config", config, constant])


@pytest.mark.slow
def test_a_sweep_that_is_refused_at_its_first_trial_leaves_its_folder_free(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(5, 16), enable_progress_bar=False)
    sweep = ["sweep", "--config", config, "--out", "s", "--sweep", "model.optimizer.lr=0.1"]
    assert "is never reached" in refused(*sweep, "--trainer.max_steps=3")
    assert not Path("s").exists()
    main([*sweep, "--trainer.max_steps=6"])
    assert Path("s/best.yaml").is_file()
