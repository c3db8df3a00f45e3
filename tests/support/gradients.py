"""A loss with its gradients, and how far two results are apart."""

import torch
from torch import Tensor


def with_gradients(loss: Tensor, *inputs: Tensor, scale: float = 1.0) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * scale, inputs)]


def relative_gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
