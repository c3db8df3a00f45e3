"""`python -m benchmarks NAME --quick` runs anywhere: a table for people, JSON for programs."""

import csv
import dataclasses
import json
import logging
import math
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from paths import ROOT
from programs import run_program

from benchmarks import ladder
from benchmarks.__main__ import NAMES, main
from mupscale.callbacks import upscale
from mupscale.models import gpt2

SCRIPTS = sorted(path for name in ("benchmarks", "docs", "examples") for path in (ROOT / name).glob("[!_]*.py"))
SIDES = ["draft", "bare", "ours"]


@pytest.fixture(autouse=True)
def settings_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A benchmark sets them for itself, and its process ends."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "compiled"))
    monkeypatch.setattr(upscale, "pays_ahead", upscale.pays_ahead)
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
def test_three_ways_to_train(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([name, "--quick", "--device", "cpu", "--repeat", "3", "--out", str(tmp_path / "rows.json")])
    matmul, *rows, _ = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert matmul["TFLOP/s"] > 0
    measurements, summaries = rows[:9], rows[9:]
    assert [row["side"] for row in measurements] == SIDES * 3, "the sides take turns"
    _, bare, ours = measurements[:3]
    assert ours["last loss"] == pytest.approx(bare["last loss"], rel=1e-6), (
        "they train the same network on the same batches"
    )
    assert math.isfinite(ours["last loss"])
    assert [row["median of"] for row in summaries] == [f"3 {side}" for side in SIDES]
    for i, row in enumerate(summaries):
        speeds = sorted(each["steps/s"] for each in measurements[i::3])
        assert row["steps/s"] == speeds[1]
        assert row["spread %"] == pytest.approx(100 * (speeds[2] - speeds[0]) / speeds[1])
    ratios = sorted(ours["steps/s"] / draft["steps/s"] for draft, ours in zip(rows[:9:3], rows[2:9:3], strict=True))
    assert summaries[2]["÷ draft"] == pytest.approx(ratios[1])
    lines = capsys.readouterr().out.splitlines()
    printed = [line.removeprefix(bare["case"]).split() for line in lines if line.startswith(bare["case"])]
    assert [line[0] for line in printed[:9]] == SIDES * 3
    assert printed[2][1] == f"{ours['steps/s']:,.4g}"


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


@pytest.mark.slow
def test_a_ladder_grows_from_its_trunks_and_keeps_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, growths = list(ladder.QUICK.fixed.items())[:3], list(ladder.QUICK.grown.items())[:2]
    shorter = dataclasses.replace(ladder.QUICK, fixed=dict(sizes), grown=dict(growths))
    monkeypatch.setitem(ladder.LADDERS, "quick", shorter)
    monkeypatch.setattr(ladder, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    options = ["--device", "cpu", "--only", "lr0.0078-seed0", "--out", str(tmp_path), "--seeds", "0"]
    command = ["ladder", "--ladder", "quick", *options]
    main(command)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")}
    ways = [way for ways, _ in shorter.grown.values() for way in ways]
    assert len(kept) == 3 + len(ways) + 1, "sizes, ways to grow, a level of noise"
    main(command)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")} == kept
    main(["ladder", "--collect", str(tmp_path), "--out", str(tmp_path)])
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(kept)
    for row in rows:
        budget = ladder.QUICK.budget(float(row["budget"]))
        step = ladder.QUICK.flops(ladder.Size(int(row["width"]), int(row["layers"])))
        assert abs(float(row["flops"]) - budget) <= 2 * step, "narrow part, trunk and branch together cost the budget"
        if row["depth"] == "identity" or row["noise"] == "0.12":
            assert float(row["loss_after_growth"]) == pytest.approx(float(row["loss_before_growth"]), abs=2e-4)


def test_a_ladder_counts_every_parameter() -> None:
    for size in (ladder.Size(64, 2), ladder.Size(128, 4)):
        net, _ = ladder.make_model(ladder.FULL, size, torch.device("cpu"))
        assert ladder.FULL.parameters(size) == sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.slow
def test_a_grown_trunk_of_a_ladder_continues_the_narrow_one() -> None:
    """Without noise the wide trunk has the losses of the narrow one, by weights, optimizer state and rates."""
    narrow, wide = next(iter(ladder.QUICK.grown))
    device = torch.device("cpu")
    runners = [ladder.make_runner("quick", None, "cpu", size) for size in (narrow, wide)]
    torch.manual_seed(0)
    runners[0].load(ladder.state_of(*ladder.make_model(ladder.QUICK, narrow, device)))
    runners[0].train(0, range(6), lambda step: 0.002)
    state = runners[0].copy()
    run = ladder.Run(wide, 0.002, 0, (), narrow, way=ladder.Way("", "duplication", 0.0))
    runners[1].load(ladder.grow(ladder.QUICK, run, state, device))
    losses = [runner.train(0, range(6, 14), lambda step: 0.002, points=8) for runner in runners]
    assert losses[1] == [(step, pytest.approx(loss, abs=2e-5)) for step, loss in losses[0]]
    changes = [(tensor - state[name]).abs().max() for name, tensor in runners[0].copy().items() if "/" not in name]
    assert min(changes) > 1e-4
