"""The tags of a run in TensorBoard, which decide the order of its cards; checksums, and tables of a resumed run."""

import csv
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from paths import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mupscale.__main__ import main
from mupscale.callbacks.tensorboard import LossFirstLogger, keep_tables, loss_first, tag_in
from mupscale.commands.cli import run_cli

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

GROUPS = ["train", "val", "x_axis_flops", "x_axis_samples", "x_epoch", "x_growth", "x_lr", "x_throughput"]

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
        ("growth/width", "x_growth/width"),
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
    cli = run_cli(["--config", QUICKSTART, *BRIEF], "fit")
    drawn = curves()
    cards = sorted(tag for tag in drawn if "text_summary" not in tag)
    assert cards[:4] == ["train/loss", "train/width", "val/accuracy", "val/loss"]
    assert sorted({card.partition("/")[0] for card in cards}) == GROUPS
    assert {tag for tag in drawn if "text_summary" in tag} == {"config/text_summary", "x_growth/plan/text_summary"}
    assert drawn["train/width"] == list(range(6))
    assert drawn["x_growth/width"] == [3]
    assert {"val/loss", "lr-AdamW"} <= {*cli.trainer.callback_metrics}
    assert not any(name.startswith("x_") for name in cli.trainer.logged_metrics)


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
    keep_tables([logger])
    logger.log_metrics({"train/loss": 1.5}, step=1)
    logger.save()
    with path.open() as file:
        assert [(row["step"], row["train/loss"]) for row in csv.DictReader(file)] == rows
    assert list(path.parent.iterdir()) == [path]
