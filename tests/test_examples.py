"""The programs in examples/ run, and the wide model goes on where the narrow one was."""

import re
import runpy

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["plain_loop", "transformers_trainer"])
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    text = capsys.readouterr().out
    narrow, wide = (float(loss) for loss in re.findall(r"^hidden size .*?([\d.]+)$", text, flags=re.MULTILINE))
    before, after = map(float, re.findall(r"loss ([\d.]+) before, ([\d.]+) after", text)[0])
    assert abs(after - before) < 0.05
    assert wide < narrow
