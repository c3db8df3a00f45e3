"""The curves of a run, read from its TensorBoard event files."""

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mupscale.data_files import inside
from mupscale.errors import is_whole
from mupscale.flops import LOGGED

LOSS = "train/loss"
VALIDATION = "val/"
FLOPS = "x_axis_flops/train/loss"
SAMPLES = "x_axis_samples/train/loss"
"""TensorBoard tags, and beginnings of tags."""

Curve = dict[int, float]
"""Values by step. Steps are counted from 1: what was logged at 9 was logged after 10 steps."""


@dataclass
class Log:
    """The curves of a run. It is damaged if an event file could not be read to its end."""

    loss: Curve = field(default_factory=dict)
    flops: Curve = field(default_factory=dict)
    samples: Curve = field(default_factory=dict)
    validation: dict[str, Curve] = field(default_factory=lambda: defaultdict(dict))
    damaged: bool = False

    def cut(self, step: int) -> None:
        """Drops what was logged from a step on."""
        for curve in (self.loss, self.flops, self.samples, *self.validation.values()):
            for late in [each for each in curve if each >= step]:
                del curve[late]


def read_log(folder: Path) -> Log:
    """The scalars in the event files of a folder; a damaged file is read up to the damage."""
    from google.protobuf.message import DecodeError

    log = Log()
    for path in sorted(folder.glob("events.out.tfevents.*"), key=numbers_in_name):
        if not (path.is_symlink() or path.is_file()):
            log.damaged = True
            continue
        step = None
        try:
            for tag, at, value in scalars(inside(folder, path.name)):
                if not is_whole(at, 0):
                    raise DecodeError("a step that no run reaches")
                if tag == LOSS:
                    if step is None:  # a resumed run has logged some steps twice: the later file counts
                        log.cut(at + 1)
                    step = at + 1
                    log.loss[step] = value
                elif tag == FLOPS and step is not None:  # logged right after the loss, at the FLOPs of its step
                    log.flops[step] = float(at * LOGGED)
                elif tag == SAMPLES and step is not None:
                    log.samples[step] = float(at)
                elif tag.startswith(VALIDATION):
                    log.validation[tag][at + 1] = value
        except (struct.error, OverflowError, DecodeError):
            log.damaged = True
    return log


def numbers_in_name(path: Path) -> list[int]:
    """Sorts event files by time: their names hold the time, the process and a counter."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """Tag, step and value of the scalars that a report needs; raises an exception where a record is damaged.

    A long run logs tens of thousands of other scalars. A record is parsed only if the name of a wanted one is in its
    bytes, which makes this ten times faster than TensorBoard's own reader.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    wanted = [tag.encode() for tag in (LOSS, VALIDATION)]  # the tags of FLOPs and samples contain LOSS
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length
        record, (checksum,) = content[at + 12 : end], struct.unpack_from("<I", content, end)
        if any(tag in record for tag in wanted):
            event = Event.FromString(record)
            if checksum != masked_crc32c(record):
                raise DecodeError("another checksum")
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value
        at = end + 4
