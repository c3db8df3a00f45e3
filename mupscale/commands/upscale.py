"""upscale: widen a checkpoint offline, as UpscaleCallback widens a model inside a run.

For example: upscale base.ckpt --width 2000 --noise 0.1 --out wide.ckpt
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.atomic import replacing
from mupscale.commands.cli import import_classes
from mupscale.errors import UserError
from mupscale.models.base import WidthScalable
from mupscale.models.checkpoint import CHECKPOINT_KEY, load_checkpoint, mixed_widths, optimizer_names
from mupscale.mup_optimizers import apply_mup
from mupscale.widening.noise import AdditiveNoise, Noise, RecordedNoise, SameNoise, SignalNoise
from mupscale.widening.optimizer_state import continued_groups
from mupscale.widening.parameter_groups import SOURCE_GROUP
from mupscale.widening.schedule import rescale_schedule_state
from mupscale.widening.upscale import UpscaleReport, upscale


def main(command: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("checkpoint", help="the checkpoint to widen")
    parser.add_argument(
        "--width", type=int, nargs="+", required=True, help="the target width (several for unequal layers)"
    )
    parser.add_argument("--out", type=Path, required=True, help="where to write the wide checkpoint")
    strength = parser.add_mutually_exclusive_group()
    strength.add_argument("--noise", type=float, metavar="STD", help="additive noise with this base constant")
    strength.add_argument(
        "--signal-noise", type=float, metavar="T", help="noise as this fraction of each weight's spectral norm"
    )
    strength.add_argument(
        "--recorded-noise", type=Path, metavar="FILE", help="per-weight noise constants of an earlier upscale"
    )
    parser.add_argument("--save-noise", type=Path, metavar="FILE", help="write the per-weight noise constants")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the noise (default 0)")
    parser.add_argument(
        "--no-optimizer", action="store_true", help="leave the optimizer state out: then only `init_from` can use it"
    )
    parser.add_argument("--force", action="store_true", help="overwrite --out")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.force:
        raise UserError(f"--out {options.out} exists; --force overwrites it")
    width = options.width[0] if len(options.width) == 1 else options.width
    checkpoint = load_checkpoint(options.checkpoint)
    report = upscale_checkpoint(checkpoint, width, noise_of(options), options.seed, optimizer=not options.no_optimizer)
    with replacing(options.out) as new:
        torch.save(checkpoint, new)
    if options.save_noise:
        report.save_noise(options.save_noise)
    print(report)
    print(f"wrote {options.out}")


def noise_of(options: argparse.Namespace) -> Noise | None:
    if options.noise is not None:
        return AdditiveNoise(options.noise)
    if options.signal_noise is not None:
        return SignalNoise(options.signal_noise)
    return RecordedNoise(options.recorded_noise) if options.recorded_noise is not None else None


def upscale_checkpoint(
    checkpoint: dict[str, Any], width: Any, noise: Noise | None, seed: int, *, optimizer: bool
) -> UpscaleReport:
    """Widens a checkpoint in place: its weights, optimizers, schedules, and width.

    The average of an EMA gets the same noise as the weights.
    """
    module = module_of(checkpoint)
    saved, states = checkpoint[CHECKPOINT_KEY], checkpoint.get("optimizer_states", []) if optimizer else []
    averaged = "current_model_state" in checkpoint  # of an EMA run: "state_dict" is the average
    key = "current_model_state" if averaged else "state_dict"
    narrow, wide = _networks(module, width, checkpoint[key])
    rows = list(zip(states, saved["optimizer_names"], saved["optimizer_classes"], strict=False))
    narrow_opts = [_saved_optimizer(narrow, *row) for row in rows]
    wide_opts = [_fresh_optimizer(narrow, optimizer, wide) for optimizer in narrow_opts]
    report = upscale(narrow, wide, narrow_opts, wide_opts, noise=noise, seed=seed)
    for before, after in zip(narrow_opts, wide_opts, strict=True):
        continued: dict[int, dict[str, Any]] = {}
        for group in continued_groups(report.plan, narrow, before, wide):
            continued.update({id(parameter): group for parameter in group["params"]})
        for group in after.param_groups:
            group.update({**continued[id(group["params"][0])], "params": group["params"]})
    _store(checkpoint[key], wide)
    if averaged:
        # the draw depends on the precision, and the average may have a lower one than the weights
        precision = next(narrow.parameters()).dtype
        average, wide_average = _networks(module, width, checkpoint["state_dict"], at_least=precision)
        upscale(average, wide_average, noise=SameNoise(report.noise), seed=seed)
        _store(checkpoint["state_dict"], wide_average)
    checkpoint["hyper_parameters"]["width"] = width
    checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in wide_opts]
    saved["optimizer_names"] = [optimizer_names(wide, optimizer, "net.") for optimizer in wide_opts]
    saved["optimizer_classes"] = saved["optimizer_classes"][: len(wide_opts)]
    saved["mixed_widths"] = mixed_widths(wide)
    for state, after in zip(checkpoint.get("lr_schedulers", []), wide_opts, strict=False):
        rescale_schedule_state(state, after.param_groups)
    return report


def module_of(checkpoint: dict[str, Any]) -> WidthScalable:
    """The module that a checkpoint was saved from, at the checkpoint's width, without weights."""
    if CHECKPOINT_KEY not in checkpoint:
        raise UserError("this checkpoint was not saved by a width-scalable module")
    import_classes()
    folder, _, name = checkpoint[CHECKPOINT_KEY]["class_path"].rpartition(".")
    settings = {key: value for key, value in checkpoint["hyper_parameters"].items() if not key.startswith("_")}
    return getattr(importlib.import_module(folder), name)(**settings | {"init_from": None})


def _networks(
    module: WidthScalable, width: Any, weights: dict[str, Tensor], at_least: torch.dtype | None = None
) -> tuple[nn.Module, nn.Module]:
    own = {name.removeprefix("net."): value for name, value in weights.items() if name.startswith("net.")}
    dtype = next(value.dtype for value in own.values() if value.is_floating_point())
    dtype = torch.promote_types(dtype, at_least or dtype)
    narrow = module.network(module.width).to(dtype)  # not on meta: no checkpoint holds all buffers
    narrow.load_state_dict(own)
    return narrow, module.network(width, meta=True).to(dtype)


def _store(weights: dict[str, Tensor], net: nn.Module) -> None:
    weights.update({f"net.{name}": value.to(weights[f"net.{name}"].dtype) for name, value in net.state_dict().items()})


def _saved_optimizer(narrow: nn.Module, state: dict[str, Any], names: list[str], class_path: str) -> Optimizer:
    """The optimizer of the checkpoint, over the narrow network. `names` are the parameters that its state numbers."""
    folder, _, name = class_path.rpartition(".")
    parameters = {f"net.{key}": parameter for key, parameter in narrow.named_parameters()}
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [parameters[names[index]] for index in group["params"]]})
    optimizer = getattr(importlib.import_module(folder), name)(groups)
    optimizer.load_state_dict(state)
    return optimizer


def _fresh_optimizer(narrow: nn.Module, optimizer: Optimizer, wide: nn.Module) -> Optimizer:
    """An optimizer with the groups that `configure_optimizers` would make at the wide width, in the same order.

    The groups before muP are split for the wide width. Their hyperparameters are still those of the narrow width.
    """
    order = {name: index for index, (name, _) in enumerate(narrow.named_parameters())}
    names = {id(parameter): name for name, parameter in narrow.named_parameters()}
    targets = dict(wide.named_parameters())
    sources: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        source = sources.setdefault(group[SOURCE_GROUP], {**group, "params": []})
        source["params"] += [names[id(parameter)] for parameter in group["params"]]
    groups = []
    for source in sources.values():
        del source[SOURCE_GROUP]
        groups.append({**source, "params": [targets[name] for name in sorted(source["params"], key=order.__getitem__)]})
    kind: Any = type(optimizer)
    return apply_mup(kind(groups), wide)
