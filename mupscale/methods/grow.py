"""The paper's meta-algorithm over (model, optimizer): `grow` does what a plan says, and `grow_tensors` writes it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError, refuse_unless_whole, shown
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.noise import (
    NO_NOISE,
    Constants,
    Noise,
    NoiseOrAuto,
    SameNoise,
    add_noise_,
    may_overflow,
    noise_constant,
    save_constants,
)
from mupscale.methods.tensors import grow_tensors, is_noisy, read_from
from mupscale.sharding import gathered, own_part, whole
from mupscale.text_tables import notes_by_layer
from mupscale.widening import write
from mupscale.widening.growth import Growth
from mupscale.widening.hints import Hints
from mupscale.widening.layers import at_depth
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import OptimizerTransfer

Optimizers = Optimizer | Sequence[Optimizer] | None

HOW_TO_CHECK = "pass call=lambda model: model(batch), and upscale compares outputs and gradients with the narrow model"


@dataclass(frozen=True)
class UpscaleReport:
    """The result of `upscale`: the new optimizer, the plan, and the noise that was added. `print` it.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> noise = mupscale.AdditiveNoise(0.1)
        >>> report = mupscale.upscale(narrow, wide, noise=noise, call=lambda model: model(torch.ones(1, 3)))
        >>> report.noise_text
        'noise on 2 of 4 parameters'
    """

    plan: Plan
    optimizer: Optimizer | list[Optimizer] | None
    """The optimizer, or the list of them, that continues the run on the wide model."""
    noise: Constants = field(repr=False)
    """The noise constant σ̄ of every parameter; 0 if it got no noise."""
    notes: tuple[str, ...]
    """Reasons, other than noise, why the wide run does not continue the narrow one exactly, and what was frozen in the
    wide model alone."""
    seconds: float
    wide: nn.Module = field(repr=False)
    """The wide model."""
    method: GrowthMethod = field(repr=False)
    """The growth method, which decides what rates, eps and weight decay are multiplied by."""
    centred: bool = False
    """Whether the noise was centred."""
    exact: bool | None = None
    """Whether the wide model, before noise, computes and trains as the narrow one; None if that was not checked."""
    check: str = f"not checked: {HOW_TO_CHECK}"
    """How that was checked, in words."""

    @property
    def new_parameters(self) -> tuple[str, ...]:
        """The names of the parameters of new layers; to train these alone, freeze all others."""
        return self.plan.new_parameters

    def save_noise(self, path: str | Path) -> None:
        """Writes the noise constants to a JSON file that `RecordedNoise` reads."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_constants(self.noise, path, self.centred)

    def same_noise(self) -> Noise:
        """The noise of this upscale for a copy such as an EMA average, wrapped or not, with the same seed."""
        return SameNoise(self.noise, self.centred)

    def __str__(self) -> str:
        before, after = self.plan.sizes
        lines = [f"grown {before:,} → {after:,} parameters in {self.seconds:.3f} s", self.noise_text, self.check]
        return "\n".join([*lines, *(f"note: {note}" for note in notes_by_layer(self.notes))])

    @property
    def noise_text(self) -> str:
        """What noise was added; without any, what that means for copies."""
        noisy = sum(bool(torch.as_tensor(constant).any()) for constant in self.noise.values())
        if noisy:
            return f"{'centred ' * self.centred}noise on {noisy} of {len(self.noise)} parameters"
        return NO_NOISE if self.method.leaves_copies_equal(self.plan) else "no noise"


@torch.no_grad()
def grow(
    narrow: nn.Module,
    wide: nn.Module,
    narrow_opt: Optimizers = None,
    wide_opt: Optimizers = None,
    *,
    hints: Hints | None = None,
    plan: Plan | None = None,
    noise: NoiseOrAuto = None,
    seed: int = 0,
    method: GrowthMethod | None = None,
    consume: bool = False,
    rebuild: write.Rebuild | None = None,
    before_noise: Callable[[], None] | None = None,
) -> UpscaleReport:
    """What `mupscale.upscale` does once the growth is checked, with the same arguments.

    `rebuild` builds the wide model again, on the CPU. It provides the buffers that are not saved, if `wide` is on the
    meta device. `wide` keeps its own value of any other buffer that is not saved. `before_noise` is called when all
    weights and buffers are written, and noise is not yet.
    """
    start = time.perf_counter()
    refuse_unless_whole("upscale: seed", seed, least=None)
    if method is None:
        method = Duplication()
    if not isinstance(method, GrowthMethod):
        raise UserError(f"method must be a growth method, such as Duplication() or Net2Net(); got {method!r}")
    plan = method.plan(narrow, wide, hints) if plan is None else plan
    shallow, narrow = narrow, at_depth(narrow, wide, plan.layers)
    _refuse_other_plan(plan, narrow, wide)
    write.refuse_other_rescale(plan, narrow, wide)
    method.check(plan)
    narrow_opts = as_list(narrow_opt)
    wide_opts = [None] * len(narrow_opts) if wide_opt is None else as_list(wide_opt)
    if len(wide_opts) != len(narrow_opts):
        raise UserError(
            f"there are {len(narrow_opts)} narrow optimizers and {len(wide_opts)} wide ones; give one for each, in the "
            "same order"
        )
    for before, given in zip(narrow_opts, wide_opts, strict=True):
        # made again once the weights are written, because it holds the narrow ones
        OptimizerTransfer(plan, shallow, before, wide, method.rates, method.state).check(given)
    noise, about_noise = method.choose_noise(noise, plan, narrow)
    write.refuse_unknown_buffers(plan, wide, rebuild)
    write.refuse_non_finite_model(plan, narrow, wide)
    _try_noise(plan, narrow, wide, method, noise, seed)
    write.refuse_held(wide, wide_opts)
    refuse_without_values(plan, wide)

    notes = [*plan.notes, *(write.notes_on_copied_buffers(plan, wide) if rebuild is None else ())]
    write.materialise_recurrent_(wide, narrow)
    notes += about_noise
    notes += write.carry_frozen_(narrow, wide)
    write.carry_modes_(narrow, wide)
    if consume and any(parameter.grad is not None for parameter in narrow.parameters()):
        notes.append(
            "consume=True frees the gradients of the narrow model: those of an accumulation window that is not "
            "complete are lost. Grow between two windows, after zero_grad()"
        )
    settings: dict[str, Any] = {"consume": consume, "adds_later": before_noise is not None}
    constants = _write_parameters_(plan, shallow, narrow, wide, method, noise, seed, **settings)
    method.edit_(plan, wide)
    write.set_own_buffers_(plan, narrow, wide, rebuild)
    buffers = dict(wide.named_buffers())
    grow_tensors(plan.buffers.values(), method, None, read_from(narrow), lambda entry, _: [(buffers[entry.name], None)])
    kept = {id(buffer) for buffer in wide.buffers()}
    for buffer in shallow.buffers() if consume else ():
        if id(buffer) not in kept:
            write.release_(buffer)
    if before_noise is not None:
        before_noise()
        if noise is not None:
            same = SameNoise(constants, noise.centred)
            for name, target in wide.named_parameters():
                if is_noisy(same, plan.parameters[name]):
                    add_noise_(target, plan.parameters[name], same, target, seed)
    write.remember_widths(plan, narrow, wide, method.scale, entrywise=method.hyperparameters == "table")
    optimizers: list[Optimizer] = []
    if narrow_opts and method.state != "carry":
        notes.append(f"the state of {'new copies' if method.state == 'reset_new_copies' else 'the optimizer'} is reset")
    for before, given in zip(narrow_opts, wide_opts, strict=True):
        continuation = OptimizerTransfer(plan, shallow, before, wide, method.rates, method.state)
        after = continuation.new_optimizer() if given is None else given
        notes += continuation.notes_on_unscaled(after)
        continuation.transfer(after, consume=consume, **method.state_settings())
        optimizers.append(after)
    answer = optimizers[0] if isinstance(narrow_opt, Optimizer) else optimizers if narrow_opt is not None else None
    centred = noise is not None and noise.centred
    return UpscaleReport(plan, answer, constants, tuple(notes), time.perf_counter() - start, wide, method, centred)


def _try_noise(
    plan: Plan, narrow: nn.Module, wide: nn.Module, method: GrowthMethod, noise: Noise | None, seed: int
) -> None:
    """Raises a UserError for noise that overflows, drawn weight by weight where its level or the dtype allow it."""
    sources, targets = dict(narrow.named_parameters()), dict(wide.named_parameters())
    level = 0.0 if noise is None else noise.level()

    def write(entry: Growth, by_rows: bool) -> Iterator[tuple[Tensor, None]]:
        source, target = sources[entry.name], targets[entry.name]
        device = source.device if target.is_meta else target.device
        yield torch.empty(entry.wide_shape, dtype=target.dtype, device=device), None

    risky = (e for e in plan.parameters.values() if is_noisy(noise, e) and may_overflow(level, targets[e.name].dtype))
    grow_tensors(risky, method, noise, read_from(narrow), write, seed)


def _write_parameters_(
    plan: Plan,
    shallow: nn.Module,
    narrow: nn.Module,
    wide: nn.Module,
    method: GrowthMethod,
    noise: Noise | None,
    seed: int,
    *,
    consume: bool,
    adds_later: bool,
) -> Constants:
    """Writes the parameters of a model and the gradients that wait on them; returns σ̄ of noise, also if added later."""
    sources, originals = dict(narrow.named_parameters()), dict(shallow.named_parameters())
    targets, constants = dict(wide.named_parameters()), Constants()
    to_come = Counter(entry.origin for entry in plan.parameters.values() if not entry.kept)

    def write_parameter(entry: Growth, by_rows: bool) -> Iterator[tuple[Tensor, slice | None]]:
        source, target, original = sources[entry.name], targets[entry.name], originals[entry.origin]
        assert isinstance(target, nn.Parameter)
        if target is original:  # both models have it, as a metric with a network in it
            return
        if target.is_meta:
            write.materialise_(target, source.device)
        with own_part(target, by_rows=by_rows) as (weight, rows):
            yield weight, rows
            if adds_later and noise is not None and is_noisy(noise, entry):  # the source may be freed
                constants[entry.name] = noise_constant(weight, entry, noise, gathered(source), seed)
        target.grad = None if consume else _carry_gradient(target, source, entry, method)
        to_come[entry.origin] -= 1
        if consume and source is not original:
            source.data = source.data.new_empty(0)  # the memory is that of the original
        if consume and not to_come[entry.origin]:
            write.release_(original)

    added = None if adds_later else noise
    return grow_tensors(plan.parameters.values(), method, added, read_from(narrow), write_parameter, seed) | constants


def _carry_gradient(target: Tensor, source: Tensor, entry: Growth, method: GrowthMethod) -> Tensor | None:
    """The gradient that waits on a narrow parameter, in an accumulation window, as that of the wide one."""
    waiting = source.grad
    if waiting is None or not target.requires_grad or entry.inserted in ("identity", "random"):
        return None
    gradient = torch.empty_like(target, memory_format=torch.preserve_format)
    with whole(gradient) as wide:
        method.widen_gradient_(wide, gathered(waiting.to_dense() if waiting.is_sparse else waiting), entry)
    return gradient.to_sparse(waiting.sparse_dim()) if waiting.is_sparse else gradient


def refuse_without_values(plan: Plan, wide: nn.Module) -> None:
    """Raises a UserError for random layers of a wide model on the meta device, which has no random values."""
    for name, target in wide.named_parameters():
        if plan.parameters[name].kept and target.is_meta:
            raise UserError(
                f"depth: {name!r} is in a random layer, which keeps the initial values of the deep model, and that is "
                "on the meta device. Build it on a device"
            )


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """One optimizer, several or none, as a list. Raises a UserError for anything else."""
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    if not isinstance(listed, list | tuple) or not all(isinstance(each, Optimizer) for each in listed):
        raise UserError(f"optimizers must be a torch.optim.Optimizer, or a list of them; got {shown(optimizers)}")
    return list(listed)


def _refuse_other_plan(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    for name, model in (("narrow", narrow), ("wide", wide)):
        planned = {key: getattr(entry, f"{name}_shape") for key, entry in plan.parameters.items()}
        if {key: tuple(parameter.shape) for key, parameter in model.named_parameters()} != planned:
            raise UserError(f"plan is one of other models: its parameters are not those of `{name}`. Make a new one")
