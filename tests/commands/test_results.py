"""run.json and result.json: every fit writes its length when it begins, and its numbers when it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import small, upscale
from extensions import Crash, Crashed
from logged import curves

from mupscale.__main__ import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def read(name: str, folder: str = "runs/default/version_0") -> dict[str, Any]:
    return json.loads((Path(folder) / name).read_text())


def test_a_fit_writes_its_length_and_its_numbers(tmp_path: Path):
    main(["fit", "--config", small(tmp_path / "c.yaml", upscale(4, 16), enable_progress_bar=False)])
    plan, result = read("run.json"), read("result.json")
    assert (plan["steps"], plan["steps_per_epoch"]) == (20, 6)
    assert (result["steps"], result["width"], result["validated_at"]) == (20, 16, 18)
    logged = {tag: dict(points) for tag, points in curves(Path("runs/default/version_0")).items()}
    assert result["validation"] == {name: pytest.approx(logged[name][17]) for name in ("val/loss", "val/accuracy")}
    (growth,) = result["growths"]
    assert (growth["step"], growth["before"], growth["after"]) == (4, 8, 16)
    assert growth["loss_after"] == pytest.approx(logged["widening/loss_after"][4])
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
    whole, resumed = read("result.json"), read("result.json", "runs/default/version_1")
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
        main(["resume", "runs/default/version_0", "--trainer.max_steps=20"])
    Crash.at = -1
    assert not Path("runs/default/version_0/result.json").exists()
    assert read("run.json")["steps"] == 20
