"""The experiments that compare all growth methods under equal tuning."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import LR, NOISE, trials
from paths import ROOT

from mupscale.__main__ import main
from mupscale.commands.tuning.results import Results
from mupscale.widening.methods import METHODS

METHOD = "UpscaleCallback.method"

FILES = sorted((ROOT / "configs/experiments").glob("methods_*.yaml"))


def content_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def class_of(described: dict[str, Any]) -> str:
    return str(described["class_path"]).rpartition(".")[2]


def test_there_is_a_file_for_each_task() -> None:
    assert [path.stem.removeprefix("methods_") for path in FILES] == ["gpt2", "mlp_adamw", "quickstart", "resnet"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_method_is_in_the_grid(path: Path) -> None:
    """With rates and noise levels to tune, the same for all; a second HyperCloning is the diagonal one."""
    sweep = content_of(path)["sweep_2"]
    listed = Counter(class_of(method) for method in sweep[METHOD])
    assert set(listed) == {type(make()).__name__ for make in METHODS.values()}
    assert {name: count for name, count in listed.items() if count > 1} == {"HyperCloning": 2}
    assert sweep.keys() == {METHOD, LR, NOISE}
    assert len(sweep[LR]) > 1
    assert sweep[NOISE][0] == 0 < max(sweep[NOISE])


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_all_methods_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart at a size for tests: one rate, one noise level, one seed, twelve steps."""
    monkeypatch.setattr("mupscale.commands.reporting.write_report", lambda folders, out: [])
    monkeypatch.setattr(Results, "draw", lambda *_: [])
    Path("configs").symlink_to(ROOT / "configs")
    content = content_of(ROOT / "configs/experiments/methods_quickstart.yaml")
    content["seeds"] = [0]
    for key in (LR, NOISE):
        content["sweep_2"][key] = content["sweep_2"][key][-1:]
    Path("e.yaml").write_text(yaml.safe_dump(content))
    size = ["--trainer.max_steps=12", "--data.batch_size=1000", "--trainer.log_every_n_steps=1"]
    main(["experiment", "e.yaml", "--out", "o", *size])
    rows = trials(Path("o/sweep_2"))
    assert [yaml.safe_load(row[METHOD]) for row in rows] == content["sweep_2"][METHOD]
    values = [float(row["last_epoch"]) for row in rows]
    assert all(map(math.isfinite, values))
    assert len(set(values)) == len(values)  # each method is another run
    best = content["sweep_2"][METHOD][values.index(min(values))]
    run = yaml.safe_load(Path("o/upscale/seed=0/config.yaml").read_text())
    (swap,) = (c for c in run["trainer"]["callbacks"] if class_of(c) == "UpscaleCallback")
    assert class_of(swap["init_args"]["method"]) == class_of(best)
