"""Sharded parameters (FSDP2's DTensors), one at a time: gathered whole, written whole, scattered back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, without importing torch.distributed for everybody


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; a tensor that is not sharded is returned as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def replicated(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, to compute with a sharded one."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


@contextmanager
def whole(target: Tensor) -> Iterator[Tensor]:
    """A whole tensor to write into: `target` itself, or a temporary whose shards are put into it at the end.

    Every rank writes the same values, so that scattering needs no communication.
    """
    if not is_sharded(target):
        yield target
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    local = target.to_local()
    full = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    yield full
    local.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to_local())
