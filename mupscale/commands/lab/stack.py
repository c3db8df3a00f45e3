"""Runs that differ in numbers, as one program: opens them, trains them as a StackedModule, and writes their files.

All state is in the folder of the stack, until its runs have their results: `runs.json`, and the newest checkpoint.
"""

import json
import math
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from mupscale._torch import tree_map
from mupscale.atomic import replacing, write_durably, write_text
from mupscale.callbacks.curves import flops_kind, log_by_cost
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.tensorboard import cut_events, event_files, log_folders, tensorboards
from mupscale.callbacks.trial_metric import TrialMetric, TrialScore, look_up, untrained_loss, window_of
from mupscale.callbacks.upscale import UpscaleCallback, swaps_of
from mupscale.commands.checkpoints import read_run, write_run
from mupscale.commands.cli import CLI, open_cli
from mupscale.commands.config import class_name, dump
from mupscale.commands.configured import first_batches
from mupscale.commands.lab.run import Result, Run, RunProgress, claim_when_free, drop_checkpoints, explained, logged
from mupscale.datamodules.joint import JointData
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError
from mupscale.methods.noise import SignalNoise, save_constants
from mupscale.models._lightning import callbacks_in, log_interval
from mupscale.models.base import init_contexts
from mupscale.models.checkpoint import RUN_KEY
from mupscale.models.sharded import damage_at
from mupscale.models.stacked import StackedModule, TrialGrowth, loss_of, optimizer_and_schedule, trial_checkpoint
from mupscale.stacking.stack import bytes_per_model
from mupscale.widening.records import step_records

SHARE = 0.9
"""The share of the free memory that a stack may use."""

SINGLE = {
    "accumulate_grad_batches": 1, "gradient_clip_algorithm": (None, "norm"), "profiler": None, "plugins": None,
    "detect_anomaly": (None, False), "max_time": None, "reload_dataloaders_every_n_epochs": (None, 0),
    "overfit_batches": (None, 0, 0.0), "inference_mode": (None, True),
}  # fmt: skip
"""Options of the trainer, and the values with which runs can be trained together."""


class NotStackable(UserError):
    """Runs cannot be trained as one program; the message is the reason."""


def train_stack(runs: Sequence[Run], folder: Path, size: int | str) -> dict[Path, Result]:
    """Trains runs as one program, or goes on with that, and returns their results; or raises NotStackable.

    Of `auto`, or of a number, as many runs are taken as there is room for; the others have no result.
    """
    clock, begun = RunProgress(), bool(checkpoints_in(folder))
    handler = signal.getsignal(signal.SIGINT)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, handler)  # which Lightning sets after Ctrl-C
        stack.enter_context(logged(folder))
        members: list[StackedRun] = []
        room = len(runs)
        while len(members) < room:
            run = runs[len(members)]
            with explained(run.name, run.folder):
                cli = stack.enter_context(open_cli(run.config, "fit"))
            if not members and not begun:  # before anything is done to the folder of a run
                reason = why_apart(cli, run)
                if reason is not None:
                    raise NotStackable(reason)
                room = min(room, room_in_stack(cli, size))
            with explained(run.name, run.folder):
                members.append(StackedRun(run, cli, begun=begun))
        write_text(folder / "runs.json", json.dumps({"runs": [str(member.run.folder) for member in members]}))
        return fit_stack(members, folder, clock)


def fit_stack(members: list["StackedRun"], folder: Path, clock: RunProgress) -> dict[Path, Result]:
    files = StackFiles(members, folder, clock)
    first = members[0].cli
    config = first.config["loop"]
    if config["tf32"]:
        torch.set_float32_matmul_precision("high")
    seeds = [int(member.run.config["seed_everything"]) for member in members]
    try:
        module = StackedModule(
            [member.cli.model for member in members],
            seeds,
            [member.growths() for member in members],
            max_norm=first.config["trainer"]["gradient_clip_val"],
            cuda_graph=config["cuda_graph"],
        )
        options = {
            **first.config_init["trainer"],
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False),
            **dict.fromkeys(("gradient_clip_val", "min_steps", "min_epochs")),
            "callbacks": [files, ExactResume()],
            "num_sanity_val_steps": 0,
            "default_root_dir": str(folder),
        }
        newest = next(reversed(checkpoints_in(folder)), None)
        trainer = Trainer(**options)
        data = JointData([member.cli.datamodule for member in members], seeds)
        trainer.fit(module, data, ckpt_path=None if newest is None else str(newest), weights_only=True)
    except UserError as error:
        if files.has_stepped:
            raise
        raise NotStackable(str(error)) from error
    return files.write_results(trainer, module)


def checkpoints_in(folder: Path) -> list[Path]:
    """The undamaged checkpoints of a stack, by their steps."""
    found = {int(path.stem.partition("=")[2]): path for path in folder.glob("step=*.ckpt")}
    return [found[step] for step in sorted(found) if damage_at(found[step]) is None]


class StackedRun:
    """A run of a stack: what its configuration makes, and its own files."""

    def __init__(self, run: Run, cli: CLI, *, begun: bool) -> None:
        self.run, self.cli = run, cli
        self.metric = callbacks_in(cli.trainer, TrialMetric)[0].metric
        self.loggers = tensorboards(cli.trainer)
        self.score = TrialScore()
        claim_when_free(run.folder).release()  # another process, whose driver died, may be about to end it
        self.is_finished = run.result is not None
        if self.is_finished:
            return
        if begun:
            drop_checkpoints(run.folder)  # of a process that was killed while it wrote the results
        else:
            shutil.rmtree(run.folder, ignore_errors=True)
        cli.before_fit()

    def growths(self) -> list[TrialGrowth]:
        names = ("at_step", "width", "layers", "noise", "method", "depth", "lr", "restart_schedule")
        answer = []
        for swap in swaps_of(self.cli.trainer):
            swap.method.state, swap.method.rewarm_steps = swap.state_rule, swap.rewarm_steps
            answer.append(TrialGrowth(**{name: getattr(swap, name) for name in names}))
        return answer

    def begin(self, total: int, batches: int) -> None:
        """Writes what every run begins with."""
        text = f"# lightning.pytorch=={lightning.__version__}\n{dump(self.cli.journal.config)}"
        write_durably(self.run.folder / "config.yaml", text.encode())
        write_run(self.run.folder, steps=total, steps_per_epoch=batches)

    def log(self, values: dict[str, float], step: int, spent: dict[str, float]) -> None:
        """Logs values after a step, against the steps and against what they cost."""
        for logger in self.loggers:
            logger.log_metrics(values, step=step - 1)
        log_by_cost(self.loggers, values, spent)

    def log_lengths(self) -> dict[str, int]:
        for logger in self.loggers:
            logger.experiment.flush()
        return {name: path.stat().st_size for logger in self.loggers for name, path in event_files(logger).items()}


class StackFiles(Callback):
    """Writes of every run of a stack what it would write alone, and drops what diverges.

    Its saved state: the scores, the costs so far, and the lengths of the curves.
    """

    def __init__(self, members: Sequence[StackedRun], folder: Path, clock: RunProgress) -> None:
        self.members, self.folder, self._clock = list(members), folder, clock
        self.spent = {"samples": 0.0, "flops": 0.0}
        self.ends: dict[int, dict[str, float]] = {}
        """What trials had spent when they ended."""
        self.validated_at: int | None = None
        self.has_stepped = False
        self._losses: list[Tensor] = []
        self._logged_at = 0
        self._sums: list[float] = []
        self._flops: dict[Any, float] = {}
        self._seconds, self._since = 0.0, time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {
            "scores": [member.score.state_dict() for member in self.members],
            "spent": dict(self.spent),
            "ends": dict(self.ends),
            "validated_at": self.validated_at,
            "sums": list(self._sums),
            "logged_at": self._logged_at,
            "seconds": self._seconds + time.monotonic() - self._since,
            "lengths": [member.log_lengths() for member in self.members],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for member, own, lengths in zip(self.members, state_dict["scores"], state_dict["lengths"], strict=True):
            member.score.load_state_dict(own)
            for logger in member.loggers if not member.is_finished else ():
                cut_events(logger, lengths)
        self.spent, self.ends = dict(state_dict["spent"]), dict(state_dict["ends"])
        self.validated_at, self._seconds = state_dict["validated_at"], state_dict["seconds"]
        self._sums, self._logged_at = list(state_dict["sums"]), state_dict["logged_at"]

    # --- hooks

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        steps = 0
        for member in self.members:
            member.score.begin(member.metric, trainer)
            steps = member.score.steps
            if not member.is_finished:
                member.begin(steps, int(trainer.num_training_batches))
        self._sums = self._sums or [0.0] * len(self.members)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for index in pl_module.running:
            score = self.members[index].score
            if score.size is None:
                own = batch if pl_module.shares_batches else tree_map(lambda part, at=index: part[at], batch)
                score.reference = untrained_loss(trainer, pl_module.trials[index], own)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_stepped = True
        for index in pl_module.ended.keys() - self.ends.keys():
            self.ends[index] = dict(self.spent)
        first = pl_module.alive[0]
        one = batch if pl_module.shares_batches else tree_map(lambda part: part[0], batch)
        samples = first.batch_size(one)
        self.spent["samples"] += samples
        self.spent["flops"] += self._flops_of(first, samples, one)
        self._losses.append(pl_module.losses)
        step, every = trainer.global_step, log_interval(trainer)
        score = self.members[pl_module.running[0]].score
        is_logged, is_new = bool(every) and step % every == 0, str(first.size) != score.size
        is_checked = step % score.interval == 0 or step == score.steps
        saves, grows = step % self._save_every == 0, pl_module.grows_at(step)
        if is_new or is_checked or is_logged or saves or grows:
            self._take_losses(trainer, pl_module, is_new)
        if is_logged:
            self._log(trainer, pl_module)
        if is_checked:
            self._check(trainer, pl_module)
        if is_checked or grows:
            self._drop_diverged(pl_module)
        if saves and pl_module.running:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if pl_module.running:
            self._save(trainer)  # after the last validation

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.validated_at = trainer.global_step
        for index in pl_module.running:
            self.members[index].log(pl_module.scores[index], trainer.global_step, self.spent)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            raise exception  # Ctrl-C ends the whole sweep; Lightning would turn it into an exit of this run

    def write_results(self, trainer: Trainer, module: Any) -> dict[Path, Result]:
        """Writes results and last checkpoints of the runs that have none; returns all results."""
        whole = torch.load(checkpoints_in(self.folder)[-1], weights_only=True, mmap=True) if module.running else {}
        seconds = (self._seconds + time.monotonic() - self._since) / len(self.members)
        answer = {}
        for index, member in enumerate(self.members):
            folder, score = member.run.folder, member.score
            if not member.is_finished:
                score.diverged = index in module.ended
                if window_of(member.metric) is None and not score.diverged:
                    score.logged = look_up(member.metric, module.scores[index])
                if index in module.running:
                    self._write_checkpoint(member, trial_checkpoint(whole, index))
                member.run.record({"value": score.value, "seconds": seconds, **self._numbers(trainer, module, index)})
            result = member.run.result
            assert result is not None
            answer[folder] = result
        shutil.rmtree(self.folder)
        with suppress(OSError):
            self.folder.parent.rmdir()  # unless others are under way
        return answer

    # --- parts

    @property
    def _save_every(self) -> int:
        return int(self.members[0].run.config["checkpoint"]["every_n_train_steps"] or 10**9)

    def _flops_of(self, trial: Any, samples: int, batch: Any) -> float:
        kind = flops_kind(str(trial.size), samples, batch)
        if kind not in self._flops:
            try:
                self._flops[kind] = trial.training_flops(batch)
            except UserError:
                self._flops[kind] = math.nan
        return self._flops[kind]

    def _take_losses(self, trainer: Trainer, module: Any, is_new: bool) -> None:
        """Reads the losses of the last steps; waits for the device."""
        rows = torch.stack(self._losses).cpu()
        self._losses = []
        for place, index in enumerate(module.running):
            score, losses = self.members[index].score, rows[:, place].contiguous()
            score.add(trainer.global_step - len(rows), losses)
            self._sums[index] += float(losses.sum())
            if is_new:
                score.begin_size(str(module.trials[index].size), float(losses[-1]))
                self._save_noise(module, index)

    def _log(self, trainer: Trainer, module: Any) -> None:
        step = trainer.global_step
        for place, index in enumerate(module.running):
            size = module.trials[index].size
            numbers = {"width": size.width, "layers": size.layers}
            values = {"train/loss": self._sums[index] / (step - self._logged_at)}
            for name, number in numbers.items():
                if number is not None:
                    values[name] = float(number if isinstance(number, int) else max(number))
            self.members[index].log(values, step, self.spent)
            groups = module.stack.optimizers[place].param_groups
            name = f"lr-{type(module.stack.optimizers[place]).__name__}"
            names = [name] if len(groups) == 1 else [f"{name}/pg{number}" for number in range(1, len(groups) + 1)]
            for logger in self.members[index].loggers:
                logger.log_metrics(
                    {each: group["lr"] for each, group in zip(names, groups, strict=True)}, step=step - 1
                )
            self._sums[index] = 0.0
        self._logged_at = step

    def _check(self, trainer: Trainer, module: Any) -> None:
        best = min(self.members[index].score.check() for index in module.running)
        what = f"{len(module.running)} still on, best loss {best:.4g}"
        self._clock.print(f"{len(self.members)} runs", trainer.global_step, self.members[0].score.steps, what)

    def _drop_diverged(self, module: Any) -> None:
        scores = {index: self.members[index].score for index in module.running}
        found = [index for index, score in scores.items() if score.diverged or not math.isfinite(score.recent)]
        for index in found:
            self.ends[index] = dict(self.spent)
        if found:
            module.drop(found)

    def _save(self, trainer: Trainer) -> None:
        path = self.folder / f"step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        for other in self.folder.glob("step=*.ckpt"):
            if other != path:
                other.unlink()

    def _save_noise(self, module: Any, index: int) -> None:
        done = len(module.growths_done[index])
        if done and index in module.constants:
            growth = module.growths[index][done - 1]
            if isinstance(growth.noise, SignalNoise):
                path = self.members[index].run.folder / f"noise-{growth.at_step}.json"
                save_constants(module.constants[index], path, growth.noise.centred)

    def _numbers(self, trainer: Trainer, module: Any, index: int) -> dict[str, Any]:
        """What result.json holds of a run, as `RunJournal` writes it."""
        arguments = module.trials[index].hparams
        spent = self.ends.get(index, self.spent)
        return {
            "steps": module.ended.get(index, trainer.global_step),
            "width": arguments["width"],
            "layers": module.trials[index].size.layers,
            **{name: amount for name, amount in spent.items() if math.isfinite(amount)},
            "validation": module.scores[index],
            "validated_at": self.validated_at if module.scores[index] else None,
            "growths": module.growths_done[index],
        }

    def _write_checkpoint(self, member: StackedRun, checkpoint: dict[str, Any]) -> None:
        folder = member.run.folder
        checkpoint[RUN_KEY] = {
            "id": read_run(folder).get("id"),
            "folder": str(folder.resolve()),
            "config": member.cli.journal.config,
            "log_folders": log_folders(member.cli.trainer),
        }
        (folder / "checkpoints").mkdir(exist_ok=True)
        with replacing(folder / "checkpoints" / "last.ckpt") as stream:
            torch.save(checkpoint, stream)


# --- which runs, and how many


def why_apart(cli: CLI, run: Run) -> str | None:
    """Why a run is not trained together with others, as far as its configuration shows."""
    trainer = cli.config["trainer"]
    for name, plain in SINGLE.items():
        if trainer[name] not in (plain if isinstance(plain, tuple) else (plain,)):
            return f"trainer.{name} is {trainer[name]}"
    if cli.trainer.precision == "16-mixed":
        return "trainer.precision is 16-mixed, whose loss scale is that of one run"
    metric = callbacks_in(cli.trainer, TrialMetric)[0].metric
    if window_of(metric) is None and not metric.startswith("val/"):
        return f"the metric {metric} is logged by each run for itself"
    for callback in run.config["trainer"]["callbacks"] or []:
        if class_name(callback) not in (UpscaleCallback.__name__, TrialMetric.__name__):
            return f"trainer.callbacks has {class_name(callback)}"
    for swap in swaps_of(cli.trainer):
        if swap.method.needs_batches or (swap.width is None and swap.layers is None):
            return "UpscaleCallback learns from batches, or grows by hparams"
    return None


def room_in_stack(cli: CLI, size: int | str) -> int:
    """How many runs like this one to train together: `size`, or for `auto` as many as fit into memory.

    Raises a UserError if `size` of them do not fit, and NotStackable if two do not, or if a stack would be slower.
    """
    module, device = cli.model, cli.trainer.strategy.root_device
    if size == "auto" and device.type == "cuda" and module.stacked_losses() is None:
        raise NotStackable(
            f"torch.vmap of {type(module).__name__} is slower on a GPU; to use it anyway, give --stack N"
        )
    free = SHARE * free_bytes(device)
    final = module.size
    for swap in swaps_of(cli.trainer):
        final = swap.size_after(final)
    try:
        each = bytes_of(cli, final)
    except UserError as error:
        raise NotStackable(str(error)) from error
    most = int(free // each)
    if isinstance(size, str) and most < 2:
        raise NotStackable(
            f"{free / 1e9:.1f} GB of free memory do not hold two networks of {final} ({each / 1e9:.1f} GB each)"
        )
    if isinstance(size, str):
        return most
    if size > most:
        raise UserError(
            f"--stack {size}: networks of {final} take about {each / 1e9:.2g} GB each, and {free / 1e9:.2g} GB "
            f"are free. Give at most {most}"
        )
    return size


def bytes_of(cli: CLI, final: Any) -> int:
    """The memory that one more run of a stack takes at its final size."""
    module = cli.model
    (batch,) = first_batches(module, cli.datamodule, 1)
    with torch.random.fork_rng(devices=[]), init_contexts(cli.trainer):  # in the precision of the run
        module.net = module.network(*final, meta=True)
        try:
            optimizer, _ = optimizer_and_schedule(module)
            return bytes_per_model(
                module,
                type(optimizer),
                loss_of,
                cli.trainer.precision_plugin.convert_input(batch),
                losses=module.stacked_losses(),
                amsgrad=any(group.get("amsgrad", False) for group in optimizer.param_groups),
                grown=any(record.changes_steps for record in step_records(optimizer).values())
                or bool(swaps_of(cli.trainer)),
            )
        finally:
            module.net = None
