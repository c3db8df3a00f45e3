"""`python -m experiments.ladder quick`: growth at equal FLOPs, under AdamW and under Muon."""

import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from experiments import ladder
from experiments.ladder import Rates, Run, Size, Way, make_model, plan_runs, read_ladder, read_way
from experiments.steps import State, Text, state_of, step_muon

QUICK = read_ladder("quick")
MUON = read_ladder("quick_muon")


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(None, QUICK.rows, QUICK.context, QUICK.validated, "cpu")


@pytest.fixture(autouse=True)
def fresh_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_RUNNERS", {})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "muon_lr"), [("quick", ""), ("quick_muon", "0.016")])
def test_a_ladder_grows_from_its_trunks_and_keeps_finished_runs(
    name: str, muon_lr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "processes", ThreadPoolExecutor)
    command = [name, "--device", "cpu", "--out", str(tmp_path), "--seeds", "0"]
    command += ["--only", "(^|-)(16x1|32x1|16-32x1|32x2)-lr0.0078(-muon0.016)?-seed0(?!.*inter)"]
    ladder.main(command)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")}
    assert len(kept) == 3 + 6, "sizes, and ways to grow"
    ladder.main(command)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*.json")} == kept
    ladder.main(["quick", "--collect", str(tmp_path), "--out", str(tmp_path)])
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(kept)
    assert {row["muon_lr"] for row in rows} == {muon_lr}
    for row in rows:
        budget = QUICK.budget(float(row["budget"]))
        step = QUICK.flops(Size(int(row["width"]), int(row["layers"])))
        assert abs(float(row["flops"]) - budget) <= 2 * step, "narrow part, trunk and branch together cost the budget"
        if row["depth"] == "identity" or row["noise"] == "0.12":
            assert float(row["loss_after_growth"]) == pytest.approx(float(row["loss_before_growth"]), abs=2e-4)
    ends = {(row["depth"], row["budget"]): row["loss"] for row in rows if row["depth"]}
    assert ends["stack", "0"] == ends["0,0", "0"], "the sources of the layers, by name and one by one"


@pytest.mark.parametrize("size", [Size(64, 2), Size(128, 4)], ids=str)
def test_a_ladder_counts_every_parameter(size: Size) -> None:
    full = read_ladder("full")
    net, _ = make_model(full, size, torch.device("cpu"))
    assert full.parameters(size) == sum(parameter.numel() for parameter in net.parameters())


def test_muon_trains_the_matrices_of_the_blocks_at_half_its_rate_at_width_256() -> None:
    net, (adamw, muon) = make_model(MUON, Size(256, 2), torch.device("cpu"))
    (group,) = muon.param_groups
    hidden = [each for name, each in net.named_parameters() if name.startswith("blocks") and each.ndim == 2]
    assert {*map(id, group["params"])} == {*map(id, hidden)}
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    both = [parameter for optimizer in (adamw, muon) for each in optimizer.param_groups for parameter in each["params"]]
    assert len(both) == len(list(net.parameters()))


def test_a_step_at_rates_in_memory_is_that_of_muon() -> None:
    """Also with the decay; two groups have two rates."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 16), torch.randn(16, 8)]
    twins = [[torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2)]
    optimizers = [
        torch.optim.Muon([{"params": [a], "lr": 0.01}, {"params": [b], "lr": 0.02}], adjust_lr_fn="match_rms_adamw")
        for a, b in twins
    ]
    for _ in range(3):
        for a, b in zip(*twins, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizers[0].step()
        step_muon(optimizers[1], torch.tensor([0.01, 0.02]))
    for weight, a, b in zip(weights, *twins, strict=True):
        assert (a - weight).abs().max() > 0.01
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.01, 0.02]


@pytest.mark.slow
@pytest.mark.parametrize("of", [QUICK, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("way", ["duplication-0", "diagonal-0"])
def test_a_grown_trunk_continues_the_narrow_one(of: ladder.Ladder, way: str, text: Text) -> None:
    """Without noise the wide trunk has the losses of the narrow one, by weights, optimizer state and rates.

    torch's Muon computes in bfloat16, so its updates differ by 1 %.
    """
    narrow, wide, tolerance = Size(16, 1), Size(32, 1), 2e-5 if of is QUICK else 2e-3
    runners = [ladder.make_runner(of, text, size) for size in (narrow, wide)]
    torch.manual_seed(0)
    runners[0].load(state_of(*make_model(of, narrow, torch.device("cpu"))))
    runners[0].train(0, range(6), (0.002, 0.002), lambda step: 1.0)
    state: State = runners[0].copy()
    run = Run(wide, Rates(0.002), 0, (), narrow, way=read_way(way))
    runners[1].load(ladder.grow(of, run, state, torch.device("cpu")))
    losses = [runner.train(0, range(6, 14), (0.002, 0.002), lambda step: 1.0, points=8) for runner in runners]
    assert losses[1] == [(step, pytest.approx(loss, abs=tolerance)) for step, loss in losses[0]]
    changes = [(tensor - state[name]).abs().max() for name, tensor in runners[0].copy().items() if "/" not in name]
    assert min(changes) > 1e-4


def test_names_of_ways_and_runs() -> None:
    names = ["stack", "diagonal-1", "interleave-diagonal-0.5", "0,1,2,1,2,3", ""]
    ways = [Way("stack"), Way("", "diagonal", 1), Way("interleave", "diagonal", 0.5), Way("0,1,2,1,2,3"), Way()]
    assert [read_way(name) for name in names] == ways
    assert [str(way) for way in ways] == names
    first, *_, last = [run.name for run in plan_runs(read_ladder("muon"), [0])]
    assert first == "256x8-lr0.0156-muon0.008-seed0"
    assert last == "128-256x8-lr0.0156-muon0.016-seed0-at-1-diagonal-1"
