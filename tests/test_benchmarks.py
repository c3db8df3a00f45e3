"""`python -m benchmarks NAME --quick` runs anywhere: a table for people, JSON for programs."""

import json
import logging
import math
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paths import ROOT
from programs import run_program

from benchmarks.__main__ import NAMES, main
from mupscale.callbacks import growth_schedule
from mupscale.models import gpt2

SCRIPTS = sorted(
    path for name in ("benchmarks", "docs", "examples", "experiments") for path in (ROOT / name).glob("[!_]*.py")
)
SIDES = ["bare", "ours"]


@pytest.fixture(autouse=True)
def settings_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A benchmark sets them for itself, and its process ends."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "compiled"))
    monkeypatch.setattr(growth_schedule, "should_precompile", growth_schedule.should_precompile)
    logger, backend = logging.getLogger("lightning.pytorch"), torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), logger.level, backend.benchmark
    yield
    torch.set_float32_matmul_precision(before[0])
    logger.setLevel(before[1])
    backend.benchmark = before[2]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(path: Path) -> None:
    runpy.run_path(str(path), run_name="imported")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", pytest.param("resnet", marks=pytest.mark.exhaustive)])
def test_two_ways_to_train(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([name, "--quick", "--device", "cpu", "--repeat", "3", "--out", str(tmp_path / "rows.json")])
    matmul, *rows, _ = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert matmul["TFLOP/s"] > 0
    measurements, summaries = rows[:6], rows[6:]
    assert [row["side"] for row in measurements] == SIDES * 3, "the sides take turns"
    bare, ours = measurements[:2]
    assert ours["last loss"] == pytest.approx(bare["last loss"], rel=1e-6), (
        "they train the same network on the same batches"
    )
    assert math.isfinite(ours["last loss"])
    assert [row["median of"] for row in summaries] == [f"3 {side}" for side in SIDES]
    for i, row in enumerate(summaries):
        speeds = sorted(each["steps/s"] for each in measurements[i::2])
        assert row["steps/s"] == speeds[1]
        assert row["spread %"] == pytest.approx(100 * (speeds[2] - speeds[0]) / speeds[1])
    ratios = sorted(ours["steps/s"] / bare["steps/s"] for bare, ours in zip(rows[:6:2], rows[1:6:2], strict=True))
    assert summaries[1]["÷ bare"] == pytest.approx(ratios[1])
    lines = capsys.readouterr().out.splitlines()
    printed = [line.removeprefix(bare["case"]).split() for line in lines if line.startswith(bare["case"])]
    assert [line[0] for line in printed[:6]] == SIDES * 3
    assert printed[1][1] == f"{ours['steps/s']:,.4g}"


@pytest.mark.slow
def test_a_growth_in_both_directions_is_timed(tmp_path: Path) -> None:
    main(["pause", "--quick", "--device", "cpu", "--only", "ahead", "--out", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["compiled"], row["ahead s"]) == ("ahead", "")
    assert 0 < row["growth s"] < row["pause s"] < row["total s"], "it includes a checkpoint and a step"
    assert row["parameters"] == sum(
        each.numel() for each in gpt2.GPT2Net(64, layers=2, heads=2, vocabulary=256, context=32).parameters()
    )
    assert row["footprint GB"] == pytest.approx(3 * 4 * row["parameters"] / 1e9, rel=1e-3)
    assert min(row["before /s"], row["after /s"], row["fresh /s"]) > 0


def test_an_unknown_benchmark_is_named() -> None:
    with pytest.raises(SystemExit, match="there is no benchmark 'nope'") as refusal:
        main(["nope"])
    assert all(name in str(refusal.value) for name in NAMES)


def test_help_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    told = capsys.readouterr().out
    assert all(f"  {name} " in told and text in told for name, text in NAMES.items())


@pytest.mark.slow
def test_a_rank_grows_within_its_shard_and_half_a_tensor(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """It takes 0.31 of the largest tensor; wide tensors made whole take 0.81, narrow weights that stay alive 1.32."""
    rows = tmp_path / "rows.json"
    processes = "2,4" if pytestconfig.getoption("--all") else "2"
    command = ["-m", "benchmarks", "swap_memory", "--processes", processes, "--width", "512", "--only", "none"]
    run = run_program(*command, "--out", rows, cwd=ROOT)
    for row in json.loads(rows.read_text())["rows"]:
        assert row["shard"] > 4 * row["whole"], "the tensor must not hide what else is held"
        assert row["shard"] < row["peak"] <= row["shard"] + row["whole"] / 2, run.stdout
