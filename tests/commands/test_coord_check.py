"""`python -m mupscale coord-check`: what it prints, draws and refuses, and its exit status."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from mupscale.__main__ import main
from mupscale.checks.coordinate_check import DEFAULT_NOISE
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
        main(["coord-check", "--config", config, "--widths=16,32,64", "--seeds=1", f"--out={tmp_path}"])
    assert exit.value.code == 1
    assert "look first at layers.1" in capsys.readouterr().out
    assert (tmp_path / "coord_check.png").is_file()


def arguments_of_check(monkeypatch: pytest.MonkeyPatch, config: str, *options: str) -> tuple[Any, dict[str, Any]]:
    """The function that makes networks, and the named arguments, with which the command calls `coord_check`."""
    found: list[Any] = []

    def stop(network: Any, widths: Any, **named: Any) -> None:
        found.extend((network, named))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "coord_check", stop)
    with pytest.raises(KeyboardInterrupt):
        command.main("coord-check", ["--config", config, *options, "--widths=16,32,64"])
    return found[0], found[1]


def test_a_warm_up_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"start_factor": 1e-3}}
    rates = []
    for arguments in ({}, {"lr_scheduler": warm_up}):
        network, named = arguments_of_check(monkeypatch, configuration(tmp_path / "c.yaml", **arguments))
        rates.append([group["lr"] for each in named["optimizer"](network(16)) for group in each.param_groups])
    assert rates[0] == rates[1]
    assert max(rates[0]) == 0.003


def test_the_configured_noise_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path / "c.yaml")
    assert arguments_of_check(monkeypatch, config)[1]["noise"] == DEFAULT_NOISE
    given = ", noise: {class_path: AdditiveNoise, init_args: {std: 0.25}}"
    for noise, std in (("", DEFAULT_NOISE.std), (", noise: null", None), (given, 0.25)):
        swap = f"{{class_path: UpscaleCallback, init_args: {{at_step: 1, width: 16{noise}}}}}"
        taken = arguments_of_check(monkeypatch, config, f"--trainer.callbacks=[{swap}]")[1]["noise"]
        assert getattr(taken, "std", None) == std
