"""What the calculator says of growths inside and outside of the runs that it rests on, and what the guide quotes."""

import pytest
from paths import ROOT

from experiments import should_i_grow
from experiments.ladder import read_size
from experiments.should_i_grow import answer, estimate, main, predict_half, read_points


def test_guide_quotes_it(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "should_i_grow.md").read_text("utf-8")
    command, output = guide.partition("<!-- calculator -->")[::2]
    arguments = command.rpartition("experiments.should_i_grow ")[2].splitlines()[0].split()
    main(arguments)
    assert capsys.readouterr().out == output.partition("```text\n")[2].partition("```")[0]


@pytest.mark.parametrize(
    ("have", "want", "tokens", "said"),
    [
        ("256x4", "256x8", 5.5e7, "S, target size: 1.23 ("),
        ("128x4", "256x8", 1e8, "depth: interleave, and diagonal"),
        ("128x4", "256x8", 2e8, "not known. Such runs have 5 to 10 tokens per parameter"),
        ("256x8", "1024x8", 1e8, "not known. Such runs grow to 2 times the width and 1 times the layers"),
        ("512x8", "1024x8", 1e9, "not known. Such runs grow to width 128 to 512"),
        ("256x8", "128x8", 1e8, "nothing grows"),
    ],
)
def test_answers(have: str, want: str, tokens: float, said: str) -> None:
    assert said in answer(read_points(), read_size(have), read_size(want), tokens)


def test_a_held_out_half_does_not_see_itself() -> None:
    points = read_points()
    seen, found, _ = next(predict_half(points, "target"))
    assert seen == pytest.approx(points[1].advantages["target"])
    assert found != estimate(points, points[1], "target")
    assert should_i_grow.SHARE == 0.25
