"""The tags of a run in TensorBoard, which decide the order of its cards; checksums, and tables of a resumed run."""

import csv
import errno
import os
import struct
import threading
import time
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from paths import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as theirs
from tensorboard.summary.writer import record_writer

from mupscale.__main__ import main
from mupscale.callbacks.tensorboard import (
    LONGEST,
    DirectWriter,
    LossFirstLogger,
    event_files,
    keep_tables,
    loss_first,
    masked_crc32c,
    tag_in,
)
from mupscale.commands.cli import parsed

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
BRIEF = [
    "--trainer.max_steps=6",
    "--trainer.log_every_n_steps=1",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.callbacks=[{class_path: UpscaleCallback, init_args: {at_step: 3, width: 128}}]",
]
PLACE = "init_args: {save_dir: runs, name: quickstart, version: version_0}"

GROUPS = ["train", "val", "widening", "x_axis_flops", "x_axis_samples", "x_epoch", "x_lr", "x_throughput"]

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def curves(folder: str = "runs/quickstart/version_0") -> dict[str, list[int]]:
    """The steps of each scalar and text, in their order: files of one second may be read in any."""
    events = EventAccumulator(folder).Reload()
    scalars = {tag: sorted(event.step for event in events.Scalars(tag)) for tag in events.Tags()["scalars"]}
    return scalars | {tag: sorted(event.step for event in events.Tensors(tag)) for tag in events.Tags()["tensors"]}


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("width", "train/width"),
        ("upscale/width", "widening/width"),
        ("by_flops/train/loss", "x_axis_flops/train/loss"),
        ("epoch", "x_epoch"),
        ("lr-AdamW/pg1-momentum", "x_lr/AdamW/pg1-momentum"),
        ("throughput/steps_per_second", "x_throughput/steps_per_second"),
        ("my/epoch", "my/epoch"),
    ],
)
def test_only_a_logger_that_sorts_renames(name: str, tag: str, tmp_path: Path) -> None:
    assert loss_first(name) == tag
    assert tag_in(LossFirstLogger(tmp_path), name) == tag
    assert tag_in(TensorBoardLogger(tmp_path), name) == name
    assert tag_in(CSVLogger(tmp_path), name) == name


@pytest.mark.slow
def test_the_first_cards_are_the_losses_and_the_width() -> None:
    cli = parsed(["--config", QUICKSTART, *BRIEF], "fit")
    drawn = curves()
    cards = sorted(tag for tag in drawn if "text_summary" not in tag)
    assert cards[:4] == ["train/loss", "train/width", "val/accuracy", "val/loss"]
    assert sorted({card.partition("/")[0] for card in cards}) == GROUPS
    assert {tag for tag in drawn if "text_summary" in tag} == {"config/text_summary", "widening/plan/text_summary"}
    assert drawn["train/width"] == list(range(6))
    assert drawn["widening/width"] == [3]
    assert {"val/loss", "lr-AdamW"} <= {*cli.trainer.callback_metrics}
    assert not any(name.startswith(("x_", "widening/")) for name in cli.trainer.logged_metrics)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_tags() -> None:
    main(["fit", "--config", QUICKSTART, *BRIEF, f"--trainer.logger={{class_path: TensorBoardLogger, {PLACE}}}"])
    run = Path("runs/quickstart/version_0")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["logger"]["class_path"].endswith(".TensorBoardLogger")
    before = curves()
    for path in run.rglob("*.ckpt"):
        if path.name != "pre-upscale-3.ckpt":
            path.unlink()
    main(["resume", str(run)])
    assert curves() == before
    assert before["train/loss"] == list(range(6))


# --- checksums


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


# --- event files


def length(logger: LossFirstLogger) -> int:
    return sum(path.stat().st_size for path in event_files(logger).values())


def test_records_reach_their_file_without_a_thread(tmp_path: Path) -> None:
    logger = LossFirstLogger(str(tmp_path), "run", "0")
    before = threading.enumerate()
    lengths = []
    for step in range(3):
        logger.log_metrics({"train/loss": 0.5}, step)
        logger.experiment.flush()
        lengths.append(length(logger))
    assert lengths == sorted(set(lengths)), "each flush writes"
    assert [type(thread) for thread in threading.enumerate() if thread not in before] == [threading.Timer]
    logger.finalize("success")


def test_records_reach_their_file_some_time_later(tmp_path: Path) -> None:
    logger = LossFirstLogger(str(tmp_path), "run", "0", flush_secs=0.01)
    logger.experiment.flush()
    before = length(logger)
    logger.log_metrics({"train/loss": 0.5}, 3)
    deadline = time.monotonic() + 60
    while length(logger) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert length(logger) > before
    logger.finalize("success")


def test_an_error_of_a_file_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = LossFirstLogger(str(tmp_path), "run", "0", flush_secs=0.01)
    logger.experiment.flush()
    writer = logger.experiment.file_writer.event_writer._async_writer
    assert isinstance(writer, DirectWriter)

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer._file, "flush", full)
        logger.log_metrics({"train/loss": 0.5}, 3)
        writer._timer.join(60)
    with pytest.raises(OSError, match="No space left on device"):
        logger.log_metrics({"train/loss": 0.5}, 4)


# --- tables


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")  # it is the run's own
@pytest.mark.parametrize(
    ("there", "rows"), [("step,train/loss\n0,2.5\n", [("0", "2.5"), ("1", "1.5")]), ("", [("1", "1.5")])]
)
def test_a_table_is_gone_on_with_even_if_a_kill_left_nothing_in_it(
    there: str, rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "run" / "metrics.csv"
    path.parent.mkdir()
    path.write_text(there)
    logger = CSVLogger(tmp_path, "", "run")
    keep_tables(Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False))
    logger.log_metrics({"train/loss": 1.5}, step=1)
    logger.save()
    with path.open() as file:
        assert [(row["step"], row["train/loss"]) for row in csv.DictReader(file)] == rows
    assert list(path.parent.iterdir()) == [path]
