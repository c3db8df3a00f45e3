"""Runs killed at their file operations and resumed end as if nothing had happened: small, and large by --all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import SUPPORT
from programs import SHARED_CODE, run_program
from run_ends import differences

SECONDS = {"small": 300, "large": 3000}
"""After which an attack has failed."""


@pytest.mark.slow
def test_killed_runs_end_as_undisturbed_ones(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    size = "large" if pytestconfig.getoption("--all") else "small"
    program = run_program(SUPPORT / "attack.py", tmp_path, size, variables=SHARED_CODE, limit=SECONDS[size])
    cases = [json.loads(line) for line in program.stdout.splitlines()]
    different = [case for case in cases if case["differences"]]
    assert not different, "\n".join(map(str, different[:10]))
    kills = sum(len(case["where"]) for case in cases)
    assert kills >= {"small": 10, "large": 500}[size]


@pytest.mark.slow
@pytest.mark.exhaustive  # tests of sweeps and experiments have single kills
@pytest.mark.parametrize("kind", ["driver", "worker", "node"])
def test_killed_experiments_end_as_undisturbed_ones(kind: str, tmp_path: Path) -> None:
    arguments = ("lab", 20, kind)
    program = run_program(SUPPORT / "attack.py", tmp_path, *arguments, variables=SHARED_CODE, limit=SECONDS["large"])
    cases = [json.loads(line) for line in program.stdout.splitlines()]
    assert [case for case in cases if case["differences"]] == []
    assert sum(len(case["where"]) for case in cases) == 20


WEIGHT = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"w": WEIGHT.clone(), "lr": 0.1, "steps": [1, 2]}, []),
        ({"w": -WEIGHT * -1, "lr": 0.1, "steps": [1, 2]}, []),
        ({"w": WEIGHT * torch.tensor([-1.0, 1.0]), "lr": 0.1, "steps": [1, 2]}, ["/w is a tensor"]),  # -0.0
        ({"w": WEIGHT.double(), "lr": 0.1, "steps": [1, 2]}, ["/w is a tensor"]),
        ({"w": WEIGHT, "lr": 0.1 + 1e-17 + 2e-17, "steps": (1, 3)}, ["/lr", "/steps/1 is 3"]),
        ({"w": WEIGHT, "lr": 0.1, "steps": [1, 2, 2]}, ["/steps has 3 entries instead of 2"]),
        ({"lr": 0.1, "steps": [1, 2], "x": 1}, ["/w is missing", "/x is left behind"]),
        ({"w": WEIGHT, "lr": 0.1, "steps": "12"}, ["/steps is 12 instead of [1, 2]"]),
    ],
)
def test_differences(ours: dict[str, Any], said: list[str]) -> None:
    found = list(differences(ours, {"w": WEIGHT, "lr": 0.1, "steps": [1, 2]}))
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def test_differences_ignore_clocks() -> None:
    one, other = (
        {"callbacks": {"UpscaleCallback[at_step=5,width=8]": {"seconds": seconds, "loss_after": 1.0}}}
        for seconds in (1.0, 2.0)
    )
    assert list(differences(one, other)) == []
