"""Rebuilds the model and the optimizers of a checkpoint."""

import importlib
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.base_shapes import apply_mup
from mupscale.commands.cli import descendants, import_classes, is_abstract
from mupscale.errors import UserError, one_line, prefix_errors
from mupscale.methods import GrowthMethod
from mupscale.models.base import Growable
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    RUN_KEY,
    Size,
    group_sizes,
    mixed_widths,
    optimizer_names,
    refuse_malformed,
    refuse_other_kinds,
)
from mupscale.schedules import refuse_one_rate_for_all, spread_schedule_state_
from mupscale.widening.optimizers import registered_optimizer
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import SOURCE_GROUP, OptimizerTransfer

MAKING_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError)
"""What a model or an optimizer raises for arguments that it does not expect."""


def module_of(checkpoint: dict[str, Any], model: str | None = None) -> Growable:
    """The module that a checkpoint was saved from, at the checkpoint's width, without weights.

    The checkpoint's class is looked up among the loaded classes. Only `model`, which the user gives, is imported.
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
    with prefix_errors(f"the checkpoint's hyper_parameters do not fit {kind.__name__}", *MAKING_ERRORS):
        module = kind(**settings | {"init_from": None})
        module.network(*module.size, meta=True)
    return module


def load_weights(module: Growable, net: nn.Module, weights: dict[str, Tensor], *, assign: bool = False) -> None:
    """Loads a checkpoint's weights into a network of its module; with `assign`, they take its parameters' place.

    Raises a UserError if they are of another network.
    """
    own = {name.removeprefix("net."): value for name, value in weights.items() if name.startswith("net.")}
    refuse_other_kinds(net.state_dict(), own)
    with prefix_errors(f"the checkpoint's weights are not those of a {type(module).__name__}", RuntimeError):
        net.load_state_dict(own, assign=assign)


def _loaded_model(class_path: str) -> type[Growable] | None:
    """The loaded class of this import path, or the class of mupscale with this short name."""
    for kind in descendants(Growable):
        names = {f"{kind.__module__}.{kind.__qualname__}"}
        if kind.__module__.startswith("mupscale."):
            names.add(kind.__name__)
        if class_path in names and not is_abstract(kind):
            return kind
    return None


def _imported_model(model: str) -> type[Growable]:
    kind: Any = _loaded_model(model)
    if kind is None:
        folder, _, name = model.rpartition(".")
        try:
            kind = getattr(importlib.import_module(folder), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"--model {model}: there is no such class ({error})") from error
    if not isinstance(kind, type) or not issubclass(kind, Growable) or is_abstract(kind):
        raise UserError(f"--model {model} is not a model: wanted a subclass of mupscale.models.base.Growable")
    return kind


def saved_optimizer(narrow: nn.Module, state: dict[str, Any], names: list[str], class_path: str) -> Optimizer:
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
        raise UserError(
            f"the checkpoint's optimizer state does not make a {kind.__name__}: {one_line(error)}. "
            "--no-optimizer leaves its state out"
        ) from error
    if optimizer.state:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            parameter.requires_grad_(parameter in optimizer.state)  # the others were frozen in the run
    return optimizer


def fresh_optimizer(plan: Plan, narrow: nn.Module, optimizer: Optimizer, wide: nn.Module) -> Optimizer:
    """An optimizer with the groups that `configure_optimizers` would make at the wide size, in the same order.

    The groups before muP are split for the wide size. Their hyperparameters are still those of the narrow one.
    """
    order = {name: index for index, name in enumerate(plan.parameters)}
    names = {id(parameter): name for name, parameter in narrow.named_parameters()}
    by_origin, targets = plan.by_origin(), dict(wide.named_parameters())
    sources: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        source = sources.setdefault(group[SOURCE_GROUP], {**group, "params": []})
        source["params"] += [entry.name for p in group["params"] for entry in by_origin[names[id(p)]]]
    groups = []
    for source in sources.values():
        del source[SOURCE_GROUP]
        groups.append({**source, "params": [targets[name] for name in sorted(source["params"], key=order.__getitem__)]})
    kind: Any = type(optimizer)
    return apply_mup(kind(groups), wide)


def grow_optimizers(
    plan: Plan,
    narrow: nn.Module,
    narrow_opts: list[Optimizer],
    wide: nn.Module,
    method: GrowthMethod,
    schedules: list[dict[str, Any]],
) -> list[Optimizer]:
    """The optimizers of the wide network, without state; their hyperparameters continue those of the narrow ones.

    Rescales the states of schedules, as a swap inside a run does. Raises a UserError if one cannot continue.
    """
    continuations = [OptimizerTransfer(plan, narrow, before, wide, method.rates) for before in narrow_opts]
    wide_opts = [fresh_optimizer(plan, narrow, before, wide) for before in narrow_opts]
    for continuation, after in zip(continuations, wide_opts, strict=True):
        continuation.check(after)
        continued = {id(parameter): group for group in continuation.groups() for parameter in group["params"]}
        for group in after.param_groups:
            group.update({**continued[id(group["params"][0])], "params": group["params"]})
    for number, state in enumerate(schedules if narrow_opts else []):
        index = _optimizer_of(state, number, narrow_opts)
        source_of, groups = continuations[index].sources(), wide_opts[index].param_groups
        sources = [source_of[id(group["params"][0])] for group in groups]
        try:
            factors, remedy = [source.factor for source in sources], "--no-optimizer leaves it out"
            refuse_one_rate_for_all(state, factors, "a schedule of the checkpoint", remedy)
            spread_schedule_state_(state, sources)
        except UserError:
            raise
        except MAKING_ERRORS as error:
            raise UserError(
                f"lr_schedulers[{number}] of the checkpoint does not fit its optimizer ({type(error).__name__}); "
                "--no-optimizer leaves it out"
            ) from error
    return wide_opts


def _optimizer_of(state: dict[str, Any], number: int, optimizers: list[Optimizer]) -> int:
    """Which optimizer a schedule belongs to, by its last rates; if they do not show it, the one at its place."""
    order = sorted(range(len(optimizers)), key=lambda index: index != number)
    for index in order:
        if state.get("_last_lr") == [group["lr"] for group in optimizers[index].param_groups]:
            return index
    return order[0]


def set_size_(checkpoint: dict[str, Any], size: Size, wide: nn.Module, optimizers: list[Optimizer]) -> None:
    """Lets a checkpoint say what it is of, after it has grown: the size of the model, and its optimizers."""
    checkpoint.pop(RUN_KEY, None)  # it goes on with another configuration
    checkpoint["hyper_parameters"] = checkpoint["hyper_parameters"] | size.arguments
    ours = checkpoint[CHECKPOINT_KEY]
    checkpoint[CHECKPOINT_KEY] = {
        **ours,
        "optimizer_names": [optimizer_names(wide, optimizer, "net.") for optimizer in optimizers],
        "group_sizes": group_sizes(optimizers),
        "optimizer_classes": ours["optimizer_classes"][: len(optimizers)],
        "mixed_widths": mixed_widths(wide),
    }
