"""The checksum of TensorBoard's records, against TensorBoard's own."""

import os
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs
from tensorboard.summary.writer import record_writer

from mupscale.callbacks.tensorboard import LONGEST, LossFirstLogger, masked_crc32c


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 255, LONGEST - 1, LONGEST, LONGEST + 1])
def test_it_is_that_of_tensorboard(length: int) -> None:
    for data in (os.urandom(length), bytes(length), b"\xff" * length):
        assert masked_crc32c(data) == theirs(data)
    assert masked_crc32c(struct.pack("<Q", length)) == theirs(struct.pack("<Q", length))


def test_a_logger_writes_by_it(tmp_path: Path) -> None:
    logger = LossFirstLogger(str(tmp_path), "run", "0")
    logger.log_metrics({"train/loss": 0.5}, 3)
    logger.finalize("success")
    assert record_writer.masked_crc32c is masked_crc32c
    events = EventAccumulator(logger.log_dir)  # refuses records whose checksum is wrong
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.5)]
