"""The optimizers of the equivalence grid: every one that can be continued, with settings that make each of its terms
matter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FIXED_SIZES = {5, 10, 11, 30}
"""Classes, features, positions, vocabulary: a parameter with such an axis is no hidden matrix, and not for Muon."""


def optimizer(name: str, **settings: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, **settings)


def muon_and_adamw(params: list[nn.Parameter]) -> list[Optimizer]:
    matrices = [p for p in params if p.ndim == 2 and not FIXED_SIZES & set(p.shape)]
    rest = [p for p in params if not any(p is m for m in matrices)]
    return [torch.optim.Muon(matrices, lr=0.001, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.003, eps=1e-3)]


GRID_OPTIMIZERS = {
    "sgd": optimizer("SGD", lr=0.05),
    "sgd_dampened": optimizer("SGD", lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "sgd_nesterov": optimizer("SGD", lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adam": optimizer("Adam", lr=0.003, eps=1e-3, weight_decay=0.1, fused=True),
    "adam_amsgrad": optimizer("Adam", lr=0.003, eps=1e-3, amsgrad=True, maximize=False, foreach=True),
    "adam_decoupled": optimizer("Adam", lr=0.003, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": optimizer("AdamW", lr=0.003, eps=1e-3, weight_decay=0.1, amsgrad=True, foreach=False),
    "nadam": optimizer("NAdam", lr=0.003, eps=1e-3, weight_decay=0.1),
    "nadam_decoupled": optimizer("NAdam", lr=0.003, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": optimizer("RAdam", lr=0.003, eps=1e-3, weight_decay=0.1),
    "radam_decoupled": optimizer("RAdam", lr=0.003, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": optimizer("Adamax", lr=0.003, eps=1e-3, weight_decay=0.1),
    "rmsprop": optimizer("RMSprop", lr=0.001, eps=1e-3, weight_decay=0.1),
    "rmsprop_centered": optimizer("RMSprop", lr=0.001, eps=1e-3, weight_decay=0.1, centered=True, momentum=0.9),
    "adagrad": optimizer("Adagrad", lr=0.01, eps=1e-3, weight_decay=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "muon": muon_and_adamw,
}
"""Functions of a list of parameters. eps is large, so that an unscaled one shows."""


def float64_newton_schulz(grad: Tensor, ns_coefficients: tuple[float, ...], ns_steps: int, eps: float) -> Tensor:
    """Takes the place of torch's, which computes in bfloat16."""
    a, b, c = ns_coefficients
    x = grad / grad.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
