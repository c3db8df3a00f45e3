"""LiGO: maps that a short run learns."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.errors import UserError, is_finite_number, refuse_unless_whole
from mupscale.methods.base import GrowthMethod, Loss
from mupscale.methods.by_groups import AxisGroups, UnitGroup, copies_of_units, unit_groups, with_biases
from mupscale.methods.tensors import grow_tensors, read_from
from mupscale.sharding import is_sharded
from mupscale.widening.growth import Axis, Growth, Piece, wide_length
from mupscale.widening.hints import Hints
from mupscale.widening.plan_text import Plan
from mupscale.widening.write import own_buffers

Maps = dict[str, dict[str, Tensor]]
"""The maps of each group: `out`, what new units produce, and `in`, how they are consumed; wide × narrow units."""

_JITTER = 0.1
"""How far `inn` starts from the equal split, relative to it; without it copies would stay equal for ever."""


class LiGO(GrowthMethod):
    """LiGO's learned maps (Wang et al. 2023): `fit` learns `out` and `inn` of each group of axes by gradient descent.

    `method = LiGO(); method.fit(narrow, wide, batches, loss); upscale(narrow, wide, optimizer, method=method)`. Inside
    a run `UpscaleCallback` fits it on batches of the run's data.

    The maps preserve the function at first; then Adam trains them for `steps` batches, which changes the function. The
    axes of one group (`groups`, or the model's `width_groups`) share their maps; all others are duplicated. Buffers,
    such as the running statistics of a batch norm, are duplicated too. As published, hyperparameters are unchanged and
    the optimizer state is reset; with `state="carry"` it moves as in duplication.
    """

    equal_copies = False
    needs_batches = True

    published_state = "reset"
    published_hyperparameters = "same"

    def __init__(
        self, steps: int = 100, lr: float = 0.02, seed: int = 0, groups: AxisGroups | None = None, **options: Any
    ) -> None:
        """
        Args:
            steps: The number of batches to fit on.
            lr: Adam's learning rate of the maps, times the number of units: the maps of a group of n units are learned
                at lr / n, because each new unit is a sum over all n. So a good value carries over to other widths.
            seed: The seed of the initial maps and of the fit, for example of dropout.
            groups: Axes that hold the same units, by any name: `{"hidden": {"0.weight": 0, "1.weight": 1}}`. By default
                the model's `width_groups`.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        refuse_unless_whole("LiGO: steps", steps)
        refuse_unless_whole("LiGO: seed", seed, least=None)
        if not is_finite_number(lr) or lr <= 0:
            raise UserError(f"LiGO: lr must be a finite number above 0, got {lr!r}")
        self.steps = steps
        self.lr = lr
        self.seed = seed
        self.groups = groups
        self.losses: list[float] = []
        """The losses of all steps of the last fit."""
        self._axes: dict[str, dict[int, tuple[UnitGroup, int]]] = {}
        """The group of each mapped axis, by parameter, and the length of a unit on it."""
        self._maps: Maps = {}

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = super().plan(narrow, wide, hints)
        unit_groups("LiGO", narrow, plan, self.groups)
        return plan

    def fit(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        hints: Hints | None = None,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Learns the maps, a step for each batch; `wide` lends its modules only: it may be on the meta device."""
        self.forget()
        plan = self.plan(narrow, wide, hints)
        sources = {name: parameter.detach() for name, parameter in narrow.named_parameters()}
        if any(is_sharded(source) for source in sources.values()):
            raise UserError("LiGO: its maps cannot be learned on sharded weights. Train on one device, or with DDP")
        groups = unit_groups("LiGO", narrow, plan, self.groups)
        for group in groups:
            for name, (axis, block) in with_biases(plan, group.axes).items():
                self._axes.setdefault(name, {})[axis] = group, block
        maps = self._first_maps(groups, sources)
        duplicated = {name: self._duplicated(source, plan.parameters[name]) for name, source in sources.items()}
        buffers = own_buffers(plan, narrow, wide)

        def new_buffer(entry: Growth, _: bool) -> list[tuple[Tensor, None]]:
            like = narrow.get_buffer(entry.name)
            buffers[entry.name] = like.new_empty(entry.wide_shape)
            return [(buffers[entry.name], None)]

        grow_tensors(plan.buffers.values(), self, None, read_from(narrow), new_buffer)
        dtypes = {name: parameter.dtype for name, parameter in wide.named_parameters()}
        model = Called(wide, loss)

        def loss_of(batch: Any) -> Tensor:
            tensors = {f"model.{name}": buffer for name, buffer in buffers.items()}
            for name, weight in duplicated.items():
                tensors[f"model.{name}"] = self._mapped(weight, plan.parameters[name], maps).to(dtypes[name])
            return torch.func.functional_call(model, tensors, (batch,))

        learned = [matrix.requires_grad_() for pair in maps.values() for matrix in pair.values()]
        rates = [{"params": list(maps[group.name].values()), "lr": self.lr / group.units} for group in groups]
        device = learned[0].device
        optimizer = torch.optim.Adam(rates)
        self.losses = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(self.seed)
            for batch in islice(_endless(batches), self.steps):
                value = loss_of(batch)
                for matrix, gradient in zip(learned, torch.autograd.grad(value, learned), strict=True):
                    matrix.grad = gradient if average is None else average(gradient)
                optimizer.step()
                self.losses.append(float(value.detach()))
        finite = [bool(torch.isfinite(matrix).all()) for matrix in learned]
        if not all(finite) or not all(map(math.isfinite, self.losses)):
            raise UserError(f"LiGO: the fit diverged at lr = {self.lr:g}. Give a lower lr")
        self._maps = {name: {side: matrix.detach() for side, matrix in pair.items()} for name, pair in maps.items()}

    def forget(self) -> None:
        self._maps, self._axes = {}, {}

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if not self._maps:
            raise UserError(
                "LiGO: its maps are not learned yet. Call method.fit(narrow, wide, batches, loss) first, or use "
                "UpscaleCallback, which does"
            )
        for name, axes in self._axes.items():
            entry = plan.parameters.get(name)
            for axis, (group, block) in axes.items():
                if entry is None or len(entry.layouts) <= axis or not _fits(entry, axis, group, block):
                    raise UserError("LiGO: its maps were learned for other models. Call method.fit again with these")

    def widen_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        if entry.name not in self._axes:
            super().widen_(target, source, entry)
        else:
            target.copy_(self._mapped(self._duplicated(source, entry), entry, self._maps))

    def _first_maps(self, groups: list[UnitGroup], sources: dict[str, Tensor]) -> Maps:
        """Maps that preserve the function: copies produce their unit, and are read in random shares that sum to it."""
        generator = torch.Generator().manual_seed(self.seed)
        answer = {}
        for group in groups:
            like = sources[next(iter(group.axes))]
            copies = torch.tensor(group.copies)
            out = torch.eye(group.units, dtype=torch.float64).repeat_interleave(copies, 0)
            unit = torch.arange(group.units).repeat_interleave(copies)
            rest = torch.randn(group.wide_units, group.units, generator=generator, dtype=torch.float64)
            mean = torch.zeros_like(rest[: group.units]).index_add_(0, unit, rest) / copies[:, None]
            rest = (rest - mean[unit]) / copies[unit, None] * (_JITTER / math.sqrt(group.units))
            dtype = torch.promote_types(like.dtype, torch.float32)
            answer[group.name] = {"out": out.to(like.device, dtype), "in": (out / copies + rest).to(like.device, dtype)}
        return answer

    def _duplicated(self, source: Tensor, entry: Growth) -> Tensor:
        """The weight in its unit, grown along the axes that have no maps."""
        mapped = self._axes.get(entry.name, {})
        sizes = enumerate(entry.narrow_shape)
        axes = tuple(Axis((Piece(n, n, 1),)) if axis in mapped else entry.axes[axis] for axis, n in sizes)
        target = torch.empty(
            [wide_length(axis.pieces) for axis in axes],
            dtype=torch.promote_types(source.dtype, torch.float32),
            device=source.device,
        )
        super().widen_(target, source, replace(entry, axes=axes, offset=0.0))
        return target

    def _mapped(self, weight: Tensor, entry: Growth, maps: Maps) -> Tensor:
        """The weight grown along the axes that have maps."""
        for axis, (group, block) in self._axes.get(entry.name, {}).items():
            side = entry.sides[axis]
            assert side is not None
            matrix = maps[group.name][side].to(weight)
            moved = weight.movedim(axis, 0)
            rest = moved.shape[1:]
            units = moved.reshape(-1, group.units, block, rest.numel())
            wide = torch.einsum("vu,subr->svbr", matrix, units)
            weight = wide.reshape(-1, *rest).movedim(0, axis)
        return weight + entry.shift if entry.shift else weight


class Called(nn.Module):
    """A function of a model as the call of a module, which `functional_call` can make with other tensors."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, batch: Any) -> Any:
        return self.function(self.model, batch)


def _fits(entry: Growth, axis: int, group: UnitGroup, block: int) -> bool:
    """Whether an axis has the units of a group, some times over, in blocks of this length."""
    layout = entry.layouts[axis]
    copies = copies_of_units(layout)
    return layout[0].block == block and copies == group.copies * (len(copies) // group.units)


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise UserError("LiGO: there are too few batches to learn from. Give a list of batches, or a data loader")
