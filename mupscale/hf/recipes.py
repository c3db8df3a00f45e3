"""Tensors made of runs of older ones: what `experts` and `vocabulary` have in common, in memory and in folders.

A recipe lists the runs of entries that a new tensor consists of, in the order of its memory. The same list writes the
tensor, moves its optimizer state, and streams it from one folder into another, a few entries at a time.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.widening import table
from mupscale.widening.optimizers import Group, OptimizerRule, Sized, rule_of
from mupscale.widening.state import settings_of, split_groups
from mupscale.widening.table import NOTHING, Scale


class CopyNoise(NamedTuple):
    """Noise on one of several copies, which cancels in their sum."""

    level: float
    """The size of the noise, in units of the standard deviation of what is copied."""
    key: str
    """The seed of the draw, which the copies of one original share."""
    copies: int
    number: int

    def added(self, values: Tensor) -> Tensor:
        exact = torch.promote_types(values.dtype, torch.float32)
        generator = torch.Generator().manual_seed(zlib.crc32(self.key.encode()))
        drawn = torch.randn((self.copies, values.numel()), generator=generator).to(values.device, exact)
        noise = drawn[self.number] - drawn.mean(0)
        return (values + noise * (self.level * values.to(exact).std())).to(values.dtype)


@dataclass(frozen=True)
class EntryRun:
    """Entries of a new tensor that follow each other: `count` stretches of `length` entries of an old one."""

    source: Any
    """The name of the old tensor, or where it is stored; None if the run has `values`."""
    length: int
    start: int = 0
    count: int = 1
    stride: int = 0
    """Entries from the beginning of one stretch to that of the next."""
    factor: float = 1.0
    noise: CopyNoise | None = None
    values: Tensor | None = None
    """The entries of each stretch, where they are no copies."""

    @property
    def size(self) -> int:
        return self.length * self.count

    def part(self, first: int, last: int) -> "EntryRun":
        """The entries from `first` to `last` of the run."""
        if (first, last) == (0, self.size):
            return self
        if self.noise or (self.count > 1 and (first % self.length or last % self.length)):
            raise UserError("a tensor of the folder ends within what is moved at once, so it cannot be streamed")
        if self.count == 1:
            values = None if self.values is None else self.values[first:last]
            return replace(self, start=self.start + first, length=last - first, values=values)
        start = self.start + first // self.length * self.stride
        return replace(self, start=start, count=(last - first) // self.length)

    def entries(self, read: Callable[["EntryRun"], Tensor]) -> Tensor:
        """The entries of the run, on one axis; `read` gives those of the old tensor."""
        if self.values is not None:
            return self.values.repeat(self.count)
        found = read(self)
        found = found if self.noise is None else self.noise.added(found)
        return found if self.factor == 1 else found * self.factor


def stretches(run: EntryRun, old: Tensor) -> Tensor:
    """The entries of a run in a flat tensor."""
    if run.count == 1:
        return old[run.start : run.start + run.length]
    return old[run.start :].unfold(0, run.length, run.stride)[: run.count].reshape(-1)


def pieces(runs: Iterable[EntryRun], most: int) -> Iterator[EntryRun]:
    """The same entries in runs of at most `most`, unless a stretch is longer, or noise needs a run at once."""
    for run in runs:
        step = run.size if run.noise else most if run.count == 1 else max(most // run.length, 1) * run.length
        for first in range(0, run.size, step):
            yield run.part(first, min(first + step, run.size))


Runs = Mapping[str, tuple[EntryRun, ...]]


def resolve(runs: Iterable[EntryRun], older: Runs) -> Iterator[EntryRun]:
    """Runs of tensors as runs of what these are made of in their turn."""
    for run in runs:
        if run.source is None:
            yield run
            continue
        first, last, at = run.start, run.start + (run.count - 1) * run.stride + run.length, 0
        for inner in older[run.source]:
            begin, end = max(first, at), min(last, at + inner.size)
            if begin < end and run.count == 1:
                part = inner.part(begin - at, end - at)
                yield replace(part, factor=part.factor * run.factor, noise=part.noise or run.noise)
            elif begin < end:
                if (begin, end) != (first, last) or inner.count > 1 or inner.values is not None:
                    raise UserError(f"{run.source!r} is stored in several parts, which its parameter does not have")
                yield replace(run, source=inner.source, start=inner.start + first - at)
            at += inner.size


@dataclass(frozen=True)
class Recipe:
    """How one parameter or saved buffer, and its optimizer state, is made."""

    origin: str
    """The parameter whose settings it gets."""
    runs: tuple[EntryRun, ...]
    scale: Scale = NOTHING
    squares: float | None = None
    """What state that holds squared gradients is multiplied by, where that is not the square of the gradient's."""
    is_new: bool = False
    """Whether its values are no copies, so that it has no state yet."""
    fresh: Callable[[Tensor, int], Tensor] | None = None
    """Makes the state of runs with values from the old state, by the power of the gradient in it; by default 0."""

    def state(self, old: Mapping[str, Tensor], power: int, target: Tensor) -> Tensor:
        """Writes the optimizer state that holds this power of the gradient."""
        runs = [replace(run, factor=1.0, noise=None) for run in self.runs]
        for index, run in enumerate(runs):
            if run.values is not None:
                made = torch.zeros_like(run.values) if self.fresh is None else self.fresh(old[self.origin], power)
                runs[index] = replace(run, values=made.reshape(-1))
        factor = self.squares if power == 2 and self.squares is not None else table.state(self.scale, power)
        return write_runs_(target, runs, old).mul_(factor)


Recipes = Mapping[str, Recipe]


def copy_of(name: str, tensor: Tensor) -> Recipe:
    """The recipe of a tensor that stays."""
    return Recipe(name, (EntryRun(name, tensor.numel()),))


@torch.no_grad()
def write_runs_(target: Tensor, runs: Iterable[EntryRun], old: Mapping[str, Tensor]) -> Tensor:
    """Writes a contiguous tensor, run by run."""
    flat, at = target.view(-1), 0
    for run in runs:
        flat[at : at + run.size] = run.entries(lambda run: stretches(run, old[run.source].reshape(-1)))
        at += run.size
    assert at == flat.numel()
    return target


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, and its buffers that are saved, each once."""
    saved = model.state_dict(keep_vars=True)
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in saved}}


def write(narrow: nn.Module, wide: nn.Module, recipes: Recipes) -> None:
    """Writes the parameters and saved buffers of the new model."""
    old = {**dict(narrow.named_parameters(remove_duplicate=False)), **dict(narrow.named_buffers())}
    for name, target in named_tensors(wide).items():
        write_runs_(target.detach(), recipes[name].runs, {key: value.detach() for key, value in old.items()})
        if isinstance(target, nn.Parameter):
            target.requires_grad_(old[recipes[name].origin].requires_grad)


def continued(narrow: nn.Module, wide: nn.Module, recipes: Recipes, optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class for the new model, with the settings and the state that its recipes say."""
    rule = rule_of(optimizer)
    names = {id(parameter): name for name, parameter in narrow.named_parameters()}
    sources = dict(narrow.named_parameters(remove_duplicate=False))
    targets = dict(wide.named_parameters())
    made: dict[str, list[str]] = {}
    for name in targets:
        made.setdefault(names[id(sources[recipes[name].origin])], []).append(name)
    groups: list[Group] = []
    for group in optimizer.param_groups:
        continuing = [targets[name] for each in group["params"] for name in made.get(names.get(id(each), ""), ())]
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": continuing})
    sized = {id(target): Sized(recipes[name].scale, *2 * (tuple(target.shape),)) for name, target in targets.items()}
    split = split_groups(groups, rule, lambda parameter: (parameter, sized[id(parameter)]))
    new = type(optimizer)([group for group in split if group["params"]], **settings_of(optimizer))
    new.state.clear()
    for name, target in targets.items():
        recipe = recipes[name]
        used = {recipe.origin, *(run.source for run in recipe.runs if run.source is not None)}
        states = {each: optimizer.state.get(sources[each], {}) for each in used}
        if all(states.values()) and not recipe.is_new:
            new.state[target] = _moved_state(name, target, recipe, rule, sources[recipe.origin], states)
    return new


def _moved_state(
    name: str, target: Tensor, recipe: Recipe, rule: OptimizerRule, old: Tensor, states: Mapping[str, Any]
) -> dict[str, Any]:
    answer = {}
    for key, value in states[recipe.origin].items():
        if isinstance(value, Tensor) and value.shape == old.shape and value.ndim:
            if key not in rule.state:
                raise UserError(f"the state {key!r} of {name!r} is not known; register_optimizer says what it holds")
            by_name = {each: state[key] for each, state in states.items()}
            answer[key] = recipe.state(by_name, rule.state[key], value.new_empty(target.shape))
        else:
            answer[key] = value.clone() if isinstance(value, Tensor) else value
    return answer
