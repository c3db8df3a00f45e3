"""What loggers have written, and how a run that is resumed finds it."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from mupscale.callbacks.tensorboard import keep_tables


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
