"""The programs and the notebook in examples/ run, and the wide model goes on where the narrow one was."""

import re
import runpy
import sys
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


def loss_around_the_growth(text: str) -> tuple[float, float]:
    before, after = re.findall(r"^loss of one batch ([\d.]+) before, ([\d.]+) after$", text, flags=re.MULTILINE)[0]
    return float(before), float(after)


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_lightning_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of("lightning_module", capsys)
    before, after = loss_around_the_growth(text)
    assert after == before  # centred noise keeps it
    (last,) = re.findall(r"^mean loss of the last ten steps ([\d.]+)$", text, flags=re.MULTILINE)
    assert float(last) < before - 0.2
    assert (tmp_path / "runs/lightning_module/checkpoints/last.ckpt").exists()


@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_module_under_mup(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of("mup_module", capsys)
    before, after = loss_around_the_growth(text)
    assert after == pytest.approx(before, abs=2e-4)
    rates = re.findall(r"^(net\S+): rate ([\d.]+), if built wide ([\d.]+)$", text, flags=re.MULTILINE)
    assert {name: float(rate) for name, rate, _ in rates if name == "net.2.weight"} == {"net.2.weight": 0.003 / 4}
    assert all(grown == built for _, grown, built in rates)
    assert len(rates) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_lightning_cli(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    program = EXAMPLES / "lightning_cli.py"
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's calls
    monkeypatch.setattr(sys, "argv", [str(program), "fit", "--config", str(EXAMPLES / "lightning_cli.yaml")])
    with caplog.at_level("INFO"):
        runpy.run_path(str(program), run_name="__main__")
    (losses,) = re.findall(r"step 60: grew hidden=32 → hidden=128, .* dropout ([\d.]+) → ([\d.]+)", caplog.text)
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=2e-6)  # float32, printed to six places


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
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
