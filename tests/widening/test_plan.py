"""The plan of an upscale, in words."""

import pytest
import torch
from torch import Tensor, nn

import mupscale
from mupscale.errors import UserError
from mupscale.models.mlp import MLPNet

PLAN = """\
parameter        role     narrow → wide  k_out  k_in  weight   duplicated
-----------------------------------------------------------------------------------
layers.0.weight  vector   4×3 → 8×3          2     1  dup      axis 0 ×2
layers.0.bias    vector   4 → 8              2     1  dup      axis 0 ×2
layers.1.weight  matrix   4×4 → 12×8         3     2  dup / 2  axis 0 ×3, axis 1 ×2
layers.1.bias    vector   4 → 12             3     1  dup      axis 0 ×3
readout.weight   readout  2×4 → 2×12         1     3  dup / 3  axis 1 ×3
readout.bias     scalar   2                  1     1  copy
46 → 166 parameters"""


def test_the_plan_in_words():
    narrow, wide = MLPNet(3, (4, 4), 2, readout_zero_init=False), MLPNet(3, (8, 12), 2, readout_zero_init=False)
    assert str(mupscale.plan(narrow, wide)) == PLAN


def test_blocks_are_explained():
    narrow, wide = (nn.Sequential(nn.Linear(3, width)) for width in (4, 8))
    text = str(mupscale.plan(narrow, wide, hints=mupscale.Hints(blocks={"0.*": {0: 2}})))
    assert "axis 0 ×2 by 2" in text
    assert text.endswith("by N: blocks of N entries are repeated as wholes")


def test_pieces_of_an_axis_in_words():
    narrow, wide = (nn.Sequential(nn.Linear(width + 3, 2)) for width in (4, 8))
    plan = mupscale.plan(narrow, wide, hints=mupscale.Hints(blocks={"0.weight": {1: [(4, 1, 2), (3, 1, 1)]}}))
    assert "axis 1: 4·2 by 1 + 3·1 by 1" in str(plan)


def duplicated(plan: mupscale.Plan, name: str) -> list[tuple[int, ...]]:
    """The pieces of the first axis."""
    return [tuple(piece) for piece in plan.parameters[name].layouts[0]]


def test_a_bias_follows_the_blocks_of_its_norm_in_any_role():
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 2)) for n in (4, 8))
    blocks = {"*.weight": {0: 2}, "2.weight": {0: 1, 1: 2}}
    for role in ("vector", "readout"):
        plan = mupscale.plan(narrow, wide, hints=mupscale.Hints(blocks=blocks, roles={"1.*": role}))
        assert duplicated(plan, "1.bias") == duplicated(plan, "1.weight") == [(4, 2, 2)]
    # the bias of a square readout is no copy of what it sums over
    square = [nn.Sequential(nn.Linear(3, n), nn.Linear(n, 4)) for n in (4, 8)]
    assert duplicated(
        mupscale.plan(*square, hints=mupscale.Hints(blocks={"0.weight": {0: 2}, "1.weight": {1: 2}})), "1.bias"
    ) == [(4, 4, 1)]


def test_a_bias_and_statistics_follow_the_blocks_of_a_depthwise_convolution():
    def build(n: int) -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, n, 1), nn.Conv1d(n, n, 3, groups=n), nn.BatchNorm1d(n))

    plan = mupscale.plan(build(4), build(8), hints=mupscale.Hints(blocks={"*.weight": {0: 2}}))
    assert duplicated(plan, "1.bias") == duplicated(plan, "1.weight") == [(4, 2, 2)]
    assert tuple(plan.buffers["2.running_mean"].layouts[0][0]) == (4, 2, 2)
    # what the module implies holds where nothing is given, and what is given for the bias itself wins
    assert duplicated(mupscale.plan(build(4), build(8)), "1.bias") == [(4, 1, 2)]
    plan = mupscale.plan(build(4), build(8), hints=mupscale.Hints(blocks={"*.weight": {0: 2}, "1.bias": {0: 4}}))
    assert duplicated(plan, "1.bias") == [(4, 4, 2)]


class Projected(nn.Module):
    """An embedding tied to a readout, with a projection right before it instead of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, width), nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.project(self.embed(tokens).tanh()))


def test_a_readout_role_with_two_axes_carries_the_factor_of_a_tied_readout():
    torch.manual_seed(0)
    with pytest.raises(UserError, match="conflicting roles"):
        mupscale.plan(Projected(4), Projected(8))
    tokens = torch.randint(7, (4, 5))
    answer = mupscale.verify(
        Projected(4),
        Projected(12),
        hints=mupscale.Hints(roles={"project.*": "readout"}),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batches=[tokens],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1).flatten()),
        steps=4,
    )
    assert answer.passed, answer


def test_blocks_that_do_not_fit_have_a_remedy():
    narrow, wide = nn.Sequential(nn.Linear(3, 8)), nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(
        UserError, match=r"axis 0 of '0.weight' .* narrower in the wide model \(4 < 8\)\. Give the smaller"
    ):
        mupscale.plan(narrow, wide, hints=mupscale.Hints(blocks={"0.weight": {0: 2}}))


@pytest.mark.parametrize(("optimizer", "kept"), [(torch.optim.AdamW, 1.0), (torch.optim.SGD, 2.0)])
def test_kept_layers_beside_new_ones_get_the_rates_of_the_deep_model(optimizer: type, kept: float) -> None:
    """Of branches multiplied by 2 / layers. The kept ones get back in their weights what they lose, and no rate."""
    narrow, wide = (MLPNet(5, [8], 3, layers, branch_multiplier=2 / layers) for layers in (2, 4))
    report = mupscale.upscale(
        narrow, wide, optimizer(narrow.parameters(), lr=0.1), depth="identity", call=lambda net: net(torch.randn(4, 5))
    )
    names = {id(parameter): name for name, parameter in wide.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in report.optimizer.param_groups for p in group["params"]}
    in_blocks = {name: rate for name, rate in rates.items() if name.startswith("blocks")}
    assert set(in_blocks.values()) == {0.1 * kept}
    assert torch.equal(wide.blocks[0].outer.weight, 2 * narrow.blocks[0].outer.weight)
