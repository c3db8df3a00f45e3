"""upscale: make the model of a checkpoint wider or deeper, as UpscaleCallback does during a run.

For example: upscale base.ckpt --width 2000 --noise 0.1 --out wide.ckpt, or upscale base.ckpt --layers 8 --out deep.ckpt

A sharded checkpoint (a folder, written under FSDP2) grows into another folder, with one tensor in memory at a
time.

A model folder of the transformers library is widened by: upscale FOLDER --factor 2 --out WIDE (for its options: upscale
--factor 2 --help).
"""

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.atomic import replacing, whole_folder
from mupscale.checks.agreement import Agreement
from mupscale.commands.configured import configured, first_batches
from mupscale.commands.growth_options import add_growth_options, depth_of, method_of, noise_of
from mupscale.commands.process import ArgumentParser, refuse_new_folder, refuse_output, show
from mupscale.commands.saved_model import grow_optimizers, load_weights, module_of, saved_optimizer, set_size_
from mupscale.errors import UserError
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow, write_alone
from mupscale.methods.noise import Constants, Noise
from mupscale.models.base import Growable, refuse_bad_width
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    Size,
    load_checkpoint,
    optimizer_names,
    refuse_malformed_optimizers,
    restore_mixed_widths,
)
from mupscale.models.growth_check import check_growth, find_residual_outputs, refuse_inexact, undeclared_lists
from mupscale.models.sharded import WEIGHTS, Keys, ShardedCheckpoint, ShardWriter, is_sharded_checkpoint
from mupscale.text_tables import starred
from mupscale.widening import table
from mupscale.widening.growth import Growth, duplicate_
from mupscale.widening.hints import Hints
from mupscale.widening.layers import Depth, source_of, stand_in
from mupscale.widening.optimizers import rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import Continuation
from mupscale.widening.stepping import set_records
from mupscale.widening.write import first_non_finite, refuse_other_rescale, remember_widths


def widen_checkpoint(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("checkpoint", help="the checkpoint to grow")
    parser.add_argument("--width", type=int, nargs="+", help="the target width, or one for each layer")
    parser.add_argument("--layers", type=int, nargs="+", help="the target number of layers, or one for each list")
    parser.add_argument("--out", type=Path, required=True, help="where to write the wide checkpoint")
    add_growth_options(parser)
    parser.add_argument(
        "--no-optimizer",
        action="store_true",
        help="omit the optimizer state; the result can then be used by init_from only",
    )
    parser.add_argument(
        "--model",
        metavar="CLASS",
        help="the import path of your own model class (mine.Tagger); a checkpoint alone never imports code. "
        "Its module may call mupscale.register_optimizer for your own optimizer",
    )
    parser.add_argument(
        "--check",
        metavar="CONFIG",
        help="compare both widths with a batch of this configuration's data before anything is written",
    )
    parser.add_argument("--force", action="store_true", help="overwrite --out")
    options = parser.parse_args(arguments)
    method = method_of(options)
    source = Path(options.checkpoint)
    is_sharded = is_sharded_checkpoint(source)
    inputs = {"the checkpoint to widen": source}
    if is_sharded:
        refuse_new_folder("--out", options.out)
    else:
        refuse_output("--out", options.out, inputs)
    if options.out.exists() and not options.force:
        raise UserError(f"--out {options.out} exists; --force overwrites it")
    noise = noise_of(options, inputs)
    shards = ShardedCheckpoint(source) if is_sharded else None
    checkpoint = load_checkpoint(options.checkpoint) if shards is None else shards.rest
    module = module_of(checkpoint, options.model)
    size, depth = _target_size(module, options.width, options.layers), depth_of(options)
    batch = None
    if options.check is not None:
        _, data, _ = configured("upscale", ["--config", options.check], None)
        batch = first_batches(module, data, 1)[0]
    hints = None
    if size.layers != module.size.layers:
        hints = depth_hints(module, size, depth, batch)
    check = NOT_CHECKED if batch is None else check_with(batch, module, size, hints)
    with_state = not options.no_optimizer
    if shards is not None:
        growth = ShardedGrowth(shards, module, size, hints, method, noise, options.seed, optimizer=with_state)
        report = growth.write(options.out)
    else:
        report = upscale_checkpoint(
            checkpoint, module, size, noise, options.seed, optimizer=with_state, method=method, hints=hints
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(options.out) as new:
            torch.save(checkpoint, new)
    if options.save_noise:
        report.save_noise(options.save_noise)
    show(str(replace(report, exact=check.exact, check=str(check))))
    wanted = " and ".join(f"model.{key} to {value}" for key, value in size.arguments.items())
    print(f"wrote {options.out}\n  train it: set model.init_from to {options.out} and {wanted} in a configuration")


def _target_size(module: Growable, width: list[int] | None, layers: list[int] | None) -> Size:
    """The size that the options ask for; raises a UserError if it is none that the model can grow to."""
    if width is None and layers is None:
        raise UserError("give --width, --layers, or both")
    if layers is not None and module.size.layers is None:
        raise UserError(f"--layers: {type(module).__name__} has a fixed number of layers; it grows in width only")
    wanted: dict[str, Any] = module.size._asdict()
    for key, given in (("width", width), ("layers", layers)):
        if given is None:
            continue
        value, current = given[0] if len(given) == 1 else given, wanted[key]
        wanted[key] = value
        refuse_bad_width(f"--{key}", value)
        if value == current:
            raise UserError(f"--{key} {value} is that of the checkpoint already; give a larger one")
        if isinstance(value, int) and isinstance(current, int) and value < current:
            raise UserError(f"--{key} {value} is less than the {current} of the checkpoint; give a larger one")
    return Size(**wanted)


NOT_CHECKED = Agreement(None, reason="--check CONFIG compares both widths with a batch of that configuration's data")


def depth_hints(module: Growable, size: Size, depth: Depth, batch: Any) -> Hints:
    """How layers are added, and what makes them add nothing, found with the batch where their class does not say it."""
    narrow, wide = (module.network(*each, meta=True) for each in (module.size, size))
    lists = undeclared_lists(narrow, wide, depth, {}) if depth == "identity" else []
    if lists and batch is None:
        raise UserError(
            f"--layers {size.layers}: the class of the layers in {lists[0]!r} does not declare residual_outputs, the "
            "parameters that make a new layer add nothing. Give --check CONFIG, with whose data they are found; or use "
            "--depth stack, which copies layers"
        )
    return Hints(depth=depth, residual=find_residual_outputs(module, module.size, lists, batch) if lists else {})


def check_with(batch: Any, module: Growable, size: Size, hints: Hints | None) -> Agreement:
    """Compares small networks of the same factors with a batch.

    Raises a UserError if they differ. New networks are as good as the saved one, because a plan depends on shapes.
    """
    depth: Depth = "identity" if hints is None or hints.depth is None else hints.depth
    found = check_growth(module, module.size, size, batch, depth, hints.residual if hints is not None else {})
    refuse_inexact(f"--width {size.width}" if hints is None else f"--layers {size.layers}", module.size, found)
    return found


def upscale_checkpoint(
    checkpoint: dict[str, Any],
    module: Growable,
    size: Size,
    noise: Noise | None,
    seed: int,
    *,
    optimizer: bool,
    method: GrowthMethod | None = None,
    hints: Hints | None = None,
) -> UpscaleReport:
    """Grows a checkpoint in place: its weights, optimizers, schedules, and size. `module` is `module_of` it.

    The average of an EMA gets the same noise as the weights.
    """
    if optimizer:
        refuse_malformed_optimizers(checkpoint)
    method = Duplication() if method is None else method
    saved, states = checkpoint[CHECKPOINT_KEY], checkpoint.get("optimizer_states", []) if optimizer else []
    averaged = "current_model_state" in checkpoint  # of an EMA run: "state_dict" is the average
    key = "current_model_state" if averaged else "state_dict"
    narrow, wide = _networks(module, size, checkpoint.get(key, {}))
    restore_mixed_widths(narrow, saved.get("mixed_widths", {}))
    rows = list(zip(states, saved["optimizer_names"], saved["optimizer_classes"], strict=False))
    narrow_opts = [saved_optimizer(narrow, *row) for row in rows]
    plan = method.plan(narrow, wide, hints)
    wide_opts = grow_optimizers(plan, narrow, narrow_opts, wide, method, checkpoint.get("lr_schedulers", []))
    rebuild = partial(module.network, *size)
    report = grow(
        narrow, wide, narrow_opts, wide_opts, noise=noise, seed=seed, hints=plan, method=method, rebuild=rebuild
    )
    checkpoint[key] = _stored(checkpoint[key], wide)
    if averaged:
        average, wide_average = _networks(module, size, checkpoint.get("state_dict", {}))
        kept = report.same_noise()
        grow(average, wide_average, noise=kept, seed=seed, hints=report.plan, method=method, rebuild=rebuild)
        checkpoint["state_dict"] = _stored(checkpoint["state_dict"], wide_average)
    checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in wide_opts]
    set_size_(checkpoint, size, wide, wide_opts)
    return report


def _networks(module: Growable, size: Size, weights: dict[str, Tensor]) -> tuple[nn.Module, nn.Module]:
    own = [value for name, value in weights.items() if name.startswith("net.")]
    dtypes = [value.dtype for value in own if value.is_floating_point() and value.dtype.itemsize > 1]
    if not dtypes:
        raise UserError(
            "the checkpoint has no weights in floating point of at least 16 bits: it is empty, or quantised. "
            "Widen the checkpoint before it was quantised"
        )
    narrow = module.network(module.width).to(dtypes[0])  # not on meta: no checkpoint holds all buffers
    load_weights(module, narrow, weights)
    return narrow, module.network(*size, meta=True).to(dtypes[0])


def _stored(weights: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """The weights of a checkpoint with those of the network, in the dtypes that they had."""
    dtypes = {starred(name): value.dtype for name, value in weights.items()}
    others = {name: value for name, value in weights.items() if not name.startswith("net.")}
    own = {f"net.{name}": value for name, value in net.state_dict().items()}
    return others | {name: value.to(dtypes[starred(name)]) for name, value in own.items()}


# --- a sharded checkpoint, tensor by tensor, without ever holding the model


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
        self.narrow, self.wide = _networks_of_shards(checkpoint, module, size)
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
        schedules = checkpoint.rest.get("lr_schedulers", [])
        self.wide_opts = grow_optimizers(self.plan, self.narrow, self.narrow_opts, self.wide, method, schedules)

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
                before = Continuation(self.plan, self.narrow, self.narrow_opts[number], self.wide)
                set_records(self.wide, optimizer, before.births())
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
        found = list(checkpoint.optimizers(checkpoint.read_small))
        if [Counter(names) for names, _ in found] != [Counter(names) for names in saved.get("optimizer_names", [])]:
            raise UserError(f"{checkpoint.folder} is damaged: its optimizers have other parameters than it names")
        refuse_malformed_optimizers({CHECKPOINT_KEY: saved, "optimizer_states": [state for _, state in found]})
        rows = zip(found, saved["optimizer_classes"], strict=True)
        return [saved_optimizer(self.narrow, state, names, kind) for (names, state), kind in rows]

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
            if is_parameter:
                wide = torch.empty(entry.wide_shape, dtype=source.dtype)
                constant = write_alone(wide, source, entry, self.method, self.noise, self.seed)
                self.constants[entry.name] = constant
            else:
                wide = _duplicated(source, entry)
            writer.add((path[0], target), wide)

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


def _networks_of_shards(checkpoint: ShardedCheckpoint, module: Growable, size: Size) -> tuple[nn.Module, nn.Module]:
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
                f"{module.size}: {name} is {found.get(name, 'missing')} in its shards and "
                f"{wanted.get(name, 'missing')} in the model"
            )
    restore_mixed_widths(narrow, checkpoint.rest[CHECKPOINT_KEY].get("mixed_widths", {}))
    return narrow, wide


def _duplicated(source: Tensor, entry: Growth, scale: float = 1.0) -> Tensor:
    if not entry.wide_shape:
        return source * scale if scale != 1.0 else source
    target = torch.empty(entry.wide_shape, dtype=source.dtype)
    duplicate_(target, source, entry.layouts, scale=scale)
    return target
