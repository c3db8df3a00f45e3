"""`python -m benchmarks NAME --quick` runs anywhere: a table for people, JSON for programs."""

import csv
import dataclasses
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

from benchmarks import ladder, released
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


NETWORK = """
import mup
from torch import nn
from torch.nn import functional as F
from types import SimpleNamespace as GPTConfig

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("a network")
        assert config.bias and (config.n_layer, config.n_head, config.block_size) == (2, 2, 32)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.lm_head = mup.MuSharedReadout(self.wte.weight, bias=False)

    def forward(self, x, targets):
        logits = self.lm_head(self.wte(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def stand_in_checkout(folder: Path, network: str = NETWORK) -> Path:
    """The files and names of the authors' repository that are used."""
    source = folder / "src" / "weight_transfer"
    (source / "GPT2").mkdir(parents=True)
    (source / "GPT2" / "gpt2_model.py").write_text(network)
    (source / "optim.py").write_text("from mup import MuAdamW")
    return folder


@pytest.mark.slow
def test_gpt2_beside_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = stand_in_checkout(tmp_path / "checkout")
    out = tmp_path / "rows.json"
    main(["gpt2", "--quick", "--device", "cpu", "--against", str(checkout), "--out", str(out)])
    _, authors, bare, ours, _ = json.loads(out.read_text())["rows"]
    assert [row["side"] for row in (authors, bare, ours)] == ["authors", "bare", "ours"]
    assert bare["last loss"] == ours["last loss"]
    assert ours["÷ authors"] == pytest.approx(ours["steps/s"] / authors["steps/s"])
    assert "a network" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_growth_in_both_directions_is_timed(tmp_path: Path) -> None:
    main(["pause", "--quick", "--device", "cpu", "--ways", "ahead", "--out", str(tmp_path / "rows.json")])
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
@pytest.mark.exhaustive
@pytest.mark.parametrize(("options", "least", "most"), [([], 2, 4), (["--deep"], 1.5, 2)])
def test_folders_beside_cp(
    options: list[str], least: float, most: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["folder", "--quick", *options, "--where", str(tmp_path), "--out", str(tmp_path / "row.json")])
    (row,) = json.loads((tmp_path / "row.json").read_text())["rows"]
    assert least < row["wide_gb"] / row["narrow_gb"] < most
    assert row["peak_gb"] > row["largest_wide_tensor_gb"] > 0
    assert "cp_seconds" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["row.json"]


@pytest.mark.slow
def test_a_rank_grows_within_its_shard_and_half_a_tensor(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """It takes 0.31 of the largest tensor; wide tensors made whole take 0.81, narrow weights that stay alive 1.32."""
    rows = tmp_path / "rows.json"
    processes = "2,4" if pytestconfig.getoption("--all") else "2"
    command = ["-m", "benchmarks", "swap_memory", "--processes", processes, "--width", "512", "--noise", "none"]
    run = run_program(*command, "--out", rows, cwd=ROOT)
    for row in json.loads(rows.read_text())["rows"]:
        assert row["shard"] > 4 * row["whole"], "the tensor must not hide what else is held"
        assert row["shard"] < row["peak"] <= row["shard"] + row["whole"] / 2, run.stdout


@pytest.mark.slow
def test_a_ladder_grows_from_its_trunks_and_keeps_finished_runs(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", "lr0.0078-seed0", "--out", str(tmp_path), "--seeds", "0"]
    command = ["ladder", "--ladder", "quick", *options]
    main(command)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")}
    assert len(kept) == 5 + 7 + 1, "sizes, ways to grow, a level of noise"
    main(command)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")} == kept
    main(["ladder", "--collect", str(tmp_path), "--out", str(tmp_path)])
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (len(kept) - 2), "two sizes only grow"
    for row in rows:
        budget = ladder.QUICK.budget(float(row["budget"]))
        step = ladder.QUICK.flops(ladder.Size(int(row["width"]), int(row["layers"])))
        assert abs(float(row["flops"]) - budget) <= 2 * step, "narrow part, trunk and branch together cost the budget"
        if row["depth"] == "identity" or row["noise"] == "0.12":
            assert float(row["loss_after_growth"]) == pytest.approx(float(row["loss_before_growth"]), abs=2e-4)


@pytest.mark.slow
def test_a_start_that_exists_costs_nothing(tmp_path: Path) -> None:
    """Its run is trained on by the whole budget, a fifth of it with a falling rate, from where the start stood."""
    start, device = ladder.Size(16, 1), torch.device("cpu")
    point = 8 * 32 / ladder.QUICK.parameters(start)  # eight steps of 32 tokens
    growths = {(start, start): ((ladder.FIXED,), {point: (0.0,)})}
    sunk = dataclasses.replace(ladder.QUICK, sunk=True, grown=growths, top=start, tokens_per_parameter=20 / 8 * point)
    runner = ladder.Runner(sunk, start, ladder.Text(None, sunk, device), device)
    (tmp_path / "states").mkdir()
    ladder.train_run(sunk, ladder.Run(start, sunk.lr, 0, ()), runner, tmp_path)
    continued = ladder.Run(start, sunk.lr, 0, (0.0,), start, point)
    assert continued.is_ready(tmp_path)
    result = ladder.train_run(sunk, continued, runner, tmp_path)
    assert result["around_growth"][0] == result["around_growth"][1]
    assert result["ends"][0]["tokens"] == (8 + 20) * 32
    branch = [tokens for power, tokens, *_ in result["curve"] if power == 0.0]
    assert min(branch) > (8 + 16) * 32 >= max(tokens for power, tokens, *_ in result["curve"] if power is None)


@pytest.mark.exhaustive
def test_a_released_checkpoint_is_trained_on(tmp_path: Path) -> None:
    main(["released", "--quick", "--lrs", "0.004", "--device", "cpu", "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "released.csv").read_text().splitlines()))
    by_arm = {row["arm"]: row for row in rows if row["share"] == "1.0"}
    assert list(by_arm) == list(released.ARMS)
    before = {arm: float(row["loss_before"]) for arm, row in by_arm.items()}
    kept = before["as it is"]
    assert before["twice as wide"] == before["twice as deep, identity"] == kept
    assert before["twice as deep, stack"] != kept
    spent = [float(row["flops"]) for row in by_arm.values()]
    assert max(spent) < 1.1 * min(spent), "up to a step"
    assert all(float(row["loss"]) < kept for row in by_arm.values())


def test_a_ladder_counts_every_parameter() -> None:
    for size in (ladder.Size(64, 2), ladder.Size(128, 4)):
        net, _ = ladder.make_model(ladder.FULL, size, torch.device("cpu"))
        assert ladder.FULL.parameters(size) == sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.slow
def test_a_grown_trunk_of_a_ladder_continues_the_narrow_one() -> None:
    """Without noise the wide trunk has the losses of the narrow one, by weights, optimizer state and rates."""
    narrow, wide = next(iter(ladder.QUICK.grown))
    device = torch.device("cpu")
    text = ladder.Text(None, ladder.QUICK, device)
    runners = [ladder.Runner(ladder.QUICK, size, text, device) for size in (narrow, wide)]
    torch.manual_seed(0)
    runners[0].load(ladder.state_of(*ladder.make_model(ladder.QUICK, narrow, device)))
    list(runners[0].train(0, range(6), lambda step: 0.002, points=1))
    state = {name: tensor.clone() for name, tensor in runners[0].state.items()}
    run = ladder.Run(wide, 0.002, 0, (), narrow, way=ladder.Way("", "duplication", 0.0))
    runners[1].load(ladder.grow(ladder.QUICK, run, state, device))
    losses = [list(runner.train(0, range(6, 14), lambda step: 0.002, points=8)) for runner in runners]
    assert losses[1] == [(step, pytest.approx(loss, abs=2e-5)) for step, loss in losses[0]]
    changes = [(tensor - state[name]).abs().max() for name, tensor in runners[0].state.items() if "/" not in name]
    assert min(changes) > 1e-4
