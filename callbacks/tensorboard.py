"""A TensorBoard logger that shows the losses first."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer import record_writer

from mupscale.models._lightning import open_writer

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
        """TensorBoard's writer."""
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


# --- checksums

LONGEST = 1024
"""The length in bytes of the longest record that the tables cover; TensorBoard handles longer ones, which are rare."""

_theirs = pywrap_tensorflow.masked_crc32c


def masked_crc32c(data: bytes) -> int:
    """The checksum of TensorBoard's records, as its function of that name, many times as fast.

    TensorBoard computes it byte by byte in Python, on the threads of its writers. With a hundred runs in one process,
    that takes longer than all other logging.
    """
    length = len(data)
    if length > LONGEST:
        return int(_theirs(data))
    if length == 8:
        return _of_header(data)
    return _masked(data)


@cache
def _of_header(data: bytes) -> int:
    """Of the length of a record. There are few lengths."""
    return _masked(data)


def _masked(data: bytes) -> int:
    tables, of_zeros, places = _tables()
    length = len(data)
    # the register is linear in the bytes: each adds what its place, counted from the end, makes of it
    parts = tables[places[LONGEST - length :], np.frombuffer(data, np.uint8)]
    crc = int(np.bitwise_xor.reduce(parts, initial=0)) ^ int(of_zeros[length]) ^ 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a byte followed by n bytes becomes, what the empty register becomes after n zero bytes, and n … 1, 0."""
    byte = np.array(pywrap_tensorflow.CRC_TABLE, dtype=np.uint32)
    tables = np.empty((LONGEST, 256), dtype=np.uint32)
    of_zeros = np.empty(LONGEST + 1, dtype=np.uint32)
    tables[0], of_zeros[0] = byte, 0xFFFFFFFF
    for n in range(1, LONGEST):
        tables[n] = byte[tables[n - 1] & 0xFF] ^ (tables[n - 1] >> 8)
    for n in range(1, LONGEST + 1):
        of_zeros[n] = byte[of_zeros[n - 1] & 0xFF] ^ (of_zeros[n - 1] >> 8)
    return tables, of_zeros, np.arange(LONGEST - 1, -1, -1)


record_writer.masked_crc32c = masked_crc32c  # of all writers in this process
