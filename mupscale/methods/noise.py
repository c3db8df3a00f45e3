"""Symmetry-breaking noise (Step 2 of the paper's meta-algorithm), and its signal-normalised variant.

Noise N(0, (σ̄ · scale)²) is added to an entry after its weight was rescaled. `scale` is the muP initialisation scale of
the role at the wide width: N_in^-1/2 for a matrix, where N_in counts the summed width axis only (input channels, not
channels × kernel), and 1 with one width axis. Under base shapes, a plain readout has base width / N_in: the multiplier
that it lacks, so that its noise acts as that of a `Readout`. Without them, its noise follows its own norm. A unit
multiplies the noise on its parameter, and does not change σ̄. σ̄ transfers between widths: it is one number, or one per
weight (per kernel position of a convolution).

By default noise is added to weights and embeddings, but not to biases, gains (norms, PReLU, LayerScale), parameters
without a width axis, or readouts that are initialised at zero (`is_noisy`). `where={"pattern": True or False}`
overrides this by name.

Centred noise preserves the function: the mean over the copies of one input unit is subtracted from every draw, so that
the noise cancels on duplicated inputs and the loss does not change at the swap. Copies still become different in
training, because they are read with different weights. Only weights that sum over copies can be centred; the others
(input layers, embeddings tied or not, depthwise convolutions, biases, gains) get no noise. σ̄ and t are those after
centring: the standard deviation of an entry is σ̄ · scale in either case, and t of `SignalNoise` is the spectral norm of
the added noise over that of the signal.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mupscale.atomic import write_text
from mupscale.data_files import json_of, read_text
from mupscale.errors import UserError, refuse_unless_level
from mupscale.text_tables import unwrapped
from mupscale.widening import table
from mupscale.widening.growth import Growth, centre_
from mupscale.widening.hints import some_names
from mupscale.widening.plan import wrapper_of
from mupscale.widening.plan_text import Plan

Constants = dict[str, float | list[Any]]
"""σ̄ of every parameter: 0 where it gets no noise; nested lists where each kernel position has its own."""

AUTO_LEVEL = 0.3
"""The level of `noise="auto"`: t of centred `SignalNoise`; measured by docs/folder_noise.py."""

NO_NOISE = "no noise: the copies of each unit stay equal, and the new width is not used"

KINDS = 'noise must be "auto", None, AdditiveNoise(std), SignalNoise(t) or RecordedNoise(path)'


class Noise(ABC):
    """Base class of noise: decides which parameters get noise, and how strong it is."""

    where: Mapping[str, bool] | None = None
    """Exceptions from the rule which parameters get noise, by name pattern."""
    centred: bool = False
    """Whether the mean over the copies of an input unit is subtracted."""
    level_name: str | None = None
    """The argument that all constants are proportional to, or the largest of them; None if there is none."""

    @abstractmethod
    def constant(self, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor | float:
        """σ̄ of one parameter, or of each position, from its narrow and widened values and the draw Δ at σ̄ = 1."""

    def level(self) -> float:
        """The argument `level_name`; infinite if there is none."""
        return math.inf if self.level_name is None else getattr(self, self.level_name)

    def reads_widened(self, entry: Growth) -> bool:
        """Whether `constant` needs all widened values of this parameter; if not, some of its rows are enough."""
        return True

    def applies(self, entry: Growth) -> bool:
        """Whether this parameter gets noise, by default or by `where`; centred noise only if it sums over copies."""
        if self.centred and entry.copies_summed == 1:
            return False
        answer = entry.kind == "weight" and entry.role != "scalar" and not entry.zero_initialised
        for pattern, wanted in (self.where or {}).items():
            if entry.matches(pattern):
                answer = wanted
        return answer

    def check_level(self) -> None:
        """Raises a UserError if the level of this noise is invalid for any model."""
        own = type(self).__name__
        if self.level_name is not None:
            refuse_unless_level(f"{own}: {self.level_name}", self.level())
        if not isinstance(self.centred, bool):
            raise UserError(f"{own}: centred must be true or false, got {self.centred!r}")

    def check(self, plan: Plan) -> None:
        """Raises a UserError if this noise cannot be added under `plan`; runs before anything is written."""
        self.check_level()
        if self.where is not None:
            _check_patterns(plan, self.where, self.centred)
        self.refuse_inert(plan)

    def refuse_inert(self, plan: Plan) -> None:
        """Raises a UserError for centred noise that no parameter would get."""
        if not self.centred or any(self.applies(entry) for entry in plan.parameters.values()):
            return
        summed = [name for name, entry in plan.parameters.items() if entry.copies_summed > 1]
        if not summed:
            raise UserError(
                "noise: centred noise would do nothing here, because no parameter sums over a width axis that grows. "
                "Use plain noise (centred=False)"
            )
        remedy = f"Give it to them, where={{{summed[0]!r}: True}}, or use" if "where" in vars(self) else "Use"
        raise UserError(
            "noise: centred noise would do nothing here, because the parameters that sum over a width axis that grows "
            f"({some_names(summed)}) get no noise. {remedy} plain noise (centred=False)"
        )


class AdditiveNoise(Noise):
    """Noise with the same constant σ̄ = `std` for all weights.

    `upscale(narrow, wide, noise=AdditiveNoise(0.5, centred=True))` preserves the function.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(
        ...     narrow, wide, noise=mupscale.AdditiveNoise(0.5, centred=True), call=lambda model: model(x)
        ... )
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
    """

    level_name = "std"

    def __init__(self, std: float, where: Mapping[str, bool] | None = None, centred: bool = False) -> None:
        """
        Args:
            std: The standard deviation (after centring) in units of the muP initialisation scale; of a readout without
                muP's multiplier, the spectral norm of the noise as a fraction of its own.
            where: Which parameters get noise, by name pattern; by default weights and embeddings.
            centred: Keep the function: subtract the mean over the copies of each input unit.
        """
        self.std, self.where, self.centred = std, where, centred

    def constant(self, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor | float:
        return _relative(self.std, entry, narrow, widened, delta) if _is_plain_readout(entry) else self.std

    def reads_widened(self, entry: Growth) -> bool:
        return entry.mixed and _is_plain_readout(entry)


class SignalNoise(Noise):
    """Noise relative to each weight, in spectral norms: σ̄_W = t · ‖W̃‖ / ‖Δ‖. At t = 1 it is as strong as the weight.

    Each kernel position of a convolution is a separate matrix. t does not transfer between widths, but the resulting
    constants do: save them with `report.save_noise(path)` and apply them at the target width with
    `RecordedNoise(path)`.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.1), call=lambda model: model(x))
        >>> report.save_noise("noise.json")
    """

    level_name = "t"

    def __init__(self, t: float, where: Mapping[str, bool] | None = None, centred: bool = False) -> None:
        """
        Args:
            t: The spectral norm of the added noise, as a fraction of the weight's.
            where: Which parameters get noise, by name pattern; by default weights and embeddings.
            centred: Keep the function: subtract the mean over the copies of each input unit.
        """
        self.t, self.where, self.centred = t, where, centred

    def constant(self, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor:
        return _relative(self.t, entry, narrow, widened, delta)

    def reads_widened(self, entry: Growth) -> bool:
        return entry.mixed


def _relative(level: float, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor:
    """σ̄ with which the noise has this fraction of the weight's spectral norm."""
    # of unlike pieces the norm does not follow from the narrow one
    signal = _norms(widened, entry) if entry.mixed else widened_norms(entry, narrow)
    ratio = level * signal / _norms(delta, entry).to(signal.device)
    return ratio.reshape(_positions(entry))


def _is_plain_readout(entry: Growth) -> bool:
    """Whether a readout has neither muP's multiplier nor a base width: its size follows from no rule."""
    return entry.role == "readout" and entry.base is None


NoiseOrAuto = Noise | Literal["auto"] | None
"""What users give: "auto" is chosen by the plan, None is no noise."""


class RecordedNoise(Noise):
    """Noise with the constants σ̄_W of each weight that an earlier upscale, at a small width, saved to `path`.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> def call(model):
        ...     return model(torch.randn(5, 3))
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> mupscale.upscale(narrow, wide, noise=mupscale.SignalNoise(0.1), call=call).save_noise("noise.json")
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (100, 200))
        >>> report = mupscale.upscale(narrow, wide, noise=mupscale.RecordedNoise("noise.json"), call=call)
    """

    def __init__(self, path: str | Path, centred: bool | None = None) -> None:
        """
        Args:
            path: A file that `report.save_noise` wrote.
            centred: Whether the noise preserves the function; by default as it was recorded.
        """
        self.path = Path(path)
        try:
            record = json_of(read_text(self.path))
        except (OSError, ValueError) as error:
            raise UserError(f"RecordedNoise: {self.path} cannot be read as recorded noise ({error})") from error
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise UserError(f"RecordedNoise: {self.path} is not a file written by report.save_noise")
        try:
            self.constants = _by_name_inside(
                {name: torch.tensor(value, dtype=torch.float64).tolist() for name, value in record["constants"].items()}
            )
            self.centred = bool(record["centred"]) if centred is None else centred
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"RecordedNoise: {self.path} is damaged: its constants are not numbers by parameter name"
            ) from error

    def level(self) -> float:
        constants = [torch.as_tensor(constant, dtype=torch.float64).flatten() for constant in self.constants.values()]
        return max((float(constant.max()) for constant in constants if constant.numel()), default=0.0)

    def check(self, plan: Plan) -> None:
        self.check_level()
        known = {entry.inside(name): entry.inside(entry.origin) for name, entry in plan.parameters.items()}
        missing = {name for name, origin in known.items() if not {name, origin} & self.constants.keys()}
        extra = self.constants.keys() - known.keys() - set(known.values())
        if missing or extra:
            raise UserError(
                f"RecordedNoise: {self.path} is of another architecture: it lacks {sorted(missing)[:4] or 'nothing'}, "
                f"and has {sorted(extra)[:4] or 'nothing'} beyond this model. Give the noise of the same architecture"
            )
        for name, entry in plan.parameters.items():
            constant = torch.as_tensor(self._recorded(entry))
            wanted = _positions(entry)
            if constant.ndim and tuple(constant.shape) != wanted:
                raise UserError(
                    f"RecordedNoise: {self.path} has constants of shape {tuple(constant.shape)} for {name!r}, which "
                    f"has {wanted}"
                )
            if not bool(torch.isfinite(constant).all()) or bool((constant < 0).any()):
                raise UserError(f"RecordedNoise: {self.path} has a constant for {name!r} that is no standard deviation")
        if self.level() > 0:
            self.refuse_inert(plan)

    def applies(self, entry: Growth) -> bool:
        recorded = bool(torch.as_tensor(self._recorded(entry)).any())
        return recorded and (not self.centred or entry.copies_summed > 1)

    def constant(self, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> Tensor | float:
        return torch.tensor(self._recorded(entry), dtype=torch.float64)

    def reads_widened(self, entry: Growth) -> bool:
        return False

    def _recorded(self, entry: Growth) -> float | list[Any]:
        """The constant of the parameter, or of the layer it comes from: noise may be recorded with fewer layers."""
        names = entry.inside(entry.name), entry.inside(entry.origin)
        return next(self.constants[name] for name in names if name in self.constants)


def _by_name_inside(constants: Constants) -> Constants:
    """Constants by the names of parameters in their network, without what wrappers add."""
    wrapper = wrapper_of(constants)
    return {unwrapped(name).removeprefix(wrapper): constant for name, constant in constants.items()}


class SameNoise(RecordedNoise):
    """The noise of a report, used directly instead of through a file."""

    def __init__(self, constants: Constants, centred: bool) -> None:
        self.path = Path("the report")
        self.constants = _by_name_inside(constants)
        self.centred = centred


_FORMAT = "mupscale noise constants, version 2"


def save_constants(constants: Constants, path: str | Path, centred: bool = False) -> None:
    record = {"format": _FORMAT, "centred": centred, "constants": constants}
    try:
        write_text(Path(path), json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"save_noise: {path} cannot be written ({error.strerror}); name another file") from error


def init_scale(entry: Growth) -> float:
    """The muP initialisation scale of the role; 1 for a plain readout without a base width, which has none."""
    return table.std(entry.sides, entry.fan_in, entry.fan_in if entry.base is None else entry.base)


def may_overflow(level: float, dtype: torch.dtype) -> bool:
    """Whether noise of this level might overflow `dtype`: always in float16, otherwise only at absurd levels."""
    return (dtype.is_floating_point or dtype.is_complex) and (torch.finfo(dtype).max < 1e6 or level > 1e30)


def add_noise_(
    target: Tensor, entry: Growth, noise: Noise, narrow: Tensor, seed: int, rows: slice | None = None
) -> float | list[Any]:
    """Adds noise to `target`, or to `rows` of it unless the noise `reads_widened`; returns σ̄, ready to be saved."""
    if not noise.applies(entry):
        return 0.0
    delta, constant = _drawn(target, entry, noise, narrow, seed)
    delta.mul_(_align(constant.to(target.device, delta.dtype), entry))
    if entry.rescale != 1:
        delta.mul_(entry.rescale)
    added = delta if rows is None else delta[rows]
    target.copy_(added.add_(target))
    return constant.tolist()


def noise_constant(target: Tensor, entry: Growth, noise: Noise, narrow: Tensor, seed: int) -> float | list[Any]:
    """σ̄ of the noise that `add_noise_` would add."""
    return _drawn(target, entry, noise, narrow, seed)[1].tolist() if noise.applies(entry) else 0.0


def _drawn(target: Tensor, entry: Growth, noise: Noise, narrow: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Noise at σ̄ = 1, and σ̄.

    The draw depends on seed, parameter name and device type alone, so every rank, every resumed run and every average
    of the weights, in whatever dtype, gets the same. The name is that inside the network: a wrapper changes nothing.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)  # a half-precision sum would round the noise away
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    generator = torch.Generator(target.device).manual_seed(_seed(seed, entry.inside(entry.name)))
    delta = torch.randn(entry.wide_shape, generator=generator, dtype=drawn, device=target.device).to(dtype)
    delta.mul_(init_scale(entry))
    if entry.quiet:
        delta[list(entry.quiet)] = 0
    if noise.centred:
        centre_(delta, entry.layouts, entry.summed_axes)
    in_role_units = target if entry.rescale == 1 and not entry.offset else (target - entry.shift) / entry.rescale
    constant = torch.as_tensor(noise.constant(entry, narrow, in_role_units, delta), dtype=torch.float64)
    return delta, constant


def widened_norms(entry: Growth, narrow: Tensor) -> Tensor:
    """‖W̃‖ of every matrix of the widened weight, without `rescale`."""
    return _norms(narrow, entry) * table.spectral(entry.scale) / entry.rescale


def _norms(tensor: Tensor, entry: Growth) -> Tensor:
    """The spectral norm of every matrix."""
    from mupscale.spectral import spectral_norms  # few kinds of noise need it

    return spectral_norms(_matrices(tensor, entry))


def _matrices(tensor: Tensor, entry: Growth) -> Tensor:
    """(positions, rows, columns): one matrix per kernel position."""
    tensor = tensor.detach()
    if tensor.ndim == 0:
        return tensor.reshape(1, 1, 1)
    if entry.matrix_axes is not None:
        return tensor.movedim(entry.matrix_axes, (-2, -1)).flatten(0, -3) if tensor.ndim > 2 else tensor[None]
    rows = min(range(tensor.ndim), key=lambda axis: ("out", "mean", "in", None).index(entry.sides[axis]))
    return tensor.movedim(rows, 0).reshape(1, tensor.shape[rows], -1)


def _positions(entry: Growth) -> tuple[int, ...]:
    """The shape of the per-position constants: the axes beside the two of the matrix."""
    if entry.matrix_axes is None:
        return ()
    return tuple(size for axis, size in enumerate(entry.wide_shape) if axis not in entry.matrix_axes)


def _align(constant: Tensor, entry: Growth) -> Tensor:
    """Per-position constants, with axes of length 1 where the matrix stands."""
    matrix = entry.matrix_axes or ()
    sizes = [1 if axis in matrix else size for axis, size in enumerate(entry.wide_shape)]
    return constant.reshape(sizes) if constant.ndim else constant


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _check_patterns(plan: Plan, where: Mapping[str, bool], centred: bool) -> None:
    if not isinstance(where, Mapping) or not all(
        isinstance(pattern, str) and isinstance(wanted, bool) for pattern, wanted in where.items()
    ):
        raise UserError(f"noise: give `where` as name patterns mapped to True or False, got {where!r}")
    for pattern, wanted in where.items():
        entries = plan.parameters.values()
        matched = [entry for entry in entries if entry.matches(pattern)]
        if not matched:
            raise UserError(
                f"noise: the pattern {pattern!r} of `where` matches no parameter; there are "
                f"{some_names(plan.parameters)}"
            )
        if wanted and centred and all(entry.copies_summed == 1 for entry in matched):
            raise UserError(
                f"noise: `where` asks for centred noise on {pattern!r}, but nothing that it matches "
                f"({some_names([entry.name for entry in matched])}) sums over a width axis that grows. Remove the "
                "pattern, or use plain noise (centred=False)"
            )
