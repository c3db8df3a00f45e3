"""A TensorBoard logger that shows the losses first; and the log files of a run, which a resume truncates."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary

from mupscale.atomic import truncate, write_text
from mupscale.models._lightning import close_writer, open_writer, run_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

L = TypeVar("L", bound=Logger)

_AXES = {"by_flops/": "x_axis_flops/", "by_samples/": "x_axis_samples/"}
"""Groups that show other metrics against another axis: the name of the metric follows."""

_GROUPS = {"lr-": "x_lr/", "throughput/": "x_throughput/", "growth/": "x_growth/"}
"""How the names of metrics begin, and how their tags do."""

_NAMES = {"epoch": "x_epoch", "width": "train/width"}


class LossFirstLogger(TensorBoardLogger):
    """A TensorBoardLogger whose first cards are `train/loss`, `train/width` and the validation.

    TensorBoard sorts the cards of a run by their tags. This logger keeps `train/…`, `val/…` and every name it does not
    know, and writes the others under tags that come later in the alphabet:

    - `x_axis_flops/…` and `x_axis_samples/…` for `by_flops/…` and `by_samples/…`,
    - `x_epoch` for `epoch`, `x_lr/…` for `lr-…` of LearningRateMonitor, `x_throughput/…` for `throughput/…`,
    - `x_growth/…` for `growth/…`.

    Only the tags in the event file differ: callbacks that monitor a metric, and other loggers, use the original name.
    """

    @property
    def experiment(self) -> "SummaryWriter":
        open_writer(self)
        return super().experiment

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        log_scalars(self, {loss_first(name): float(value) for name, value in metrics.items()}, step)


@rank_zero_only
def log_scalars(logger: TensorBoardLogger, values: Mapping[str, float], step: int | None) -> None:
    """Writes values of one step as one record, by their tags; a record for each would take several times as long."""
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    logger.experiment.file_writer.add_summary(summary, step)


@cache
def loss_first(name: str) -> str:
    """The tag of a metric in a LossFirstLogger.

    >>> loss_first("throughput/steps_per_second")
    'x_throughput/steps_per_second'
    >>> loss_first("by_flops/width")
    'x_axis_flops/train/width'
    """
    for start, group in _AXES.items():
        if name.startswith(start):
            return group + loss_first(name.removeprefix(start))
    for start, group in _GROUPS.items():
        if name.startswith(start):
            return group + name.removeprefix(start)
    return _NAMES.get(name, name)


def tag_in(logger: Logger, name: str) -> str:
    """The tag under which a logger shows a metric, for what is written past its `log_metrics`."""
    return loss_first(name) if isinstance(logger, LossFirstLogger) else name


# --- the files of all loggers


def log_folders(trainer: Trainer) -> list[str | None]:
    """The folder of each logger, relative to that of the run; None for loggers of other kinds."""
    of_run = run_folder(trainer)
    return [
        os.path.relpath(logger.log_dir, of_run)
        if of_run is not None and isinstance(logger, TensorBoardLogger | CSVLogger)
        else None
        for logger in trainer.loggers
    ]


def log_lengths(trainer: Trainer) -> dict[str, list[Any]]:
    """The lengths of the event files of each TensorBoard logger, and the rows of the table of each CSV logger."""
    return {
        "events": [
            {name: path.stat().st_size for name, path in event_files(logger).items()}
            for logger in tensorboards(trainer)
        ],
        "rows": [max(0, len(lines(logger)) - 1) for logger in tables(trainer)],
    }


def truncate_logs(trainer: Trainer, lengths: dict[str, list[Any]]) -> None:
    """Removes what was logged later. Shorter files are not the recorded ones, and are not changed."""
    for events, files in zip(tensorboards(trainer), lengths.get("events", []), strict=False):
        cut_events(events, files)
    for table, rows in zip(tables(trainer), lengths.get("rows", []), strict=False):
        there = lines(table)  # with their header, which may have grown since: so they are counted, and not their bytes
        if len(there) > rows + 1:
            write_text(table_of(table), "".join(there[: rows + 1]))


@rank_zero_only
def keep_tables(loggers: Sequence[Logger]) -> None:
    """Starts the CSV loggers without deleting the tables in their folders, as Lightning would."""
    for logger in of_kind(CSVLogger, loggers):
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


def delete_logs(trainer: Trainer, *, within: Path = Path("/")) -> None:
    """Deletes what loggers of this trainer have written: tables, as Lightning does, and event files in this folder."""
    for events in tensorboards(trainer):
        if not Path(events.log_dir).resolve().is_relative_to(within.resolve()):
            continue
        close_writer(events)  # or it would append to a file that is gone, and leave out its first record
        for path in event_files(events).values():
            path.unlink()
        # it may be torn, and the logger keeps one that is there
        (Path(events.log_dir) / events.NAME_HPARAMS_FILE).unlink(missing_ok=True)
    for table in tables(trainer):
        table_of(table).unlink(missing_ok=True)
        table.experiment.metrics_keys = []


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return of_kind(TensorBoardLogger, trainer.loggers)


def tables(trainer: Trainer) -> list[CSVLogger]:
    return of_kind(CSVLogger, trainer.loggers)


def of_kind(kind: type[L], loggers: Sequence[Logger]) -> list[L]:
    return [logger for logger in loggers if isinstance(logger, kind)]


def event_files(logger: TensorBoardLogger) -> dict[str, Path]:
    folder = Path(logger.log_dir)
    names = os.listdir(folder) if folder.is_dir() else []
    return {name: folder / name for name in names if name.startswith("events.out.tfevents.")}


def cut_events(logger: TensorBoardLogger, lengths: dict[str, int]) -> None:
    files = event_files(logger)
    if not lengths or any(name not in files or files[name].stat().st_size < length for name, length in lengths.items()):
        return
    close_writer(logger)
    for name, path in event_files(logger).items():
        if name in lengths:
            truncate(path, lengths[name])
        else:
            path.unlink()


def table_of(logger: CSVLogger) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def lines(logger: CSVLogger) -> list[str]:
    path = table_of(logger)
    return path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
