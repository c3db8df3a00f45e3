"""The results of an experiment of protocol midrun: runs that grow against fixed widths, at one budget."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mupscale.commands.config import read_json
from mupscale.commands.figures import Band
from mupscale.commands.reporting.compare import Difference, Losses, Spread, compare, compare_best, rank, spread
from mupscale.commands.reporting.draw import Picture, band_of, draw_bands, without_range
from mupscale.commands.reporting.folders import ExperimentFolder
from mupscale.commands.reporting.reach import FEWEST, SHARE, trailing_means
from mupscale.commands.reporting.runs import Line, LoggedRun
from mupscale.commands.reporting.words import capital, ranged_losses
from mupscale.commands.widths import BUDGETS, FIXED, folder_name
from mupscale.data_files import interpreting

LOSSES = ("validation", "training")
"""The first one that all runs have decides."""


@dataclass
class Arm:
    """Runs that differ in their seeds: of a fixed width, or of one noise and one share of a growth."""

    name: str
    fixed: str = ""
    noise: str = ""
    share: float = 0.0
    runs: list[LoggedRun] = field(default_factory=list)

    def losses(self, loss: str) -> Losses:
        """By seed. Infinite if a run diverged, and NaN if it has none."""
        return {run.seed: run.row[f"{loss}_loss"] for run in self.runs}

    @property
    def place(self) -> tuple[int, str, float]:
        """What arms are sorted by: the fixed widths first, then the growths by noise and share."""
        return [*FIXED, ""].index(self.fixed), self.noise, self.share


@dataclass
class ArmComparison:
    """The arms of one schedule at one budget."""

    schedule: str
    budget: str
    arms: list[Arm]
    costs: dict[str, float] = field(default_factory=dict)
    """Of a step of each width, of what the budget counts."""

    @property
    def words(self) -> str:
        return BUDGETS[self.budget]

    def losses(self, loss: str, *, grown: bool) -> dict[str, Losses]:
        """Those of the growths, or of the fixed widths, by the names of the arms."""
        return {arm.name: arm.losses(loss) for arm in self.arms if grown != bool(arm.fixed)}

    def has(self, loss: str) -> bool:
        return not any(math.isnan(value) for arm in self.arms for value in arm.losses(loss).values())

    def margin(self, loss: str) -> tuple[str, str, Difference] | None:
        """The best growth, the best fixed width, and by how much growing is lower; None if a side has nothing."""
        return compare_best(self.losses(loss, grown=True), self.losses(loss, grown=False))

    def verdict(self) -> list[str]:
        """Who won, by how much, and whether that is clear, in sentences."""
        where = f"At {self.words}, schedule {self.schedule}"
        margins = {loss: margin for loss in LOSSES if self.has(loss) and (margin := self.margin(loss)) is not None}
        if not margins:
            return [f"{where}: there is nothing to compare: losses are missing, or runs diverged."]
        outcomes = ", ".join(f"by {loss} loss {outcome(margin[2])}" for loss, margin in margins.items())
        return [f"{where}: {outcomes}.", *(self._sentence(loss, *margin) for loss, margin in margins.items())]

    def _sentence(self, loss: str, growth: str, fixed: str, difference: Difference) -> str:
        grown, widths = self.losses(loss, grown=True), self.losses(loss, grown=False)
        text = (
            f"{capital(loss)} loss: the best growth, {growth}, ends at {ranged_losses(grown[growth])}, the best fixed "
            f"width, {fixed}, at {ranged_losses(widths[fixed])}: growing is {difference}"
        )
        wide = next((arm.name for arm in self.arms if arm.fixed == "wide"), fixed)
        if wide != fixed and wide in rank(widths):
            others = compare(grown[growth], widths[wide], pairs=len(grown))
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
        self.metric = str(experiment.keys.get("metric", "last_epoch"))
        shares = experiment.keys.get("tuned_at") or experiment.keys.get("shares") or []
        self.costs: dict[str, Any] = {}
        self.comparisons: list[ArmComparison] = []
        with interpreting(f"{self.folder} is not a whole experiment of protocol midrun"):
            self.tuned_at = ", ".join(f"{100 * share:g} %" for share in shares)
            made: list[tuple[dict[str, Any], LoggedRun]] = []
            path = self.folder / "costs.json"
            if path.is_file():
                self.costs = read_json(path)
                for name in ("flops", "seconds", "start_seconds"):
                    self.costs[name] = {width: float(cost) for width, cost in self.costs[name].items()}
                made = [(entry, LoggedRun(run)) for run, entry in experiment.runs if (run / "result.json").is_file()]
            self.missing = len(experiment.runs) - len(made)
            arms: dict[tuple[str, str], dict[str, Arm]] = {}
            for schedule in dict.fromkeys(entry["schedule"] for entry, _ in made):
                arms |= {(schedule, budget): {} for budget in BUDGETS}
            for entry, run in made:
                run.row = self._row(entry, run)
                tags = {name: entry[name] for name in ("fixed", "noise", "share") if name in entry}
                for budget in entry["budgets"]:
                    arm = Arm(run.row["arm"], **tags)
                    arms[entry["schedule"], budget].setdefault(arm.name, arm).runs.append(run)
            for (schedule, budget), found in arms.items():
                if found:
                    ordered = sorted(found.values(), key=lambda arm: arm.place)
                    self.comparisons.append(ArmComparison(schedule, budget, ordered, self.costs[budget]))
            self.edges = [
                f"{key} = {(sweep.best_trial(self.metric) or {})[key]} of {sweep.name}"
                for sweep in experiment.sweeps
                for key in sweep.edges(self.metric)
            ]
            """Values that are the best of a sweep at the edge of its grid, in words."""
        self.verdicts = [comparison.verdict() for comparison in self.comparisons]

    def _row(self, entry: dict[str, Any], run: LoggedRun) -> dict[str, Any]:
        swap = run.swaps[0] if run.swaps else {}
        noise = (swap.get("noise") or {}).get("init_args", {})
        steps, at_step = run.max_steps, swap.get("at_step")
        training = run.value if run.value is not None and self.metric.startswith("last_") else math.nan
        validation = run.last("val/loss") if run.result.get("validated_at") == steps else math.nan
        if run.value is None or not math.isfinite(run.value):
            training = validation = math.inf
        share = None if "fixed" in entry else float(entry["share"])
        return {
            "arm": f"width {run.end_width}" if share is None else f"grown at {100 * share:g} % ({entry['noise']})",
            "width": folder_name(run.end_width),
            "noise": entry.get("noise", ""),
            "share": share,
            "seed": run.seed,
            "training_loss": training,
            "validation_loss": validation,
            "grown_at_step": at_step,
            "steps": steps,
            "epochs": steps / self.costs["steps_per_epoch"],
            "lr": run.config["model"]["init_args"]["optimizer"]["init_args"]["lr"],
            "lr_after": swap.get("lr"),
            "noise_level": next((noise[name] for name in ("std", "t") if name in noise), None),
            "flops": spent_by(steps, run, at_step, self.costs["flops"]),
            "seconds": spent_by(steps, run, at_step, self.costs["seconds"]),
            "pause_seconds": run.last_growth.get("seconds", math.nan),
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run, in each of its budgets."""
        answer = []
        for each in self.comparisons:
            head = {"schedule": each.schedule, "budget": each.budget}
            answer += [head | run.row for arm in each.arms for run in arm.runs]
        return answer


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


# --- its figures


def draw_midrun(midrun: Midrun, path: Path) -> list[Picture]:
    """Draws, for each schedule and budget, losses at the end over the share of the budget after which runs grow, and
    training curves over the share that is spent.
    """
    drawn = []
    for each in midrun.comparisons:
        where = f"at {each.words}, {each.schedule}"
        file = path.with_name(re.sub(r"[^\w.-]+", "-", f"{path.name}_{each.schedule}_{each.budget}"))
        x_label = "share of the budget after which a run grows, %"
        for loss in filter(each.has, LOSSES):
            y_label, ends = f"{loss} loss at the end", ends_of(each, loss)
            drawn += draw_bands(file.with_name(f"{file.name}_{loss}"), ends, x_label, y_label, f"{y_label} {where}")
        labels = "share of the budget that is spent, %", "training loss"
        drawn += draw_bands(file.with_name(f"{file.name}_curves"), lines_of(each), *labels, f"{labels[1]} {where}")
    return drawn


def ends_of(comparison: ArmComparison, loss: str) -> list[Band]:
    """A horizontal line with its range for each fixed width, and a line over the shares for each noise."""
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for arm in comparison.arms:
        found = spread([*arm.losses(loss).values()])
        if found is not None and arm.fixed:
            lines[f"fixed {arm.name}"] = [(0.0, found), (100.0, found)]
        elif found is not None:
            lines.setdefault(f"grown, {arm.noise}", []).append((100 * arm.share, found))
    bands = []
    for colour, (label, points) in enumerate(lines.items()):
        x, means, lows, highs = zip(*((at, each.mean, each.min, each.max) for at, each in points), strict=True)
        bands.append(Band(label, colour, x, means, lows, highs))
    return bands


def lines_of(comparison: ArmComparison) -> list[Band]:
    """The mean curve of each arm over its seeds: the share of the budget in percent, and the loss.

    Runs that grow are drawn from their growth on, those with the noise that ends lowest.
    """
    loss = next(filter(comparison.has, LOSSES), "training")
    best = rank(comparison.losses(loss, grown=True))[:1]
    noises = [arm.noise for arm in comparison.arms if arm.name in best]
    answer: list[Band] = []
    for arm in comparison.arms:
        if arm.fixed or arm.noise in noises:
            line = without_range(band_of(arm.name, len(answer), [curve_of(run, comparison) for run in arm.runs]))
            answer += [line] if line else []
    return answer


def curve_of(run: LoggedRun, comparison: ArmComparison) -> Line:
    """The share of the budget in percent, and the running mean of the loss over the last of it.

    Of a run that grows, only losses since then count: at the narrow width, a share of the budget is many more steps.
    """
    at_step, costs = run.row["grown_at_step"] or 0, comparison.costs
    percent = 100 / spent_by(run.row["steps"], run, at_step, costs)
    steps, losses = run.curve
    grown = steps > at_step
    spent = percent * spent_by(steps[grown], run, at_step, costs)
    end = step_costs(run, costs)[1]
    fewest = (FEWEST - 0.5) * run.interval * end * percent  # half an interval less, lest rounding decide
    return trailing_means(spent, losses[grown], spent, max(100 * SHARE, fewest))
