"""A sweep, read from its folder: its settings, its table, and whether it is finished. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupscale.commands.config import read_json
from mupscale.text_tables import read_csv


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep. What it holds is read again whenever it is asked for: another process may write there."""

    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """What it was started with; empty if the folder has no sweep."""
        path = self.folder / "sweep.json"
        return read_json(path) if path.is_file() else {}

    @property
    def is_tuning(self) -> bool:
        """Whether it varies values; otherwise it is the runs of one configuration."""
        return bool(self.settings.get("sweep"))

    @property
    def rows(self) -> list[dict[str, str]]:
        """Those of its table, one for each finished trial."""
        return read_csv(self.folder / "trials.csv")

    @property
    def trials(self) -> list[Path]:
        """The folders of its runs."""
        return sorted(path.parent for path in (self.folder / "trials").glob("*/config.yaml"))

    @property
    def best(self) -> Path | None:
        """The file with the best values; None if there is none yet, or if all trials diverged."""
        path = self.folder / "best.yaml"
        return path if path.is_file() else None

    @property
    def best_line(self) -> str:
        """The best trial in words: the first line of best.yaml, empty while there is none."""
        return self.best.read_text("utf-8").partition("\n")[0].removeprefix("# ") if self.best else ""

    @property
    def has_diverged(self) -> bool:
        """Whether it is finished, and all of its trials diverged."""
        rows, settings = self.rows, self.settings
        return len(rows) == settings.get("trials") and all(row[settings["metric"]] == "diverged" for row in rows)

    @property
    def is_finished(self) -> bool:
        return self.best is not None or self.has_diverged

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the best trial. `{seed}` in it stands for the seed, if there are several."""
        metric, seeds = self.settings["metric"], self.settings["seeds"]
        finite = [row for row in self.rows if row[metric] != "diverged"]
        run = min(finite, key=lambda row: float(row[metric]))["run"]
        if len(seeds) > 1:
            run = run.replace(f"seed={seeds[0]}", "seed={seed}")
        return self.folder / run / "checkpoints" / "last.ckpt"
