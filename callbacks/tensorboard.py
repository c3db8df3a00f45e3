"""A TensorBoard logger that shows the losses first; and the log files of a run, which a resume truncates."""

import os
from collections.abc import Mapping
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer import event_file_writer, record_writer

from mupscale.atomic import replacing
from mupscale.errors import refuse_unless_level
from mupscale.models._lightning import close_writer, open_writer, run_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_AXES = {"by_flops/": "x_axis_flops/", "by_samples/": "x_axis_samples/"}
"""Groups that show other metrics against another axis: the name of the metric follows."""

_GROUPS = {"lr-": "x_lr/", "throughput/": "x_throughput/", "upscale/": "widening/"}
"""How the names of metrics begin, and how their tags do."""

_NAMES = {"epoch": "x_epoch", "width": "train/width"}


class LossFirstLogger(TensorBoardLogger):
    """A TensorBoardLogger whose first cards are `train/loss`, `train/width` and the validation.

    TensorBoard sorts the cards of a run by their tags. This logger keeps `train/…`, `val/…` and every name it does not
    know, and writes the others under tags that come later in the alphabet:

    - `widening/…` for `upscale/…`,
    - `x_axis_flops/…` and `x_axis_samples/…` for `by_flops/…` and `by_samples/…`,
    - `x_epoch` for `epoch`, `x_lr/…` for `lr-…` of LearningRateMonitor, `x_throughput/…` for `throughput/…`.

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


def delete_logs(trainer: Trainer) -> None:
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


# --- event files


class DirectWriter:
    """Takes the records of an event file in the thread that logs them.

    TensorBoard has a thread for each file. One thread at a time runs Python: to wake it for every record, and to wait
    for it at every checkpoint, takes a run longer than the work itself.

    Records reach the file by `flush`, or `flush_secs` after the first of them; the next call raises the error of that.
    """

    def __init__(self, writer: record_writer.RecordWriter, max_queue_size: int = 20, flush_secs: float = 120) -> None:
        refuse_unless_level("trainer.logger: flush_secs", flush_secs)
        self._seconds = flush_secs
        self._records, self._buffer, self._file = writer, BytesIO(), writer._writer
        writer._writer = self._buffer
        self._lock = Lock()
        self._timer: Timer | None = None
        self._failure: Exception | None = None

    def write(self, record: bytes) -> None:
        with self._lock:
            self._raise_failure()
            self._records.write(record)
            if self._timer is None:
                self._timer = Timer(self._seconds, self._flush_late)
                self._timer.daemon = True  # the end of a process does not wait for it
                self._timer.start()

    def flush(self) -> None:
        with self._lock:
            self._raise_failure()
            self._write_buffer()

    def close(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if not self._file.closed:
                self._write_buffer()
                self._file.close()

    def _flush_late(self) -> None:
        with self._lock:
            self._timer = None
            try:
                if not self._file.closed:
                    self._write_buffer()
            except Exception as error:
                self._failure = error

    def _write_buffer(self) -> None:
        records = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        if records:
            self._file.write(records)
            self._file.flush()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


event_file_writer._AsyncWriter = DirectWriter  # of all writers in this process


# --- checksums

LONGEST = 1024
"""The length in bytes of the longest record that the tables cover; TensorBoard handles longer ones, which are rare."""

PLACES = np.arange(LONGEST - 1, -1, -1)

_theirs = pywrap_tensorflow.masked_crc32c


@lru_cache(16)  # the lengths of records, which have checksums too, are few
def masked_crc32c(data: bytes) -> int:
    """The checksum of TensorBoard's records, as its function of that name, many times as fast.

    TensorBoard computes it byte by byte in Python, which takes longer than all other logging.
    """
    length = len(data)
    if not 4 <= length <= LONGEST:
        return int(_theirs(data))
    values = np.frombuffer(bytearray(data), np.uint8)
    values[:4] ^= 0xFF  # the register starts with ones
    # it is linear in the bytes: each adds what its place, counted from the end, makes of it
    crc = int(np.bitwise_xor.reduce(_table()[PLACES[LONGEST - length :], values])) ^ 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _table() -> np.ndarray:
    """What the register is after a byte and n zeros, by n and the byte."""
    table = np.empty((LONGEST, 256), dtype=np.uint32)
    table[0] = pywrap_tensorflow.CRC_TABLE
    for n in range(1, LONGEST):
        table[n] = table[0][table[n - 1] & 0xFF] ^ (table[n - 1] >> 8)
    return table


record_writer.masked_crc32c = masked_crc32c  # of all writers in this process
