"""A sweep: its trials, what they have come to, and its files. All of it is in one folder.

Every trial has a number, its cell. The points of a grid follow from the axes; drawn points are in points.json before
their runs begin. The results are those of the runs.
"""

import json
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from mupscale.atomic import write_text
from mupscale.commands.config import Point, at, read_json, refuse_difference
from mupscale.commands.lab.execution import is_begun
from mupscale.commands.lab.results import Outcome, Results, Settings
from mupscale.commands.lab.run import Result, Run, Trial, ending_of, result_of, with_run
from mupscale.commands.lab.space import grid, labels, point_text
from mupscale.commands.lab.trial import drop_checkpoints
from mupscale.commands.run_folder import RESULT
from mupscale.data_files import refuse_links
from mupscale.errors import UserError

TPE_ROUNDS = 10
"""In how many rounds a TPE draws its points: those of a round may be trained together, without each other's ends."""

POINTS = "points.json"
"""In the folder of a sweep that draws its points: their parameters, as Optuna has them, by cell."""


class Sweep:
    """The sweep of these settings in the folder `out`. UserError if the folder holds another one."""

    def __init__(self, out: Path, settings: Settings, name: str = "") -> None:
        """`name` is what the names of its trials start with."""
        self.out, self.settings, self.name = out, settings, name
        self._labels = labels(settings.axes)
        self._folders = Results(out, settings, []).folders
        self._results: dict[Path, Result] = {}
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out} is a file; name a folder for the sweep")
        refuse_links(out, POINTS)
        path = out / "sweep.json"
        if path.exists():
            refuse_difference(read_json(path), settings.description(), f"--out {out} holds another sweep")
        elif out.is_dir() and any(out.iterdir()) and not is_begun(out):
            raise UserError(f"--out {out} is not empty and has no sweep; name a new folder")

    def begin(self) -> None:
        """Writes sweep.json."""
        self.out.mkdir(parents=True, exist_ok=True)
        if not (self.out / "sweep.json").exists():
            write_text(self.out / "sweep.json", json.dumps(self.settings.description(), indent=1) + "\n")

    # --- points

    @cached_property
    def points(self) -> list[Point]:
        """The points by cell; of a sweep that draws them, those that it has drawn."""
        if self.settings.sampler == "grid":
            return list(grid(self.settings.axes))
        from mupscale.commands.lab.draws import point_of

        path = self.out / POINTS
        try:
            return [point_of(self.settings.axes, each) for each in self._drawn()]
        except (LookupError, TypeError, ValueError, StopIteration) as error:
            raise UserError(f"{path} is not of this sweep ({error!r}); delete it, or name a new folder") from error

    def _drawn(self) -> list[dict[str, object]]:
        path = self.out / POINTS
        return read_json(path)["points"] if path.exists() else []

    def _draw(self, count: int) -> None:
        """Draws points until there are so many. Those of a TPE follow the results of the finished trials."""
        from mupscale.commands.lab.draws import draw

        assert self.settings.sampler != "grid"
        known = {outcome.cell: outcome.value for outcome in self.outcomes()}
        drawn = self._drawn()
        while len(drawn) < count:
            before = [(each, known.get(cell)) for cell, each in enumerate(drawn)]
            drawn.append(draw(self.settings.axes, self.settings.sampler, len(drawn), before))
        write_text(self.out / POINTS, json.dumps({"points": drawn}, indent=1) + "\n")
        self.__dict__.pop("points", None)

    # --- trials

    def rounds(self) -> Iterator[dict[int, Trial]]:
        """The trials by cell, in rounds: only a TPE has several, whose points depend on the results of those before."""
        trials = self.settings.trials
        size = math.ceil(trials / TPE_ROUNDS) if self.settings.sampler == "tpe" else trials
        for start in range(0, trials, size):
            if self.settings.sampler != "grid":
                self._draw(min(start + size, trials))
            yield {cell: self._trial(cell) for cell in range(start, min(start + size, trials))}

    def _trial(self, cell: int) -> Trial:
        settings, point = self.settings, self.points[cell]
        config = at(settings.config, point)
        name = ", ".join(filter(None, [self.name, point_text(point, self._labels)]))
        runs = []
        for seed, folder in self._folders(cell, point).items():
            of_seed = f", seed {seed}" if len(settings.seeds) > 1 else ""
            runs.append(Run(with_run(config, settings.metric, seed, folder), folder, f"the trial {name}{of_seed}"))
        return Trial(name, runs, self._finish)

    def _finish(self, results: list[Result]) -> str:
        """Writes the table; returns the end of a trial in words."""
        self.tidy()
        values, seconds = [value for value, _ in results], sum(seconds for _, seconds in results)
        best = self.results.best
        leader = f"best {best.value:.5g} ({point_text(best.point, self._labels)})" if best else "all diverged so far"
        mean = sum(values) / len(values)
        return f"{f'{mean:.5g}' if math.isfinite(mean) else 'diverged'} in {seconds:.0f} s; {leader}"

    # --- results

    def outcomes(self) -> list[Outcome]:
        """The finished trials, by cell."""
        answer = []
        for cell, point in enumerate(self.points):
            results = ending_of(self._folders(cell, point).values(), self._result_of)
            if results is not None:
                values = [value for value, _ in results]
                seconds = sum(seconds for _, seconds in results)
                answer.append(Outcome(cell, point, sum(values) / len(values), values, seconds))
        return answer

    def _result_of(self, folder: Path) -> Result | None:
        if folder not in self._results and (folder / RESULT).exists():
            self._results[folder] = result_of(folder)
        return self._results.get(folder)

    @property
    def results(self) -> Results:
        return Results(self.out, self.settings, self.outcomes())

    @property
    def left(self) -> int:
        """How many trials are not finished."""
        return self.settings.trials - len(self.outcomes())

    def progress(self) -> str:
        return f"{self.left} of {self.settings.trials} left"

    def tidy(self) -> None:
        """Writes the table of finished trials, and deletes the checkpoints of all of them but the best."""
        results = self.results
        results.write_table()
        for outcome in results.outcomes:
            if outcome != results.best:
                for folder in results.runs(outcome):
                    drop_checkpoints(folder)

    def conclude(self) -> tuple[Path, list[Path]]:
        """Writes the figures of a finished sweep and then best.yaml; returns the paths of best.yaml and the figures."""
        self.tidy()  # again, because the process that finished the last trial may have died before it did
        results = self.results
        best = results.best
        if best is None:
            raise UserError(
                f"all {len(results.outcomes)} trials diverged, so there is no best.yaml; "
                f"sweep smaller learning rates or less noise. {self.out / 'trials.csv'} lists the trials"
            )
        drawn = results.draw(best)
        return results.write_best(best), drawn
