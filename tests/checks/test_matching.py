"""Tensors that are duplicates of others, and the layouts that say how."""

import pytest
import torch

from mupscale.checks.matching import as_layout, match
from mupscale.widening.axes import Piece, duplicate, evenly, parse_layout, source_index

LAYOUTS = [
    (12, 24, 12),
    (12, 24, 4),
    (12, 36, 1),
    (12, 20, [(4, 4, 3), (8, 8, 1)]),
    (12, 20, [(8, 8, 1), (4, 4, 3)]),
    (12, 24, [(6, 6, 2), (2, 2, 2), (4, 4, 2)]),
    (12, 19, [(2, 2, 1), (7, 7, 2), (3, 3, 1)]),
]


@pytest.mark.parametrize(("narrow", "wide", "spec"), LAYOUTS)
def test_a_layout_is_read_off_its_copies(narrow: int, wide: int, spec: object) -> None:
    layout = parse_layout(spec, narrow, wide)
    found = as_layout(source_index(layout).tolist())
    assert found is not None
    assert torch.equal(source_index(found), source_index(layout))


def test_what_pieces_cannot_say_has_no_layout() -> None:
    assert as_layout([1, 0, 1, 0]) is None
    assert as_layout([0, 2, 1]) is None
    assert as_layout([]) == ()


@pytest.mark.parametrize(("narrow", "wide", "spec"), LAYOUTS)
@pytest.mark.parametrize("ratio", [1.0, 0.5, 2**0.5])
def test_a_duplicate_is_matched(narrow: int, wide: int, spec: object, ratio: float) -> None:
    layouts = ((Piece(3, 3, 1),), parse_layout(spec, narrow, wide), (Piece(2, 2, 1),))
    tensor = torch.randn(3, narrow, 2, dtype=torch.float64)
    found = match(tensor, duplicate(tensor, layouts) * ratio, 1e-9)
    assert found is not None
    assert found.ratio == pytest.approx(ratio, rel=1e-12)
    assert torch.equal(duplicate(tensor, found.layouts), duplicate(tensor, layouts))


def test_two_axes_may_grow() -> None:
    tensor = torch.randn(4, 6, dtype=torch.float64)
    wide = tensor.repeat_interleave(2, 0).repeat(1, 3)
    found = match(tensor, wide, 1e-9)
    assert found is not None
    assert torch.equal(duplicate(tensor, found.layouts), wide)


def test_another_tensor_is_not_matched() -> None:
    tensor = torch.randn(2, 8, dtype=torch.float64)
    wide = torch.cat([tensor, tensor], 1)
    wide[0, 3] += 1e-6
    assert match(tensor, wide, 1e-9) is None
    assert match(tensor, tensor[:, :4], 1e-9) is None
    assert match(tensor, tensor[None], 1e-9) is None
    assert match(tensor, -tensor, 1e-9) is None
    assert match(torch.zeros(3), torch.ones(3), 1e-9) is None


def test_masked_places_must_agree() -> None:
    tensor = torch.tensor([[1.0, -torch.inf, 3.0]], dtype=torch.float64)
    assert match(tensor, tensor * 1.0, 1e-9) is not None
    other = torch.tensor([[1.0, 2.0, -torch.inf]], dtype=torch.float64)
    assert match(tensor, other, 1e-9) is None


def test_of_several_ways_a_planned_one_is_taken() -> None:
    tensor = torch.zeros(2, 12, dtype=torch.float64)
    wide = torch.zeros(2, 24, dtype=torch.float64)
    layout = parse_layout(3, 12, 24)
    assert match(tensor, wide, 1e-9).layouts[1] == parse_layout(12, 12, 24)
    assert match(tensor, wide, 1e-9, {(12, 24): [layout]}).layouts[1] == layout


def test_two_axes_may_grow_by_a_fraction() -> None:
    layouts = evenly(4, 6), evenly(8, 12, 4)
    tensor = torch.randn(4, 8, dtype=torch.float64)
    found = match(tensor, duplicate(tensor, layouts), 1e-9)
    assert found is not None
    assert found.layouts == layouts
