"""Jobs: which trials are made together, what goes on, and what is made one by one."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from experiment_files import finish

from mupscale.commands.lab import jobs
from mupscale.commands.lab.execution import part_of
from mupscale.commands.lab.jobs import STACKS, Job, jobs_of
from mupscale.commands.lab.run import Result, Run, Trial, results_in
from mupscale.commands.lab.stack import NotStackable
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class NamedRun(Run):
    """One whose kind is the first part of its name."""

    @property
    def kind(self) -> str:
        return self.name.split()[0]


def trials(*names: str, seeds: int = 1) -> list[Trial]:
    """Their runs are called `a 0 1` and have the folder s/trials/a0-1."""
    return [
        Trial(name, [NamedRun({}, folder_of(f"{name} {seed}"), f"{name} {seed}") for seed in range(seeds)])
        for name in names
    ]


def folder_of(run: str) -> Path:
    kind, number, seed = run.split()
    return Path(f"s/trials/{kind}{number}-{seed}")


def names_in(found: list[Job]) -> list[str]:
    return [f"{job.size}: {', '.join(run.name for trial in job.trials for run in trial.runs)}" for job in found]


FOUR = ("a 0", "a 1", "b 0", "b 1")


@pytest.mark.parametrize(
    ("size", "slots", "seeds", "wanted"),
    [
        ("auto", 1, 1, ["auto: a 0 0, a 1 0", "auto: b 0 0, b 1 0"]),
        ("auto", 4, 1, ["auto: a 0 0", "auto: a 1 0", "auto: b 0 0", "auto: b 1 0"]),
        ("off", 1, 1, ["off: a 0 0", "off: a 1 0", "off: b 0 0", "off: b 1 0"]),
        (1, 1, 1, ["1: a 0 0", "1: a 1 0", "1: b 0 0", "1: b 1 0"]),
        (4, 1, 2, ["4: a 0 0, a 0 1, a 1 0, a 1 1", "4: b 0 0, b 0 1, b 1 0, b 1 1"]),
        (1, 1, 2, ["1: a 0 0, a 0 1", "1: a 1 0, a 1 1", "1: b 0 0, b 0 1", "1: b 1 0, b 1 1"]),
    ],
)
def test_similar_trials_are_made_together(size: Any, slots: int, seeds: int, wanted: list[str]) -> None:
    assert names_in(jobs_of(trials(*FOUR, seeds=seeds), size, slots, {})) == wanted


def test_what_is_finished_is_not_made_again_and_divergence_ends_a_trial() -> None:
    for run, value in (("a 0 0", 2.0), ("a 1 0", math.inf), ("a 2 1", 3.0)):
        finish(folder_of(run), value)
    known: dict[Path, Result] = {}
    three = trials("a 0", "a 1", "a 2", seeds=2)
    assert names_in(jobs_of(three, "auto", 1, known)) == ["auto: a 0 1, a 2 0"]
    assert results_in(three[1].folders, known) == [(math.inf, 1.0)]
    known |= {folder_of("a 2 0"): (5.0, 1.0)}
    assert results_in(three[2].folders, known) == [(5.0, 1.0), (3.0, 1.0)]
    assert results_in(three[0].folders, known) is None


def begin_stack(*runs: str) -> None:
    folder = Path("s", STACKS, folder_of(runs[0]).name)
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps({"runs": [str(folder_of(run)) for run in runs]}))


class Trained(list[str]):
    """The calls of `train_stack` and `Run.make`, which make no run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 9, reason: str | None = None) -> None:
        super().__init__()
        self.room, self.reason = room, reason
        monkeypatch.setattr(jobs, "train_stack", self.train_stack)
        monkeypatch.setattr(jobs, "checkpoints_in", lambda folder: [folder] if (folder / "runs.json").exists() else [])
        monkeypatch.setattr(Run, "make", lambda run: self.make(run))

    def train_stack(self, runs: list[Run], folder: Path, size: Any) -> dict[Path, Result]:
        self.append(f"{folder}: {', '.join(run.name for run in runs)}")
        if self.reason is not None:
            folder.mkdir(parents=True)
            raise NotStackable(self.reason)
        (folder / "runs.json").unlink(missing_ok=True)
        return {run.folder: (1.0, 1.0) for run in runs[: self.room]}

    def make(self, run: Run) -> Result:
        self.append(run.name)
        return (math.inf if run.name == "a 0 0" else 1.0), 1.0


def test_what_does_not_stack_is_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, two = Trained(monkeypatch, reason="it has an LSTM"), trials("a 0", "a 1", seeds=2)
    results = Job(two, "auto").carry_out()
    assert {path.name: value for path, (value, _) in results.items()} == {"a0-0": math.inf, "a1-0": 1.0, "a1-1": 1.0}
    assert "runs are trained one after another: it has an LSTM\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="--stack 2: it has an LSTM; --stack off trains runs one after another"):
        Job(two, 2).carry_out()
    assert made[1:4] == ["a 0 0", "a 1 0", "a 1 1"]
    assert not Path("s/stacks").exists()


def test_a_run_that_was_begun_alone_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing opens it as part of a stack, which would begin it anew."""
    made = Trained(monkeypatch)
    found = {folder_of("b 1 0"): Path("step=20.ckpt")}
    monkeypatch.setattr(Run, "newest_checkpoint", lambda run: (found.get(run.folder), {}))
    for size in ("auto", 2):
        assert len(Job(trials("b 0", "b 1"), size).carry_out()) == 2  # type: ignore[arg-type]
    assert made == ["b 0 0", "b 1 0"] * 2


def test_what_has_no_room_in_a_stack_is_made_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Trained(monkeypatch, room=3)
    assert len(Job(trials("a 0", "a 1", seeds=2), "auto").carry_out()) == 4
    assert made == ["s/stacks/a0-0: a 0 0, a 0 1, a 1 0, a 1 1", "s/stacks/a1-1: a 1 1"]


@pytest.mark.parametrize("finished", ["a 0 0", None])
def test_a_stack_that_has_begun_goes_on_as_it_was(finished: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if some of its results are written; the other trials make new stacks. A job that is done again likewise."""
    made = Trained(monkeypatch)
    if finished:
        finish(folder_of(finished), 2.0)
    three = trials("a 0", "a 1", "a 2", seeds=2)
    begin_stack("a 0 0", "a 0 1", "a 1 0")
    found = jobs_of(three, "auto", 1, {})
    assert names_in(found) == ["auto: a 0 0, a 0 1, a 1 0", "auto: a 1 1, a 2 0, a 2 1"]
    assert names_in(jobs_of(three[1:], "auto", 1, {})) == ["auto: a 1 0, a 1 1, a 2 0, a 2 1"], "not all are its own"
    assert len(Job(three, "auto").carry_out()) == 6
    assert made == ["s/stacks/a0-0: a 0 0, a 0 1, a 1 0", "s/stacks/a1-1: a 1 1, a 2 0, a 2 1"]


def test_parts_in_words() -> None:
    assert [part_of(SimpleNamespace(part=text)) for text in (None, "11/12")] == [(0, 1), (11, 12)]  # type: ignore[arg-type]
    for text in ("4/4", "1", "-1/2", "a/b", "0/0"):
        with pytest.raises(UserError, match=f"--part {text}: give I/N, the number of this part, from 0"):
            part_of(SimpleNamespace(part=text))  # type: ignore[arg-type]
