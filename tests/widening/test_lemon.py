"""LEMON's unequal split: shares, rates, and what it refuses."""

from typing import Any

import pytest
import torch
from bad_input import assert_refused
from nets import mlp
from torch import Tensor, nn

import mupscale
from mupscale.errors import UserError
from mupscale.methods import Lemon


def widened(method: Lemon, width: int = 4, **settings: Any) -> tuple[nn.Module, nn.Module, mupscale.UpscaleReport]:
    torch.manual_seed(0)
    narrow, wide = mlp(width).double(), mlp(3 * width).double()
    return narrow, wide, mupscale.upscale(narrow, wide, method=method, **settings)


def shares_of(narrow: Tensor, wide: Tensor) -> Tensor:
    """(units, copies): by what the columns of a weight were multiplied."""
    ratios = wide[::3] / narrow.repeat_interleave(3, 1)
    assert torch.allclose(ratios, ratios[:1].expand_as(ratios))
    return ratios[0].view(-1, 3)


def test_copies_have_unequal_shares_that_sum_to_one():
    narrow, wide, _ = widened(Lemon(spread=0.5))
    shares = shares_of(narrow.layers[1].weight.detach(), wide.layers[1].weight.detach())
    torch.testing.assert_close(shares.sum(1), torch.ones(4).double())
    assert (shares.max(1).values - shares.min(1).values).min() > 0.01
    assert shares.max() / shares.min() < 9  # (1.5 / 0.5)²
    assert torch.equal(wide.layers[0].weight, narrow.layers[0].weight.repeat_interleave(3, 0))


def test_shares_depend_on_the_seed_and_the_spread():
    def shares(**settings: Any) -> Tensor:
        narrow, wide, _ = widened(Lemon(**settings))
        return shares_of(narrow.layers[1].weight.detach(), wide.layers[1].weight.detach())

    assert torch.equal(shares(seed=1), shares(seed=1))
    assert not torch.equal(shares(seed=1), shares(seed=2))
    assert (shares(spread=0.01) - 1 / 3).abs().max() < 0.01 < (shares() - 1 / 3).abs().max()


def normalised(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3))


def test_a_norm_over_a_group_is_refused():
    method = Lemon(groups={"hidden": {"0.weight": 0, "1.weight": 0, "2.weight": 1}})
    assert_refused(
        lambda: (normalised(4), normalised(8), {"method": method}),
        ("Lemon: the group 'hidden' has '1.weight', whose norm averages over the units", "Give groups without it"),
    )


@pytest.mark.parametrize("spread", [0, 1, -0.1, float("nan"), "wide", True])
def test_a_spread_that_leaves_no_share(spread: Any):
    with pytest.raises(UserError, match="Lemon: spread must be a number between 0 and 1, got"):
        Lemon(spread=spread)
