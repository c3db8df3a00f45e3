"""torch's optimizers under muP, over a model or its parameters."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import mupscale


def _made(kind: Callable[..., Optimizer], params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    model = params if isinstance(params, nn.Module) else None
    return mupscale.apply_mup(kind(params.parameters() if isinstance(params, nn.Module) else params, **settings), model)


MuSGD, MuAdam, MuAdamW = (partial(_made, kind) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
