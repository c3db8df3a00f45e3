"""The log files of a run: records their lengths, and truncates them to recorded lengths."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from mupscale.atomic import replacing
from mupscale.models._lightning import close_writer, run_folder

folder = run_folder


def folders(trainer: Trainer) -> list[str | None]:
    """The folder of each logger, relative to that of the run; None for loggers of other kinds."""
    of_run = folder(trainer, trainer.log_dir)
    return [
        os.path.relpath(logger.log_dir, of_run)
        if of_run is not None and isinstance(logger, TensorBoardLogger | CSVLogger)
        else None
        for logger in trainer.loggers
    ]


def written(trainer: Trainer) -> dict[str, list[Any]]:
    """The lengths of the event files of each TensorBoard logger, and the rows of the table of each CSV logger."""
    return {
        "events": [
            {name: path.stat().st_size for name, path in event_files(logger).items()}
            for logger in tensorboards(trainer)
        ],
        "rows": [max(0, len(lines(logger)) - 1) for logger in tables(trainer)],
    }


def cut_back(trainer: Trainer, lengths: dict[str, list[Any]]) -> None:
    """Removes what was logged later. Shorter files are not the recorded ones, and are not changed."""
    for events, files in zip(tensorboards(trainer), lengths.get("events", []), strict=False):
        cut_events(events, files)
    for table, rows in zip(tables(trainer), lengths.get("rows", []), strict=False):
        cut_rows(table, rows)


def keep_tables(trainer: Trainer) -> None:
    """Starts the CSV loggers without deleting the tables in their folders, as Lightning would."""
    for logger in tables(trainer):
        path = table_of(logger)
        aside = path.with_name(f"{path.name}.kept")  # where a crash in between leaves it, and the next start finds it
        if path.is_file():
            path.replace(aside)
        if aside.is_file():
            writer = logger.experiment
            aside.replace(path)
            # none, if it broke off before its first byte: Lightning empties it to write it anew
            header = lines(logger)[:1]
            writer.metrics_keys = header[0].strip().split(",") if header else []


def delete(trainer: Trainer) -> None:
    """Deletes all that was logged in the folders of this run."""
    for events in tensorboards(trainer):
        close_writer(events)  # or it would append to a file that is gone, and leave out its first record
        for path in event_files(events).values():
            path.unlink()
        # it may be torn, and the logger keeps one that is there
        (Path(events.log_dir) / events.NAME_HPARAMS_FILE).unlink(missing_ok=True)
    for table in tables(trainer):
        table_of(table).unlink(missing_ok=True)
        table.experiment.metrics_keys = []


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def tables(trainer: Trainer) -> list[CSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]


def event_files(logger: TensorBoardLogger) -> dict[str, Path]:
    return {path.name: path for path in Path(logger.log_dir).glob("events.out.tfevents.*")}


def cut_events(logger: TensorBoardLogger, lengths: dict[str, int]) -> None:
    files = event_files(logger)
    if not lengths or any(name not in files or files[name].stat().st_size < length for name, length in lengths.items()):
        return
    close_writer(logger)
    for name, path in event_files(logger).items():
        if name in lengths:
            os.truncate(path, lengths[name])
        else:
            path.unlink()


def table_of(logger: CSVLogger) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def lines(logger: CSVLogger) -> list[str]:
    path = table_of(logger)
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


def cut_rows(logger: CSVLogger, rows: int) -> None:
    there = lines(logger)  # with their header, which may have grown since: so they are counted, and not their bytes
    if len(there) > rows + 1:
        with replacing(table_of(logger)) as new:
            new.write_text("".join(there[: rows + 1]))
