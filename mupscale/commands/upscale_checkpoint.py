"""upscale: widen a saved checkpoint, as UpscaleCallback does during a run.

For example: upscale base.ckpt --width 2000 --noise 0.1 --out wide.ckpt

A sharded checkpoint (a folder, written under FSDP2) is widened into another folder, with one tensor in memory at a
time.

A model folder of the transformers library is widened by: upscale FOLDER --factor 2 --out WIDE (for its options: upscale
--factor 2 --help).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.atomic import replacing
from mupscale.checks.agreement import Agreement
from mupscale.commands.arguments import ArgumentParser
from mupscale.commands.configured import configured, first_batches
from mupscale.commands.next_steps import after_upscale
from mupscale.commands.noise_options import add_noise_options, method_of, noise_of
from mupscale.commands.outputs import refuse_new_folder, refuse_output
from mupscale.commands.saved_model import (
    continue_groups,
    continue_schedules,
    fresh_optimizer,
    module_of,
    saved_optimizer,
)
from mupscale.commands.terminal import show
from mupscale.commands.upscale_sharded import ShardedGrowth
from mupscale.errors import UserError
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow
from mupscale.methods.noise import Noise
from mupscale.models.arguments import refuse_bad_width
from mupscale.models.base import Growable
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    RUN_KEY,
    Width,
    load_checkpoint,
    mixed_widths,
    optimizer_names,
    refuse_malformed_optimizers,
    refuse_malformed_rates,
    refuse_other_kinds,
    restore_mixed_widths,
)
from mupscale.models.growth_check import check_growth, refuse_inexact
from mupscale.models.sharded import ShardedCheckpoint, is_sharded_checkpoint


def widen_checkpoint(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("checkpoint", help="the checkpoint to widen")
    parser.add_argument("--width", type=int, nargs="+", required=True, help="the target width, or one for each layer")
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
        help="the import path of your own model class (mine.Denoiser); a checkpoint alone never imports code. "
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
    noise = noise_of(options)
    if options.save_noise is not None:
        if noise is None:
            raise UserError("--save-noise: there is no noise to save; give --noise STD or --signal-noise T")
        refuse_output("--save-noise", options.save_noise, inputs | {"--out": options.out})
    width = options.width[0] if len(options.width) == 1 else options.width
    refuse_bad_width("--width", width)
    shards = ShardedCheckpoint(source) if is_sharded else None
    checkpoint = load_checkpoint(options.checkpoint) if shards is None else shards.rest
    module = module_of(checkpoint, options.model)
    if module.width == width:
        raise UserError(f"--width {width} is the width of the checkpoint already; give a larger one")
    if isinstance(width, int) and isinstance(module.width, int) and width < module.width:
        raise UserError(
            f"--width {width} is narrower than the checkpoint, which has width {module.width}; give a larger one"
        )
    check = NOT_CHECKED if options.check is None else check_with(options.check, module, width)
    with_state = not options.no_optimizer
    if shards is not None:
        growth = ShardedGrowth(shards, module, width, method, noise, options.seed, optimizer=with_state)
        report = growth.write(options.out)
    else:
        report = upscale_checkpoint(checkpoint, module, width, noise, options.seed, optimizer=with_state, method=method)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(options.out) as new:
            torch.save(checkpoint, new)
    if options.save_noise:
        report.save_noise(options.save_noise)
    show(str(replace(report, exact=check.exact, check=str(check))))
    print("\n".join([f"wrote {options.out}", *after_upscale(source, options.out, width)]))


NOT_CHECKED = Agreement(None, reason="--check CONFIG compares both widths with a batch of that configuration's data")


def check_with(config: str, module: Growable, width: Width) -> Agreement:
    """Compares small networks of the same factor with the first batch of a configuration.

    Raises a UserError if they differ. New networks are as good as the saved one, because a plan depends on shapes.
    """
    _, data, _ = configured("upscale", ["--config", config], None)
    after = module.size._replace(width=width)
    found = check_growth(module, module.size, after, first_batches(module, data, 1)[0])
    refuse_inexact(f"--width {width}", module.size, found)
    return found


def upscale_checkpoint(
    checkpoint: dict[str, Any],
    module: Growable,
    width: Any,
    noise: Noise | None,
    seed: int,
    *,
    optimizer: bool,
    method: GrowthMethod | None = None,
) -> UpscaleReport:
    """Widens a checkpoint in place: its weights, optimizers, schedules, and width. `module` is `module_of` it.

    The average of an EMA gets the same noise as the weights.
    """
    if optimizer:
        refuse_malformed_optimizers(checkpoint)
        refuse_malformed_rates(checkpoint)
    method = Duplication() if method is None else method
    saved, states = checkpoint[CHECKPOINT_KEY], checkpoint.get("optimizer_states", []) if optimizer else []
    averaged = "current_model_state" in checkpoint  # of an EMA run: "state_dict" is the average
    key = "current_model_state" if averaged else "state_dict"
    narrow, wide = _networks(module, width, checkpoint.get(key, {}))
    restore_mixed_widths(narrow, saved.get("mixed_widths", {}))
    rows = list(zip(states, saved["optimizer_names"], saved["optimizer_classes"], strict=False))
    narrow_opts = [saved_optimizer(narrow, *row) for row in rows]
    wide_opts = [fresh_optimizer(narrow, optimizer, wide) for optimizer in narrow_opts]
    plan = method.plan(narrow, wide)
    for before, after in zip(narrow_opts, wide_opts, strict=True):
        continue_groups(plan, narrow, before, wide, after, method)
    rebuild = partial(module.network, width)
    report = grow(
        narrow, wide, narrow_opts, wide_opts, noise=noise, seed=seed, hints=plan, method=method, rebuild=rebuild
    )
    _store(checkpoint[key], wide)
    if averaged:
        average, wide_average = _networks(module, width, checkpoint.get("state_dict", {}))
        grow(
            average,
            wide_average,
            noise=report.same_noise(),
            seed=seed,
            hints=report.plan,
            method=method,
            rebuild=rebuild,
        )
        _store(checkpoint["state_dict"], wide_average)
    checkpoint["hyper_parameters"]["width"] = width
    checkpoint.pop(RUN_KEY, None)  # it goes on with another configuration
    checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in wide_opts]
    saved["optimizer_names"] = [optimizer_names(wide, optimizer, "net.") for optimizer in wide_opts]
    saved["optimizer_classes"] = saved["optimizer_classes"][: len(wide_opts)]
    saved["mixed_widths"] = mixed_widths(wide)
    continue_schedules(checkpoint.get("lr_schedulers", []), plan, narrow, narrow_opts, wide, wide_opts, method)
    return report


def _networks(module: Growable, width: Any, weights: dict[str, Tensor]) -> tuple[nn.Module, nn.Module]:
    own = {name.removeprefix("net."): value for name, value in weights.items() if name.startswith("net.")}
    dtypes = [value.dtype for value in own.values() if value.is_floating_point() and value.dtype.itemsize > 1]
    if not dtypes:
        raise UserError(
            "the checkpoint has no weights in floating point of at least 16 bits: it is empty, or quantised. "
            "Widen the checkpoint before it was quantised"
        )
    narrow = module.network(module.width).to(dtypes[0])  # not on meta: no checkpoint holds all buffers
    refuse_other_kinds(narrow.state_dict(), own)
    try:
        narrow.load_state_dict(own)
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise UserError(f"the checkpoint's weights are not those of a {type(module).__name__}: {message}") from error
    return narrow, module.network(width, meta=True).to(dtypes[0])


def _store(weights: dict[str, Tensor], net: nn.Module) -> None:
    weights.update({f"net.{name}": value.to(weights[f"net.{name}"].dtype) for name, value in net.state_dict().items()})
