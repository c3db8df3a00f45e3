"""Tables as text: what is aligned, and what becomes of rows that are longer than the terminal."""

import pytest

from mupscale.text_tables import Style, braced, table

ROWS = [("name", "number", "where"), ("a.long.name", "5", "first, second"), ("b", "120", "")]


def test_numbers_are_aligned_to_the_right():
    assert table(ROWS, right=[1]) == [
        "name         number  where",
        "----------------------------------",
        "a.long.name       5  first, second",
        "b               120",
    ]


@pytest.mark.parametrize("columns", [20, 24, 30, 40, 200])
def test_no_line_is_longer_than_the_terminal_and_no_word_is_lost(columns: int):
    rows = [*ROWS, ("a.name.without.any.space.that.is.long", "1", "x")]
    lines = table(rows, columns=columns)
    assert max(map(len, lines)) <= columns
    shown = "".join("".join(lines).split()).replace("-", "")
    assert sorted(shown) == sorted("".join("".join(cell for row in rows for cell in row).split()))


def test_colours_do_not_move_columns():
    def paint(text: str, style: Style) -> str:
        return f"<{style}>{text}"

    painted = table(ROWS, right=[1], styles={2: "bad"}, paint=paint)
    plain = table(ROWS, right=[1])
    assert painted == [f"<heading>{plain[0]}", *plain[1:3], f"<bad>{plain[3]}"]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["h.0.w", "h.1.w"], ["h.{0,1}.w"]),
        ([f"h.{i}.w" for i in range(12)], ["h.{0…11}.w"]),
        ([f"h.{i}.e.{j}.w" for i in range(3) for j in range(4)], ["h.{0…2}.e.{0…3}.w"]),
        (["h.0.e.0.w", "h.0.e.1.w", "h.1.e.0.w"], ["h.0.e.{0,1}.w", "h.1.e.0.w"]),
        (["0.w", "2.w", "3.w", "4.w", "layer1.w", "layer2.w"], ["{0,2…4}.w", "layer1.w", "layer2.w"]),
        (["h.0.a = h.0.b", "h.1.a = h.1.b"], ["h.0.a = h.0.b", "h.1.a = h.1.b"]),
        (["w"], ["w"]),
        ([], []),
    ],
)
def test_names_of_layers_are_joined_only_where_nothing_is_lost(names: list[str], labels: list[str]):
    found = braced(names)
    assert list(found) == labels
    assert sorted(name for members in found.values() for name in members) == sorted(names)
