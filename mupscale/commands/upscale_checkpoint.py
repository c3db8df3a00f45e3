"""upscale: make the model of a checkpoint wider or deeper, as UpscaleCallback does during a run.

For example: upscale base.ckpt --width 2000 --noise 0.1 --out wide.ckpt, or upscale base.ckpt --layers 8 --out deep.ckpt

A sharded checkpoint (a folder, written under FSDP2) grows into another folder, with one tensor in memory at a
time.

A model folder of the transformers library is widened by: upscale FOLDER --factor 2 --out WIDE (for its options: upscale
--factor 2 --help).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mupscale.atomic import replacing
from mupscale.checks.agreement import Agreement
from mupscale.commands import saved_model
from mupscale.commands.arguments import ArgumentParser, refuse_new_folder, refuse_output
from mupscale.commands.configured import configured, first_batches
from mupscale.commands.noise_options import add_noise_options, method_of, noise_of
from mupscale.commands.process import show
from mupscale.commands.upscale_sharded import ShardedGrowth
from mupscale.errors import UserError
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow
from mupscale.methods.noise import Noise
from mupscale.models.base import Growable, refuse_bad_width
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    Size,
    load_checkpoint,
    refuse_malformed_optimizers,
    restore_mixed_widths,
)
from mupscale.models.growth_check import check_growth, find_residual_outputs, refuse_inexact, undeclared_lists
from mupscale.models.sharded import ShardedCheckpoint, is_sharded_checkpoint
from mupscale.text_tables import starred
from mupscale.widening.hints import Hints
from mupscale.widening.layers import Depth, How


def widen_checkpoint(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("checkpoint", help="the checkpoint to grow")
    parser.add_argument("--width", type=int, nargs="+", help="the target width, or one for each layer")
    parser.add_argument("--layers", type=int, nargs="+", help="the target number of layers, or one for each list")
    parser.add_argument(
        "--depth",
        choices=[how for how in get_args(How) if how != "random"],
        help="how the model becomes deeper: inserted layers add nothing at first (identity, the default), each layer "
        "several times in place (interleave), or the whole stack again (stack)",
    )
    parser.add_argument("--out", type=Path, required=True, help="where to write the wide checkpoint")
    add_noise_options(parser)
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
    module = saved_model.module_of(checkpoint, options.model)
    size = _target_size(module, options.width, options.layers)
    if options.depth is not None and options.layers is None:
        raise UserError("--depth says how a model becomes deeper: give --layers too")
    batch = None
    if options.check is not None:
        _, data, _ = configured("upscale", ["--config", options.check], None)
        batch = first_batches(module, data, 1)[0]
    hints = None
    if size.layers != module.size.layers:
        hints = depth_hints(module, size, options.depth or "identity", batch)
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
    narrow_opts = [saved_model.saved_optimizer(narrow, *row) for row in rows]
    plan = method.plan(narrow, wide, hints)
    wide_opts = [saved_model.fresh_optimizer(plan, narrow, optimizer, wide) for optimizer in narrow_opts]
    for before, after in zip(narrow_opts, wide_opts, strict=True):
        saved_model.continue_groups(plan, narrow, before, wide, after, method)
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
    saved_model.set_size_(checkpoint, size, wide, wide_opts)
    schedules = checkpoint.get("lr_schedulers", [])
    saved_model.continue_schedules(schedules, plan, narrow, narrow_opts, wide, wide_opts, method)
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
    saved_model.load_weights(module, narrow, weights)
    return narrow, module.network(*size, meta=True).to(dtypes[0])


def _stored(weights: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """The weights of a checkpoint with those of the network, in the dtypes that they had."""
    dtypes = {starred(name): value.dtype for name, value in weights.items()}
    others = {name: value for name, value in weights.items() if not name.startswith("net.")}
    own = {f"net.{name}": value for name, value in net.state_dict().items()}
    return others | {name: value.to(dtypes[starred(name)]) for name, value in own.items()}
