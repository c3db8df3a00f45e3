"""Networks on the meta device."""

import torch
from torch import nn

from mupscale.models.meta_device import WithoutDraws


def test_only_the_meta_device_goes_without_random_numbers() -> None:
    def filled() -> list[torch.Tensor]:
        weights = [torch.empty(4, 4) for _ in range(4)]
        weights[0].normal_()
        nn.init.normal_(weights[1])
        nn.init.kaiming_uniform_(tensor=weights[2])
        nn.init.xavier_uniform_(weights[3])
        return [*weights, *nn.Linear(3, 3).parameters()]

    torch.manual_seed(0)
    expected = filled()
    torch.manual_seed(0)
    with torch.device("meta"), WithoutDraws():
        assert all(weight.is_meta for weight in filled())
    with WithoutDraws():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(filled(), expected, strict=True))
