"""The driver, with an executor that only notes its jobs: which trials are made together, and what follows a death."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from experiments import finish

from mupscale.commands.lab.driver import Driver, Ending, Job
from mupscale.commands.lab.execution import read_part
from mupscale.commands.lab.run import Result, Run, Trial
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@dataclass(frozen=True)
class NamedRun(Run):
    """One whose kind is the first part of its name; a run of kind `alone` never stacks."""

    @property
    def kind(self) -> str | None:
        kind = self.name.split()[0]
        return None if kind == "alone" else kind


class Noted:
    """Makes jobs at once, with the value 1 unless `values` has another one. `events` are what ends the next jobs."""

    has_room = True

    def __init__(self, slots: int = 1, events: list[dict[str, Any]] | None = None, **values: float) -> None:
        self.slots, self.values, self.events = slots, values, events or []
        self.jobs: list[str] = []
        self._submitted: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(f"{job.size}: {', '.join(run.name for trial in job.trials for run in trial.runs)}")
        self._submitted.append(job)

    def wait(self) -> list[Ending]:
        answer = []
        for job in self._submitted:
            event = dict(self.events.pop(0)) if self.events else {}
            room = event.pop("room", math.inf)
            runs = [run for trial in job.trials for run in trial.runs]
            made = {run.folder: (self.values.get(run.name.replace(" ", "_"), 1.0), 1.0) for run in runs}
            answer.append(Ending(job, {} if event else dict(list(made.items())[: int(min(room, 99))]), **event))
        self._submitted = []
        return answer


def trials(*names: str, seeds: int = 1, ends: list[Any] | None = None) -> dict[int, Trial]:
    answer = {}
    for number, name in enumerate(names):
        runs = [NamedRun({}, Path(f"{name}-{seed}"), f"{name} {seed}") for seed in range(seeds)]

        def finish(results: list[Result], name: str = name) -> str:
            if ends is not None:
                ends.append((name, [value for value, _ in results]))
            return "end"

        answer[number] = Trial(name, runs, finish)
    return answer


FOUR = ("a 0", "a 1", "b 0", "b 1")


@pytest.mark.parametrize(
    ("size", "slots", "jobs"),
    [
        ("auto", 1, ["auto: a 0 0, a 1 0", "auto: b 0 0, b 1 0"]),
        ("auto", 4, ["auto: a 0 0", "auto: a 1 0", "auto: b 0 0", "auto: b 1 0"]),
        ("off", 1, ["off: a 0 0", "off: a 1 0", "off: b 0 0", "off: b 1 0"]),
        (1, 1, ["1: a 0 0", "1: a 1 0", "1: b 0 0", "1: b 1 0"]),
    ],
)
def test_similar_trials_are_made_together(size: Any, slots: int, jobs: list[str]) -> None:
    executor, ends = Noted(slots), list[Any]()
    Driver(executor, size).make(trials(*FOUR, ends=ends), lambda: "")
    assert executor.jobs == jobs
    assert ends == [(name, [1.0]) for name in FOUR]


def test_a_stack_counts_runs_and_holds_whole_trials() -> None:
    for size, jobs in ((4, ["4: a 0 0, a 0 1, a 1 0, a 1 1", "4: a 2 0, a 2 1"]), (1, ["1: a 0 0, a 0 1"])):
        executor = Noted()
        Driver(executor, size).make(trials("a 0", "a 1", "a 2", seeds=2), lambda: "")
        assert executor.jobs[: len(jobs)] == jobs


def test_what_is_finished_is_not_made_again_and_divergence_ends_a_trial() -> None:
    for folder, value in (("a 0-0", 2.0), ("a 1-0", math.inf), ("a 2-1", 3.0)):
        finish(Path(folder), value)
    executor, ends = Noted(a_2_0=5.0), list[Any]()
    driver = Driver(executor, "auto")
    whole = trials("a 0", "a 1", "a 2", seeds=2, ends=ends)
    driver.make(whole, lambda: "")
    assert executor.jobs == ["auto: a 0 1, a 2 0"]
    assert ends == [("a 0", [2.0, 1.0]), ("a 2", [5.0, 3.0])]
    assert driver.have_finished(whole)
    diverging = Noted(b_0_0=math.inf)
    Driver(diverging, "auto").make(trials("b 0", seeds=3, ends=ends), lambda: "")
    assert ends[-1] == ("b 0", [math.inf])


def test_what_does_not_stack_is_made_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    executor, ends = Noted(events=[{"apart": "it has an LSTM"}]), list[Any]()
    driver = Driver(executor, "auto")
    driver.make(trials("a 0", "a 1", "alone 0", ends=ends), lambda: "left")
    assert executor.jobs == ["auto: a 0 0, a 1 0", "off: alone 0 0", "off: a 0 0", "off: a 1 0"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs are trained one after another: it has an LSTM"
    assert lines[1:] == ["alone 0: end; left", "a 0: end; left", "a 1: end; left"]
    driver.make(trials("a 7", "a 8"), lambda: "")  # a later stage: it is not tried again
    assert executor.jobs[4:] == ["off: a 7 0", "off: a 8 0"]
    with pytest.raises(UserError, match="--stack 2: it has an LSTM; --stack off trains runs one after another"):
        Driver(Noted(events=[{"apart": "it has an LSTM"}]), 2).make(trials("a 0"), lambda: "")


def test_what_has_no_room_in_a_stack_is_made_in_the_next() -> None:
    executor, ends = Noted(events=[{"room": 3}]), list[Any]()
    Driver(executor, "auto").make(trials("a 0", "a 1", seeds=2, ends=ends), lambda: "")
    assert executor.jobs == ["auto: a 0 0, a 0 1, a 1 0, a 1 1", "auto: a 1 1"]
    assert ends == [("a 0", [1.0, 1.0]), ("a 1", [1.0, 1.0])]


def test_a_job_whose_process_dies_is_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    death = {"death": "its process died (signal 9)"}
    executor, ends = Noted(events=[death, death]), list[Any]()
    Driver(executor, "auto").make(trials("a 0", "a 1", ends=ends), lambda: "")
    assert executor.jobs == ["auto: a 0 0, a 1 0"] * 3
    assert len(ends) == 2
    assert capsys.readouterr().err == "a 0 and 1 more: its process died (signal 9); the runs continue\n" * 2
    with pytest.raises(UserError, match=r"^a 0: its process died \(signal 9\), 3 times. If the memory is too small, "):
        Driver(Noted(events=[death] * 3), "off").make(trials("a 0"), lambda: "")
    gone = {"death": "its node died", "is_own_fault": False}
    executor = Noted(events=[gone] * 5)
    Driver(executor, "off").make(trials("a 0"), lambda: "")
    assert len(executor.jobs) == 6
    assert "a 0: its node died; the runs continue" in capsys.readouterr().err


def test_parts_share_a_stage_by_the_numbers_of_its_trials() -> None:
    made = []
    for index in range(3):
        executor = Noted()
        driver = Driver(executor, "off", index, 3)
        whole = trials(*(f"a {number}" for number in range(5)))
        del whole[3]  # which was finished when this part began
        driver.make(whole, lambda: "")
        assert not driver.have_finished(whole)
        made.append(executor.jobs)
    assert made == [["off: a 0 0"], ["off: a 1 0", "off: a 4 0"], ["off: a 2 0"]]


def test_a_part_waits_for_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver(Noted(), "off", 0, 2)
    whole = trials("a 0", "a 1")
    driver.make(whole, lambda: "")
    seconds = []

    def sleep(time: float) -> None:
        seconds.append(time)
        if len(seconds) == 3:
            finish(Path("a 1-0"), 1.0)
        assert len(seconds) <= 3, "it waits for ever"

    monkeypatch.setattr("time.sleep", sleep)
    driver.wait_for_other_parts(whole)
    assert seconds == [1.0] * 3
    assert capsys.readouterr().out.count("waiting for the other parts\n") == 1


def test_parts_in_words() -> None:
    assert (read_part("0/4"), read_part("11/12")) == ((0, 4), (11, 12))
    for text in ("4/4", "1", "-1/2", "a/b", "0/0"):
        with pytest.raises(UserError, match=f"--part {text}: give I/N, the number of this part, from 0"):
            read_part(text)
