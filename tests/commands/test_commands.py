"""The command line: shipped configurations, composition, every command from narrow and wide checkpoints."""

from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
import yaml
from command_line import refused, upscale
from paths import ROOT
from sweeps import changed

from mupscale.__main__ import main
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.commands.cli import run_cli
from mupscale.models.mlp import MLP

CONFIGS = ROOT / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
BRIEF = [
    "--trainer.max_steps=6",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.enable_progress_bar=false",
]


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def small(path: Path, *callbacks: dict[str, Any], **trainer: Any) -> str:
    """A configuration that takes a second: width 8, six steps, and all of its checkpoints."""
    limits = {"limit_test_batches": 1, "limit_predict_batches": 1, "enable_progress_bar": False}
    logger = {"init_args": {"name": "small"}}
    given = {"max_steps": 6, "val_check_interval": 3, "logger": logger, **limits, **trainer}
    config = command_line.small(path, *callbacks, **given)
    return changed(
        config, data={"init_args": {"batch_size": 500}}, checkpoint={"every_n_train_steps": 2, "save_top_k": -1}
    )


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configuration_runs(config: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load(config.read_text())
    callbacks = settings["trainer"].get("callbacks", [])
    swaps = [callback for callback in callbacks if callback["class_path"].endswith("UpscaleCallback")]
    for index, swap in enumerate(swaps):
        swap["init_args"]["at_step"] = 1 + index
    copy = tmp_path / "config.yaml"
    copy.write_text(yaml.safe_dump(settings))
    main(["fit", "--config", str(copy), *BRIEF])
    path, checkpoint = newest_checkpoint(next(Path("runs").rglob("config.yaml")).parent)
    assert path is not None
    assert checkpoint["global_step"] == 6


@pytest.mark.slow
def test_every_command_takes_narrow_and_wide_checkpoints(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(3, 16), upscale(5, 48))
    main(["fit", "--config", config])
    checkpoints = {
        torch.load(p, weights_only=True)["hyper_parameters"]["width"]: p for p in Path("runs").rglob("*.ckpt")
    }
    assert checkpoints.keys() == {8, 16, 48}
    for width, checkpoint in checkpoints.items():
        for command in ("validate", "test", "predict"):
            cli = run_cli(["--config", config, "--ckpt_path", str(checkpoint)], command)
            assert cli.model.width == width
        assert MLP.load_from_checkpoint(checkpoint).width == width
    predictions = [torch.load(path) for path in Path("runs").rglob("predictions.pt")]
    assert len(predictions) == 3
    assert all(torch.allclose(batch.sum(-1), torch.ones(500)) for file in predictions for batch in file)


def test_model_and_data_may_share_the_name_of_an_argument(tmp_path: Path) -> None:
    main(["fit", "--config", small(tmp_path / "c.yaml", max_steps=1), "--data", "extensions.WidthOfRows"])
    logged = yaml.safe_load(Path("runs/small/version_0/hparams.yaml").read_text())
    assert (logged["width"], logged["data.width"]) == (8, 54)
    assert logged["batch_size"] == 500
    saved = newest_checkpoint(Path("runs/small/version_0"))[1]
    assert saved["hyper_parameters"]["width"] == 8
    assert saved["datamodule_hyper_parameters"] == {"batch_size": 500, "width": 54}


@pytest.mark.slow
def test_composition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump({"trainer": {"max_steps": 8, "callbacks+": [{"class_path": "extensions.Marker"}]}}))
    configs = ["--config", small(tmp_path / "c.yaml", upscale(3, 16)), "--config", str(more)]
    with pytest.raises(SystemExit) as exit:
        main(["fit", *configs, "--model.width=4", "--print_config"])
    assert exit.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_steps"] == 8
    classes = [callback["class_path"].rpartition(".")[2] for callback in printed["trainer"]["callbacks"]]
    assert classes == ["UpscaleCallback", "Marker"]
    assert printed["model"]["init_args"]["width"] == 4
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(printed))
    main(["fit", "--config", str(again)])  # what is printed runs
    assert newest_checkpoint(next(Path("runs").rglob("config.yaml")).parent)[1]["global_step"] == 8


def test_resume_refuses_to_start_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not the folder of a run" in refused("resume", str(tmp_path))
    main(["fit", "--config", small(tmp_path / "c.yaml")])
    run = Path("runs/small/version_0")
    capsys.readouterr()
    main(["resume", str(run)])
    assert "is finished" in capsys.readouterr().out
    for elsewhere in ("runs/small", "runs/small/version_7"):
        problem = (
            f"{elsewhere} is not the folder of a run: it has no config.yaml. Runs near it, the newest first: {run}"
        )
        assert problem in refused("resume", elsewhere)
    for path in run.rglob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:1000])
    assert "no checkpoint that can be read" in refused("resume", str(run))


@pytest.mark.slow
def test_a_run_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["fit", "--config", small(tmp_path / "c.yaml")])
    for path in Path("runs").rglob("*=6.ckpt"):
        path.unlink()
    Path("elsewhere").mkdir()
    Path("runs/small/version_0").rename("elsewhere/mine")
    monkeypatch.chdir(tmp_path / "elsewhere")
    main(["resume", "mine"])
    assert newest_checkpoint(Path("mine"))[1]["global_step"] == 6
    assert [path.name for path in Path().iterdir()] == ["mine"]


@pytest.mark.slow
def test_an_attempt_that_died_before_its_first_checkpoint_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["--config", QUICKSTART, *BRIEF, "--trainer.logger.version=one", "--trainer.callbacks=[]"]
    assert "there is no checkpoint" in refused("fit", *named, "--model.init_from=missing.ckpt")
    Path("half.ckpt").write_bytes(b"PK")
    assert "half.ckpt is not a checkpoint, or is damaged" in refused("fit", *named, "--model.init_from=half.ckpt")
    folder = Path("runs/quickstart/one")
    assert not folder.exists()  # a mistake that is found before the first step leaves nothing behind
    with monkeypatch.context() as broken:
        broken.setattr(MLP, "training_step", lambda *_: (_ for _ in ()).throw(RuntimeError("mine")))
        with pytest.raises(RuntimeError, match="mine"):
            main(["fit", *named])
    (folder / "events.out.tfevents.1.dead").write_text("what it logged")
    (folder / "run.json").unlink()  # as if the configuration were the user's own, in a folder with other files
    (folder / "checkpoints").mkdir(exist_ok=True)
    assert (folder / "config.yaml").is_file()
    main(["fit", *named])
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["init_from"] is None
    assert "dead" not in " ".join(path.name for path in folder.iterdir())
    assert "has a run already" in refused("fit", *named)


@pytest.mark.slow
def test_a_run_with_a_logger_of_ones_own_has_a_folder_of_its_own() -> None:
    def arguments(version: str) -> list[str]:
        logger = f"{{class_path: extensions.Silent, init_args: {{save_dir: runs, name: mine, version: {version}}}}}"
        trainer = [f"--trainer.logger={logger}", "--trainer.callbacks=[]", "--checkpoint.every_n_train_steps=2"]
        return ["--config", QUICKSTART, *BRIEF, *trainer]

    for version in ("one", "two"):
        main(["fit", *arguments(version)])
    assert "runs/mine/one has a run already" in refused("fit", *arguments("one"))
    main(["resume", "runs/mine/one", "--trainer.max_steps=8"])
    steps = [newest_checkpoint(Path("runs/mine") / version)[1]["global_step"] for version in ("one", "two")]
    assert steps == [8, 6]
