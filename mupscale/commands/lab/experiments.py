"""An experiment in its folder: its stages, what is done, experiment.json, and the results."""

import json
import shutil
from pathlib import Path
from typing import Any

from mupscale.atomic import write_text
from mupscale.commands.config import read_json
from mupscale.commands.lab.costs import CostPart
from mupscale.commands.lab.driver import Driver
from mupscale.commands.lab.execution import refuse_folder
from mupscale.commands.lab.file import Description, check
from mupscale.commands.lab.parts import Part, RunPart, SweepPart
from mupscale.commands.lab.protocols import PROTOCOLS, SMALL_BASE
from mupscale.commands.lab.quick import IMAGES, write_images
from mupscale.commands.lab.run import Trial
from mupscale.commands.lab.transfer import write_transfer


class Experiment:
    """The experiment of a description in a folder. It may have begun."""

    def __init__(self, out: Path, description: Description) -> None:
        self.out, self.description = out, description
        self.stages = PROTOCOLS[description.protocol](out, description).stages()

    @property
    def parts(self) -> list[Part]:
        return [part for stage in self.stages for part in stage]

    def begin(self, command: list[str]) -> None:
        """Checks what can be checked without a run, and writes experiment.json."""
        self.refuse_others()
        path = self.out / "experiment.json"
        if path.exists():
            return
        check(self.description)
        self.out.mkdir(parents=True, exist_ok=True)
        if self.description.quick:
            write_images(self.out / IMAGES)
        write_text(path, json.dumps(self._record(command), indent=1) + "\n")

    def _record(self, command: list[str]) -> dict[str, Any]:
        """The content of experiment.json."""
        runs: list[dict[str, Any]] = []
        tuning: dict[str, str] = {}
        for part in self.parts:
            if isinstance(part, RunPart) and part.role != SMALL_BASE:
                role, folder = part.role.rpartition("/")[2], str(part.folder.relative_to(self.out))
                runs.append({"role": role, "seed": part.seed, "folder": folder, **part.details})
            elif not isinstance(part, CostPart):
                name = part.name if isinstance(part, SweepPart) else SMALL_BASE
                tuning[name] = name
        head: dict[str, Any] = {"protocol": self.description.protocol, "command": command}
        if self.description.quick:
            head["quick"] = True
        return {**head, **self.description.identity(), "runs": runs, "sweeps": tuning}

    def refuse_others(self) -> None:
        """Raises a UserError if the folder holds another experiment, or something else."""
        refuse_folder(self.out, "experiment", json.loads(json.dumps(self.description.identity())))

    def make(self, driver: Driver) -> bool:
        """Makes the runs, stage by stage. False if, at the end, those of other parts are missing."""
        for stage in self.stages:
            trials = trials_of(stage)
            driver.make(trials, self.progress)
            if stage is not self.stages[-1]:
                driver.wait_for_other_parts(trials)
            elif not driver.have_finished(trials):
                return False
            for part in stage:
                part.conclude()
        return True

    @property
    def left(self) -> tuple[int, int]:
        """How many runs are not finished, and how many there are."""
        total = sum(part.total for part in self.parts)
        return total - sum(part.done for part in self.parts), total

    def progress(self) -> str:
        left, total = self.left
        return f"{left} of {total} runs left"

    # --- results

    def conclude(self) -> str:
        """Writes the results of a finished experiment, and returns them in words."""
        if self.description.protocol == "transfer":
            sweeps = {part.name: part.sweep for part in self.parts if isinstance(part, SweepPart)}
            lines = write_transfer(self.out, self.description, sweeps)
        else:
            lines = self._report()
        if self.description.quick:
            from mupscale.commands.reporting.folders import QUICK

            lines.append(QUICK)
        return "\n".join(lines)

    def _report(self) -> list[str]:
        """Writes the report, and returns its verdicts; if growth methods are compared, those on them."""
        from mupscale.commands.reporting import write_report

        for draft in self.out.glob(".report-*"):  # left by a process that was killed
            shutil.rmtree(draft)
        write_report([self.out], self.out / "report")
        summary = read_json(self.out / "report" / "summary.json")
        verdicts = summary["methods"][0]["verdict"] if self.description.methods else summary["verdicts"]
        return [*verdicts, f"the report is {self.out / 'report' / 'index.html'}"]


def trials_of(stage: list[Part]) -> dict[int, Trial]:
    """The trials of a stage that are not known to be finished, by their numbers among all of the stage."""
    answer: dict[int, Trial] = {}
    number = 0
    for part in stage:
        if not part.finished:
            answer |= dict(enumerate(part.trials(), number))
        number += part.total
    return answer
