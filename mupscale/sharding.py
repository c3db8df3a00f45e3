"""Sharded parameters (FSDP2's DTensors), one at a time: gathered whole, written by rows, or whole and scattered."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, without importing torch.distributed


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank; a tensor that is not sharded is returned as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; all of one that is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def own_rows(tensor: Tensor) -> slice | None:
    """The rows of a sharded tensor that this rank has, from a start to an end; None if its shards are no such rows."""
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    if tensor.device_mesh.ndim != 1 or not tensor.placements[0].is_shard(0):
        return None
    rows, local = len(tensor), local_part(tensor)
    most = -(-rows // tensor.device_mesh.size())  # as torch.chunk
    start = min(tensor.device_mesh.get_local_rank() * most, rows)
    answer = slice(start, min(start + most, rows))
    return answer if tuple(local.shape) == (answer.stop - answer.start, *tensor.shape[1:]) else None


def largest_of_ranks(values: Tensor, like: Tensor) -> Tensor:
    """The largest of each value over the ranks that share `like`; NaN where one of them has it."""
    from torch.distributed import ReduceOp, all_reduce
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    # whether the maximum of a number and NaN is NaN depends on the backend
    pair = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), values.isnan().to(values)])
    for axis in range(like.device_mesh.ndim):
        all_reduce(pair, ReduceOp.MAX, group=like.device_mesh.get_group(axis))
    return pair[0].masked_fill(pair[1] > 0, math.nan)


def replicated(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, to compute with a sharded one."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


@contextmanager
def own_part(target: Tensor, *, by_rows: bool = True) -> Iterator[tuple[Tensor, slice | None]]:
    """What this rank must write of `target`, and which of its rows that is; None for all, as without `by_rows`."""
    rows = own_rows(target) if by_rows else None
    if rows is not None:
        yield local_part(target), rows
    else:
        with whole(target) as full:
            yield full, None


@contextmanager
def whole(target: Tensor) -> Iterator[Tensor]:
    """A whole tensor to write into, equal on every rank: `target`, or a temporary whose shards are put into it."""
    if not is_sharded(target):
        yield target
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    local = target.to_local()
    full = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    yield full
    local.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None).to_local())
