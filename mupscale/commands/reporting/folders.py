"""Which runs and sweeps there are in folders."""

from pathlib import Path

from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.sweep_folder import SweepFolder
from mupscale.data_files import refuse_odd_name
from mupscale.errors import UserError


class RunFolders:
    """The runs and sweeps in folders, and notes on what is missing or damaged.

    Raises a UserError if one of the folders holds nothing.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.runs: list[LoggedRun] = []
        self.sweeps: list[SweepFolder] = []
        self.notes: list[str] = []
        self._seen: set[Path] = set()
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder; name folders of runs, sweeps or experiments")
            before = len(self.runs) + len(self.sweeps)
            self._search(folder)
            if len(self.runs) + len(self.sweeps) == before:
                raise UserError(f"{folder} holds no runs: no config.yaml beside TensorBoard events, at any depth")
        for run in self.runs:
            if not run.last_step:
                self.notes.append(f"{run.folder} has logged no training loss to TensorBoard, and is left out.")
            elif run.log.damaged:
                damage = "is damaged or cut off; it counts as far as it can be read."
                self.notes.append(f"An event file of {run.folder} {damage}")
        self.runs = [run for run in self.runs if run.last_step]
        if not self.runs and not any(sweep.rows for sweep in self.sweeps):
            raise UserError(" ".join([f"there is nothing to report in {', '.join(map(str, folders))}.", *self.notes]))

    def _search(self, folder: Path) -> None:
        """Adds what a folder holds, at any depth. The trials of a sweep over values are no runs of their own."""
        if folder.resolve() in self._seen:
            return
        refuse_odd_name(folder)
        self._seen.add(folder.resolve())
        sweep = SweepFolder(folder)
        if (folder / "config.yaml").is_file():
            self.runs.append(LoggedRun(folder))
        elif sweep.is_tuning:
            self.sweeps.append(sweep)
        else:
            for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
                self._search(inner)
