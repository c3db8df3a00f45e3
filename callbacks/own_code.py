"""What a module's own code does in a run, where a growth could not follow: rates set by hand, weights kept outside."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import updates_of
from mupscale.checks.recording import attributes_of, leaves_of
from mupscale.errors import UserError
from mupscale.models._lightning import OF_EVERY_MODULE
from mupscale.widening.layers import joined
from mupscale.widening.state import Source

TOLERANCE = 0.01
"""Of the ratio of two rates. One rate for all groups changes it by the factor of a growth."""

REMEDY = (
    "Multiply the rate of each group, group['lr'] *= factor, or let a schedule do it, such as LambdaLR: it is relative "
    "to the rate of each group"
)


class RateWatch:
    """Looks at the rates of an optimizer before each of its steps: a warning before the growth, an error after it."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], module: str) -> None:
        """`schedulers` are those of the optimizer; `module` is the name of what trains with it."""
        self._optimizer, self._schedulers, self._module = optimizer, schedulers, module
        self._last = _rates_of(optimizer)
        self._sources: list[Source] | None = None
        """For each group the one that it was before all growths, and the factor of its rate since then."""
        self._has_warned = False
        optimizer.register_step_pre_hook(self._look)

    def go_on(self, optimizer: Optimizer, sources: Sequence[Source]) -> None:
        """After a growth, if it is that of this optimizer: each group has a source among those before it."""
        if optimizer is not self._optimizer:
            return
        before = self._sources
        if before is not None:
            sources = [Source(before[each.group].group, before[each.group].factor * each.factor) for each in sources]
        self._sources = list(sources)

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        rates = _rates_of(optimizer)
        if self._sources is None:
            self._warn_of_own(rates, type(optimizer).__name__)
            self._last = rates
        elif len(rates) == len(self._sources):
            self._refuse_other_ratios(rates, self._sources, type(optimizer).__name__)

    def _warn_of_own(self, rates: list[float], optimizer: str) -> None:
        scheduled = [list(map(float, each.get_last_lr())) for each in self._schedulers if hasattr(each, "get_last_lr")]
        is_new = len(rates) != len(self._last)  # a group was added
        if self._has_warned or is_new or rates == self._last or rates in scheduled:
            return
        self._has_warned = True
        now, last = next(pair for pair in zip(rates, self._last, strict=True) if pair[0] != pair[1])
        rank_zero_warn(
            f"{self._module} sets the learning rate of {optimizer} by hand ({last:g} → {now:g}). "
            "After the growth its groups have different rates, and a run that gives all of them the same one is "
            f"stopped. {REMEDY}"
        )

    def _refuse_other_ratios(self, rates: list[float], sources: list[Source], optimizer: str) -> None:
        first: dict[int, tuple[float, float]] = {}
        for rate, source in zip(rates, sources, strict=True):
            known, factor = first.setdefault(source.group, (rate, source.factor))
            if not math.isclose(rate / source.factor, known / factor, rel_tol=TOLERANCE):
                raise UserError(
                    f"UpscaleCallback: since the growth, groups of {optimizer} have rates that differ by a factor of "
                    f"{source.factor / factor:g}, and {self._module} has set them to {known:g} and {rate:g}: training "
                    f"would not continue as before. {REMEDY}"
                )


def _rates_of(optimizer: Optimizer) -> list[float]:
    """The rate of each group; none on a GPU, where reading it would wait."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [] if any(isinstance(rate, Tensor) and rate.is_cuda for rate in rates) else list(map(float, rates))


class WeightsOutside:
    """Weights in objects that a module, or a part of it, has in attributes, but not as its own parts.

    They have the shapes of all parameters that grow in a part of the module. Of other modules only parameters count:
    statistics of a batch norm change without being updated. An object that stays as it is does no harm.
    """

    def __init__(self, module: LightningModule, growing: Collection[str]) -> None:
        """`growing` are the names of the parameters that grow."""
        self._step = module.trainer.global_step
        named = dict(module.named_parameters())
        of_parts: defaultdict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
        for name in growing:
            places = name.split(".")
            for depth in range(len(places)):
                of_parts[".".join(places[:depth])][tuple(named[name].shape)] += 1
        self._of_parts = [shapes for shapes in of_parts.values() if shapes.total() > 1]
        self._before: dict[tuple[str, str], list[tuple[int, int]]] | None = self._found(module)

    def refuse_updates(self, module: LightningModule) -> None:
        """Raises a UserError if a step has changed them. Called before each batch, it looks once, after a step."""
        if self._before is None or module.trainer.global_step == self._step:
            return
        before, self._before = self._before, None
        for (name, owner), tensors in self._found(module).items():
            if before.get((name, owner), tensors) != tensors:
                raise UserError(
                    f"UpscaleCallback: each step of {type(module).__name__} updates weights in the attribute {name!r} "
                    f"({owner}), where they do not grow. Make their network a part of the module, as an attribute of "
                    "its own or in a ModuleList; for an average of the weights, use Lightning's EMAWeightAveraging"
                )

    def _found(self, module: LightningModule) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """By attribute and class of the object: its tensors, each by its id, and how often they were updated."""
        known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        answer = {}
        for prefix, part in module.named_modules():
            for name, value in attributes_of(part).items():
                for leaf in () if name in OF_EVERY_MODULE else leaves_of(value):
                    tensors = [tensor for tensor in _tensors_in(leaf) if id(tensor) not in known]
                    shapes = Counter(tuple(tensor.shape) for tensor in tensors)
                    if any(wanted <= shapes for wanted in self._of_parts):
                        answer[joined(prefix, name), type(leaf).__name__] = [(id(x), updates_of(x)) for x in tensors]
        return answer


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The parameters of a module, or the tensors in attributes of another object, unless it is an optimizer."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif not isinstance(value, Tensor | Optimizer | type):  # a tensor by itself is compared by what depends on it
        inside = list(getattr(value, "__dict__", {}).values())
        yield from (leaf for leaf in leaves_of(inside) if isinstance(leaf, Tensor))
