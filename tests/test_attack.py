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


KILLED = """
import os, sys
from pathlib import Path
from kill_points import Point, Watch
folder = Path(sys.argv[1])
watch = Watch([folder], Point("main", int(sys.argv[2]), sys.argv[3] == "half") if sys.argv[2:] else None)
watch.start()
(folder / "a").mkdir()
(folder / "a").mkdir(exist_ok=True)              # changes nothing, and does not count
(folder / "a" / "one.txt").write_text("12345678")
with open(folder / "a" / "one.txt", "a") as file:
    file.write("9")
os.replace(folder / "a" / "one.txt", folder / "two.txt")
(folder / "two.txt").unlink()
(folder / "two.txt").unlink(missing_ok=True)
Path(os.devnull).write_text("elsewhere")
print(*(operation.what for operation in watch.operations["main"]))
"""


def test_kill_points(tmp_path: Path) -> None:
    def killed(*arguments: str) -> dict[str, str]:
        folder = tmp_path / "-".join(arguments or ("all",))
        folder.mkdir()
        status = -9 if arguments else 0
        program = run_program("-c", KILLED, folder, *arguments, variables=SHARED_CODE, status=status)
        texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.txt")}
        return texts or {"printed": program.stdout.strip()}

    assert killed() == {"printed": "mkdir open write write replace unlink"}
    assert killed("2", "before") == {"a/one.txt": ""}
    assert killed("2", "half") == {"a/one.txt": "1234"}
    assert killed("4", "before") == {"a/one.txt": "123456789"}
    assert killed("5", "before") == {"two.txt": "123456789"}
