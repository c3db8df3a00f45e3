"""The cost of a training step at each width: counted FLOPs and measured seconds."""

import json
import math
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from mupscale.atomic import write_text
from mupscale.commands.config import Config, read_json
from mupscale.commands.configured import first_batches
from mupscale.commands.lab.file import Description, of_width
from mupscale.commands.lab.run import Part, Result, Run, Trial, drop_checkpoints, free_memory, open_run, with_run
from mupscale.commands.widths import Growth, Size, folder_name, model_size
from mupscale.data_files import interpreting
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_in

COSTS = "costs.json"

BLOCKS = 5
"""Into how many stretches the timed steps are divided: their median counts, so that a short disturbance does not."""


@dataclass(frozen=True)
class Costs:
    """The content of costs.json. Widths are named as folders are."""

    steps: int
    """Of the budget: a run of the wide width has as many."""
    steps_per_epoch: int
    batches_per_step: int
    flops: dict[str, float]
    """Of a step."""
    seconds: dict[str, float]
    """Of a step, once everything is compiled; empty if there is no budget of seconds."""
    start_seconds: dict[str, float]
    """Of the start of a run and its first steps, in which it is compiled. The budget is not charged with them."""
    device: str
    timed_steps: int
    batches_per_epoch: int

    def batches_of(self, steps: int) -> int:
        """The batches of a run of so many steps: the last step of an epoch takes those that are left."""
        epochs, more = divmod(steps, self.steps_per_epoch)
        return epochs * self.batches_per_epoch + more * self.batches_per_step

    def per_step(self, budget: str, width: Size) -> float:
        return (self.flops if budget == "flops" else self.seconds)[folder_name(width)]

    def steps_of(self, budget: str, width: Size, wide: Size) -> int:
        """The steps of a fixed width that cost as much as `steps` steps of the wide one."""
        return max(1, round(self.steps * self.per_step(budget, wide) / self.per_step(budget, width)))

    def steps_of_growth(self, budget: str, growth: Growth, share: float) -> tuple[int, int]:
        """The step at which a run grows that has then spent a share of the budget, and the steps of the whole run."""
        narrow = self.per_step(budget, growth.before) / self.per_step(budget, growth.after)
        before = max(1, round(share * self.steps / narrow))
        after = max(1, round((1 - share) * self.steps))
        return before, before + after


class CostPart(Part):
    """Measures the cost of steps once. It is a stage of its own, because timing needs the device alone."""

    def __init__(self, out: Path, description: Description) -> None:
        super().__init__("costs", out / "costs")
        self.out, self.description = out, description

    @property
    def costs(self) -> Costs:
        path = self.out / COSTS
        with interpreting(f"{path} is damaged; delete it and run the same command again"):
            return Costs(**read_json(path))

    @property
    def finished(self) -> bool:
        return (self.out / COSTS).exists()

    def trials(self) -> list[Trial]:
        run = CostRun({}, self.folder, self.name, description=self.description)
        return [Trial(self.name, [run], lambda results: f"a budget of {self.costs.steps:,} steps")]


@dataclass(frozen=True)
class CostRun(Run):
    """The measurement of costs, as a run of `folder`; costs.json is beside it."""

    description: Description | None = None

    @property
    def kind(self) -> None:
        return None  # a stack would be timed otherwise

    def written_result(self) -> Result | None:
        return (0.0, 0.0) if (self.folder.parent / COSTS).exists() else None

    def make(self) -> Result:
        assert self.description is not None
        start = time.monotonic()
        costs = measured(self.description, self.folder)
        write_text(self.folder.parent / COSTS, json.dumps(asdict(costs), indent=1) + "\n")
        return 0.0, time.monotonic() - start


def measured(description: Description, folder: Path) -> Costs:
    """The costs of all widths of an experiment. Timing runs have their logs in `folder`."""
    keys = description.midrun
    assert keys is not None
    small, target = description.growths
    timed = [target.after, keys.middle, target.before]
    counted = {folder_name(width): width for width in (*timed, small.after, keys.small_middle, small.before)}
    _, cli = description.made(of_width(target.after))
    (batch,) = first_batches(cli.model, cli.datamodule, 1)
    trainer = description.common["trainer"]
    batches_per_step = trainer["accumulate_grad_batches"]
    batches = batches_of(cli.datamodule, trainer["limit_train_batches"])
    steps_per_epoch = math.ceil(batches / batches_per_step)
    flops = {}
    for name, width in counted.items():
        cli.model.rebuild(**model_size(width), meta=True)
        try:
            flops[name] = batches / steps_per_epoch * cli.model.training_flops(batch)
        except UserError as error:
            raise UserError(f"model: protocol midrun compares runs at equal FLOPs, but {error}") from error
    clocks: dict[str, StepClock] = {}
    for width in timed if "seconds" in keys.budgets else []:
        name = folder_name(width)
        clocks[name] = timed_run(description.config(of_width(width)), folder / f"width={name}", keys.timing_steps)
    return Costs(
        steps=budget_steps(trainer, steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        batches_per_step=batches_per_step,
        flops=flops,
        seconds={name: clock.seconds for name, clock in clocks.items()},
        start_seconds={name: clock.start_seconds for name, clock in clocks.items()},
        device=next((clock.device for clock in clocks.values()), ""),
        timed_steps=keys.timing_steps if clocks else 0,
        batches_per_epoch=batches,
    )


def batches_of(data: LightningDataModule, limit: int | float | None) -> int:
    """The batches of an epoch, as many as `trainer.limit_train_batches` leaves."""
    try:
        batches = len(data.train_dataloader())
    except TypeError as error:
        raise UserError("data: protocol midrun needs a train_dataloader that has a length") from error
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def budget_steps(trainer: Config, steps_per_epoch: int) -> int:
    lengths = [(trainer["max_steps"], 1), (trainer["max_epochs"], steps_per_epoch)]
    return min(length * steps for length, steps in lengths if length not in (None, -1))


class StepClock(Callback):
    """Measures the time of a training step: the median over stretches of a run, after its first steps."""

    def __init__(self, warm_up: int, steps: int) -> None:
        """`warm_up` are the first of the `steps` of the run, which are not timed."""
        self.warm_up, self.steps = warm_up, steps
        self.device = ""
        self._begin = time.perf_counter()
        self._marks: list[tuple[int, float]] = []

    @property
    def seconds(self) -> float:
        """Of a step."""
        stretches = zip(self._marks, self._marks[1:], strict=False)
        return statistics.median((end - begin) / (to - since) for (since, begin), (to, end) in stretches)

    @property
    def start_seconds(self) -> float:
        """From the making of this callback to the end of the steps that are not timed, less these at their speed."""
        return max(0.0, self._marks[0][1] - self._begin - self.warm_up * self.seconds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, timed = trainer.global_step, self.steps - self.warm_up
        if self._marks and self._marks[-1][0] == step:
            return  # in the middle of an accumulation of batches
        if step in [self.warm_up + index * timed // BLOCKS for index in range(BLOCKS + 1)]:
            self.device = "cpu"
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
                self.device = torch.cuda.get_device_name(pl_module.device)
            self._marks.append((step, time.perf_counter()))


def timed_run(config: Config, folder: Path, steps: int) -> StepClock:
    """The clock of a run that nothing else is trained beside."""
    warm_up = max(4, steps // 5)  # beyond the steps after which a CUDA graph is captured
    clock = {"class_path": f"{StepClock.__module__}.StepClock", "init_args": {"warm_up": warm_up, "steps": steps}}
    whole = with_run(config, "last_100%", 0, folder)
    whole["trainer"]["callbacks"].append(clock)
    whole["trainer"] |= {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    whole["checkpoint"]["every_n_train_steps"] = steps + 1
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed: a time must be measured in one go
    torch.compiler.reset()
    with open_run(Run(whole, folder, "costs")) as cli:
        cli.run()
    answer = callbacks_in(cli.trainer, StepClock)[0]
    drop_checkpoints(folder)
    free_memory()
    return answer
