"""experiment --quick: a tiny version of every experiment file, which runs from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.commands.config import class_name
from mupscale.commands.lab.file import Description, description_of, read
from mupscale.commands.lab.quick import quick_content
from mupscale.commands.lab.run import result_of

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

FILES = sorted((ROOT / "configs/experiments").glob("*.yaml"))

MOST_RUNS = 25

SOME_METHODS = ["duplication", "ligo"]
"""Growth methods that are run, because each takes seconds; --all runs all of them."""

SLOW_METHODS = {"ligo": "net2net"}
"""In the place of methods that take many seconds on a ResNet, because they learn something."""


@pytest.fixture(autouse=True)
def _with_our_configurations(in_an_empty_folder: None) -> None:
    Path("configs").symlink_to(ROOT / "configs")


@pytest.fixture
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and other tests draw them; what `check` refuses is that of the test of shipped files."""
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", lambda *_: [])
    monkeypatch.setattr("mupscale.commands.lab.protocols.check", lambda description: None)


KEPT = ("methods_quickstart", "transfer_mlp_sgd")
"""Without `--all`; test_experiment.py reads all files and runs the protocol upscale, test_experiment_midrun.py runs the
protocol midrun, and test_configs.py trains one step of every model."""


@pytest.mark.usefixtures("_without_figures")
@pytest.mark.parametrize("name", slow_except([path.stem for path in FILES], kept=KEPT))
def test_every_experiment_runs(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not request.config.getoption("--all"):
        monkeypatch.setattr("mupscale.commands.lab.quick.quick_content", with_some_methods)
    main(["experiment", f"configs/experiments/{name}.yaml", "--quick"])
    out = Path("runs/experiments", f"{name}-quick")
    output = capsys.readouterr().out
    assert output.splitlines()[-1].startswith("quick: no evidence")
    described = json.loads((out / "experiment.json").read_text())
    assert described["quick"] is True
    for run in described["runs"]:
        assert result_of(out / run["folder"]) is not None
    assert len(list(out.rglob("result.json"))) <= MOST_RUNS
    if described["protocol"] == "transfer":
        assert (out / "transfer.png").exists()
        assert "the optimum of model.optimizer.lr goes as width^" in output
    else:
        assert "quick: no evidence" in (out / "report/index.html").read_text()
    assert not Path("data").exists()


def with_some_methods(description: Description, out: Path) -> dict[str, Any]:
    content = quick_content(description, out)
    if "methods" in content:
        is_resnet = class_name(description.common["model"]) == "ResNet18"
        names = [SLOW_METHODS.get(name, name) if is_resnet else name for name in SOME_METHODS]
        content["methods"] = {name: content["methods"][name] for name in names}
    return content


def test_all_methods_have_one_trial_each() -> None:
    whole = read(Path("configs/experiments/methods_mlp_adamw_4x.yaml"), [])
    content = quick_content(whole, Path("o"))
    assert content["methods"] == whole.content["methods"]
    assert content["sweep_2"] == {"model.optimizer.lr": [0.032], "UpscaleCallback.noise.std": [0.8]}
    assert content["sweep_1"] == {"model.optimizer.lr": [0.05, 0.4]}
    assert (content["small"], content["target"]) == ([4, 16], [20, 80])


def test_the_tiny_version_of_a_file() -> None:
    whole = read(Path("configs/experiments/midrun_gpt2_reduced.yaml"), [])
    content = quick_content(whole, Path("o"))
    assert (content["small"], content["target"], content["middle"]) == ([4, 8], [16, 32], 24)
    assert (content["seeds"], content["shares"], content["tuned_at"], list(content["schedules"])) == (
        [0], [0.5], [0.5], ["decay"],
    )  # fmt: skip
    assert list(content["noises"]) == ["centred"]
    schedule = content["schedules"]["decay"]["model"]["init_args"]["lr_scheduler"]["init_args"]
    assert schedule == {"warmup": 2, "steps": "100%", "decay": "20% of the budget"}
    assert content["sweep_2"] == {"UpscaleCallback.lr": [0.0078, 0.0156], "UpscaleCallback.noise.std": [0.24]}
    assert whole.content["seeds"] == [0, 1]
    config = description_of(content, ["--trainer.log_every_n_steps=3"], quick=True).config()
    assert (config["trainer"]["max_steps"], config["trainer"]["precision"]) == (10, "32-true")
    assert config["trainer"]["log_every_n_steps"] == 3  # an option is laid over the tiny version
    assert config["model"]["init_args"]["layers"] == 2
    assert config["data"]["init_args"]["data_dir"] is None
