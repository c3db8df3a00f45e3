"""The check that a loader gives the same batches by position as by iteration, alone and jointly with others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mupscale.datamodules.resident import ResidentLoader, joint_batch

EPOCHS = 3


def parts(batch: Any) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else batch


def assert_same(batch: Any, other: Any) -> None:
    assert type(batch) is type(other)
    for part, expected in zip(parts(batch), parts(other), strict=True):
        assert part.dtype == expected.dtype
        assert torch.equal(part, expected)


def check_positions(make: Callable[[int], ResidentLoader], *, follows_seed: bool) -> None:
    """`make` gives a new loader of a seed, always of the same tensors."""
    drawn = {}
    for seed in (0, 1):
        drawing = make(seed)
        drawn[seed] = [list(drawing) for _ in range(EPOCHS)]

    loader = make(0)
    before = loader.state_dict()
    # back and forth over more epochs than are kept
    for epoch in (2, 0, 1, 0, 2):
        for position, batch in reversed(list(enumerate(drawn[0][epoch]))):
            assert_same(loader.batch_at(epoch, position), batch)
    assert loader.state_dict() == before

    together = [make(0), make(1), make(0)]
    assert together[0].order == together[2].order
    assert len({loader.order for loader in together}) == (2 if follows_seed else 1)
    for epoch in (2, 0, 1, 0, 2):
        for position in range(len(loader)):
            joint = joint_batch(together, epoch, position)
            batches = [parts(drawn[seed][epoch][position]) for seed in (0, 1, 0)]
            assert_same(parts(joint), tuple(torch.stack(same_part) for same_part in zip(*batches, strict=True)))
            assert isinstance(joint, Tensor) == isinstance(drawn[0][epoch][position], Tensor)
    assert all(loader.state_dict() == make(seed).state_dict() for loader, seed in zip(together, (0, 1, 0), strict=True))
