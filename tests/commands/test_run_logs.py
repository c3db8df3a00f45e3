"""Steps, losses, FLOPs, epochs and widths read from the event files of runs: whole, resumed and damaged ones."""

import math
from pathlib import Path

import pytest
from synthetic_runs import Events, upscale, write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mupscale.commands.run_logs import EPOCH, FLOPS, WIDTH, LoggedRun, read_log, scalars


def logged(folder: Path, losses: dict[int, float], name: str) -> Path:
    """An event file with losses by step, and 3e6 FLOPs a step."""
    events = Events(folder, name)
    for step, loss in losses.items():
        events.add("train/loss", step - 1, loss)
        events.add(FLOPS, 3 * step, loss)
    return events.close()


def test_numbers_of_a_run(tmp_path: Path):
    folder = write_run(
        tmp_path / "run",
        lambda step: 1 / step,
        seed=3,
        flops=lambda step: step * 2e6,
        grown={40: 2000},
        validation={"val/loss": lambda step: step / 100},
        values={"trainer.callbacks": [upscale(at_step=40)]},
    )
    run = LoggedRun(folder)
    assert run.seed == 3
    assert (run.start_width, run.end_width) == (500, 2000)
    assert run.steps.tolist() == list(range(5, 201, 5))
    assert run.losses[3] == pytest.approx(1 / 20)
    assert run.growths == [40]
    assert run.steps_per_epoch == 20
    assert run.planned_steps(20) == 200
    assert run.log.validation["val/loss"] == pytest.approx({step: step / 100 for step in range(20, 201, 20)})
    assert run.flops_at(100) == 200e6
    assert run.flops_at(7) == 14e6  # between two that were logged
    assert run.flops_at(210) == 420e6  # after them
    assert run.diverged_at is None


def test_flops_per_step_are_those_of_the_last_width(tmp_path: Path):
    folder = write_run(
        tmp_path,
        lambda step: 1.0,
        flops=lambda step: step * 1e6 if step <= 40 else 40e6 + (step - 40) * 16e6,
        grown={40: 2000},
        values={"trainer.callbacks": [upscale(at_step=40)]},
    )
    run = LoggedRun(folder)
    assert run.flops_per_step == 16e6
    assert run.flops_at(200) == 40e6 + 160 * 16e6


def test_the_reader_agrees_with_tensorboard(tmp_path: Path):
    validation = {"val/loss": lambda step: step / 100}
    write_run(tmp_path, lambda step: 1 / step, flops=lambda step: step * 2e6, validation=validation)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    log = read_log(tmp_path)
    assert log.loss == {event.step + 1: event.value for event in events.Scalars("train/loss")}
    assert list(log.flops.values()) == [event.step * 1e6 for event in events.Scalars(FLOPS)]
    assert log.validation["val/loss"] == {event.step + 1: event.value for event in events.Scalars("val/loss")}


def test_records_that_a_report_does_not_need_are_not_parsed(tmp_path: Path):
    validation = {"val/loss": lambda step: 1.0}
    write_run(tmp_path, lambda step: 1.0, flops=lambda step: 1e6, validation=validation, grown={5: 8})
    (path,) = tmp_path.glob("events*")
    parsed = {tag for tag, _, _ in scalars(path)}
    assert parsed == {"train/loss", "val/loss", FLOPS, WIDTH, EPOCH}  # no samples, no throughput


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


def test_garbage_is_no_log(tmp_path: Path):
    (tmp_path / "events.out.tfevents.1.host.1.0").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "events.out.tfevents.2.host.1.0").write_bytes(b"")
    log = read_log(tmp_path)
    assert log.damaged
    assert not log.loss


def test_divergence(tmp_path: Path):
    run = LoggedRun(write_run(tmp_path / "nan", lambda step: math.nan if step > 50 else 1.0))
    assert run.diverged_at == 55
    given_up = LoggedRun(write_run(tmp_path / "given_up", lambda step: 1e9, steps=30, result=math.inf))
    assert given_up.diverged_at == 30


EVERY_100_STEPS = {"trainer.check_val_every_n_epoch": None, "trainer.val_check_interval": 100}


@pytest.mark.parametrize(
    ("values", "epochs", "wanted"),
    [
        pytest.param({}, {20: 0, 40: 1}, 20, id="validated-after-epochs"),
        pytest.param({"trainer.check_val_every_n_epoch": 3}, {60: 2}, 20, id="after-every-third"),
        pytest.param(EVERY_100_STEPS, {100: 4, 700: 34}, 20, id="by-steps"),
        pytest.param(EVERY_100_STEPS, {100: 3}, None, id="too-few-to-tell"),
        pytest.param({}, {}, None, id="never"),
    ],
)
def test_steps_of_an_epoch(tmp_path: Path, values: dict, epochs: dict[int, int], wanted: int | None):
    write_run(tmp_path, lambda step: 1.0, steps=5, values=values)
    events = Events(tmp_path, "events.out.tfevents.1800000000.host.1.0")
    for step, epoch in epochs.items():
        events.add(EPOCH, step - 1, epoch)
    events.close()
    assert LoggedRun(tmp_path).steps_per_epoch == wanted


def test_steps_of_an_epoch_if_metrics_are_logged_in_the_middle_of_epochs(tmp_path: Path):
    """A model's own `self.log` in training logs the epoch, too."""
    for name, validation in (("validated", {"val/loss": lambda step: 1.0}), ("not", {})):
        write_run(tmp_path / name, lambda step: 1.0, validation=validation)
        events = Events(tmp_path / name, "events.out.tfevents.1800000000.host.1.0")
        for step in range(3, 200, 3):
            events.add(EPOCH, step - 1, (step - 1) // 20)
        events.close()
        assert LoggedRun(tmp_path / name).steps_per_epoch == 20, name


def test_steps_of_an_epoch_of_a_finished_run_without_validation(tmp_path: Path):
    assert LoggedRun(write_run(tmp_path, lambda step: 1.0, result=1.0)).steps_per_epoch == 20


def test_a_single_callback_need_not_be_a_list(tmp_path: Path):
    assert LoggedRun(write_run(tmp_path, lambda step: 1.0, values={"trainer.callbacks": upscale()})).end_width == 2000


def test_an_invalid_configuration(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"config\.yaml is not the configuration of a run"):
        LoggedRun(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match="seed_everything"):
        LoggedRun(tmp_path)
