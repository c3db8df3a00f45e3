"""upscale: make the model of a checkpoint wider or deeper, as UpscaleCallback does during a run.

For example: upscale base.ckpt --width 2000 --noise 0.1 --out wide.ckpt, or upscale base.ckpt --layers 8 --out deep.ckpt

A sharded checkpoint (a folder, written under FSDP2) grows into another folder, with one tensor in memory at a
time.

A model folder of the transformers library grows by: upscale FOLDER --factor 2 --out WIDE (for its options: upscale
--factor 2 --help).
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.atomic import locked_output, replacing, whole_folder
from mupscale.checks.check_step import Agreement
from mupscale.commands.configured import configured, first_batches
from mupscale.commands.growth_options import add_growth_options, depth_of, method_of, noise_of
from mupscale.commands.growth_plans import check_growth, undeclared_lists
from mupscale.commands.process import ArgumentParser, refuse_new_folder, refuse_output, show
from mupscale.commands.saved_model import grow_optimizers, load_weights, module_of, saved_optimizer, set_size_
from mupscale.errors import UserError
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow, refuse_without_values
from mupscale.methods.noise import NoiseOrAuto
from mupscale.methods.tensors import grow_tensors
from mupscale.models.base import Growable, refuse_bad_width
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    Size,
    load_checkpoint,
    optimizer_names,
    refuse_malformed_optimizers,
    restore_mixed_widths,
)
from mupscale.models.sharded import WEIGHTS, Keys, ShardedCheckpoint, ShardWriter, is_sharded_checkpoint
from mupscale.text_tables import starred
from mupscale.widening.growth import Growth
from mupscale.widening.hints import Hints
from mupscale.widening.layers import Depth, at_depth, source_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import OptimizerTransfer
from mupscale.widening.write import first_non_finite, refuse_other_rescale, remember_widths


def widen_checkpoint(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("checkpoint", help="the checkpoint to grow")
    parser.add_argument("--width", type=int, nargs="+", help="the target width, or one for each layer")
    parser.add_argument("--layers", type=int, nargs="+", help="the target number of layers, or one for each list")
    parser.add_argument("--out", type=Path, required=True, help="where to write the larger checkpoint")
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
    inputs = {"the checkpoint to grow": source}
    if is_sharded:
        refuse_new_folder("--out", options.out)
    else:
        refuse_output("--out", options.out, inputs)
    refuse_existing(options.out, force=options.force)
    noise = noise_of(options, inputs)
    shards = ShardedCheckpoint(source) if is_sharded else None
    checkpoint = load_checkpoint(options.checkpoint) if shards is None else shards.rest
    module = module_of(checkpoint, options.model)
    size, depth = _target_size(module, options.width, options.layers), depth_of(options)
    batch = None
    if options.check is not None:
        _, data, _ = configured("upscale", ["--config", options.check], None)
        batch = first_batches(module, data, 1)[0]
    hints, check = hints_with(batch, module, size, depth)
    with_state = not options.no_optimizer
    if shards is not None:
        given = noise, options.seed, options.out
        report = upscale_shards(shards, module, size, *given, optimizer=with_state, method=method, hints=hints)
    else:
        report = upscale_checkpoint(
            checkpoint, module, size, noise, options.seed, optimizer=with_state, method=method, hints=hints
        )
        with locked_output(options.out):
            refuse_existing(options.out, force=options.force)  # again: another process may have been faster
            with replacing(options.out) as stream:
                torch.save(checkpoint, stream)
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


def refuse_existing(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise UserError(f"--out {out} exists; --force overwrites it")


def hints_with(batch: Any, module: Growable, size: Size, depth: Depth) -> tuple[Hints | None, Agreement]:
    """How the module grows, and whether small networks of the same factors agree on a batch, if there is one.

    Raises a UserError if they differ. New networks are as good as the saved one, because a plan depends on shapes.
    """
    adds_layers = size.layers != module.size.layers
    if batch is None:
        narrow, wide = (module.network(*each, meta=True) for each in (module.size, size))
        lists = undeclared_lists(narrow, wide, depth) if adds_layers and depth == "identity" else []
        if lists:
            raise UserError(
                f"--layers {size.layers}: the class of the layers in {lists[0]!r} does not declare residual_outputs, "
                "the parameters that make a new layer add nothing. Give --check CONFIG, with whose data they are "
                "found; or use --depth stack, which copies layers"
            )
        return Hints(depth=depth) if adds_layers else None, NOT_CHECKED
    hints, found = check_growth(module, module.size, size, batch, depth)
    if found.exact is False and not found.is_random:
        option = f"--layers {size.layers}" if adds_layers else f"--width {size.width}"
        reason = found.reason.replace("what call(model) returns", "the loss")
        raise UserError(
            f"{option}: growth from {module.size} is not exact: {reason}. "
            "Blocks, roles or units may be missing (mupscale.discover finds them), or `loss` depends on the width"
        )
    return hints if adds_layers else None, found


def upscale_checkpoint(
    checkpoint: dict[str, Any],
    module: Growable,
    size: Size,
    noise: NoiseOrAuto,
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
        narrow, wide, narrow_opts, wide_opts, noise=noise, seed=seed, plan=plan, method=method, rebuild=rebuild
    )
    checkpoint[key] = _stored(checkpoint[key], wide)
    if averaged:
        average, wide_average = _networks(module, size, checkpoint.get("state_dict", {}))
        kept = report.same_noise()
        grow(average, wide_average, noise=kept, seed=seed, plan=report.plan, method=method, rebuild=rebuild)
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
            "Grow the checkpoint before it was quantised"
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


@torch.no_grad()
def upscale_shards(
    shards: ShardedCheckpoint,
    module: Growable,
    size: Size,
    noise: NoiseOrAuto,
    seed: int,
    out: Path,
    *,
    optimizer: bool,
    method: GrowthMethod,
    hints: Hints | None = None,
) -> UpscaleReport:
    """Writes the wide folder of a sharded checkpoint, which is there whole at the end, or not at all."""
    start = time.perf_counter()
    method.refuse_across_layers("a sharded checkpoint")
    if optimizer and method.state == "reset":
        raise UserError(
            f"{type(method).__name__} does not carry the optimizer state over, which a sharded checkpoint must hold. "
            "Use another method, grow inside the run, or leave the state out: --no-optimizer"
        )
    narrow, wide = _networks_of_shards(shards, module, size)
    plan = method.plan(narrow, wide, hints)
    twin = at_depth(narrow, wide, plan.layers)
    refuse_other_rescale(plan, twin, wide)
    refuse_without_values(plan, wide)
    method.check(plan)
    added, notes = method.choose_noise(noise, plan, twin)
    narrow_opts = _saved_optimizers(shards, narrow) if optimizer else []
    schedules = shards.rest.get("lr_schedulers", [])
    wide_opts = grow_optimizers(plan, narrow, narrow_opts, wide, method, schedules)
    remember_widths(plan, twin, wide, method.scale, entrywise=method.hyperparameters == "table")
    with whole_folder(out) as folder, ShardWriter(folder, shards.shards) as writer:
        entries = [*plan.parameters.values(), *(entry for entry in plan.buffers.values() if not entry.kept)]

        def read(entry: Growth, rows: slice | None) -> Tensor:
            is_plain = entry.kind == "buffer" and not entry.grows
            return _read_finite(shards, (WEIGHTS, f"net.{entry.origin}"), infinite_allowed=is_plain)

        def write(entry: Growth, by_rows: bool) -> Iterator[tuple[Tensor, None]]:
            kind = shards.kind((WEIGHTS, f"net.{entry.origin}"))
            assert kind is not None
            target = torch.empty(entry.wide_shape, dtype=kind.properties.dtype)
            yield target, None
            for name in entry.names:
                writer.add((WEIGHTS, f"net.{name}"), target)

        constants = grow_tensors(entries, method, added, read, write, seed)
        grown = {f"net.{source_of(plan.layers, name)}" for entry in entries for name in entry.names}
        for path in shards.paths(WEIGHTS):
            if path[1] not in grown:
                writer.add(path, shards.read(path))
        for number, before in enumerate(narrow_opts):
            _write_optimizer(
                f"optimizer_{number}", before, wide_opts[number], plan, narrow, wide, method, shards, writer
            )
        rest = dict(shards.rest)  # with schedules that are rescaled already
        set_size_(rest, size, wide, wide_opts)
        writer.finish(rest)
    sigma = {name: constants[name] for name in plan.parameters}
    centred = added is not None and added.centred
    seconds = time.perf_counter() - start
    return UpscaleReport(plan, None, sigma, (*notes, *plan.notes), seconds, wide, method, centred)


def _read_finite(shards: ShardedCheckpoint, path: Keys, *, infinite_allowed: bool = False) -> Tensor:
    value: Tensor = shards.read(path)
    if first_non_finite([("", value)], infinite_allowed=infinite_allowed) is not None:
        key, remedy = (path[1], "") if path[0] == WEIGHTS else (f"{path[3]} of {path[2]}", ", or --no-optimizer")
        raise UserError(f"{key!r} has NaN or infinite entries; use an earlier checkpoint{remedy}")
    return value


def _saved_optimizers(shards: ShardedCheckpoint, narrow: nn.Module) -> list[Optimizer]:
    """The optimizers of the checkpoint on the meta device: their groups, and the shapes of their state."""
    saved = shards.rest[CHECKPOINT_KEY]
    found = list(shards.optimizers(shards.read_small))
    if [Counter(names) for names, _ in found] != [Counter(names) for names in saved.get("optimizer_names", [])]:
        raise UserError(f"{shards.folder} is damaged: its optimizers have other parameters than it names")
    refuse_malformed_optimizers({CHECKPOINT_KEY: saved, "optimizer_states": [state for _, state in found]})
    rows = zip(found, saved["optimizer_classes"], strict=True)
    return [saved_optimizer(narrow, state, names, kind) for (names, state), kind in rows]


def _write_optimizer(
    section: str,
    before: Optimizer,
    after: Optimizer,
    plan: Plan,
    narrow: nn.Module,
    wide: nn.Module,
    method: GrowthMethod,
    shards: ShardedCheckpoint,
    writer: ShardWriter,
) -> None:
    """Writes the state and the groups of an optimizer. New layers, which have no history, get zeros."""
    done = set[Keys]()

    def read(entry: Growth, key: str, value: Tensor) -> Tensor:
        return _read_finite(shards, (section, "state", f"net.{entry.origin}", key)) if value.is_meta else value

    def write(entry: Growth, key: str, value: Tensor) -> Tensor:
        path = section, "state", f"net.{entry.name}", key
        writer.add(path, value)
        done.add(path)
        return value.to("meta")

    continuation = OptimizerTransfer(plan, narrow, before, wide, method.rates, method.state)
    continuation.transfer(after, **method.state_settings(), read=read, write=write)
    sources, targets = dict(narrow.named_parameters()), dict(wide.named_parameters())
    for name, entry in plan.parameters.items():
        own, narrow_state = after.state.get(targets[name], {}), before.state.get(sources[entry.origin], {})
        for key in own | narrow_state:
            path = section, "state", f"net.{name}", key
            value = own.get(key, narrow_state.get(key))
            if path not in done and key in continuation.rule.state:
                value = torch.zeros(entry.wide_shape, dtype=narrow_state[key].dtype)
            elif key not in own:
                value = value * 0
            if path not in done:
                writer.add(path, value)
    names = iter(optimizer_names(wide, after, "net."))
    for index, group in enumerate(after.state_dict()["param_groups"]):
        for key, value in group.items():
            kept = [next(names) for _ in value] if key == "params" else value
            writer.add((section, "param_groups", index, key), kept)


def _networks_of_shards(checkpoint: ShardedCheckpoint, module: Growable, size: Size) -> tuple[nn.Module, nn.Module]:
    """The narrow and the wide network on the meta device. Raises a UserError if the weights are of another model."""
    if "current_model_state" in checkpoint.rest:
        raise UserError(
            f"{checkpoint.folder} has the weights of an EMA run, which grow in a file only; save it as one: "
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
