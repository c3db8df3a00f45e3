"""Duplication along axes: interleaved, in blocks, in unlike pieces."""

import pytest
import torch

from mupscale.widening.axes import Layout, Piece, duplicate, duplicate_, parse_layout, wide_length


def test_interleaved_is_repeat_interleave():
    x = torch.randn(3, 4)
    got = duplicate(x, [(Piece(3, 1, 2),), (Piece(4, 1, 3),)])
    assert torch.equal(got, x.repeat_interleave(2, 0).repeat_interleave(3, 1))


def test_blocks_repeat_whole_runs():
    x = torch.arange(6)
    assert duplicate(x, [parse_layout(3, 6, 12)]).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert duplicate(x, [parse_layout(2, 6, 12)]).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]


def test_unlike_pieces():
    layout = parse_layout([(2, 1, 3), (2, 2, 2), (1, 1, 1)], 5, 11)
    assert layout == (Piece(2, 1, 3), Piece(2, 2, 2), Piece(1, 1, 1))
    assert duplicate(torch.arange(5), [layout]).tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 2, 3, 4]


def test_scales_apply_per_piece():
    layout = parse_layout([(1, 1, 2), (1, 1, 1)], 2, 3)
    target = torch.empty(3)
    duplicate_(target, torch.tensor([4.0, 5.0]), [layout], [[0.5, 1.0]])
    assert target.tolist() == [2.0, 2.0, 5.0]


def test_scaling_happens_in_the_wider_dtype():
    target = torch.empty(2, dtype=torch.float64)
    duplicate_(target, torch.tensor([1.0]), [(Piece(1, 1, 2),)], [[1 / 3]])
    assert target.tolist() == [1 / 3, 1 / 3]


def test_memory_formats_and_scalars():
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    target = torch.empty(4, 9, 4, 4).contiguous(memory_format=torch.channels_last)
    layouts = [(Piece(2, 1, 2),), (Piece(3, 1, 3),), (Piece(4, 4, 1),), (Piece(4, 4, 1),)]
    duplicate_(target, x, layouts)
    assert torch.equal(target, x.repeat_interleave(2, 0).repeat_interleave(3, 1))
    assert duplicate(torch.tensor(7), []).item() == 7


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (4, "a block of 4 does not divide 6"),
        (0, "at least 1"),
        ([(6, 1, 3)], r"cover 6 → 18 entries, the axis has 6 → 12"),
        ([(6, 1)], r"a list of \(length, block, factor\)"),
        (2.0, "in whole numbers"),
    ],
)
def test_bad_layouts(spec, message: str):
    with pytest.raises(ValueError, match=message):
        parse_layout(spec, 6, 12)


@pytest.mark.parametrize(
    "layout",
    [
        (Piece(6, 1, 3),),
        (Piece(6, 3, 2),),
        (Piece(2, 2, 1), Piece(4, 2, 3)),
        tuple(Piece(1, 1, 1 + unit % 2) for unit in range(6)),
    ],
)
@pytest.mark.parametrize("many_cells", [False, True])
def test_some_rows_are_those_of_the_whole(layout: Layout, many_cells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank writes its rows alone; one of many may have none."""
    if many_cells:
        monkeypatch.setattr("mupscale.widening.axes._MANY_CELLS", 0)
    source = torch.arange(30.0, dtype=torch.float64).view(6, 5) + 1
    layouts = layout, (Piece(5, 1, 2),)
    scales = [[1.0 / (number + 2) for number in range(len(layout))], [0.5]]
    count = wide_length(layout)
    whole = torch.empty(count, 10, dtype=torch.float64)
    duplicate_(whole, source, layouts, scales, scale=3.0)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            part = torch.empty(stop - start, 10, dtype=torch.float64)
            duplicate_(part, source, layouts, scales, scale=3.0, rows=slice(start, stop))
            assert torch.equal(part, whole[start:stop])
