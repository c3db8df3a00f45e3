"""The plan of an upscale, in words."""

from torch import nn

import mupscale
from mupscale.models.mlp import MLPNet

PLAN = """\
parameter        role     narrow → wide  k_out  k_in  weight   duplicated
-----------------------------------------------------------------------------------
layers.0.weight  vector   4×3 → 8×3      2      1     dup      axis 0 ×2
layers.0.bias    vector   4 → 8          2      1     dup      axis 0 ×2
layers.1.weight  matrix   4×4 → 12×8     3      2     dup / 2  axis 0 ×3, axis 1 ×2
layers.1.bias    vector   4 → 12         3      1     dup      axis 0 ×3
readout.weight   readout  2×4 → 2×12     1      3     dup / 3  axis 1 ×3
readout.bias     scalar   2              1      1     copy
46 → 166 parameters"""


def test_the_plan_in_words():
    narrow, wide = MLPNet(3, (4, 4), 2, readout_zero_init=False), MLPNet(3, (8, 12), 2, readout_zero_init=False)
    assert str(mupscale.plan(narrow, wide)) == PLAN


def test_pieces_of_an_axis_in_words():
    narrow, wide = (nn.Sequential(nn.Linear(width + 3, 2)) for width in (4, 8))
    plan = mupscale.plan(narrow, wide, blocks={"0.weight": {1: [(4, 1, 2), (3, 1, 1)]}})
    assert "axis 1: 4·2 by 1 + 3·1 by 1" in str(plan)
