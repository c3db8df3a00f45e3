"""The optimizers of a run after a growth: the same objects, with groups split and rescaled, and grown state."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mupscale.methods.grow import UpscaleReport
from mupscale.schedules import spread_schedule_
from mupscale.widening.hints import some_names
from mupscale.widening.records import names_by_id
from mupscale.widening.state import OptimizerTransfer, StateSource

Groups = list[dict[str, Any]]


def continue_optimizers_(
    optimizers: Sequence[Optimizer],
    schedules: Sequence[Any],
    narrow: nn.Module,
    wide: nn.Module,
    report: UpscaleReport,
    lr: float | None = None,
) -> list[tuple[list[StateSource], str]]:
    """Gives optimizers, and their schedules, the groups and the state of a growth.

    Returns, for each, where its groups come from, and a line on how they were split.
    """
    grown = report.optimizer if isinstance(report.optimizer, list) else [report.optimizer]
    answer, names = [], names_by_id(wide)
    for optimizer, continued in zip(optimizers, grown, strict=True):
        assert continued is not None
        source_of = OptimizerTransfer(report.plan, narrow, optimizer, wide, report.method.rates).sources()
        before, groups = list(optimizer.param_groups), continued.param_groups
        sources = [source_of[id(group["params"][0])] for group in groups]
        if lr is not None:
            sources = _rescale_(optimizer, groups, sources, lr)
        parts = [_change(before[each.group], group, each, names) for group, each in zip(groups, sources, strict=True)]
        answer.append((sources, f"{type(optimizer).__name__} after the growth: {'; '.join(parts)}"))
        regroup_(optimizer, schedules, groups, sources)
        optimizer.state.clear()
        optimizer.state.update(continued.state)
    return answer


def _change(before: dict[str, Any], group: dict[str, Any], source: StateSource, names: dict[int, str]) -> str:
    """How the settings of a group have changed, by its name or those of its parameters."""
    factors = {"lr": source.factor}
    for key, word in (("weight_decay", "decay"), ("eps", "eps")):
        if before.get(key):
            factors[word] = float(group[key]) / float(before[key])
    changes = [f"{each:.4g} × {word}" for word, each in factors.items() if not math.isclose(each, 1, rel_tol=1e-6)]
    name = group.get("name") or some_names(names[id(parameter)] for parameter in group["params"])
    return f"{name}: {', '.join(changes) or 'as before'}"


def regroup_(optimizer: Optimizer, schedules: Sequence[Any], groups: Groups, sources: Sequence[StateSource]) -> None:
    """Gives an optimizer other groups, and its schedules the rates of these."""
    for scheduler in schedules:
        if scheduler.optimizer is optimizer:
            spread_schedule_(scheduler, sources)
    optimizer.param_groups[:] = groups


def _rescale_(optimizer: Optimizer, groups: Groups, sources: list[StateSource], lr: float) -> list[StateSource]:
    ratio = lr / float(optimizer.defaults["lr"])
    optimizer.defaults["lr"] = lr
    for group in groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if key in group:
                group[key] = group[key] * ratio
    return [StateSource(source.group, source.factor * ratio) for source in sources]
