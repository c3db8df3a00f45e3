"""A run read from its folder: its length, growths, validations, FLOPs and divergence."""

import math
from pathlib import Path

import pytest
from synthetic_runs import epochs, upscale, write_run

from mupscale.commands.reporting.folders import Found
from mupscale.commands.reporting.groups import group_runs
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.errors import UserError


def test_numbers_of_a_run(tmp_path: Path):
    options: dict = {"flops": lambda step: step * 2e6, "validation": {"val/loss": lambda step: step / 100}}
    values = {"trainer.callbacks": [upscale(at_step=40)]}
    run = LoggedRun(write_run(tmp_path / "run", lambda step: 1 / step, seed=3, values=values, **options))
    assert run.seed == 3
    assert (run.start_width, run.end_width) == (500, 2000)
    assert run.steps.tolist() == list(range(5, 201, 5))
    assert run.losses[3] == pytest.approx(1 / 20)
    assert run.growths == [40]
    assert run.planned("steps_per_epoch") == 20
    assert run.planned_steps == 200
    assert run.log.validation["val/loss"] == pytest.approx({step: step / 100 for step in range(20, 201, 20)})
    assert run.flops_at(100) == 200e6
    assert run.flops_at(7) == 14e6  # between two that were logged
    assert run.flops_at(210) == 420e6  # after them
    assert run.diverged_at is None


def test_the_end_of_a_run_is_in_its_result(tmp_path: Path):
    options: dict = {"validation": {"val/loss": lambda step: step / 100}, "grown": {0: 2000}, "swap_losses": (2.0, 3.0)}
    options |= {"steps": 60, "values": {"trainer.callbacks": [upscale()]}}
    ended = LoggedRun(write_run(tmp_path / "early", lambda step: 1.0, has_ended=True, **options))
    going = LoggedRun(write_run(tmp_path / "going", lambda step: 1.0, **options))
    assert (ended.planned_steps, going.planned_steps) == (60, 200)
    assert ended.last_growth == {"loss_before": 2.0, "loss_after": 3.0, "seconds": 1.0}
    assert going.last_growth == {}
    assert ended.last("val/loss") == 0.6
    assert going.last("val/loss") == pytest.approx(0.6)  # from its curve
    assert math.isnan(ended.last("val/accuracy"))
    assert (ended.value, going.value) == (None, None)
    assert LoggedRun(write_run(tmp_path / "trial", lambda step: 1.0, result=0.25)).value == 0.25


@pytest.mark.parametrize(
    "content",
    [
        "{", "[1]", '{"value": "many"}', '{"steps": -1}', '{"steps": "4"}', '{"validation": {"val/loss": []}}',
        '{"growths": [{}]}', '{"growths": 3}',
    ],
)  # fmt: skip
def test_a_damaged_result_is_named(tmp_path: Path, content: str):
    write_run(tmp_path, lambda step: 1.0)
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(UserError, match=r"result\.json is damaged.*; delete it and run the same command again"):
        LoggedRun(tmp_path)


def test_an_invalid_configuration(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"config\.yaml is not YAML that can be read"):
        LoggedRun(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match=r"config\.yaml is not the configuration of a run: it has no 'trainer'"):
        LoggedRun(tmp_path)


def test_a_run_that_becomes_deeper_has_the_roles_of_one_that_becomes_wider(in_an_empty_folder: None) -> None:
    """Only a run with all layers from its start is from scratch, and one with the first is the base."""
    deeper = upscale(layers=8, width=None)
    runs = {"grown": ([deeper], 2), "deep": ([], 8), "shallow": ([], 2), "middle": ([], 4)}
    for name, (callbacks, layers) in runs.items():
        values = {"trainer.callbacks": callbacks, "model.init_args.layers": layers}
        write_run(Path("runs") / name, epochs(0.2), values=values)
    groups = group_runs(Found([Path("runs")]).runs)
    roles = {"grown": "upscaled", "deep": "scratch", "shallow": "base", "middle": "other"}
    assert {group.runs[0].folder.name: group.role for group in groups} == roles
    grown = LoggedRun(Path("runs/grown"))
    assert (grown.start_width, grown.end_width) == ("500 with 2 layers", "500 with 8 layers")
    assert grown.end_size == LoggedRun(Path("runs/deep")).end_size == (500, 8)
