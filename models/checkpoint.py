"""The checkpoints of growable modules: what they hold in addition to Lightning's part, and how it is loaded."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.data_files import META, METADATA, damage_in, data_in, interpreting
from mupscale.errors import UserError, is_whole, refuse_unless_level, refuse_unless_whole, shown
from mupscale.sharding import is_sharded, whole
from mupscale.widening.records import Records, record_of, records_of, store_records
from mupscale.widening.write import first_non_finite

Width = int | list[int]
"""What a user calls the width of a model: a number, or one for each layer."""

Layers = int | list[int]
"""How many layers a model has: a number, or one for each of its lists of layers."""


class Size(NamedTuple):
    """What growth changes about a model."""

    width: Width
    layers: Layers | None = None
    """The number of layers; None for a model that grows in width only."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The size as arguments of the model."""
        return {key: value for key, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        return f"width {self.width}" if self.layers is None else f"width {self.width} and {self.layers} layers"

    def to(self, after: "Size") -> str:
        """The growth to another size, in words."""
        return f"width {self.width} → {after.width}" if self.layers == after.layers else f"{self} → {after}"


def size_of(module: LightningModule) -> Size | None:
    """Returns the size of a module with a hyperparameter `width`, and perhaps `layers`; None of any other."""
    values: list[Any] = [module.hparams.get(name) for name in Size._fields]
    width, layers = (value if is_size(value) else None for value in values)
    return None if width is None else Size(width, layers)


def is_size(value: Any) -> bool:
    """Whether something is a whole number above 0, or a list of them."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return bool(numbers) and all(map(is_whole, numbers))


CHECKPOINT_KEY = "mupscale"
"""The key of mupscale's part of a checkpoint: the module's class; for each optimizer its class and the names of its
parameters, in its order, and how many are in each of its groups; and the widths of parameters whose pieces grew by
different factors, which cannot be recomputed."""

RUN_KEY = "mupscale_run"
"""The run of a checkpoint: its identity, and its configuration. Checkpoints of a fit without the command have none."""

RESUME = "resume"
"""The folder of checkpoints that a run keeps for resuming; `resume-IDENTITY` where several runs may have one."""

SAVED = "hf"
"""The folder, in that of the run, into which a model of transformers is saved at the end of a fit."""

PRE_UPSCALE = "pre-upscale-"
"""How the name of the checkpoint before a growth begins."""

_FOREIGN = "this checkpoint was not saved by a growable module; use a checkpoint of a mupscale run"

_FREE = ("width", "init_from", "compile")
"""Arguments that may differ from those of a checkpoint, whatever the module is."""


def growth_metadata(module: nn.Module, net: nn.Module | None, optimizers: list[Optimizer]) -> dict[str, Any]:
    """What a checkpoint of `module` holds under CHECKPOINT_KEY."""
    return {
        "class_path": class_path(module),
        "optimizer_classes": [class_path(optimizer) for optimizer in optimizers],
        "optimizer_names": [optimizer_names(module, optimizer) for optimizer in optimizers],
        "group_sizes": group_sizes(optimizers),
        "mixed_widths": mixed_widths(net) if net is not None else {},
    }


def group_sizes(optimizers: Iterable[Optimizer]) -> list[list[int]]:
    """How many parameters each group of each optimizer has."""
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]


def load_checkpoint(path: str | Path, *, mapped: bool = False) -> dict[str, Any]:
    """A checkpoint on the CPU, file or sharded folder: tensors and primitives. `mapped` tensors are read when used."""
    if (Path(path) / METADATA).is_file():
        from mupscale.models.sharded import ShardedCheckpoint  # loads torch.distributed

        return ShardedCheckpoint(Path(path)).whole()
    if Path(path).is_dir():
        below = next((found for found in sorted(Path(path).glob("**/last.ckpt"))), Path(path) / "last.ckpt")
        raise UserError(f"{path} is a folder; name a checkpoint file, such as {below}")
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}; name a file that exists")
    problem = damage_in(Path(path))
    if problem is not None:
        raise UserError(f"{path} is damaged: {problem}")
    return data_in(Path(path), mapped=mapped)


def peek(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint, its tensors mapped and not read; None if it is damaged or not a checkpoint."""
    try:
        content = data_in(path / META if path.is_dir() else path, mapped=True)  # a sharded checkpoint is a folder
    except UserError:
        return None
    return content if is_whole(content.get("global_step"), 0) else None


def run_in(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run; empty if it is of a fit without the command, or of an older version."""
    run = checkpoint.get(RUN_KEY)
    return run if isinstance(run, dict) else {}


def run_and_step(path: Path) -> tuple[str | None, int]:
    """The identity of the run that wrote a checkpoint, None if it has none or is not a checkpoint; and its step."""
    content = peek(path)
    return (None, -1) if content is None else (run_in(content).get("id"), content["global_step"])


def refuse_malformed(checkpoint: dict[str, Any]) -> None:
    """Raises a UserError if something is not a checkpoint of a growable module, or parts have wrong types."""
    ours, arguments = checkpoint.get(CHECKPOINT_KEY), checkpoint.get("hyper_parameters")
    if not isinstance(ours, dict) or not isinstance(arguments, dict):
        raise UserError(_FOREIGN)
    sizes = {key: arguments.get(key) for key in ("width", "layers")}
    for key, value in {**dict.fromkeys(_FORMS), **ours, **checkpoint, **sizes}.items():
        kinds = _FORMS.get(key)
        if kinds is not None and value is not None and not isinstance(value, kinds):
            raise _damaged(key, value, " or ".join(kind.__name__ for kind in kinds))
    for key in ("global_step", "epoch"):
        if key in checkpoint:
            refuse_unless_whole(f"this checkpoint is damaged: {key}", checkpoint[key], 0)
    for key in ("state_dict", "current_model_state"):
        for name, value in (checkpoint.get(key) or {}).items():
            if not isinstance(name, str) or (name.startswith("net.") and not _is_plain(value)):
                raise _damaged(f"{key}[{name!r}]", value, "a dense tensor")


_FORMS: dict[Any, tuple[type, ...]] = {
    **dict.fromkeys(("state_dict", "current_model_state", "mixed_widths", "callbacks", "loops"), (dict,)),
    **dict.fromkeys(("optimizer_states", "optimizer_names", "optimizer_classes", "lr_schedulers"), (list,)),
    **dict.fromkeys(("width", "layers"), (int, list, tuple)),
}
"""What parts of a checkpoint are, if they are there."""


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_quantized)


def refuse_malformed_optimizers(checkpoint: dict[str, Any]) -> None:
    """Raises a UserError if optimizer or schedule states of a checkpoint are not what torch's state_dict returns."""
    ours, states = checkpoint[CHECKPOINT_KEY], checkpoint.get("optimizer_states", [])
    names, classes = ours.get("optimizer_names", []), ours.get("optimizer_classes", [])
    if states and not len(states) == len(names) == len(classes):
        raise _damaged("optimizer_classes", classes, f"the classes and the parameter names of {len(states)} optimizers")
    with interpreting("this checkpoint is damaged: its optimizer state"):
        for state, parameters in zip(states, names, strict=False):
            indices = [index for group in state["param_groups"] for index in group["params"]]
            if sorted(indices) != list(range(len(parameters))):
                raise _damaged("params of param_groups", indices, f"each of 0 to {len(parameters) - 1} once")
            entries = state["state"]
            if not all(key in indices and isinstance(entry, dict) for key, entry in entries.items()):
                raise _damaged("the optimizer state", entries, "a dict for each of the numbers in param_groups")
            for group in state["param_groups"]:
                for key in ("lr", "eps", "weight_decay", "momentum", "betas"):
                    value = group["lr"] if key == "lr" else group.get(key, 0.0)
                    levels = value if isinstance(value, tuple | list) else [value]
                    for level in (level for level in levels if level is not None):
                        refuse_unless_level(f"this checkpoint is damaged: {key} of param_groups", level)


def _damaged(key: str, value: Any, wanted: str) -> UserError:
    return UserError(f"this checkpoint is damaged: {key} is {shown(value)}, wanted {wanted}; use another checkpoint")


def refuse_other_size(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    ours, theirs = size_of(module), checkpoint_size(checkpoint, type(module).__name__)
    assert ours is not None
    for key, here, there in zip(Size._fields, ours, theirs, strict=True):
        if here != there:
            raise UserError(f"its {key} is {there}, but model.{key} is {here}; set model.{key}: {there}")


def checkpoint_size(checkpoint: dict[str, Any], module: str) -> Size:
    """The size a checkpoint was saved at; raises a UserError if it is of a module of another class."""
    refuse_malformed(checkpoint)
    if "width" not in checkpoint["hyper_parameters"]:
        raise UserError(_FOREIGN)
    # the module that defines it may go by another name: __main__
    name = str(checkpoint[CHECKPOINT_KEY].get("class_path")).rpartition(".")[2]
    if name != module:
        raise UserError(f"this checkpoint is of a {name}, the configured model is a {module}")
    arguments = checkpoint["hyper_parameters"]
    return Size(arguments["width"], arguments.get("layers"))


def refuse_other_architecture(
    net: nn.Module, arguments: Mapping[str, Any], checkpoint: dict[str, Any], prefix: str = "net."
) -> None:
    """Raises a UserError, naming arguments that differ, if a network of its width does not fit the checkpoint."""
    ours = {f"{prefix}{name}": tensor for name, tensor in net.state_dict().items()}
    # a sharded checkpoint has loaded its weights before
    theirs = {name: tensor for name, tensor in checkpoint.get("state_dict", ours).items() if name.startswith(prefix)}
    odd = sorted(ours.keys() ^ theirs.keys()) or [name for name in ours if ours[name].shape != theirs[name].shape]
    refuse_other_kinds(ours, theirs)
    saved, arguments = _by_key(checkpoint["hyper_parameters"]), _by_key(arguments)
    differing = {key: value for key, value in arguments.items() if key not in _FREE and saved.get(key, value) != value}
    if odd or not differing.keys().isdisjoint(("base_width", "base_layers")):
        pairs = [f"model.{key} is {saved[key]} there and {value} here" for key, value in differing.items()]
        raise UserError(f"the checkpoint is of another architecture: {'; '.join(pairs) or f'it differs in {odd[:4]}'}")


def refuse_other_kinds(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raises a UserError where copying a checkpoint's tensors would truncate fractions, or drop imaginary parts."""
    for name in ours.keys() & theirs.keys():
        here, there = _kind(ours[name]), _kind(theirs[name])
        if here != there:
            raise UserError(f"the checkpoint has {there} in {name}, and the network {here}; use another checkpoint")


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex numbers"
    return "fractions" if tensor.is_floating_point() else "whole numbers"


def _by_key(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A model's arguments with those inside of mappings, by their keys in a configuration."""
    answer: dict[str, Any] = {}
    for key, value in arguments.items():
        if isinstance(value, Mapping) and value:
            answer |= _by_key(value, f"{prefix}{key}.")
        else:
            answer[f"{prefix}{key}"] = value
    return answer


def non_finite_in(checkpoint: dict[str, Any], parameters: Iterable[str] = ()) -> str | None:
    """The name of a weight or an optimizer state in a checkpoint that has NaN or infinite entries, or None.

    Infinities count only in `parameters`, and in what the optimizers train: a mask among the buffers may hold them.
    """
    refuse_malformed_optimizers(checkpoint)
    ours = checkpoint[CHECKPOINT_KEY]
    trained = set(parameters).union(*ours["optimizer_names"])
    weights = [(name, value) for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)]
    bad = first_non_finite((name, value) for name, value in weights if name in trained)
    bad = bad or first_non_finite(
        ((name, value) for name, value in weights if name not in trained), infinite_allowed=True
    )
    if bad is not None:
        return repr(bad)
    for names, saved in zip(ours["optimizer_names"], checkpoint.get("optimizer_states") or [], strict=False):
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        name_of = dict(zip(indices, names, strict=True))
        states = [
            (f"{key!r} of {name_of.get(index, index)!r}", value)
            for index, state in saved["state"].items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        bad = first_non_finite(states)
        if bad is not None:
            return f"optimizer state {bad}"
    return None


@torch.no_grad()
def load_weights(net: nn.Module, checkpoint: dict[str, Any], prefix: str = "net.") -> None:
    """Writes a checkpoint's weights and buffers into a network, sharded or not, or into a module without the prefix."""
    for name, tensor in net.state_dict().items():
        with whole(tensor) as target:
            target.copy_(checkpoint["state_dict"][f"{prefix}{name}"])


def start_from(path: str | Path, module: LightningModule, net: nn.Module) -> dict[str, Any]:
    """Writes the weights of a checkpoint of the same module and size into its network; returns the checkpoint."""
    checkpoint = load_checkpoint(path)
    refuse_other_size(module, checkpoint)
    refuse_other_architecture(net, module.hparams, checkpoint)
    bad = non_finite_in(checkpoint, (name for name, _ in module.named_parameters()))
    if bad is not None:
        raise UserError(f"it has NaN or infinite entries in {bad}; use an earlier checkpoint")
    load_weights(net, checkpoint)
    restore_mixed_widths(net, checkpoint[CHECKPOINT_KEY]["mixed_widths"])
    return checkpoint


def load_optimizer_state(module: nn.Module, optimizers: list[Optimizer], checkpoint: dict[str, Any]) -> None:
    """Gives optimizers a checkpoint's state, if any, by parameter name: other settings may split groups otherwise."""
    if not checkpoint.get("optimizer_states"):
        return
    ours = checkpoint[CHECKPOINT_KEY]
    classes = [class_path(optimizer) for optimizer in optimizers]
    if classes != ours["optimizer_classes"]:
        raise UserError(
            f"it has the state of {', '.join(ours['optimizer_classes'])}, but model.optimizer makes "
            f"{', '.join(classes)}; take the same, or leave the state out: python -m mupscale upscale --no-optimizer"
        )
    saved_rows = zip(optimizers, ours["optimizer_names"], checkpoint["optimizer_states"], strict=True)
    for optimizer, names, saved in saved_rows:
        saved_indices = [index for group in saved["param_groups"] for index in group["params"]]
        index_of = dict(zip(names, saved_indices, strict=True))
        state = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, (name, parameter) in enumerate(zip(optimizer_names(module, optimizer), parameters, strict=True)):
            moved = saved["state"].get(index_of.get(name), {})
            state["state"][index] = {key: _sharded_like(parameter, value) for key, value in moved.items()}
        optimizer.load_state_dict(state)


def load_hyperparameters(optimizers: list[Optimizer], checkpoint: dict[str, Any]) -> None:
    """Gives the groups of optimizers the hyperparameters of a checkpoint of the same run."""
    for optimizer, saved in zip(optimizers, checkpoint.get("optimizer_states", []), strict=True):
        for group, then in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in then.items() if key not in ("params", "param_names")})


def class_path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def optimizer_names(module: nn.Module, optimizer: Optimizer, prefix: str = "") -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state_dict counts them."""
    names = {id(parameter): f"{prefix}{name}" for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def mixed_widths(net: nn.Module) -> dict[str, dict[str, Any]]:
    """The records of parameters that one rate does not train (`widening/records.py`), as primitives."""
    return {name: record.as_primitives() for name, record in records_of(net).items() if record.changes_steps}


def restore_mixed_widths(net: nn.Module, saved: dict[str, dict[str, Any]]) -> None:
    if saved:
        store_records(net, Records(True, records_of(net) | {name: record_of(values) for name, values in saved.items()}))


def _sharded_like(parameter: Tensor, value: Any) -> Any:
    if not (is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape):
        return value
    answer = torch.empty_like(parameter, dtype=value.dtype)
    with whole(answer) as target:
        target.copy_(value)
    return answer
