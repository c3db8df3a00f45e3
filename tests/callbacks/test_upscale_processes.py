"""A run that grows, on 2, then 4, then 1 process: it goes on as if it had always been one."""

from typing import Any

import pytest
import torch
from paths import SUPPORT
from process_runs import AT, CASES, PARTS, STEPS
from programs import run_program
from tiers import slow_except
from training_runs import assert_identical

pytestmark = pytest.mark.slow


KEPT = [name for name in CASES if name not in ("ddp", "fsdp2 with noise")]
"""The last case has ddp, fsdp2 and noise, and test_upscale_distributed.py a GPT-2 whose weights are sharded."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[Any, Any]:
    """What every rank of every part of every run reports."""
    folder = tmp_path_factory.mktemp("processes")
    names = CASES if pytestconfig.getoption("--all") else KEPT
    run_program(SUPPORT / "process_runs.py", folder, *names, limit=600)
    return torch.load(folder / "answers.pt", weights_only=True)


@pytest.mark.parametrize("name", slow_except(CASES, kept=KEPT))
def test_another_number_of_processes(name: str, answers: dict[Any, Any]) -> None:
    model, noise, precision, _ = CASES[name]
    (whole,) = answers[model, noise, precision, "whole"]
    parts = answers[name]
    for ranks, (processes, first, last, _) in zip(parts, PARTS, strict=True):
        assert len(ranks) == processes
        assert ranks[0]["steps"] == list(range(first + 1, last + 1))
        for rank in ranks[1:]:
            assert_identical(ranks[0]["state"], rank["state"])
    # the second part begins before the growth, at a checkpoint of the first one, and takes some of its steps again
    losses = [*parts[0][0]["losses"][:AT], *parts[1][0]["losses"], *parts[2][0]["losses"]]
    assert len(losses) == STEPS
    gaps = (torch.tensor(losses, dtype=torch.float64) - torch.tensor(whole["losses"], dtype=torch.float64)).abs()
    assert float(gaps.max()) < (1e-12 if precision == "64-true" else 1e-6)
    again = torch.tensor(parts[0][0]["losses"][AT:]) - torch.tensor(parts[1][0]["losses"][: PARTS[0][2] - AT])
    assert float(again.abs().max()) < 1e-6, "the growth on 2 processes is that on 4"
    end = parts[2][0]["state"]
    assert end.keys() == whole["state"].keys()
    for key, tensor in whole["state"].items():
        assert torch.allclose(end[key], tensor, rtol=1e-4, atol=1e-6), key
