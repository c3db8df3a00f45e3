"""The weights with which models are compared: initial zeros and ones, and thresholds not reached, hide differences."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from mupscale.checks.recording import copied
from mupscale.widening.write import is_inexact

Weights = Callable[[nn.Module], None]
"""Changes the weights of a model."""


def as_they_are(model: nn.Module) -> None:
    """Changes nothing."""


@torch.no_grad()
def perturb_(model: nn.Module) -> None:
    """Makes equal units differ a little; entries keep their sign and shrink, because a model may take logarithms."""
    generator = torch.Generator().manual_seed(0)
    for parameter in _inexact(model):
        zeros = parameter == 0
        parameter.mul_(1 - 0.3 * _draw(torch.rand, parameter, generator))
        if bool(zeros.any()):
            drawn = _in_place_of_zeros(parameter, _draw(torch.randn, parameter, generator))
            parameter.copy_(torch.where(zeros, drawn, parameter))
    for tensor in model.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            tensor.mul_(1 + 0.3 * _draw(torch.rand, tensor, generator))
            if not bool(tensor.any()):
                tensor.add_(0.1 * _draw(torch.randn, tensor, generator))


def _in_place_of_zeros(parameter: Tensor, drawn: Tensor) -> Tensor:
    """Small entries of the size of the others, and of their sign where all of them have the same."""
    size = float(parameter.abs().square().mean().sqrt())
    if not size:
        return (0.1 * drawn).to(parameter.dtype)
    if not parameter.is_complex() and bool((parameter >= 0).all()):
        drawn = drawn.abs()
    elif not parameter.is_complex() and bool((parameter <= 0).all()):
        drawn = -drawn.abs()
    return (0.3 * size * drawn).to(parameter.dtype)


@torch.no_grad()
def enlarge_(model: nn.Module) -> None:
    """Multiplies each weight by a number from 1 to 3: some thresholds are reached only by larger activations."""
    generator = torch.Generator().manual_seed(3)
    for parameter in _inexact(model):
        parameter.mul_(1 + 2 * _draw(torch.rand, parameter, generator))


@torch.no_grad()
def disturb_(model: nn.Module) -> None:
    """Changes each weight by some rounding errors: a step that then differs shows nothing of two models."""
    generator = torch.Generator().manual_seed(4)
    for parameter in _inexact(model):
        parameter.mul_(1 + 1e-14 * _draw(torch.randn, parameter, generator))


@torch.no_grad()
def shuffle_(seed: int, model: nn.Module) -> None:
    """Shuffles the entries of each weight: units that were dead, and experts without samples, may have gradients."""
    perturb_(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in _inexact(model):
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].view_as(parameter))


def _inexact(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if is_inexact(parameter))


def _draw(distribution: Callable[..., Tensor], like: Tensor, generator: torch.Generator) -> Tensor:
    return distribution(like.shape, generator=generator, dtype=torch.float64).to(like.device)


AS_THEY_ARE: dict[str, Weights] = {"": as_they_are}
WEIGHTS = AS_THEY_ARE | {"with smaller weights": perturb_, "with larger weights": enlarge_}
"""The weights with which steps are compared."""

IN_EVALUATION: dict[str, Weights] = {"in evaluation mode": perturb_}
"""The weights with which outputs are compared in evaluation mode, too."""

SHUFFLED: dict[str, Weights] = {f"with weights shuffled by seed {seed}": partial(shuffle_, seed) for seed in range(4)}
"""Further ones, while gradients of growing parameters are missing."""


def copy_to_compare(name: str, model: nn.Module, dtype: torch.dtype = torch.float64, *, perturbed: bool) -> nn.Module:
    """A copy in evaluation mode, in which frozen parameters have gradients too; `perturbed` by `perturb_`."""
    twin = copied(name, model, dtype).eval()
    for parameter in twin.parameters():
        if is_inexact(parameter):
            parameter.requires_grad_()
    if perturbed:
        perturb_(twin)
    return twin
