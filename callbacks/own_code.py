"""What a module's own code does in a run, where a growth could not follow: settings by hand, weights kept outside."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.checks.recording import attributes_of
from mupscale.errors import UserError
from mupscale.models._lightning import OF_EVERY_MODULE
from mupscale.models.twin import held_in
from mupscale.sharding import is_sharded
from mupscale.widening.layers import joined
from mupscale.widening.state import StateSource

TOLERANCE = 0.01
"""Tolerance of the ratio of two rates. One rate for all groups changes it by the factor of a growth."""

REMEDY = (
    "Multiply that of each group, as in group['lr'] *= factor, or let a schedule do it, such as LambdaLR: it is "
    "relative to the rate of each group"
)


_WATCHED = {"lr": "learning rate", "weight_decay": "weight decay", "eps": "eps"}

Settings = list[dict[str, float]]
"""The settings of each group."""


class HandSetRates:
    """Looks at rates, decay and eps of an optimizer before steps: a warning before a growth, an error after it."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], module: str) -> None:
        """`schedulers` are those of the optimizer; `module` is the name of what trains with it."""
        self._optimizer, self._schedulers, self._module = optimizer, schedulers, module
        self._last = _settings_of(optimizer)
        self._groups: list[int] | None = None
        """The group that each group was before all growths."""
        self._factors: Settings = [dict.fromkeys(_WATCHED, 1.0) for _ in self._last]
        """The factors by which the settings of each group have been multiplied since then."""
        self._has_warned = self._is_paused = False
        optimizer.register_step_pre_hook(self._look)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Looks at no step meanwhile: those of a check are not of the run."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def go_on(self, optimizer: Optimizer, sources: Sequence[StateSource]) -> None:
        """Follows a growth of this optimizer: `sources` are the groups that the new ones come from."""
        if optimizer is not self._optimizer:
            return
        factors, groups = self._factors, self._groups or range(len(self._last))
        self._groups = [groups[each.group] for each in sources]
        self._factors = []
        for each, now in zip(sources, _settings_of(optimizer), strict=False):
            last = self._last[each.group]
            changes = {key: now[key] / last[key] for key in now.keys() & last.keys() if last[key]} | {"lr": each.factor}
            self._factors.append({key: factors[each.group].get(key, 1.0) * change for key, change in changes.items()})

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_paused:
            return
        settings, kind = _settings_of(optimizer), type(optimizer).__name__
        if self._groups is not None and len(settings) > len(self._groups):
            raise UserError(
                f"UpscaleCallback: {self._module} adds a group to {kind} after the growth, with a rate that does not "
                "follow it. Add it before, with lr = 0 or frozen parameters until they are to train"
            )
        if self._groups is None:
            self._warn_of_own(settings, kind)
        elif len(settings) == len(self._groups):
            for key in _WATCHED:
                self._refuse_other_ratios(key, settings, self._groups, kind)
        if self._groups is None and len(settings) != len(self._last):  # a group was added
            self._factors = [dict.fromkeys(_WATCHED, 1.0) for _ in settings]
        self._last = settings

    def _warn_of_own(self, settings: Settings, optimizer: str) -> None:
        scheduled = [list(map(float, each.get_last_lr())) for each in self._schedulers if hasattr(each, "get_last_lr")]
        if self._has_warned or len(settings) != len(self._last):
            return
        by_hand = {*_WATCHED} - ({"lr"} if [group.get("lr") for group in settings] in scheduled else set())
        for now, last in zip(settings, self._last, strict=True):
            for key in now.keys() & last.keys() & by_hand:
                if now[key] != last[key] and not self._has_warned:
                    self._has_warned = True
                    rank_zero_warn(
                        f"{self._module} sets the {_WATCHED[key]} of {optimizer} by hand ({last[key]:g} → "
                        f"{now[key]:g}). After the growth its groups have different ones, and a run that gives all of "
                        f"them the same is stopped. {REMEDY}"
                    )

    def _refuse_other_ratios(self, key: str, settings: Settings, groups: list[int], optimizer: str) -> None:
        first: dict[int, tuple[float, float]] = {}
        for each, factors, group in zip(settings, self._factors, groups, strict=True):
            value, factor = each.get(key), factors.get(key)
            if not value or not factor:
                continue
            known, known_factor = first.setdefault(group, (value, factor))
            if not math.isclose(value / factor, known / known_factor, rel_tol=TOLERANCE):
                raise UserError(
                    f"UpscaleCallback: since the growth, the {_WATCHED[key]} of groups of {optimizer} differs by a "
                    f"factor of {factor / known_factor:g}, and {self._module} has set it to {known:g} and {value:g}: "
                    f"training would not continue as before. {REMEDY}"
                )


def _settings_of(optimizer: Optimizer) -> Settings:
    """The numbers of each group; none of tensors on a GPU, where reading them would wait."""

    def is_read(value: Any) -> bool:
        return not value.is_cuda if isinstance(value, Tensor) else isinstance(value, float | int)

    return [{key: float(group[key]) for key in _WATCHED if is_read(group.get(key))} for group in optimizer.param_groups]


def refuse_weights_outside(module: LightningModule, growing: Collection[str], callbacks: Iterable[Callback]) -> None:
    """Raises a UserError for tensors of the shapes of growing weights that are not weights of the module.

    They are in its attributes, or in those of a callback: an average by hand, a target network in a list, anchors. They
    have the shapes of all parameters that grow in a part of the module, at least two of them. `growing` are the names
    of the parameters that grow.
    """
    named = dict(module.named_parameters())
    of_parts: defaultdict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for name in named.keys() & growing:
        places = name.split(".")
        for depth in range(len(places)):
            of_parts[".".join(places[:depth])][tuple(named[name].shape)] += 1
    wanted = [shapes for shapes in of_parts.values() if shapes.total() > 1]
    owners: list[tuple[str, Any]] = [(f"the attribute {place!r}", value) for place, value in _attributes(module)]
    for callback in callbacks:
        if not is_of_a_library(callback):
            name = type(callback).__name__
            owners += [(f"the attribute {key!r} of the callback {name}", each) for key, each in vars(callback).items()]
    for place, value in owners:
        shapes = Counter(shapes_held(module, value))
        if any(each <= shapes for each in wanted):
            raise UserError(
                f"UpscaleCallback: {type(module).__name__} trains with weights in {place} ({_kind_of(value)}), where "
                f"they do not grow. {INSIDE}"
            )


INSIDE = (
    "Make their network a part of the module, as an attribute of its own or in a ModuleList, and keep tensors in "
    "buffers (self.register_buffer): these grow. For an average of the weights, use Lightning's EMAWeightAveraging"
)


_OF_A_STEP = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
"""Hooks of callbacks that a training step calls. The check calls none, because they may write files."""


def watch_callbacks(callbacks: Iterable[Callback], module: LightningModule, step: int) -> None:
    """Lets a user's callback that changes weights or gradients in the step after this one raise a UserError."""
    for callback in callbacks:
        for hook in _OF_A_STEP if not is_of_a_library(callback) else ():
            if getattr(type(callback), hook) is not getattr(Callback, hook):
                setattr(callback, hook, partial(_call_and_compare, callback, hook, module, step))


def _call_and_compare(
    callback: Callback, hook: str, module: LightningModule, step: int, trainer: Trainer, *args: Any, **kwargs: Any
) -> Any:
    has_stepped = trainer.global_step > step
    watching = vars(callback).pop(hook)
    sums = _sums(module, with_gradients=hook in ("on_after_backward", "on_before_optimizer_step"))
    answer = getattr(callback, hook)(trainer, *args, **kwargs)
    if sums != _sums(module, with_gradients=hook in ("on_after_backward", "on_before_optimizer_step")):
        raise UserError(
            f"UpscaleCallback: {type(callback).__name__}.{hook} changes weights or gradients. The check of the growth "
            f"does not run callbacks, so it cannot tell whether this follows the growth. Do it in the hook of "
            f"{type(module).__name__} of this name, which the check runs"
        )
    if not has_stepped:
        setattr(callback, hook, watching)
    return answer


def _sums(module: LightningModule, *, with_gradients: bool) -> list[float]:
    """A number of each parameter, and of its gradient, that another value of it changes."""
    tensors = [x for p in module.parameters() for x in (p, p.grad if with_gradients else None) if x is not None]
    return [float(x.detach().abs().sum(dtype=torch.float64).nan_to_num()) for x in tensors if not is_sharded(x)]


def shapes_held(module: nn.Module, value: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors that an attribute holds at any depth, but for the module's own."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    known |= {id(part) for part in module.modules()}
    for each in held_in(value, known):  # statistics of a batch norm change without being updated
        for tensor in [each] if isinstance(each, Tensor) else each.parameters():
            if not tensor.is_meta:
                yield tuple(tensor.shape)


def attributes_with(module: nn.Module, lengths: Collection[int]) -> list[str]:
    """The attributes of a module that hold tensors with an axis of one of these lengths."""
    held = {place: shapes_held(module, value) for place, value in _attributes(module)}
    return [place for place, shapes in held.items() if any(n in lengths for shape in shapes for n in shape)]


def is_of_a_library(callback: Callback) -> bool:
    """Whether a callback is one of Lightning or of mupscale."""
    return type(callback).__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "mupscale")


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules():
        for name, value in attributes_of(part).items():
            if name not in OF_EVERY_MODULE:
                yield joined(prefix, name), value


def _kind_of(value: Any) -> str:
    """The class of a value or, of a container, that of what it holds."""
    items = list(value.values()) if isinstance(value, dict) else value
    if isinstance(items, list | tuple) and items:
        return f"a {type(value).__name__} of {type(items[0]).__name__}"
    return type(value).__name__
