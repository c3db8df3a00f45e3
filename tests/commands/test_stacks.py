"""Units of work that processes share out among themselves."""

from collections.abc import Iterator
from typing import Any

import pytest

from mupscale.commands.cluster import task_name
from mupscale.commands.stacks import Key, Share, Unit, Workshop, shared_out

TRIALS = [Key("sweep_2", "trial", number) for number in range(4)]


def test_units_are_shared_out() -> None:
    keys = [Key("base", "seed", 0), Key("base", "seed", 1), *TRIALS, Key("scratch", "seed", 0)]

    def names(size: Any, keys: list[Key], most_together: int | None = None) -> list[str]:
        return [task_name(batch) for batch in shared_out(keys, 2, size, most_together)]

    assert names("auto", keys) == ["base/seeds 0, 1", "sweep_2/trials 0, 1, 2, 3", "scratch/seed 0"]
    assert names("auto", TRIALS) == ["sweep_2/trials 0, 1", "sweep_2/trials 2, 3"]
    assert names("auto", TRIALS, 2) == [f"sweep_2/trial {number}" for number in range(4)]
    assert names("off", keys[:3]) == ["base/seed 0", "base/seed 1", "sweep_2/trial 0"]
    assert names(3, keys) == ["base/seeds 0, 1", "sweep_2/trials 0, 1, 2", "sweep_2/trial 3", "scratch/seed 0"]
    seeds = [Key("sweep_2", "trial", number, runs=2) for number in range(3)]
    assert names(4, seeds) == ["sweep_2/trials 0, 1", "sweep_2/trial 2"]
    assert names(1, seeds) == [f"sweep_2/trial {number}" for number in range(3)]


class Trials:
    """Work whose units are only taken."""

    most_together = None

    def __init__(self) -> None:
        self.left = list(TRIALS)

    @property
    def finished(self) -> bool:
        return not self.left

    def waiting(self) -> list[Key]:
        return list(self.left)

    def take(self, key: Key | None = None) -> Unit | None:
        if key not in self.left:
            return None
        self.left.remove(key)
        return Unit(str(key.number), [], lambda results: "", lambda: None)

    def progress(self) -> str:
        return ""


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Workshops make all units that they can take together. Lists the sizes of stacks they were asked for."""
    sizes = []

    def carry_out(self: Workshop) -> Iterator[tuple[Unit, str]]:
        sizes.append(str(self._size))
        units = []
        while (self.stacks or not units) and (unit := self._take()) is not None:
            units.append(unit)
        yield from ((unit, "") for unit in units)

    monkeypatch.setattr(Workshop, "carry_out", carry_out)
    return sizes


@pytest.mark.usefixtures("stacked")
def test_a_process_leaves_others_their_share() -> None:
    work, shares = Trials(), [Share(index, 2) for index in range(2)]

    def made(share: Share, under_way: int = 0) -> list[str]:
        return [unit.name for unit, _ in share.carry_out(work, under_way, "auto", lambda line: None)]

    assert made(shares[1]) == ["2", "3"]
    assert made(shares[0], under_way=2) == ["0", "1"]  # not half of what is left
    assert made(shares[0]) == []


def test_what_does_not_stack_is_taken_one_by_one(stacked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    work, share, told = Trials(), Share(0, 2), list[str]()
    monkeypatch.setattr(Workshop, "stacks", False)
    for number in range(4):
        assert [unit.name for unit, _ in share.carry_out(work, 0, "auto", told.append)] == [str(number)]
    assert stacked == ["auto", "off", "off", "off"]  # it is tried once
    assert told == [f"{number}: begins" for number in range(4)]
