"""`python -m mupscale verify`: the verdict on a configured model, as text and as an exit status."""

from pathlib import Path

import pytest
from command_line import refused, small, upscale

from mupscale.__main__ import main
from mupscale.models.mlp import ResidualBlock
from mupscale.widening import table

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_a_right_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", "--config", small(Path("c.yaml"), upscale(3, 16)), "--data.batch_size=50"])
    assert "width 8 → 16: exact" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("declared", [True, False])
def test_new_layers_keep_the_function(
    declared: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not declared:  # what makes new layers add nothing is found
        monkeypatch.delattr(ResidualBlock, "residual_outputs")
    layers = ["--model.layers=2", "--model.base_layers=2", "--callback_args={UpscaleCallback: {layers: 4}}"]
    main(["verify", "--config", small(Path("c.yaml"), upscale(3, 16)), "--data.batch_size=50", *layers])
    told = capsys.readouterr().out
    assert "width 8 and 2 layers → width 16 and 4 layers: Duplication: function preserved (deviation " in told
    assert "training not preserved" in told


@pytest.mark.slow
def test_a_broken_rule_is_an_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "lr", lambda *_: 1.0)
    with pytest.raises(SystemExit) as exit:
        main(["verify", "--config", small(Path("c.yaml"), upscale(3, 16)), "--data.batch_size=50"])
    assert exit.value.code == 1
    assert "NOT exact: layers.2 diverges first" in capsys.readouterr().out


@pytest.mark.slow
def test_an_own_configure_optimizers_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "--config", small(Path("c.yaml"), upscale(3, 16)), "--data.batch_size=50", "--model"]
    assert "UnscaledMLP.configure_optimizers: layers.0.weight and" in refused(*command, "extensions.UnscaledMLP")
    capsys.readouterr()
    main([*command, "extensions.TwoOptimizersMLP"])
    assert capsys.readouterr().out.startswith("width 8 → 16: exact")
    main([*command, "extensions.OneGroupMLP"])
    printed = capsys.readouterr().out
    assert "OneGroupMLP.configure_optimizers cannot be checked outside of a run: model.optimizer is checked" in printed
    assert "width 8 → 16: exact" in printed


@pytest.mark.slow
def test_a_loss_that_depends_on_the_width_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "--config", small(Path("c.yaml"), upscale(3, 16)), "--data.batch_size=50", "--model"]
    with pytest.raises(SystemExit):
        main([*command, "extensions.ScaledByWidthMLP"])
    assert "NOT exact: (the loss) diverges first" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [False, True])
def test_the_claim_of_a_method(
    broken: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = upscale(3, 16)
    swap["init_args"]["method"] = {"class_path": "mupscale.methods.Net2Net", "init_args": {"seed": 1}}
    command = ["verify", "--config", small(Path("c.yaml"), swap), "--data.batch_size=50"]
    if not broken:
        main(command)
        assert "width 8 → 16: Net2Net: function preserved" in capsys.readouterr().out
        return
    monkeypatch.setattr(table, "lr", lambda *_: 1.0)
    with pytest.raises(SystemExit) as exit:
        main(command)
    assert exit.value.code == 1
    assert "REFUTED" in capsys.readouterr().out
