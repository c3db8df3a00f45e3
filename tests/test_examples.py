"""The programs and the notebook in examples/ run, and the wide model goes on where the narrow one was."""

import re
import runpy
from pathlib import Path

import pytest
from paths import ROOT

EXAMPLES = ROOT / "examples"


def output_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "transformers_trainer"])
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(name, capsys)
    narrow, wide = (float(loss) for loss in re.findall(r"^hidden size .*?([\d.]+)$", text, flags=re.MULTILINE))
    before, after = map(float, re.findall(r"loss ([\d.]+) before, ([\d.]+) after", text)[0])
    assert abs(after - before) < 0.05
    assert wide < narrow


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_lightning_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of("lightning_module", capsys)
    assert text.startswith("checked: widening 32 → 64 is exact")
    lines = re.findall(r"^width (\d+): loss ([\d.]+) in", text, flags=re.MULTILINE)
    assert [width for width, _ in lines] == ["32", "32", "64", "64"]
    first, before, after, last = (float(loss) for _, loss in lines)
    assert first - 0.5 > before
    assert abs(after - before) < 0.2  # batches and a little noise
    assert last < min(before, after) - 0.1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_the_sweep_and_its_transfer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of("sweep_and_transfer", capsys)
    rows = re.findall(r"^0\.\d+ +([\d.]+) +([\d.]+) +([\d.]+)$", text, flags=re.MULTILINE)
    losses = [[float(loss) for loss in row] for row in rows]
    assert len(losses) == 3
    small = losses[1][1]
    assert small == min(map(min, losses))  # in the middle of the table: the values reach far enough
    assert "# lr=0.016, std=0.1: val/loss" in text
    assert "width 128, " in text
    (large,) = re.findall(r"^  val/loss ([\d.]+)$", text, flags=re.MULTILINE)
    assert float(large) < small
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stored outputs are those of a run. `tests/support/notebooks.py` stores them anew."""
    from notebooks import executed, pictures, printed, read

    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stored = read(EXAMPLES / "growing.ipynb")
    fresh = executed(stored, tmp_path)
    assert printed(fresh) == printed(stored)
    assert "largest difference of the losses in 300 steps: 0\n" in printed(fresh)
    narrow, exact, noisy = (float(loss) for loss in re.findall(r"([\d.]+) in the last 100", printed(fresh)))
    assert exact == narrow
    assert noisy < narrow - 0.05
    assert len(pictures(stored)) == len(pictures(fresh)) == 1


def test_the_index_has_every_example() -> None:
    listed = re.findall(r"^\| \[`(.+?)`\]\(\1\) \| .* \|$", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
