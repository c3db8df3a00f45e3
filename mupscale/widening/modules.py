"""What follows from the type of a module: which axes are outputs, which are summed over, and what is inexact.

`axis_sides` defines all layouts: `nn.Linear` is (out, in), `nn.ConvTranspose2d` and the transformers library's `Conv1D`
are (in, out), an embedding is (not width, out). For an unknown module type it returns None, and the plan then requires
a role instead of guessing."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mup import MuReadout
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase, RNNCellBase
from torch.nn.utils import parametrize, remove_weight_norm
from torch.nn.utils.weight_norm import WeightNorm as WeightNormHook

from mupscale._torch import (
    BatchNormBase,
    ConvNd,
    ConvTransposeNd,
    DropoutNd,
    WeightNormParametrization,
    forward_pre_hooks,
)
from mupscale.readout import Readout
from mupscale.widening.growth import Kind, LayoutSpec
from mupscale.widening.table import Side, product, scale_of_axis, weight_norm_gain

_NORMS = (BatchNormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_MATRIX_TYPES = (nn.Linear, nn.Bilinear, ConvNd, nn.MultiheadAttention, RNNBase, RNNCellBase)
_HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "n_kv_head",
    "n_kv_heads",
    "heads",
)


def axis_sides(module: nn.Module, attribute: str, parameter: Tensor) -> tuple[Side, ...] | None:
    """The side of every axis of `module.<attribute>`, were all of them width; None where the type does not tell."""
    rest: tuple[Side, ...] = (None,) * (parameter.ndim - 2)
    if isinstance(module, (*_NORMS, nn.PReLU)):
        return all_produced(parameter)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return (None, "out")
    if isinstance(module, nn.MultiheadAttention) and attribute in ("bias_k", "bias_v"):
        return (None, None, "out")
    if not isinstance(module, _MATRIX_TYPES) and not is_conv1d(module):
        return None
    if "bias" in attribute:
        return ("out",)
    if "weight" not in attribute or attribute.endswith("_orig"):  # by pruning: not the layer's own weight
        return None
    sides: tuple[Side, ...] = ("out", "in", *rest)
    if isinstance(module, nn.Bilinear):
        sides = ("out", "in", "in")
    elif isinstance(module, ConvTransposeNd) or is_conv1d(module):
        sides = ("in", "out", *rest)
    return sides[: parameter.ndim]  # the gain of a weight norm may have no axis


def all_produced(parameter: Tensor) -> tuple[Side, ...]:
    return tuple("out" for _ in parameter.shape)


def kind_of(module: nn.Module, attribute: str, parameter: Tensor) -> Kind:
    """A bias, a gain (norm weights, PReLU slopes, LayerScale: what multiplies or shifts unit by unit), or a weight."""
    if "bias" in attribute and not attribute.startswith("bias_k") and not attribute.startswith("bias_v"):
        return "bias"
    if isinstance(module, (*_NORMS, nn.PReLU)) or parameter.ndim <= 1:
        return "gain"
    if isinstance(module, _MATRIX_TYPES) and attribute.endswith("_g") and max(parameter.shape) == parameter.numel():
        return "gain"  # of a weight norm
    if axis_sides(module, attribute, parameter) is None and all(size == 1 for size in parameter.shape[1:]):
        return "gain"  # a LayerScale of (channels, 1, 1)
    return "weight"


def drawn_fan_growth(
    before: nn.Module, after: nn.Module, attribute: str, shapes: tuple[Sequence[int], Sequence[int]]
) -> float:
    """The growth of "fan_in", by which torch's default initialisation of this module type divides the variance."""
    if isinstance(before, RNNBase | RNNCellBase) and isinstance(after, RNNBase | RNNCellBase):
        return after.hidden_size / before.hidden_size
    if isinstance(before, nn.MultiheadAttention) and attribute.endswith(("weight", "_k", "_v")):
        small, large = (sum(shape) if len(shape) == 2 else shape[-1] for shape in shapes)  # Xavier: fan_in + fan_out
        return large / small
    if isinstance(before, (nn.Linear, nn.Bilinear, ConvNd)) and isinstance(after, (nn.Linear, nn.Bilinear, ConvNd)):
        # torch takes axis 1 for the fan, in a transposed convolution too
        return after.weight.shape[1] / before.weight.shape[1]
    return 1.0


def is_readout(module: nn.Module) -> bool:
    return isinstance(module, (Readout, MuReadout))


def untrained_rows(module: nn.Module, attribute: str) -> set[int]:
    """The rows of a parameter that never get a gradient from this module: `padding_idx` of an embedding."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and attribute == "weight":
        return set() if module.padding_idx is None else {module.padding_idx}
    return set()


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the transformers library's (in, out) linear layer; the library need not be installed."""
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and isinstance(getattr(module, "weight", None), Tensor)
    )


def growing_groups(narrow: nn.Module, wide: nn.Module) -> bool:
    """Whether a grouped convolution or a GroupNorm has more groups in the wide model."""
    return group_count(wide) > group_count(narrow)


def group_count(module: nn.Module) -> int:
    if isinstance(module, ConvNd):
        return module.groups
    return module.num_groups if isinstance(module, nn.GroupNorm) else 1


def channels_of_a_group(module: nn.Module) -> int:
    """How many channels a group of a GroupNorm has."""
    assert isinstance(module, nn.GroupNorm)
    return module.num_channels // module.num_groups


def normalises_width(module: nn.Module) -> bool:
    """Whether a module averages over its units; one of another library is known by its name."""
    kind = type(module).__name__.lower()
    return "norm" in kind and "batchnorm" not in kind and "instancenorm" not in kind


def own_blocks(narrow: nn.Module, wide: nn.Module) -> dict[str, dict[int, LayoutSpec]]:
    """The block lengths that a module type itself implies, by parameter name: whole heads, whole groups."""
    if (
        isinstance(narrow, nn.MultiheadAttention)
        and isinstance(wide, nn.MultiheadAttention)
        and wide.num_heads > narrow.num_heads
    ):
        head = narrow.head_dim
        rows = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        return {
            **{name: {0: head} for name in rows},
            "bias_k": {2: head},
            "bias_v": {2: head},
            "out_proj.weight": {1: head},
        }
    if not growing_groups(narrow, wide):
        return {}
    in_block, out_block = _group_channels(narrow)
    return {"weight": {0: in_block if isinstance(narrow, ConvTransposeNd) else out_block}, "bias": {0: out_block}}


def _group_channels(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, ConvNd):
        return module.in_channels // module.groups, module.out_channels // module.groups
    return (channels_of_a_group(module),) * 2


QUANTISERS = ("torchao", "bitsandbytes", "hqq", "quanto", "optimum", "auto_gptq", "gptqmodel", "awq")
"""Packages whose layers and tensors hold packed weights."""


def why_quantised(name: str, module: nn.Module) -> str | None:
    """Why the packed weights of a module that torch has quantised cannot be widened; None for any other module."""
    package = type(module).__module__.split(".")
    is_packed = package[0] in QUANTISERS or (package[0] == "torch" and "quantized" in package)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        kind = type(tensor)
        is_packed |= kind.__module__.partition(".")[0] in QUANTISERS or "quantized" in kind.__name__.lower()
        # floats of eight bits need scales
        is_packed |= tensor.is_quantized or (tensor.is_floating_point() and tensor.dtype.itemsize == 1)
    if not is_packed and "qweight" not in dict(module.named_buffers(recurse=False)):
        return None
    return (
        f"module {name!r} ({type(module).__name__}) is quantised: its weights are packed whole numbers, which cannot "
        "grow. Take the model as it was before, in floating point, and quantise the wide one"
    )


def why_not_exact(name: str, narrow: nn.Module, wide: nn.Module) -> str | None:
    """Why this module cannot be widened with exact dynamic equivalence, with the remedy; None where it can."""
    if (
        isinstance(narrow, nn.MultiheadAttention)
        and isinstance(wide, nn.MultiheadAttention)
        and wide.head_dim != narrow.head_dim
    ):
        return (
            f"module {name!r} (MultiheadAttention) grows head_dim {narrow.head_dim} → {wide.head_dim}, and its logits "
            "are scaled by 1/sqrt(head_dim), which is not exact. Grow num_heads instead (embed_dim / "
            f"{narrow.head_dim} of them keep head_dim = {narrow.head_dim}), or use an attention scaled by c/head_dim"
        )
    if group_count(wide) < group_count(narrow):
        return (
            f"module {name!r} ({type(narrow).__name__}) has fewer groups in the wide model ({group_count(narrow)} → "
            f"{group_count(wide)}), which mixes units that were apart. Keep the number of groups, or grow it"
        )
    if growing_groups(narrow, wide) and _group_channels(narrow) != _group_channels(wide):
        return (
            f"module {name!r} ({type(narrow).__name__}) grows both its groups ({group_count(narrow)} → "
            f"{group_count(wide)}) and the channels of a group (in, out: {_group_channels(narrow)} → "
            f"{_group_channels(wide)}). Do it in two growths, one of each"
        )
    return None


def head_counts(narrow: nn.Module, wide: nn.Module, *, of_configuration: bool = False) -> list[tuple[str, int, int]]:
    """The numbers of heads of a module, and of its configuration, by their attributes: in both models."""
    owners: list[tuple[object, object]] = [(narrow, wide)]
    if of_configuration:
        owners.append((getattr(narrow, "config", None), getattr(wide, "config", None)))
    found = []
    for before_owner, after_owner in owners:
        for attribute in _HEAD_COUNTS:
            before, after = getattr(before_owner, attribute, None), getattr(after_owner, attribute, None)
            if isinstance(before, int) and isinstance(after, int):
                found.append((attribute, before, after))
    return found


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention, by the name of its class."""
    kind = type(module).__name__.lower()
    return "attention" in kind or "attn" in kind


def dropout_of(module: nn.Module) -> float:
    """The probability with which a layer drops units; 0 for a layer that drops none."""
    if isinstance(module, DropoutNd):
        return module.p
    return module.dropout if isinstance(module, (nn.MultiheadAttention, RNNBase)) else 0.0


def caveat(narrow: nn.Module, wide: nn.Module) -> str | None:
    """A caveat about this module for the reader of the plan: dropout, groups, operations across neighbours."""
    if dropout := dropout_of(narrow):
        return f"dropout p = {dropout} on an axis that grows draws another mask for every unit of it: not exact"
    if isinstance(narrow, (nn.Embedding, nn.EmbeddingBag)) and narrow.max_norm is not None:
        return "max_norm renormalises rows, whose norm grows as sqrt(k): not exact unless max_norm grows with it"
    if isinstance(narrow, nn.LocalResponseNorm):
        return "LocalResponseNorm mixes neighbouring channels, which duplication moves apart: not exact"
    if growing_groups(narrow, wide) and max(_group_channels(narrow)) > 1:
        return (
            f"groups grow, so channels are duplicated in blocks of (in, out) {_group_channels(narrow)}; "
            "every layer that reads or writes them needs the same blocks"
        )
    return None


class WeightNorm(NamedTuple):
    """The norm of one weight of a layer."""

    layer: str
    attribute: str
    """The name of the weight in the layer."""
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
    """Why parameters of this module are not its weights, but for an allowed `weight_norm`; None where they are."""
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
