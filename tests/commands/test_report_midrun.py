"""Reports on experiments of protocol midrun: who has won, and folders of somebody else."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_runs import report, write_experiment, write_run

from mupscale.commands.reporting.midrun import Arm, ArmComparison
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def made_up(arm: Arm, *losses: float, validation: float | None = None) -> Arm:
    """An arm with runs, a seed for each loss; validation losses are one more."""
    runs: list[Any] = []
    for seed, loss in enumerate(losses):
        more = {"validation_loss": loss + 1 if validation is None else validation}
        runs.append(SimpleNamespace(seed=seed, row={"training_loss": loss, **more}))
    return replace(arm, runs=runs)


WIDE, NARROW = Arm("width 512", fixed="wide"), Arm("width 256", fixed="narrow")
GROWN = Arm("grown at 50 % (paper)", noise="paper", share=0.5)
OTHER = Arm("grown at 25 % (centred)", noise="centred", share=0.25)


def compared(*arms: Arm) -> ArmComparison:
    return ArmComparison("constant", "flops", list(arms))


def test_growing_wins_loses_or_neither() -> None:
    head = "At equal FLOPs, schedule constant: by validation loss growing"
    wins = compared(made_up(WIDE, 3.60, 3.61), made_up(NARROW, 3.70, 3.71), made_up(GROWN, 3.50, 3.51)).verdict()
    assert wins[0] == f"{head} wins, by training loss growing wins."
    assert wins[1] == (
        "Validation loss: the best growth, grown at 50 % (paper), ends at 4.505 (4.500–4.510), the best fixed width, "
        "width 512, at 4.605 (4.600–4.610): growing is lower by 0.1 (97.5 % interval 0.1 to 0.1, 2 seeds; lower by 0.1 "
        "with each seed left out of the choice)."
    )
    loses = compared(made_up(WIDE, 3.60, 3.61), made_up(NARROW, 3.40, 3.41), made_up(GROWN, 3.50, 3.51)).verdict()
    assert loses[0].startswith(f"{head} loses")
    assert "higher by 0.1" in loses[1]
    assert loses[1].endswith("; than width 512 from scratch it is lower by 0.1 (95 % interval 0.1 to 0.1, 2 seeds).")
    close = compared(made_up(WIDE, 3.50, 3.53), made_up(GROWN, 3.48, 3.52)).verdict()
    assert close[0].startswith(f"{head} and the best fixed width cannot be told apart")
    one = compared(made_up(WIDE, 3.6), made_up(GROWN, 3.5)).verdict()
    assert one[0].startswith(f"{head} ends lower, but one seed proves nothing")


def test_the_best_growth_is_compared_and_a_diverged_one_is_not() -> None:
    comparison = compared(made_up(WIDE, 3.6, 3.6), made_up(GROWN, 1.0, math.inf), made_up(OTHER, 3.5, 3.5))
    margin = comparison.margin("training")
    assert margin is not None
    assert margin[:2] == (OTHER.name, WIDE.name)
    for runs in (
        [made_up(WIDE, math.inf), made_up(GROWN, 1.0)],
        [made_up(WIDE, 1.0), made_up(GROWN, math.inf)],
        [made_up(WIDE, 1.0)],
        [made_up(WIDE, 1.0), made_up(GROWN, 1.0), made_up(OTHER, math.nan)],
    ):
        (sentence,) = compared(*runs).verdict()
        assert sentence.endswith("there is nothing to compare: losses are missing, or runs diverged.")
    without = compared(made_up(WIDE, 3.6, validation=math.nan), made_up(GROWN, 3.5)).verdict()
    assert "validation" not in without[0]
    assert sorted((GROWN, OTHER, WIDE), key=lambda arm: arm.place) == [WIDE, OTHER, GROWN]


def write_midrun(metric: str = "last_10%", costs: dict[str, Any] | None = None, **changes: Any) -> None:
    """An experiment with one run of a fixed width."""
    content = {"steps": 20, "steps_per_epoch": 6, "flops": {"500": 1.0}, "seconds": {}, "start_seconds": {}}
    values = {"trainer.max_steps": 20, "trainer.max_epochs": None}
    write_run(Path("o/run"), lambda step: 2.0, values=values, validation={"val/loss": lambda step: 1.5}, result=1.0)
    Path("o/costs.json").write_text(json.dumps(content | (costs or {})))
    run = {"schedule": "a", "budgets": ["flops"], "fixed": "wide", "seed": 0, "folder": "run", **changes}
    run = {name: value for name, value in run.items() if value is not None}
    write_experiment("o", protocol="midrun", experiment={"metric": metric}, runs=[run])


@pytest.mark.parametrize(("metric", "training"), [("last_10%", "1.0"), ("val/loss", "")])
def test_a_recorded_metric_that_is_no_training_loss_is_not_called_one(metric: str, training: str) -> None:
    write_midrun(metric)
    head = "schedule,budget,arm,width,noise,share,seed,training_loss,validation_loss"
    report("o")
    assert Path("report/midrun.csv").read_text().startswith(f"{head},grown_at_step")
    assert (
        Path("report/midrun.csv").read_text().splitlines()[1].startswith(f"a,flops,width 500,500,,,0,{training},1.5,")
    )
    Path("o/run/result.json").write_text('{"value": "inf"}')
    report("o")
    assert ",0,diverged,diverged," in Path("report/midrun.csv").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": ["a"]}, {"budgets": ["time"]}, {"fixed": "wider"},
        {"fixed": None, "noise": "paper", "share": "much"}, {"costs": {"steps_per_epoch": 0}},
        {"costs": {"flops": {"500": "x"}}}, {"costs": {"seconds": None}},
    ],
)  # fmt: skip
def test_a_folder_of_somebody_else_is_refused(changes: dict[str, Any]) -> None:
    write_midrun(**changes)
    with pytest.raises(UserError, match="o is not a whole experiment of protocol midrun"):
        report("o")


def test_names_of_somebody_else_stay_in_the_folder_of_the_report() -> None:
    write_midrun(schedule="../../evil")
    _, summary = report("o")
    assert "midrun_..-..-evil_flops_curves.png" in summary["files"]
