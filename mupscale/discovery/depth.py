"""Which parameters make a layer the identity: found by running it.

A layer that adds its branches to what it gets is the identity if each branch ends in zeros. All parameters of a layer
are made neutral, and then restored in the order of their last use while the layer returns what it gets. What cannot be
restored ends the branches: an output projection, the factors of LayerScale, or the gain of a norm.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from typing import Any

import torch
from torch import Tensor, nn

from mupscale._torch import tree_leaves
from mupscale.checks.comparison import named_gradients, weighted_sum
from mupscale.checks.precision import Precision
from mupscale.checks.recording import generators_kept
from mupscale.checks.trace import Call, EventKind, floats_of, hooked, watched
from mupscale.checks.weights import copy_to_compare
from mupscale.errors import UserError, one_line
from mupscale.text_tables import starred
from mupscale.widening.layers import joined
from mupscale.widening.write import is_inexact

IDENTITY = 1e-12
"""By how much the output of a layer may differ from its input, in units of the largest input."""

LARGEST_GRADIENT = 10.0
"""The largest gradient of a neutral parameter, relative to before. A branch of zeros behind a norm has hundreds."""

_ALTERNATIVES = 'Grow with depth="interleave" or depth="stack", which change the function'


def find_residual(model: nn.Module, lists: Sequence[str], call: Call) -> dict[str, float]:
    """The parameters that make layers the identity, by name, with the values that do.

    The value is 0; for a gain 1 + w it is -1, and for a factor of what the layer gets it is 1. Every layer of the named
    lists, `nn.ModuleList` or `nn.Sequential`, that can be the identity has such parameters. A list without such a layer
    is refused. `call` is one forward pass of a model; the model stays as it is.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        ...     def forward(self, x):
        ...         return x + self.down(self.up(self.norm(x)).relu())
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block())), torch.randn(3, 4)
        >>> find_residual(model, ["1"], lambda model: model(x))
        {'1.0.down.weight': 0.0, '1.0.down.bias': 0.0}
    """
    answer: dict[str, float] = {}
    with generators_kept():
        twin = copy_to_compare("the model", model, perturbed=True)
        layers = _recorded_layers(twin, lists, call)
        owners: dict[int, list[str]] = {}
        for name, parameter in twin.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        for name in lists:
            answer |= _residual_of_list(name, layers[name], owners)
    return answer


def _residual_of_list(name: str, layers: "list[_Layer]", owners: Mapping[int, list[str]]) -> dict[str, float]:
    answer: dict[str, float] = {}
    found: dict[Any, dict[str, float]] = {}
    reasons = []
    adds_outside = len(layers) > 1 and all(starmap(_is_added, pairwise(layers)))
    for layer in layers:
        layer.adds_outside = adds_outside
    for layer in layers:
        kind = type(layer.module), *((each, parameter.shape) for each, parameter in layer.parameters.items())
        try:
            if kind not in found or not layer.is_identity(found[kind]):
                found[kind] = _neutral_parameters(layer)
            _refuse_shared(layer, found[kind], owners)
            answer |= {f"{layer.name}.{each}": value for each, value in found[kind].items()}
        except _NoIdentity as reason:
            reasons.append(f"{layer.name!r} ({type(layer.module).__name__}) {reason}")
    if not answer and reasons:
        raise UserError(f"no layer of {name!r} can be made the identity: {reasons[0]}. {_ALTERNATIVES}")
    return answer


def _is_added(layer: "_Layer", following: "_Layer") -> bool:
    """Whether the next layer gets the sum of what this one gets and returns."""
    try:
        outputs = list(layer.outputs())
    except _NoIdentity:
        return False
    if len(outputs) != len(following.inputs):
        return False
    for given, output, sums in zip(layer.inputs, outputs, following.inputs, strict=True):
        pairs = [(a, b) for a in floats_of(given) for b in floats_of(sums) if a.shape == b.shape == output.shape]
        if not any(bool(torch.allclose(a + output, b, rtol=1e-9, atol=1e-12)) for a, b in pairs):
            return False
    return True


class _NoIdentity(Exception):
    """Why a layer cannot be the identity, with the layer as its subject."""


def _refuse_shared(layer: "_Layer", neutral: Mapping[str, float], owners: Mapping[int, list[str]]) -> None:
    for each in neutral:
        others = [name for name in owners[id(layer.parameters[each])] if not name.startswith(f"{layer.name}.")]
        if others:
            raise _NoIdentity(f"shares its weights: {each!r} is {others[0]!r}, too")


@dataclass
class _Layer:
    """A layer, and what it got in a forward pass of its model."""

    name: str
    module: nn.Module
    inputs: list[Any] = field(default_factory=list)
    adds_outside: bool = False
    """Whether the model adds what the layer returns to the stream, so that a layer that returns zeros adds nothing."""

    def __post_init__(self) -> None:
        self.parameters = {name: each for name, each in self.module.named_parameters() if is_inexact(each)}

    def outputs(self, mode: Precision | None = None) -> Iterator[Tensor]:
        """The first floating-point output of each call."""
        for given in self.inputs:
            args, kwargs = _copy_inputs(given, self.module)
            try:
                with mode or Precision():
                    outputs = floats_of(self.module(*args, **kwargs))
            except Exception as error:  # whatever a layer does apart from its model
                raise _NoIdentity(f"cannot be run by itself ({one_line(error, 100)})") from error
            if not outputs:
                raise _NoIdentity("returns no floating-point numbers")
            yield outputs[0]

    @torch.no_grad()
    def change(self) -> float:
        """The difference of the output from the input that it is most alike, in units of that; the largest of calls.

        With `adds_outside`, the largest entry of the output.
        """
        worst = 0.0
        for given, output in zip(self.inputs, self.outputs(), strict=True):
            if self.adds_outside:
                worst = max(worst, float(output.abs().max()))
                continue
            alike = [each for each in floats_of(given) if each.shape == output.shape]
            changes = [float((output - each).abs().max() / each.abs().max().clamp_min(1e-30)) for each in alike]
            worst = max(worst, min((change for change in changes if not math.isnan(change)), default=math.inf))
        return worst

    def is_identity(self, neutral: Mapping[str, float]) -> bool:
        with self.filled(neutral):
            return self.change() <= IDENTITY

    @contextmanager
    def filled(self, values: Mapping[str, float]) -> Iterator[None]:
        """Some parameters have one value each."""
        before = {name: self.parameters[name].detach().clone() for name in values}
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].fill_(value)
            try:
                yield
            finally:
                for name, tensor in before.items():
                    self.parameters[name].copy_(tensor)

    def gradients(self) -> dict[str, float]:
        """The largest entry of each parameter's gradient, of a weighted sum of the outputs."""
        with torch.enable_grad():
            found = named_gradients(self.module, weighted_sum(list(self.outputs())))
        return {name: float(found[name].abs().max()) if name in found else 0.0 for name in self.parameters}


def _copy_inputs(given: Any, module: nn.Module) -> Any:
    """Copies, because a layer may change what it gets; modules among them are shared."""
    return copy.deepcopy(given, {id(each): each for each in module.modules()})


def _recorded_layers(twin: nn.Module, lists: Sequence[str], call: Call) -> dict[str, list[_Layer]]:
    answer = {name: [_Layer(each, twin.get_submodule(each)) for each in _layer_names(twin, name)] for name in lists}
    by_name = {layer.name: layer for layers in answer.values() for layer in layers}

    def note(name: str, kind: EventKind, values: Any) -> None:
        if kind == "begins" and name in by_name:
            by_name[name].inputs.append(_copy_inputs(values, twin))

    with torch.no_grad():
        watched(twin, call, note)
    idle = [name for name, layer in by_name.items() if not layer.inputs]
    if idle:
        raise UserError(f"call(model) does not run {idle[0]!r}, so what makes it the identity is not found")
    return answer


def _layer_names(twin: nn.Module, name: str) -> list[str]:
    layers = twin.get_submodule(name)
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise UserError(f"{name!r} is no nn.ModuleList or nn.Sequential of layers, but a {type(layers).__name__}")
    if len(set(layers)) < len(layers):
        raise UserError(f"{name!r} has the same layer several times, which cannot be the identity in one place only")
    return [joined(name, key) for key, _ in layers.named_children()]


def _neutral_parameters(layer: _Layer) -> dict[str, float]:
    """The parameters that have to be neutral, by their names within the layer, with their values."""
    order, gains = _last_uses(layer)
    before = layer.gradients()
    values = {name: -1.0 if name in gains else 0.0 for name in order}
    neutral = _ends(layer, values)
    if neutral is None:  # factors of the stream itself, which are the layer's own parameters
        neutral = _ends(layer, values | dict.fromkeys((name for name in order if "." not in name), 1.0))
    if neutral is None:
        with layer.filled(values):
            change = layer.change()
        by = f" by {100 * change:.3g} %" if math.isfinite(change) else ""
        raise _NoIdentity(
            f"changes what it gets{by} even if all of its parameters are neutral: a norm or another function acts on "
            "the sum of its branches (post-norm)"
        )
    with layer.filled(neutral):
        after = layer.gradients()
    for name in neutral:
        if not after[name] > 0:
            raise _NoIdentity(f"would not train: {name!r} has no gradient")
        if after[name] > LARGEST_GRADIENT * before[name] > 0:
            raise _NoIdentity(
                f"has a norm without a gain after {name!r}, whose gradient would be {after[name] / before[name]:.0f} "
                "times as large"
            )
    ending = {starred(name): value for name, value in neutral.items()}
    idle = {name: ending.get(starred(name)) for name in layer.parameters if name not in order}  # experts without tokens
    found = {name: neutral.get(name, idle.get(name)) for name in layer.parameters}
    return {name: value for name, value in found.items() if value is not None}


def _ends(layer: _Layer, values: Mapping[str, float]) -> dict[str, float] | None:
    """Returns the fewest last-used values that alone make the layer the identity, or None."""
    neutral: dict[str, float] = {}
    for name in reversed(list(values)):
        if layer.is_identity(neutral):
            break
        neutral[name] = values[name]
    if not layer.is_identity(neutral):
        return None
    for name in reversed(list(neutral)):
        rest = {other: value for other, value in neutral.items() if other != name}
        neutral = rest if layer.is_identity(rest) else neutral
    return neutral


@torch.no_grad()
def _last_uses(layer: _Layer) -> tuple[list[str], set[str]]:
    """The parameters in the order of their last use, and those which are gains 1 + w."""
    owners: dict[str, Any] = {}
    with_vectors = {
        name: module
        for name, module in layer.module.named_modules()
        if name and any(parameter.ndim == 1 for parameter in module.parameters(recurse=False))
    }

    def begins(name: str, given: Any) -> None:
        owners[name] = _copy_inputs(given, layer.module)

    names = {id(parameter): name for name, parameter in layer.parameters.items()}
    order: dict[str, None] = {}

    def note_uses(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # a shape is no use
            for name in [names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in names]:
                order.pop(name, None)
                order[name] = None

    with hooked(with_vectors, begins, lambda name, output: None):
        for _ in layer.outputs(Precision(note_uses)):
            pass
    gains = {name for owner, inputs in owners.items() for name in _shifted_gains(layer, owner, inputs)}
    return list(order), gains


def _shifted_gains(layer: _Layer, owner: str, inputs: Any) -> Iterator[str]:
    """The parameters of a module at -1 of which, and not at 0, it returns zeros."""
    module = layer.module.get_submodule(owner)
    names = [f"{owner}.{name}" for name, _ in module.named_parameters(recurse=False)]

    def returns_zeros(values: Mapping[str, float]) -> bool:
        args, kwargs = _copy_inputs(inputs, layer.module)
        with layer.filled(values), Precision():
            outputs = floats_of(module(*args, **kwargs))
        return bool(outputs) and not bool(outputs[0].any())

    zeros = dict.fromkeys(names, 0.0)
    if not returns_zeros(zeros):
        yield from (name for name in names if returns_zeros({**zeros, name: -1.0}))
