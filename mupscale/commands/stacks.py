"""Runs that are trained together as one program, if they differ only in numbers."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from mupscale.callbacks.joint_steps import JointSteps
from mupscale.callbacks.stack_room import room_in_stack
from mupscale.callbacks.stacked_fits import Apart
from mupscale.commands.arguments import Size
from mupscale.commands.config import Config, class_name
from mupscale.commands.pattern import Pattern, Patterns
from mupscale.commands.runs import Progress, Result, Run, fitted, free_memory, known_result, make
from mupscale.errors import UserError

NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")
"""Arguments of optimizers that may differ within a stack."""

OF_THE_SWAP = ("at_step", "width", "layers", "depth")
"""Arguments of UpscaleCallback that runs of a stack have in common; the swap itself is each one's own."""

MOST_APART = 100
"""How many runs that do not fit into the next stack are held back while others are looked for."""


@dataclass(frozen=True)
class Key:
    """Which unit it is: the trial of a sweep by its number, the run of a role by its seed, or a timing."""

    group: str
    """The sweep or the role. Runs of one group may be alike."""
    kind: Literal["trial", "seed", "timing"]
    number: int
    runs: int = 1
    """How many runs it has."""

    def __str__(self) -> str:
        return f"{self.group}/{self.kind} {self.number}"


class Work(Protocol):
    """All units of a sweep or of an experiment. Its folder shows which are finished, and which are being made."""

    most_together: int | None
    """How many units should be under way at a time, because the next ones depend on their results; None: all."""

    @property
    def finished(self) -> bool: ...

    def waiting(self) -> list[Key]:
        """The units that can be made now, and that no process makes, in the order in which they are taken."""

    def take(self, key: Key | None = None) -> "Unit | None":
        """A unit for this process alone, as long as it lives: that of a key, or the first that waits.

        None if other processes have all of them.
        """

    def progress(self) -> str:
        """How much is left, in words."""


@dataclass
class Unit:
    """Runs that count as one, such as the seeds of a trial. If one diverges, the unit has diverged and ends there.

    `finish` takes their results, and returns a summary in words; `give_back` leaves them to other processes.
    """

    name: str
    runs: list[Run]
    finish: Callable[[list[Result]], str]
    give_back: Callable[[], None]
    results: dict[int, Result] = field(default_factory=dict)

    @property
    def ending(self) -> list[Result] | None:
        """The results up to the first that diverged; None if one of them is missing."""
        answer = []
        for index in range(len(self.runs)):
            if index not in self.results:
                return None
            answer.append(self.results[index])
            if math.isinf(answer[-1][0]):
                break
        return answer


class Workshop:
    """Takes units of work and runs them, similar runs together.

    If a unit fails, all units taken are given back.
    """

    def __init__(self, take: Callable[[], Unit | None], size: Size, tell: Callable[[str], None]) -> None:
        """
        Args:
            take: The next unit; None if there is none to take now.
            size: How many runs are made together.
            tell: Takes a line about what is made apart, and why.
        """
        self._take, self._size, self._tell = take, size, tell
        self._units: list[Unit] = []
        self._runs: deque[tuple[Unit, int]] = deque()
        self._patterns = Patterns()

    @property
    def stacks(self) -> bool:
        """Whether runs are made together; not after runs that should have been could not be."""
        return self._size != "off"

    def carry_out(self) -> Iterator[tuple[Unit, str]]:
        """Works until there is nothing to take; yields each unit that is finished, and its end in words."""
        try:
            while self._runs or self._pull():
                if self._runs and self._size == "off":
                    self._make_apart()
                elif self._runs:
                    self._make_together()
                for unit in list(self._units):
                    if unit.ending is not None:
                        self._units.remove(unit)
                        yield unit, unit.finish(unit.ending)
        except BaseException:
            for unit in self._units:
                unit.give_back()
            raise

    def _pull(self) -> bool:
        """Takes a unit and notes its runs that are not finished."""
        unit = self._take()
        if unit is None:
            return False
        self._units.append(unit)
        for index, run in enumerate(unit.runs):
            result = known_result(run)
            if result is None:
                self._runs.append((unit, index))
            else:
                unit.results[index] = result
        return True

    def _make_apart(self) -> None:
        unit, index = self._runs.popleft()
        if unit.ending is None:
            run = unit.runs[index]
            with self._patterns.like(run.config) as pattern:
                unit.results[index] = make(run, pattern)

    def _make_together(self) -> None:
        unit, index = self._runs[0]
        with self._patterns.like(unit.runs[index].config) as pattern:
            self._make_stack(pattern)

    def _make_stack(self, pattern: Pattern) -> None:
        """Makes the first run, and all that are alike, together. `pattern` is that of their configurations."""
        mates: list[tuple[Unit, int]] = []
        others: deque[tuple[Unit, int]] = deque()

        def jobs() -> Iterator[Callable[[], Result]]:
            kind = likeness(self._runs[0][0].runs[self._runs[0][1]].config)
            while len(others) < MOST_APART and (self._runs or self._pull()):
                while self._runs:
                    unit, index = self._runs.popleft()
                    if likeness(unit.runs[index].config) == kind:
                        mates.append((unit, index))
                        yield partial(fitted, unit.runs[index], lambda: len(mates), pattern)
                    else:
                        others.append((unit, index))

        clock = Progress()
        joint = JointSteps(
            jobs(),
            most=lambda awaited: room_in_stack(awaited, self._size),
            tell=self._tell,
            progress=lambda step, steps, count: clock.print(f"{len(mates)} runs", step, steps, f"{count} still on"),
        )
        try:
            joint.run()
        except Apart as reason:
            if self._size != "auto":
                raise UserError(
                    f"--stack {self._size}: {reason}; --stack off trains runs one after another"
                ) from reason
            self._tell(f"runs are trained one after another: {reason}")
            self._size = "off"
            self._runs.extendleft(reversed(mates))
        else:
            for (unit, index), result in zip(mates, joint.results, strict=True):
                unit.results[index] = result
        finally:
            self._runs.extend(others)
            free_memory()


class Share:
    """The part of one of several processes that begin the same work together. It leaves the others theirs."""

    def __init__(self, index: int, workers: int) -> None:
        """
        Args:
            index: Which of the processes it is, from 0.
            workers: How many there are.
        """
        self.index, self.workers = index, workers
        self._apart: set[str] = set()
        """Groups whose runs cannot be stacked."""

    def carry_out(
        self, work: Work, under_way: int, size: Size, tell: Callable[[str], None]
    ) -> Iterator[tuple[Unit, str]]:
        """Makes one batch of the units that are waiting; yields each, and its end in words.

        `under_way` is the number of units that processes are making: those of a share that another has taken.
        """
        keys = work.waiting()
        if not keys:
            return
        most = batch_size(size, len(keys) + under_way, self.workers, keys[0].runs)
        begin = self.index % math.ceil(len(keys) / most) * most
        group = keys[begin].group
        batch = Batch(work, keys[begin : begin + most], "off" if group in self._apart else size, tell)
        yield from batch.carry_out()
        if not batch.stacks:
            self._apart.add(group)


def shared_out(keys: list[Key], workers: int, size: Size, most_together: int | None = None) -> list[list[Key]]:
    """Divides units into batches of one group each. `most_together` is that of the work."""
    answer: list[list[Key]] = []
    for key in keys:
        most = batch_size(size, min(len(keys), most_together or len(keys)), workers, key.runs)
        mates = next((batch for batch in answer if batch[0].group == key.group and len(batch) < most), None)
        if mates is None:
            answer.append([key])
        else:
            mates.append(key)
    return answer


def batch_size(size: Size, units: int, workers: int, runs: int) -> int:
    """How many units of so many runs each a worker takes; for `auto`, so many that all workers have some."""
    if size == "off":
        return 1
    return math.ceil(units / workers) if size == "auto" else max(1, size // runs)


class Batch:
    """One stack of some units, or the first of them if they do not stack. What is not taken waits for any process."""

    def __init__(self, work: Work, keys: list[Key], size: Size, tell: Callable[[str], None]) -> None:
        self._work, self._left, self._tell = work, list(keys), tell
        self._workshop = Workshop(self._take, size, tell)
        self._has_ended = False

    @property
    def stacks(self) -> bool:
        """Whether the units were made together, if there were several."""
        return self._workshop.stacks

    def carry_out(self) -> Iterator[tuple[Unit, str]]:
        """Yields each unit that is finished, and its end in words."""
        for unit, end in self._workshop.carry_out():
            self._has_ended = True
            yield unit, end

    def _take(self) -> Unit | None:
        while self._left and not self._has_ended:
            unit = self._work.take(self._left.pop(0))
            if unit is not None:
                self._tell(f"{unit.name}: begins")
                return unit
        return None


def likeness(config: Config) -> str:
    """What runs of one stack have in common: a configuration without the numbers that may differ."""
    answer = deepcopy(config)
    answer["seed_everything"] = None
    answer["trainer"]["logger"] = None
    model, data = answer["model"]["init_args"], answer["data"].get("init_args") or {}
    model["init_from"] = data["seed"] = None
    numbers = (model.get("optimizer") or {}).get("init_args") or {}
    for name in NUMBERS:
        if name in numbers:
            numbers[name] = bool(numbers[name]) if name == "momentum" else None
    for callback in answer["trainer"]["callbacks"] or []:
        if class_name(callback) == "UpscaleCallback":
            arguments = callback["init_args"]
            callback["init_args"] = {name: arguments.get(name) for name in OF_THE_SWAP}
    return json.dumps(answer, sort_keys=True, default=str)
