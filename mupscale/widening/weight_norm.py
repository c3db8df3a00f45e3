"""Weight normalisation, W = g · v / ‖v‖, with a norm over all axes but one: how the two parameters of a weight grow.

v grows as any weight does; its size cancels out. With copies, v / ‖v‖ is smaller than that of the narrow v, by the root
of the factors of the axes that the norm is taken over. The gain g compensates for it, and is divided by k_in, as W is.
That is a unit (`units.py`), from which rates, decay and optimizer state follow, so that training is preserved too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize, remove_weight_norm
from torch.nn.utils.weight_norm import WeightNorm as WeightNormHook

from mupscale._torch import ConvNd, WeightNormParametrization, forward_pre_hooks
from mupscale.widening.modules import is_conv1d
from mupscale.widening.table import Side, product, scale_of_axis, weight_norm_gain


class WeightNorm(NamedTuple):
    """The norm of one weight of a layer."""

    layer: str
    """The name of the module."""
    attribute: str
    """Of the weight."""
    gain: str
    """The full name of g."""
    direction: str
    """The full name of v."""
    axis: int | None
    """The axis that the norm is not taken over, if there is one."""

    @property
    def weight(self) -> str:
        """The name of the weight, were it not normalised."""
        return f"{self.layer}.{self.attribute}".removeprefix(".")


def weight_norms(modules: Mapping[str, nn.Module]) -> list[WeightNorm]:
    """The normalised weights of the layers among modules, by their names."""
    return [norm for name, module in modules.items() for norm in _norms_of(name, module)]


def _norms_of(name: str, module: nn.Module) -> list[WeightNorm]:
    if not isinstance(module, nn.Linear | nn.Bilinear | ConvNd) and not is_conv1d(module):
        return []
    inside = f"{name}." * bool(name)
    answer = []
    for attribute, inner in _parametrisations(module).items():
        norm = inner[0]
        if len(inner) == 1 and isinstance(norm, WeightNormParametrization):
            stem = f"{inside}parametrizations.{attribute}.original"
            axis = _axis(norm.dim, inner.get_parameter("original1"))
            answer.append(WeightNorm(name, attribute, f"{stem}0", f"{stem}1", axis))
    for hook in forward_pre_hooks(module):
        if isinstance(hook, WeightNormHook):
            stem = f"{inside}{hook.name}"
            axis = _axis(hook.dim, module.get_parameter(f"{hook.name}_v"))
            answer.append(WeightNorm(name, hook.name, f"{stem}_g", f"{stem}_v", axis))
    return [norm for norm in answer if "weight" in norm.attribute]


def _parametrisations(module: nn.Module) -> dict[str, parametrize.ParametrizationList]:
    held = module.parametrizations if parametrize.is_parametrized(module) else None
    return dict(held.items()) if isinstance(held, nn.ModuleDict) else {}  # type: ignore[arg-type]


def _axis(dim: int, direction: Tensor) -> int | None:
    return None if dim == -1 else dim % direction.ndim  # torch means "over all axes" by -1


def _has_only_weight_norms(module: nn.Module) -> bool:
    """Whether a module is reparametrised by nothing but weight norms that can grow."""
    hooks = [hook for hook in forward_pre_hooks(module) if type(hook).__name__ in ("WeightNorm", "SpectralNorm")]
    return len(_norms_of("", module)) == len(_parametrisations(module)) + len(hooks)


def why_reparametrised(name: str, module: nn.Module, *, weight_norm: bool) -> str | None:
    """Why the parameters of this module are not its weights, with the remedy; None where they are.

    None, too, where `weight_norm` allows for it and nothing else is in the way.
    """
    hooks = {type(hook).__name__ for hook in forward_pre_hooks(module)}
    if not parametrize.is_parametrized(module) and not hooks & {"WeightNorm", "SpectralNorm"}:
        return None
    if _has_only_weight_norms(module):
        if weight_norm:
            return None
        why = "by weight_norm, for which muP's rates are not known"
    else:
        why = "(spectral_norm, ...): a norm over the width does not survive duplication"
    return (
        f"module {name!r} ({type(module).__name__}) is reparametrised {why}. Remove it first: "
        "torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm or remove_spectral_norm"
    )


def rescale_of_gain(norm: WeightNorm, sides: Sequence[Side], factors: Sequence[float]) -> float:
    """What g is multiplied by beyond its own axis, from the sides and the factors of the axes of v."""
    scales = [scale_of_axis(side, factor, factor) for side, factor in zip(sides, factors, strict=True)]
    normed = math.prod(factor for axis, factor in enumerate(factors) if axis != norm.axis)
    own = scales[norm.axis].weight if norm.axis is not None else 1.0
    return weight_norm_gain(normed, product(scales).weight / own)


def fold_weight_norms_(model: nn.Module) -> None:
    """Makes plain weights of normalised ones: of a copy, to look at the layers alone."""
    for module in list(model.modules()):
        norms = _norms_of("", module) if _has_only_weight_norms(module) else []
        if not parametrize.is_parametrized(module):
            for norm in norms:
                remove_weight_norm(module, norm.attribute)
        elif norms:  # by hand, because torch changes the class, which a copy shares with its original
            weights = {norm.attribute: nn.Parameter(getattr(module, norm.attribute).detach()) for norm in norms}
            del module.parametrizations
            module.__class__ = type(module).__bases__[0]
            for attribute, weight in weights.items():
                module.register_parameter(attribute, weight)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model by name; a normalised weight, by the name it would have without the norm, as its v."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for norm in weight_norms(dict(model.named_modules())):
        parameters[norm.weight] = parameters.pop(norm.direction)
        del parameters[norm.gain]
    return parameters
