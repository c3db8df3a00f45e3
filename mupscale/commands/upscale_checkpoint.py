"""upscale: widen a checkpoint offline, as UpscaleCallback widens a model inside a run.

For example: upscale base.ckpt --width 2000 --noise 0.1 --out wide.ckpt

A model folder of the transformers library is widened into another folder: upscale FOLDER --factor 2 --out WIDE (its
options: upscale --factor 2 --help).
"""

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.atomic import replacing
from mupscale.commands.arguments import ArgumentParser
from mupscale.commands.cli import import_classes
from mupscale.commands.noise_options import add_noise_options, method_of, noise_of
from mupscale.commands.outputs import refuse_output
from mupscale.errors import UserError
from mupscale.models.base import WidthScalable, refuse_bad_width
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    RUN_KEY,
    load_checkpoint,
    mixed_widths,
    optimizer_names,
    refuse_malformed,
    refuse_malformed_optimizers,
    restore_mixed_widths,
)
from mupscale.mup_optimizers import apply_mup
from mupscale.widening.methods import Duplication, GrowthMethod
from mupscale.widening.noise import Noise
from mupscale.widening.optimizer_state import continued_groups
from mupscale.widening.parameter_groups import SOURCE_GROUP
from mupscale.widening.rules import registered_optimizer
from mupscale.widening.schedule import rescale_schedule_state
from mupscale.widening.upscale import UpscaleReport, upscale

MAKING_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError)
"""What a model or an optimizer raises for arguments that it does not expect."""


def widen_checkpoint(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("checkpoint", help="the checkpoint to widen")
    parser.add_argument(
        "--width", type=int, nargs="+", required=True, help="the target width (several for unequal layers)"
    )
    parser.add_argument("--out", type=Path, required=True, help="where to write the wide checkpoint")
    add_noise_options(parser)
    parser.add_argument(
        "--no-optimizer", action="store_true", help="leave the optimizer state out: then only `init_from` can use it"
    )
    parser.add_argument(
        "--model",
        metavar="CLASS",
        help="the model's class, if it is your own (mine.Denoiser): a checkpoint does not import code. "
        "The module may register an optimizer of your own by mupscale.register_optimizer",
    )
    parser.add_argument("--force", action="store_true", help="overwrite --out")
    options = parser.parse_args(arguments)
    method = method_of(options)
    inputs = {"the checkpoint to widen": Path(options.checkpoint)}
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
    checkpoint = load_checkpoint(options.checkpoint)
    module = module_of(checkpoint, options.model)
    if module.width == width:
        raise UserError(f"--width {width} is the width of the checkpoint already; give a larger one")
    with_state = not options.no_optimizer
    report = upscale_checkpoint(checkpoint, module, width, noise, options.seed, optimizer=with_state, method=method)
    with replacing(options.out) as new:
        torch.save(checkpoint, new)
    if options.save_noise:
        report.save_noise(options.save_noise)
    print(report)
    print(f"wrote {options.out}")


def upscale_checkpoint(
    checkpoint: dict[str, Any],
    module: WidthScalable,
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
    method = Duplication() if method is None else method
    saved, states = checkpoint[CHECKPOINT_KEY], checkpoint.get("optimizer_states", []) if optimizer else []
    averaged = "current_model_state" in checkpoint  # of an EMA run: "state_dict" is the average
    key = "current_model_state" if averaged else "state_dict"
    narrow, wide = _networks(module, width, checkpoint.get(key, {}))
    restore_mixed_widths(narrow, saved.get("mixed_widths", {}))
    rows = list(zip(states, saved["optimizer_names"], saved["optimizer_classes"], strict=False))
    narrow_opts = [_saved_optimizer(narrow, *row) for row in rows]
    wide_opts = [_fresh_optimizer(narrow, optimizer, wide) for optimizer in narrow_opts]
    plan = method.plan(narrow, wide, None, None)
    for before, after in zip(narrow_opts, wide_opts, strict=True):
        continued: dict[int, dict[str, Any]] = {}
        for group in continued_groups(plan, narrow, before, wide, method.mup_rate_factors):
            continued.update({id(parameter): group for parameter in group["params"]})
        for group in after.param_groups:
            group.update({**continued[id(group["params"][0])], "params": group["params"]})
    rebuild = partial(module.network, width)
    report = upscale(
        narrow, wide, narrow_opts, wide_opts, noise=noise, seed=seed, plan=plan, method=method, rebuild=rebuild
    )
    _store(checkpoint[key], wide)
    if averaged:
        # the draw depends on the precision, and the average may have a lower one than the weights
        precision = next(narrow.parameters()).dtype
        average, wide_average = _networks(module, width, checkpoint.get("state_dict", {}), at_least=precision)
        upscale(
            average,
            wide_average,
            noise=report.same_noise(),
            seed=seed,
            plan=report.plan,
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
    for state, after in zip(checkpoint.get("lr_schedulers", []), wide_opts, strict=False):
        rescale_schedule_state(state, after.param_groups)
    return report


def module_of(checkpoint: dict[str, Any], model: str | None = None) -> WidthScalable:
    """The module that a checkpoint was saved from, at the checkpoint's width, without weights.

    The checkpoint's class is looked up among the classes that are loaded. Only `model`, the user's word, is imported.
    """
    refuse_malformed(checkpoint)
    import_classes()
    class_path = str(checkpoint[CHECKPOINT_KEY].get("class_path"))
    if model is None:
        kind = _loaded_model(class_path)
        if kind is None:
            raise UserError(
                f"the checkpoint is of {class_path}, which is no class of mupscale. "
                "If it is your own and you trust it, name it: --model CLASS, by its import path"
            )
    else:
        kind = _imported_model(model)
        if kind.__name__ != class_path.rpartition(".")[2]:
            raise UserError(f"--model {model}: the checkpoint is of another class, {class_path}")
    settings = {key: value for key, value in checkpoint["hyper_parameters"].items() if not str(key).startswith("_")}
    for key, value in settings.items():
        if not _is_data(value):
            raise UserError(f"the checkpoint has hyper_parameters.{key} of type {type(value).__name__}, wanted data")
    try:
        module = kind(**settings | {"init_from": None})
        module.network(module.width, meta=True)
    except MAKING_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the checkpoint's hyper_parameters do not make a {kind.__name__}: {message}") from error
    return module


def _loaded_model(class_path: str) -> type[WidthScalable] | None:
    """The loaded class of this import path, or the class of mupscale with this short name."""
    for kind in _subclasses(WidthScalable):
        names = {f"{kind.__module__}.{kind.__qualname__}"}
        if kind.__module__.startswith("mupscale."):
            names.add(kind.__name__)
        if class_path in names and not _is_abstract(kind):
            return kind
    return None


def _is_abstract(kind: type[WidthScalable]) -> bool:
    return any(getattr(method, "__isabstractmethod__", False) for method in (kind.build, kind.loss))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _imported_model(model: str) -> type[WidthScalable]:
    """The class that the command line names."""
    kind: Any = _loaded_model(model)
    if kind is None:
        folder, _, name = model.rpartition(".")
        try:
            kind = getattr(importlib.import_module(folder), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"--model {model}: there is no such class ({error})") from error
    if not isinstance(kind, type) or not issubclass(kind, WidthScalable) or _is_abstract(kind):
        raise UserError(f"--model {model} is not a model: wanted a subclass of mupscale.models.base.WidthScalable")
    return kind


def _is_data(value: Any) -> bool:
    """Whether a constructor argument is a number, a text, a tensor, or a collection of these."""
    if isinstance(value, dict):
        return all(_is_data(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set):
        return all(_is_data(item) for item in value)
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Tensor | torch.dtype)


def _networks(
    module: WidthScalable, width: Any, weights: dict[str, Tensor], at_least: torch.dtype | None = None
) -> tuple[nn.Module, nn.Module]:
    own = {name.removeprefix("net."): value for name, value in weights.items() if name.startswith("net.")}
    dtypes = [value.dtype for value in own.values() if value.is_floating_point() and value.dtype.itemsize > 1]
    if not dtypes:
        raise UserError(
            "the checkpoint has no weights in floating point of at least 16 bits: it is empty, or quantised. "
            "Widen the checkpoint before it was quantised"
        )
    dtype = dtypes[0]
    dtype = torch.promote_types(dtype, at_least or dtype)
    narrow = module.network(module.width).to(dtype)  # not on meta: no checkpoint holds all buffers
    try:
        narrow.load_state_dict(own)
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise UserError(f"the checkpoint's weights are not those of a {type(module).__name__}: {message}") from error
    return narrow, module.network(width, meta=True).to(dtype)


def _store(weights: dict[str, Tensor], net: nn.Module) -> None:
    weights.update({f"net.{name}": value.to(weights[f"net.{name}"].dtype) for name, value in net.state_dict().items()})


def _saved_optimizer(narrow: nn.Module, state: dict[str, Any], names: list[str], class_path: str) -> Optimizer:
    """The optimizer of the checkpoint, over the narrow network. `names` are the parameters that its state numbers."""
    try:
        kind = registered_optimizer(class_path)
    except UserError as error:
        remedy = "The module of --model may register it, and --no-optimizer leaves its state out"
        raise UserError(f"the checkpoint's {error}. {remedy}") from error
    parameters = {f"net.{key}": parameter for key, parameter in narrow.named_parameters()}
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [parameters[names[index]] for index in group["params"]]})
    if not all(isinstance(group.get(SOURCE_GROUP), int) for group in groups):
        raise UserError("the checkpoint's optimizer is not muP-scaled; --no-optimizer leaves its state out")
    try:
        optimizer = kind(groups)
        optimizer.load_state_dict(state)
    except MAKING_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the checkpoint's optimizer state does not make a {kind.__name__}: {message}. "
            "--no-optimizer leaves its state out"
        ) from error
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
