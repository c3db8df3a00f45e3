"""The results of an experiment of protocol midrun: runs that grow against fixed widths, at one budget."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from mupscale.commands.config import Config, callbacks_of, read_json
from mupscale.commands.reporting.compare import Difference, Losses, compare, compare_best, rank
from mupscale.commands.reporting.folders import ExperimentFolder
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.reporting.words import capital, ranged_losses
from mupscale.commands.widths import folder_name
from mupscale.data_files import interpreting

Loss = Literal["training", "validation"]
LOSSES: tuple[Loss, ...] = ("validation", "training")
"""The first one that all runs have decides."""

BUDGETS = {"flops": "equal FLOPs", "seconds": "equal seconds"}
"""What runs can have in common, and its words."""

Fixed = Literal["wide", "middle", "narrow"]
FIXED: tuple[Fixed, ...] = ("wide", "middle", "narrow")


class Arm(NamedTuple):
    """What runs that differ in their seeds have in common: a fixed width, or the noise and the share of a growth."""

    width: Any
    fixed: str = ""
    noise: str = ""
    share: float = 0.0

    @property
    def place(self) -> tuple[int, str, float]:
        """What arms are sorted by: the fixed widths first, then the growths by noise and share."""
        return [*FIXED, ""].index(self.fixed), self.noise, self.share

    def __str__(self) -> str:
        if self.fixed:
            return f"width {self.width}"
        return f"grown at {100 * self.share:g} % ({self.noise})"


class MidrunRun(NamedTuple):
    schedule: str
    budgets: list[str]
    arm: Arm
    row: dict[str, Any]
    """Its columns in the table. Losses are infinite if it diverged, and NaN if there is none; seconds are without
    start, compilation, validation and swap."""
    logged: LoggedRun | None = None

    def loss(self, loss: Loss) -> float:
        return float(self.row[f"{loss}_loss"])


@dataclass
class Comparison:
    """The runs of one schedule at one budget."""

    schedule: str
    budget: str
    runs: list[MidrunRun]
    costs: dict[str, float] = field(default_factory=dict)
    """Of a step of each width, of what the budget counts."""

    @cached_property
    def arms(self) -> dict[Arm, list[MidrunRun]]:
        """Runs by what they have in common: the fixed widths first, then the growths by noise and share."""
        answer: dict[Arm, list[MidrunRun]] = {}
        for run in sorted(self.runs, key=lambda run: run.arm.place):
            answer.setdefault(run.arm, []).append(run)
        return answer

    @property
    def growths(self) -> list[Arm]:
        return [arm for arm in self.arms if not arm.fixed]

    @property
    def fixed(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.fixed]

    def losses(self, arm: Arm, loss: Loss) -> Losses:
        """By seed; infinite if a run diverged."""
        return {run.row["seed"]: run.loss(loss) for run in self.arms[arm]}

    def has(self, loss: Loss) -> bool:
        return not any(math.isnan(run.loss(loss)) for run in self.runs)

    def best(self, arms: list[Arm], loss: Loss) -> Arm | None:
        return next(iter(rank({arm: self.losses(arm, loss) for arm in arms})), None)

    def margin(self, loss: Loss) -> tuple[Arm, Arm, Difference] | None:
        """The best growth, the best fixed width, and by how much growing is lower; None if a side has nothing."""
        growths, fixed = ({arm: self.losses(arm, loss) for arm in arms} for arms in (self.growths, self.fixed))
        return compare_best(growths, fixed)

    def verdict(self) -> list[str]:
        """Who won, by how much, and whether that is clear, in sentences."""
        where = f"At {BUDGETS[self.budget]}, schedule {self.schedule}"
        margins = {loss: margin for loss in LOSSES if self.has(loss) and (margin := self.margin(loss)) is not None}
        if not margins:
            return [f"{where}: there is nothing to compare: losses are missing, or runs diverged."]
        outcomes = ", ".join(f"by {loss} loss {outcome(margin[2])}" for loss, margin in margins.items())
        return [f"{where}: {outcomes}.", *(self._sentence(loss, *margin) for loss, margin in margins.items())]

    def _sentence(self, loss: Loss, growth: Arm, fixed: Arm, difference: Difference) -> str:
        ends = [ranged_losses(self.losses(arm, loss)) for arm in (growth, fixed)]
        text = (
            f"{capital(loss)} loss: the best growth, {growth}, ends at {ends[0]}, the best fixed width, {fixed}, at "
            f"{ends[1]}: growing is {difference}"
        )
        wide = next((arm for arm in self.fixed if arm.fixed == "wide"), None)
        if wide is not None and wide != fixed and self.best([wide], loss) is not None:
            others = compare(self.losses(growth, loss), self.losses(wide, loss), pairs=len(self.growths))
            text += f"; than {wide} from scratch it is {others}"
        return f"{text}."


def outcome(difference: Difference) -> str:
    if len(difference.seeds) < 2:
        ends = "lower" if difference.mean > 0 else "higher"
        return f"growing ends {ends}, but {difference.outcome}"
    words = {"lower": "growing wins", "higher": "growing loses"}
    return words.get(difference.outcome, "growing and the best fixed width cannot be told apart")


class Midrun:
    """An experiment of protocol midrun, as far as it is finished."""

    def __init__(self, experiment: ExperimentFolder) -> None:
        self.folder = experiment.folder
        self.description: dict[str, Any] = experiment.description.get("experiment") or {}
        self.metric = str(self.description.get("metric", "last_epoch"))
        self.costs: dict[str, Any] = {}
        self.runs: list[MidrunRun] = []
        listed = experiment.description.get("runs", [])
        path = self.folder / "costs.json"
        with interpreting(f"{self.folder} is not a whole experiment of protocol midrun"):
            if path.is_file():
                self.costs = checked_costs(read_json(path))
                for entry, folder in zip(listed, experiment.runs, strict=True):
                    if (folder / "result.json").is_file():
                        refuse_other_entry(entry)
                        self.runs.append(self._run(entry, LoggedRun(folder)))
            self.edges = [
                f"{key} = {(sweep.best_trial(self.metric) or {})[key]} of {sweep.name}"
                for sweep in experiment.sweeps
                for key in sweep.edges(self.metric)
            ]
            """Values that are the best of a sweep at the edge of its grid, in words."""
        self.missing = len(listed) - len(self.runs)

    def _run(self, entry: dict[str, Any], run: LoggedRun) -> MidrunRun:
        swaps = callbacks_of(run.config, "UpscaleCallback")
        swap: Config = swaps[0]["init_args"] if swaps else {}
        noise = (swap.get("noise") or {}).get("init_args", {})
        steps, at_step = run.config["trainer"]["max_steps"], swap.get("at_step")
        training = run.value if run.value is not None and self.metric.startswith("last_") else math.nan
        validation = run.last("val/loss") if run.result.get("validated_at") == steps else math.nan
        if run.value is None or not math.isfinite(run.value):
            training = validation = math.inf
        row = {
            "seed": entry["seed"],
            "training_loss": training,
            "validation_loss": validation,
            "grown_at_step": at_step,
            "steps": steps,
            "epochs": steps / self.costs["steps_per_epoch"],
            "lr": run.model["init_args"]["optimizer"]["init_args"]["lr"],
            "lr_after": swap.get("lr"),
            "noise_level": next((noise[name] for name in ("std", "t") if name in noise), None),
            "flops": spent_by(steps, run, at_step, self.costs["flops"]),
            "seconds": spent_by(steps, run, at_step, self.costs["seconds"]),
            "pause_seconds": run.last_growth.get("seconds", math.nan),
        }
        arm = Arm(run.end_width, entry.get("fixed", ""), entry.get("noise", ""), entry.get("share", 0.0))
        return MidrunRun(entry["schedule"], entry["budgets"], arm, row, run)

    @property
    def comparisons(self) -> list[Comparison]:
        answer = []
        for schedule in dict.fromkeys(run.schedule for run in self.runs):
            for budget in BUDGETS:
                runs = [run for run in self.runs if run.schedule == schedule and budget in run.budgets]
                if runs:
                    answer.append(Comparison(schedule, budget, runs, self.costs[budget]))
        return answer

    @property
    def verdicts(self) -> list[list[str]]:
        return [comparison.verdict() for comparison in self.comparisons]

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for comparison in self.comparisons:
            for arm, runs in comparison.arms.items():
                head: dict[str, Any] = {"schedule": comparison.schedule, "budget": comparison.budget, "arm": str(arm)}
                share = None if arm.fixed else arm.share
                head |= {"width": folder_name(arm.width), "noise": arm.noise, "share": share}
                rows += [{**head, **run.row} for run in runs]
        return rows


def checked_costs(costs: Any) -> dict[str, Any]:
    """The content of costs.json. ValueError if it is another's."""
    whole = all(type(costs[key]) is int and costs[key] > 0 for key in ("steps", "steps_per_epoch"))
    tables = [costs[key] for key in ("flops", "seconds", "start_seconds")]
    if not whole or not all(type(value) is float for table in tables for value in table.values()):
        raise ValueError(f"costs.json holds {costs!r}")
    return dict(costs)


def refuse_other_entry(entry: dict[str, Any]) -> None:
    """ValueError for a run in experiment.json that no experiment of the protocol has; its names go into file names."""
    names = [entry["schedule"], entry.get("noise", "paper")]
    is_known = set(entry["budgets"]) <= set(BUDGETS) and entry.get("fixed", "wide") in FIXED
    if not is_known or not all(re.fullmatch(r"\w[\w.-]*", name) for name in names):
        raise ValueError(f"experiment.json has the run {entry!r}")
    if not isinstance(entry.get("share", 0.0), float):
        raise ValueError(f"experiment.json has the share {entry['share']!r}")


def spent_by(step: Any, run: LoggedRun, at_step: int | None, table: Mapping[str, float]) -> Any:
    """What a run, which grows at `at_step`, has cost at a later step, or at several; NaN if a cost is not known."""
    start, end = step_costs(run, table)
    return step * end if at_step is None else at_step * start + (step - at_step) * end


def step_costs(run: LoggedRun, table: Mapping[str, float]) -> tuple[float, float]:
    """The costs of a step of the size that a run starts with, and of the one that it ends with."""
    costs = []
    for size in (run.start_size, run.end_size):
        deep = folder_name(size._asdict())
        costs.append(table.get(deep if deep in table else folder_name(size.width), math.nan))
    return costs[0], costs[1]
