"""`python -m mupscale coord-check`: what it prints, draws and refuses, and its exit status."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from mupscale.__main__ import main
from mupscale.commands import coord_check as command

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def configuration(path: Path, model: str = "MLP", **arguments: Any) -> str:
    settings = {
        "width": 8,
        "base_width": 16,
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}},
        **arguments,
    }
    config = {
        "trainer": {"accelerator": "cpu", "logger": False, "enable_progress_bar": False},
        "model": {"class_path": model, "init_args": settings},
        "data": {"class_path": "Covertype", "init_args": {"batch_size": 100}},
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def sizes(folder: Path) -> list[list[str]]:
    with (folder / "coord_check.csv").open() as file:
        return list(csv.reader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_figures")
def test_the_command_tells_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(tmp_path / "c.yaml")
    main(["coord-check", "--config", config, "--widths", "16,32,64", "--seeds=2", f"--out={tmp_path / 'out'}"])
    told = capsys.readouterr().out
    assert "passed: no layer's output or update grows or vanishes" in told
    assert (tmp_path / "out/coord_check.png").read_bytes().startswith(b"\x89PNG")
    rows = sizes(tmp_path / "out")
    assert rows[0] == ["scan", "layer", "width", "step", "output", "update"]
    assert len(rows) == 1 + 3 * 4 * 3 * 5  # scans, layers, widths, steps and the start
    assert [row[:4] for row in rows if row[5] == "0.0"] == [
        [scan, layer, str(width), "0"]
        for scan, widths in zip(
            ("fresh", "doubled", "grown"), ((16, 32, 64), (32, 64, 128), (32, 64, 128)), strict=True
        )
        for layer in ("layers.0", "layers.1", "layers.2", "readout")
        for width in widths
    ]


@pytest.mark.slow
def test_depths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(tmp_path / "c.yaml", layers=2, base_layers=2)
    main(["coord-check", "--config", config, "--layers", "2,4,8", "--seeds=2", f"--out={tmp_path / 'out'}"])
    told = capsys.readouterr().out
    assert "passed: no layer's output or update grows or vanishes with the depth" in told
    assert (tmp_path / "out/coord_check.png").read_bytes().startswith(b"\x89PNG")
    rows = sizes(tmp_path / "out")
    assert rows[0] == ["scan", "layer", "depth", "step", "output", "update"]
    layers = ("layers.0", "layers.1", "layers.2", "blocks.*.inner", "blocks.*.outer", "blocks.*", "readout")
    assert [row[1:3] for row in rows[1:] if row[3] == "0"] == [[layer, n] for layer in layers for n in "248"]


@pytest.mark.slow
def test_the_command_fails_where_a_layer_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(tmp_path / "c.yaml", "extensions.UnscaledMLP")
    with pytest.raises(SystemExit) as exit:
        main(["coord-check", "--config", config, "--widths=16,32,64", "--seeds=2", f"--out={tmp_path}"])
    assert exit.value.code == 1
    assert "look first at layers.1" in capsys.readouterr().out
    assert (tmp_path / "coord_check.png").is_file()


@pytest.mark.slow
def test_a_warm_up_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "draw", lambda *_: None)
    warm_up = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"start_factor": 1e-3}}
    for name, arguments in (("constant", {}), ("warm_up", {"lr_scheduler": warm_up})):
        config = configuration(tmp_path / f"{name}.yaml", **arguments)
        main(["coord-check", "--config", config, "--widths=16,32,64", "--seeds=2", f"--out={tmp_path / name}"])
    assert sizes(tmp_path / "warm_up") == sizes(tmp_path / "constant")


@pytest.mark.slow
def test_the_configured_noise_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "draw", lambda *_: None)
    config = configuration(tmp_path / "c.yaml")
    without_noise = "{class_path: UpscaleCallback, init_args: {at_step: 1, width: 16}}"
    callback = f"--trainer.callbacks=[{without_noise}]"
    main(["coord-check", "--config", config, callback, "--widths=16,32,64", "--seeds=2", f"--out={tmp_path}"])
    starts = {tuple(row[1:3]): float(row[4]) for row in sizes(tmp_path) if row[0] == "grown" and row[3] == "0"}
    assert starts["layers.2", "128"] == pytest.approx(starts["layers.2", "32"], rel=1e-5)
