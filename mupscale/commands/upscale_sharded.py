"""A sharded checkpoint widened into another one, tensor by tensor, without ever holding the model."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.atomic import whole_folder
from mupscale.commands.saved_model import (
    continue_groups,
    continue_schedules,
    fresh_optimizer,
    saved_optimizer,
    set_size_,
)
from mupscale.errors import UserError
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import UpscaleReport
from mupscale.methods.noise import Constants, Noise, add_noise_
from mupscale.models.base import Growable
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    Size,
    optimizer_names,
    refuse_malformed_optimizers,
    restore_mixed_widths,
)
from mupscale.models.sharded import WEIGHTS, Keys, ShardedCheckpoint, ShardWriter
from mupscale.widening import table
from mupscale.widening.growth import Growth, duplicate_
from mupscale.widening.hints import Hints
from mupscale.widening.layers import source_of, stand_in, standing_in
from mupscale.widening.optimizers import rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import births_of, check_transfer
from mupscale.widening.stepping import set_records
from mupscale.widening.write import first_non_finite, refuse_other_rescale, remember_widths


class ShardedGrowth:
    """The growth of a sharded checkpoint: what is known of it before anything is written. `module` is that of it."""

    def __init__(
        self,
        checkpoint: ShardedCheckpoint,
        module: Growable,
        size: Size,
        hints: Hints | None,
        method: GrowthMethod,
        noise: Noise | None,
        seed: int,
        *,
        optimizer: bool,
    ) -> None:
        _refuse_method(method, optimizer)
        self.checkpoint, self.method, self.size, self.seed = checkpoint, method, size, seed
        self.narrow, self.wide = _networks(checkpoint, module, size)
        self.plan: Plan = method.plan(self.narrow, self.wide, hints)
        self.twin = stand_in(self.narrow, self.wide, self.plan.layers)
        refuse_other_rescale(self.plan, self.twin, self.wide)
        method.check(self.plan)
        self.noise = method.choose_noise(noise, self.plan, self.twin)
        self.entries: dict[str, dict[str, Growth]] = {}
        """By the name in the checkpoint: what is made of it, by the names in the wide one."""
        for entry in (*self.plan.parameters.values(), *self.plan.buffers.values()):
            for name in entry.names:
                source = source_of(self.plan.layers, name)
                self.entries.setdefault(f"net.{source}", {})[f"net.{name}"] = entry
        self.constants: Constants = dict.fromkeys(self.plan.parameters, 0.0)
        self.narrow_opts = self._saved_optimizers() if optimizer else []
        self.wide_opts = [fresh_optimizer(self.plan, self.narrow, before, self.wide) for before in self.narrow_opts]
        for before, after in zip(self.narrow_opts, self.wide_opts, strict=True):
            check_transfer(self.plan, self.narrow, before, self.wide, after)
            continue_groups(self.plan, self.narrow, before, self.wide, after, method)
        schedules = checkpoint.rest.get("lr_schedulers", [])
        continue_schedules(schedules, self.plan, self.narrow, self.narrow_opts, self.wide, self.wide_opts, method)

    @torch.no_grad()
    def write(self, out: Path) -> UpscaleReport:
        """Writes the wide folder, which is there whole at the end, or not at all."""
        start = time.perf_counter()
        remember_widths(
            self.plan, self.twin, self.wide, self.method.scale, entrywise=self.method.hyperparameters == "table"
        )
        with whole_folder(out) as folder, ShardWriter(folder, self.checkpoint.shards) as writer:
            for path in self.checkpoint.paths(WEIGHTS):
                self._write_weight(path, writer)
            for number, optimizer in enumerate(self.wide_opts):
                before = standing_in(self.narrow, self.narrow_opts[number], self.wide, self.plan.layers)
                set_records(self.wide, optimizer, births_of(self.plan, *before))
                for path in self.checkpoint.paths(f"optimizer_{number}", "state"):
                    self._write_state(path, self.narrow_opts[number], writer)
                self._write_groups(number, optimizer, writer)
            rest = dict(self.checkpoint.rest)  # with schedules that are rescaled already
            set_size_(rest, self.size, self.wide, self.wide_opts)
            writer.finish(rest)
        centred = self.noise is not None and self.noise.centred
        seconds = time.perf_counter() - start
        return UpscaleReport(
            self.plan, None, self.constants, tuple(self.plan.notes), seconds, self.wide, self.method, centred
        )

    def _saved_optimizers(self) -> list[Optimizer]:
        """The optimizers of the checkpoint on the meta device: their groups, and the shapes of their state."""
        saved, checkpoint = self.checkpoint.rest[CHECKPOINT_KEY], self.checkpoint
        states = []
        for number, names in enumerate(saved.get("optimizer_names", [])):
            groups, index_of = checkpoint.parameter_groups(number), {name: i for i, name in enumerate(names)}
            for group in groups:
                unknown = [name for name in group["params"] if name not in index_of]
                if unknown:
                    raise UserError(f"{checkpoint.folder} is damaged: its optimizer has a parameter {unknown[0]!r}")
                group["params"] = [index_of[name] for name in group["params"]]
            state = {index: self._state_on_meta(number, name) for index, name in enumerate(names)}
            states.append({"state": {index: kept for index, kept in state.items() if kept}, "param_groups": groups})
        refuse_malformed_optimizers({CHECKPOINT_KEY: saved, "optimizer_states": states})
        rows = zip(states, saved["optimizer_names"], saved["optimizer_classes"], strict=True)
        return [saved_optimizer(self.narrow, *row) for row in rows]

    def _state_on_meta(self, optimizer: int, name: str) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key in self.checkpoint.state_keys(optimizer, name):
            path = (f"optimizer_{optimizer}", "state", name, key)
            kind = self.checkpoint.kind(path)
            if kind is None or not kind.size:
                state[key] = self.checkpoint.read(path)
            else:
                state[key] = torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
        return state

    def _write_weight(self, path: Keys, writer: ShardWriter) -> None:
        name, source = str(path[1]), self.checkpoint.read(path)
        if name not in self.entries:
            writer.add(path, source)
            return
        for target, entry in self.entries[name].items():
            is_parameter = entry.name in self.plan.parameters
            bad = first_non_finite([(name, source)], infinite_allowed=not is_parameter and not entry.grows)
            if bad is not None:
                raise UserError(f"{name!r} has NaN or infinite entries; use an earlier checkpoint")
            wide = self._widened(target, source, entry) if is_parameter else _duplicated(source, entry)
            writer.add((path[0], target), wide)

    def _widened(self, name: str, source: Tensor, entry: Growth) -> Tensor:
        weight = torch.empty(entry.wide_shape, dtype=source.dtype)
        if entry.fill is not None:
            return weight.fill_(entry.fill)
        self.method.widen_(weight, source, entry)
        if self.noise is not None and self.noise.applies(entry):
            self.constants[entry.name] = add_noise_(weight, entry, self.noise, source, self.seed)
            if not bool(torch.isfinite(weight).all()):
                raise UserError(f"noise: on {name!r} it is too large for {weight.dtype}. Give a lower level")
        return weight

    def _write_state(self, path: Keys, optimizer: Optimizer, writer: ShardWriter) -> None:
        """State of a parameter's shape, duplicated and scaled; counters as they are."""
        section, part, name, key = path
        value, rule = self.checkpoint.read(path), rule_of(optimizer)
        if name not in self.entries:
            raise UserError(f"{self.checkpoint.folder} is damaged: its optimizer has a parameter {name!r}")
        if first_non_finite([(str(key), value)] if isinstance(value, Tensor) else []) is not None:
            raise UserError(
                f"optimizer state {key!r} of {name!r} has NaN or infinite entries; use an earlier checkpoint, or "
                "leave the state out: --no-optimizer"
            )
        for target, entry in self.entries[str(name)].items():
            place = section, part, target, key
            begins = entry.inserted == "identity"  # a new layer has no history
            if not isinstance(value, Tensor) or key not in rule.state:
                writer.add(place, value * 0 if begins else value)
                continue
            scale = 0.0 if begins else table.state(self.method.scale(entry), rule.state.get(str(key), 0))
            writer.add(place, _duplicated(value, entry, scale))

    def _write_groups(self, number: int, optimizer: Optimizer, writer: ShardWriter) -> None:
        names = iter(optimizer_names(self.wide, optimizer, "net."))
        for index, group in enumerate(optimizer.state_dict()["param_groups"]):
            for key, value in group.items():
                kept = [next(names) for _ in value] if key == "params" else value
                writer.add((f"optimizer_{number}", "param_groups", index, key), kept)


def _refuse_method(method: GrowthMethod, optimizer: bool) -> None:
    name = type(method).__name__
    if type(method).edit_ is not GrowthMethod.edit_:
        raise UserError(
            f"{name} changes weights across layers, and a sharded checkpoint is widened tensor by tensor. Use another "
            "method, or grow inside the run"
        )
    if optimizer and (method.state != "carry" or not method.state_to_copies):
        raise UserError(
            f"{name} does not carry the optimizer state over, which a sharded checkpoint must hold. Use another "
            "method, grow inside the run, or leave the state out: --no-optimizer"
        )


def _networks(checkpoint: ShardedCheckpoint, module: Growable, size: Size) -> tuple[nn.Module, nn.Module]:
    """The narrow and the wide network on the meta device. Raises a UserError if the weights are of another model."""
    if "current_model_state" in checkpoint.rest:
        raise UserError(
            f"{checkpoint.folder} has the weights of an EMA run, which are widened in a file only; save it as one: "
            "save_distributed_checkpoint: false"
        )
    narrow, wide = (module.network(*each, meta=True) for each in (module.size, size))
    kinds = {str(path[1]): checkpoint.kind(path) for path in checkpoint.paths(WEIGHTS)}
    found = {name: tuple(kind.size) for name, kind in kinds.items() if kind is not None}
    wanted = {f"net.{name}": tuple(tensor.shape) for name, tensor in narrow.state_dict().items()}
    for name in [*wanted, *found]:
        if name.startswith("net.") and found.get(name) != wanted.get(name):
            raise UserError(
                f"{checkpoint.folder} is of another model than its arguments make, a {type(module).__name__} of "
                f"{module.size}: {name} is {_shown(found.get(name))} in its shards and {_shown(wanted.get(name))} in "
                "the model"
            )
    restore_mixed_widths(narrow, checkpoint.rest[CHECKPOINT_KEY].get("mixed_widths", {}))
    return narrow, wide


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(shape)


def _duplicated(source: Tensor, entry: Growth, scale: float = 1.0) -> Tensor:
    if not entry.wide_shape:
        return source * scale if scale != 1.0 else source
    target = torch.empty(entry.wide_shape, dtype=source.dtype)
    duplicate_(target, source, entry.layouts, scale=scale)
    return target
