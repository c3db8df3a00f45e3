"""Symmetry-breaking noise (Step 2 of the paper's meta-algorithm), and its signal-normalised variant.

Every noisy entry gets N(0, (σ̄ · scale)²) with the muP initialisation scale of its role at the wide width: 1 with one
width axis, N_in^-1/2 for a matrix, N_in counting the summed width axis only (input channels, not channels × kernel). It
is added after the widening rescale. σ̄ is what transfers between widths: one number, or one per weight (per kernel
position of a convolution).

Which parameters get noise is `is_noisy`: weights and embeddings, but no biases, no gains (norms, PReLU, LayerScale),
nothing without a width axis and no readout that is initialised at zero; `where={"pattern": True or False}` overrides it
by name.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mupscale.arguments import refuse_unless_level, shown
from mupscale.data_files import json_of
from mupscale.errors import UserError
from mupscale.widening.plan import Plan, TensorPlan
from mupscale.widening.roles import matches
from mupscale.widening.spectral import spectral_norms
from mupscale.widening.survey import some_names

Constants = dict[str, float | list[Any]]
"""σ̄ of every parameter: 0 where it gets no noise; nested lists where each kernel position has its own."""


class Noise(ABC):
    """How strong the noise on each parameter is."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raises UserError where this noise cannot be added under `plan`; runs before anything is written."""

    def check_level(self) -> None:  # noqa: B027  noise without a level has nothing to check
        """Raises UserError where the level of this noise makes no sense, whatever the model."""

    def level(self) -> float:
        """The largest constant it was given; infinite, where it is not known without drawing the noise."""
        return math.inf

    @abstractmethod
    def applies(self, entry: TensorPlan) -> bool:
        """Whether this parameter gets noise."""

    @abstractmethod
    def constant(self, entry: TensorPlan, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor | float:
        """σ̄ of one parameter, or of each position, from its narrow and widened values and the draw Δ at σ̄ = 1."""


class AdditiveNoise(Noise):
    """One σ̄ for all weights: `std`."""

    def __init__(self, std: float, where: Mapping[str, bool] | None = None) -> None:
        self.std = std
        self.where = where

    def check_level(self) -> None:
        _check_level("AdditiveNoise: std", self.std)

    def level(self) -> float:
        return self.std

    def check(self, plan: Plan) -> None:
        self.check_level()
        _check_patterns(plan, self.where)

    def applies(self, entry: TensorPlan) -> bool:
        return is_noisy(entry, self.where)

    def constant(self, entry: TensorPlan, narrow: Tensor, widened: Tensor, delta: Tensor) -> float:
        return self.std


class SignalNoise(Noise):
    """σ̄_W = t · ‖W̃‖ / ‖Δ‖ in spectral norms: at t = 1 the noise is as strong as the signal, layer by layer.

    Each kernel position of a convolution is a matrix of its own. t itself does not transfer between widths; the
    constants it yields do: save them with `report.save_noise(path)` and apply them at the target width with
    `RecordedNoise(path)`.
    """

    def __init__(self, t: float, where: Mapping[str, bool] | None = None) -> None:
        self.t = t
        self.where = where

    def check_level(self) -> None:
        _check_level("SignalNoise: t", self.t)

    def level(self) -> float:
        return self.t

    def check(self, plan: Plan) -> None:
        self.check_level()
        _check_patterns(plan, self.where)

    def applies(self, entry: TensorPlan) -> bool:
        return is_noisy(entry, self.where)

    def constant(self, entry: TensorPlan, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor:
        # of unlike pieces the norm does not follow from the narrow one
        signal = spectral_norms(_matrices(widened, entry)) if entry.mixed else widened_norms(entry, narrow)
        ratio = self.t * signal / spectral_norms(_matrices(delta, entry)).to(signal.device)
        return ratio.reshape(_positions(entry))


class RecordedNoise(Noise):
    """The per-weight constants σ̄_W that an earlier upscale, at a small width, saved to `path`."""

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise UserError(f"RecordedNoise: path must name a file that report.save_noise wrote, got {shown(path)}")
        self.path = Path(path)
        try:
            record = json_of(self.path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"RecordedNoise: {self.path} cannot be read as recorded noise ({error})") from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise UserError(f"RecordedNoise: {self.path} is not a file written by report.save_noise")
        constants = record.get("constants")
        if not isinstance(constants, dict) or not all(_is_numbers(value) for value in constants.values()):
            raise UserError(f"RecordedNoise: {self.path} is damaged: its constants are not numbers by parameter name")
        self.constants: Constants = constants

    def level(self) -> float:
        constants = [torch.as_tensor(constant, dtype=torch.float64).flatten() for constant in self.constants.values()]
        return max((float(constant.max()) for constant in constants if constant.numel()), default=0.0)

    def check(self, plan: Plan) -> None:
        missing, extra = plan.parameters.keys() - self.constants.keys(), self.constants.keys() - plan.parameters.keys()
        if missing or extra:
            raise UserError(
                f"RecordedNoise: {self.path} is of another architecture: it lacks {sorted(missing)[:4] or 'nothing'}, "
                f"and has {sorted(extra)[:4] or 'nothing'} beyond this model"
            )
        for name, entry in plan.parameters.items():
            constant = torch.as_tensor(self.constants[name])
            wanted = _positions(entry)
            if constant.ndim and tuple(constant.shape) != wanted:
                raise UserError(
                    f"RecordedNoise: {self.path} has constants of shape {tuple(constant.shape)} for {name!r}, which "
                    f"has {wanted}"
                )
            if not bool(torch.isfinite(constant).all()) or bool((constant < 0).any()):
                raise UserError(f"RecordedNoise: {self.path} has a constant for {name!r} that is no standard deviation")

    def applies(self, entry: TensorPlan) -> bool:
        return bool(torch.as_tensor(self.constants[entry.name]).any())

    def constant(self, entry: TensorPlan, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor | float:
        value = self.constants[entry.name]
        return torch.tensor(value, dtype=torch.float64)


class SameNoise(RecordedNoise):
    """The noise of a report, without the way over a file."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants

    def check(self, plan: Plan) -> None:
        pass


_FORMAT = "mupscale noise constants, version 1"


def _is_numbers(value: object) -> bool:
    """A number, or equally long rows of them."""
    try:
        torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def save_constants(constants: Constants, path: str | Path) -> None:
    if not isinstance(path, str | Path):
        raise UserError(f"save_noise: path must name a file to write, got {shown(path)}")
    try:
        Path(path).write_text(json.dumps({"format": _FORMAT, "constants": constants}, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"save_noise: {path} cannot be written ({error.strerror}); name another file") from error


def is_noisy(entry: TensorPlan, where: Mapping[str, bool] | None = None) -> bool:
    """The rule of which parameters get noise, and its override; the last matching pattern decides."""
    answer = entry.kind == "weight" and entry.role != "scalar" and not entry.zero_initialised
    for pattern, wanted in (where or {}).items():
        if any(matches(name, pattern) for name in entry.names):
            answer = wanted
    return answer


def init_scale(entry: TensorPlan) -> float:
    """The muP initialisation scale of the role: N_in^-1/2 with two width axes, 1 with one."""
    return entry.fan_in**-0.5 if "out" in entry.sides and "in" in entry.sides else 1.0


def may_overflow(level: float, dtype: torch.dtype) -> bool:
    """Whether noise of a level could leave the range of `dtype`: in float16 always, else only at absurd levels."""
    return (dtype.is_floating_point or dtype.is_complex) and (torch.finfo(dtype).max < 1e6 or level > 1e30)


def add_noise_(target: Tensor, entry: TensorPlan, noise: Noise, narrow: Tensor, seed: int) -> float | list[Any]:
    """Adds `noise` to the widened `target` in place; returns σ̄, ready to be saved.

    The draw depends on seed, parameter name and device type alone, so every rank, and every resumed run, gets the same.
    """
    if not noise.applies(entry):
        return 0.0
    dtype = torch.promote_types(target.dtype, torch.float32)  # a half-precision sum would round the noise away
    generator = torch.Generator(target.device).manual_seed(_seed(seed, entry.name))
    delta = torch.randn(target.shape, generator=generator, dtype=dtype, device=target.device).mul_(init_scale(entry))
    constant = torch.as_tensor(noise.constant(entry, narrow, target, delta), dtype=torch.float64)
    target.copy_(delta.mul_(_align(constant.to(target.device, dtype), entry)).add_(target))
    return constant.tolist()


def widened_norms(entry: TensorPlan, narrow: Tensor) -> Tensor:
    """‖W̃‖ of every matrix of the widened weight: duplication multiplies the narrow norm by sqrt(k_out / k_in)."""
    return spectral_norms(_matrices(narrow, entry)) * math.sqrt(entry.k_out / entry.k_in)


def _matrices(tensor: Tensor, entry: TensorPlan) -> Tensor:
    """(positions, rows, columns): one matrix per kernel position."""
    rows, columns = _axes(entry)
    if tensor.ndim == 0:
        return tensor.detach().reshape(1, 1, 1)
    if columns is None:
        return tensor.detach().movedim(rows, 0).reshape(1, tensor.shape[rows], -1)
    return (
        tensor.detach().movedim((rows, columns), (-2, -1)).flatten(0, -3) if tensor.ndim > 2 else tensor.detach()[None]
    )


def _axes(entry: TensorPlan) -> tuple[int, int | None]:
    if entry.matrix_axes is not None:
        return entry.matrix_axes
    produced = [axis for axis, side in enumerate(entry.sides) if side == "out"]
    summed = [axis for axis, side in enumerate(entry.sides) if side == "in"]
    return next(iter(produced + summed), 0), None


def _positions(entry: TensorPlan) -> tuple[int, ...]:
    """The shape of the per-position constants: the axes beside the two of the matrix."""
    if entry.matrix_axes is None:
        return ()
    return tuple(size for axis, size in enumerate(entry.wide_shape) if axis not in entry.matrix_axes)


def _align(constant: Tensor, entry: TensorPlan) -> Tensor:
    """Per-position constants, with axes of length 1 where the matrix stands."""
    if constant.ndim == 0:
        return constant
    assert entry.matrix_axes is not None
    for axis in sorted(entry.matrix_axes):
        constant = constant.unsqueeze(axis)
    return constant


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_level(what: str, value: float) -> None:
    if isinstance(value, Tensor):
        raise UserError(f"{what} must be a finite number of at least 0, got a tensor; take its .item()")
    refuse_unless_level(what, value)


def _check_patterns(plan: Plan, where: Mapping[str, bool] | None) -> None:
    if where is not None and not (
        isinstance(where, Mapping)
        and all(isinstance(pattern, str) and isinstance(wanted, bool) for pattern, wanted in where.items())
    ):
        raise UserError(f"noise: give `where` as name patterns mapped to True or False, got {where!r}")
    for pattern in where or {}:
        if not any(matches(name, pattern) for entry in plan.parameters.values() for name in entry.names):
            raise UserError(
                f"noise: the pattern {pattern!r} of `where` matches no parameter; there are "
                f"{some_names(plan.parameters)}"
            )
