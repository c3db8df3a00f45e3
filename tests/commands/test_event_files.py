"""Losses, FLOPs and validations read from event files: whole, resumed and damaged ones."""

import os
from pathlib import Path

import pytest
from synthetic_runs import Events, write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mupscale.commands.event_files import FLOPS, read_log


def logged(folder: Path, losses: dict[int, float], name: str) -> Path:
    """An event file with losses by step, and 3e6 FLOPs a step."""
    events = Events(folder, name)
    for step, loss in losses.items():
        events.add(step - 1, {"train/loss": loss})
        events.add(3 * step, {FLOPS: loss})
    return events.close()


def test_the_reader_agrees_with_tensorboard(tmp_path: Path):
    validation = {"val/loss": lambda step: step / 100}
    write_run(tmp_path, lambda step: 1 / step, flops=lambda step: step * 2e6, validation=validation)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    log = read_log(tmp_path)
    assert log.loss == {event.step + 1: event.value for event in events.Scalars("train/loss")}
    assert list(log.flops.values()) == [event.step * 1e6 for event in events.Scalars(FLOPS)]
    assert log.validation["val/loss"] == {event.step + 1: event.value for event in events.Scalars("val/loss")}


def test_a_resumed_run_overrules_what_was_logged_before(tmp_path: Path):
    """Files are read in the order of the numbers in their names: 9 before 10."""
    logged(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, "events.out.tfevents.1700000000.host.1.9")
    logged(tmp_path, {3: 30.0}, "events.out.tfevents.1700000000.host.1.10")
    log = read_log(tmp_path)
    assert log.loss == {1: 1.0, 2: 2.0, 3: 30.0}
    assert log.flops == {1: 3e6, 2: 6e6, 3: 9e6}


@pytest.mark.parametrize("cut", [1, 3, 17, 40])
def test_a_file_that_breaks_off_is_read_up_to_there(tmp_path: Path, cut: int):
    path = logged(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0}, "events.out.tfevents.1.host.1.0")
    path.write_bytes(path.read_bytes()[:-cut])
    log = read_log(tmp_path)
    assert log.damaged
    assert log.loss == {1: 1.0, 2: 2.0, 3: 3.0}  # only the last one's FLOPs are gone
    assert log.flops == {1: 3e6, 2: 6e6}


@pytest.mark.parametrize("step", [2**61, 2**54, -(2**61), -2])
def test_a_step_that_no_run_reaches_is_damage(tmp_path: Path, step: int):
    logged(tmp_path, {1: 1.0, 2: 2.0, step: 3.0}, "events.out.tfevents.1.host.1.0")
    log = read_log(tmp_path)
    assert log.damaged
    assert log.loss == {1: 1.0, 2: 2.0}


def test_a_pipe_is_damage(tmp_path: Path):
    logged(tmp_path, {1: 1.0}, "events.out.tfevents.1.host.1.0")
    os.mkfifo(tmp_path / "events.out.tfevents.1.host.1.1")
    log = read_log(tmp_path)
    assert (log.damaged, log.loss) == (True, {1: 1.0})


def test_a_number_that_was_changed_is_not_believed(tmp_path: Path):
    path = logged(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0}, "events.out.tfevents.1.host.1.0")
    content = bytearray(path.read_bytes())
    flops = FLOPS.encode()
    second = content.index(flops, content.index(flops) + 1)
    content[content.rindex(b"train/loss", 0, second) + 13] ^= 0xFF  # in the second loss
    path.write_bytes(bytes(content))
    log = read_log(tmp_path)
    assert log.damaged
    assert log.loss == {1: 1.0}
