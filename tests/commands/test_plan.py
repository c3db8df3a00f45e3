"""`python -m mupscale plan`: what would be widened, and nothing trained."""

from pathlib import Path

import pytest
from command_line import refused, small, upscale

from mupscale.__main__ import main
from mupscale.models.mlp import ResidualBlock

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_the_plan_of_every_growth_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", small(Path("c.yaml"), upscale(3, 16), upscale(5, 48))])
    printed = capsys.readouterr().out
    first, second = printed.index("width 8 → 16"), printed.index("width 16 → 48")
    assert "8×8 → 16×16" in printed[first:second]
    assert "16×16 → 48×48" in printed[second:]
    assert printed.count("layers.1.weight") == 2
    assert [path.name for path in Path().iterdir()] == ["c.yaml"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_the_configuration_that_a_run_wrote_is_read(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", small(Path("c.yaml"), max_steps=6)])
    options = ["--sweep", "model.optimizer.lr=0.1", "--out", "s"] if command == "sweep" else []
    main([command, "--config", "runs/default/version_0/config.yaml", *options])
    assert ("best.yaml" if command == "sweep" else "width 8 → 16") in capsys.readouterr().out


DEEPER = ["--model.layers=2", "--model.base_layers=2"]


@pytest.mark.slow
def test_the_plan_of_more_layers(capsys: pytest.CaptureFixture[str]) -> None:
    swap = ["--callback_args={UpscaleCallback: {layers: 4, width: 16, depth: interleave}}"]
    main(["plan", "--config", small(Path("c.yaml"), upscale(3, 8)), *DEEPER, *swap])
    printed = capsys.readouterr().out
    assert "width 8 and 2 layers → width 16 and 4 layers" in printed
    assert "blocks, 2 → 4 layers: 0 = 0, 1 (copy of 0), 2 = 1, 3 (copy of 1)" in printed
    fewer = ["--callback_args={UpscaleCallback: {layers: 1}}"]
    message = refused("plan", "--config", "c.yaml", *DEEPER, *fewer)
    assert "does not fit the width 8 and 2 layers before it: blocks (2 → 1 layers): the deep model has fewer" in message


def test_what_a_class_does_not_declare_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["plan", "--config", small(Path("c.yaml"), upscale(3, 8)), *DEEPER]
    line.append("--callback_args={UpscaleCallback: {layers: 4, width: 16}}")
    main(line)
    declared = capsys.readouterr().out
    monkeypatch.delattr(ResidualBlock, "residual_outputs")
    main(line)
    assert capsys.readouterr().out == declared


def test_the_plan_of_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    """The units of a hidden layer have numbers of copies of their own; those before the muP readout too."""
    swap = upscale(3, 16)
    swap["init_args"]["method"] = {"class_path": "mupscale.methods.Net2Net"}
    main(["plan", "--config", small(Path("c.yaml"), swap)])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "axis 0: 8 → 16 in 8 pieces" in rows["layers.0.weight"]
    assert "axis 1: 8 → 16 in 8 pieces" in rows["readout.weight"]
