"""`python -m mupscale upscale`: the offline surgery equals the swap inside a run."""

import pytest
import torch
from command_line import refused, small
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from saved import save_mlp
from tiers import slow_except
from training_runs import quiet_trainer

from mupscale.__main__ import main
from mupscale.atomic import locked_output
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands import upscale_checkpoint
from mupscale.datamodules.resident import ResidentLoader
from mupscale.methods import METHODS
from mupscale.methods.noise import AdditiveNoise
from mupscale.models.checkpoint import Size
from mupscale.models.mlp import MLP, ResidualBlock


def data() -> ResidentLoader:
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(112, 54, generator=generator), torch.randint(7, (112,), generator=generator)
    return ResidentLoader(tensors, 16, shuffle=True)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)


def fit(folder, steps: int, *callbacks, ckpt_path=None, optimizer=adamw, layers=None) -> Trainer:
    torch.manual_seed(0)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    module = MLP(8, base_width=4, optimizer=optimizer, lr_scheduler=schedule, layers=layers)
    trainer = quiet_trainer(max_steps=steps, precision="64-true", callbacks=list(callbacks), default_root_dir=folder)
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach() for p in trainer.lightning_module.net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("depth", ["identity", "interleave"])
def test_a_deepened_checkpoint_resumes_as_the_run_that_swapped(depth, tmp_path, capsys):
    """Two blocks become four, and width 8 becomes 24, after 10 of 30 steps."""
    inside = fit(tmp_path, 30, UpscaleCallback(10, 24, layers=4, depth=depth, noise=None), layers=2)
    narrow, deep = tmp_path / "pre-upscale-10.ckpt", tmp_path / "new" / "deep.ckpt"
    size = ["--width", "24", "--layers", "4", "--depth", depth, "--noise", "none"]
    main(["upscale", str(narrow), *size, "--out", str(deep)])
    assert "model.width to 24 and model.layers to 4" in capsys.readouterr().out
    outside = fit(tmp_path, 30, ckpt_path=deep, layers=2)
    assert outside.lightning_module.size == Size(24, 4)
    for one, other in zip(weights(inside), weights(outside), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_layers_that_declare_nothing_are_probed_with_the_data_of_a_configuration(tmp_path, capsys, monkeypatch):
    """Without data the command says how; with it, the same parameters are zero as with the declaration."""
    trainer = fit(tmp_path, 2, layers=2)
    trainer.save_checkpoint(tmp_path / "shallow.ckpt")
    line = ["upscale", str(tmp_path / "shallow.ckpt"), "--layers", "4", "--out"]
    main([*line, str(tmp_path / "declared.ckpt")])
    monkeypatch.delattr(ResidualBlock, "residual_outputs")
    message = refused(*line, str(tmp_path / "refused.ckpt"))
    assert "does not declare residual_outputs" in message
    assert "Give --check CONFIG" in message
    main([*line, str(tmp_path / "probed.ckpt"), "--check", small(tmp_path / "c.yaml")])
    assert "exact" in capsys.readouterr().out
    declared, probed = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("declared", "probed"))
    for name, weight in declared["state_dict"].items():
        torch.testing.assert_close(probed["state_dict"][name], weight, rtol=0, atol=0)


def test_a_widened_checkpoint_resumes_as_the_run_that_swapped(tmp_path, capsys):
    """Width 8 to 24 after 10 of 30 steps: at the end weights, rates, eps and decay agree to rounding."""
    inside = fit(tmp_path, 30, UpscaleCallback(10, 24, noise=None))
    narrow, wide = str(tmp_path / "pre-upscale-10.ckpt"), str(tmp_path / "wide.ckpt")
    main(["upscale", narrow, "--width", "24", "--noise", "none", "--out", wide])
    printed = capsys.readouterr().out
    assert "→ 2,695 parameters" in printed
    assert "not checked: --check CONFIG compares both widths" in printed
    # at its width the swap is left out
    offline = fit(tmp_path, 30, UpscaleCallback(10, 24, noise=None), ckpt_path=wide)
    assert offline.lightning_module.width == 24
    for a, b in zip(weights(offline), weights(inside), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(offline.optimizers[0].param_groups, inside.optimizers[0].param_groups, strict=True):
        assert [a[key] for key in ("lr", "initial_lr", "eps", "weight_decay")] == pytest.approx(
            [b[key] for key in ("lr", "initial_lr", "eps", "weight_decay")], rel=1e-12
        )


@pytest.mark.slow
def test_check_compares_both_widths_before_anything_is_written(tmp_path, capsys, monkeypatch):
    fit(tmp_path, 11, UpscaleCallback(10, 24, noise=None))
    line = ["upscale", str(tmp_path / "pre-upscale-10.ckpt"), "--width", "24", "--check", small(tmp_path / "c.yaml")]
    main([*line, "--out", str(tmp_path / "wide.ckpt")])
    assert "exact: a training step in float64 equals the narrow model's, outputs agree to" in capsys.readouterr().out
    monkeypatch.setattr(MLP, "loss", lambda self, batch: self(batch[0]).square().mean() * self.width)
    words = "--width 24: growth from width 8 is not exact: the loss differs by 200 %"
    assert words in refused(*line, "--out", str(tmp_path / "wrong.ckpt"))
    assert not (tmp_path / "wrong.ckpt").exists()


OFFLINE = [name for name in METHODS if name not in ("ligo", "hypercloning-noisy")]
"""Methods that neither learn from the run's data nor have noise, whose seed is the run's."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_except(OFFLINE, "net2net", "zero-padding", "hypercloning-diagonal", "lemon", "aki", kept=[])
)
def test_a_method_offline_is_the_method_inside_a_run(name, tmp_path, capsys):
    method = METHODS[name]()
    inside = fit(tmp_path, 30, UpscaleCallback(10, 24, method=method, noise=None))
    narrow, out = str(tmp_path / "pre-upscale-10.ckpt"), str(tmp_path / "wide.ckpt")
    main(["upscale", narrow, "--width", "24", "--method", name, "--noise", "none", "--out", out])
    assert "what continues the narrow run" not in capsys.readouterr().out
    offline = fit(tmp_path, 30, UpscaleCallback(10, 24, method=method, noise=None), ckpt_path=out)
    for a, b in zip(weights(offline), weights(inside), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_of_two_commands_with_one_out_one_is_refused(tmp_path, monkeypatch):
    save_mlp(tmp_path / "mlp.ckpt")
    out = tmp_path / "o.ckpt"
    arguments = ["upscale", str(tmp_path / "mlp.ckpt"), "--width", "16", "--out", str(out)]
    with locked_output(out):
        assert "another process is writing --out" in refused(*arguments)
    assert not out.exists()
    grow = upscale_checkpoint.upscale_checkpoint

    def slowly(*given, **options):
        out.write_bytes(b"of the other")
        return grow(*given, **options)

    monkeypatch.setattr(upscale_checkpoint, "upscale_checkpoint", slowly)
    assert "exists; --force overwrites it" in refused(*arguments)
    assert out.read_bytes() == b"of the other"


def test_noise_options_and_files(tmp_path):
    fit(tmp_path, 3).save_checkpoint(tmp_path / "narrow.ckpt")
    narrow, noise = str(tmp_path / "narrow.ckpt"), str(tmp_path / "noise.json")
    first = ["--signal-noise", "0.5", "--save-noise", noise]
    second = ["--recorded-noise", noise, "--no-optimizer"]
    main(["upscale", narrow, "--width", "16", *first, "--out", str(tmp_path / "a.ckpt")])
    main(["upscale", narrow, "--width", "16", *second, "--out", str(tmp_path / "b.ckpt")])
    a, b = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in "ab")
    assert all(torch.equal(a["state_dict"][name], b["state_dict"][name]) for name in a["state_dict"])
    assert (len(a["optimizer_states"]), len(b["optimizer_states"])) == (1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt", "narrow.ckpt", "noise.json"]


def test_centred_noise_leaves_the_loss_as_it_was(tmp_path):
    """Inside a run and offline; recorded noise is centred as it was. The average of an EMA gets the same."""
    swap = UpscaleCallback(10, 16, noise=AdditiveNoise(0.5, centred=True))
    fit(tmp_path, 11, EMAWeightAveraging(decay=0.9), swap)
    assert swap.summary["loss_after"] == pytest.approx(swap.summary["loss_before"], rel=1e-12)
    narrow, noise = str(tmp_path / "pre-upscale-10.ckpt"), str(tmp_path / "noise.json")
    for name, options in {
        "exact": [],
        "centred": ["--noise", "0.5", "--centred", "--save-noise", noise],
        "recorded": ["--recorded-noise", noise],
    }.items():
        main(["upscale", narrow, "--width", "16", *options, "--out", str(tmp_path / f"{name}.ckpt")])
    exact, centred, recorded = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("exact", "centred", "recorded")
    )
    for name in exact["state_dict"]:
        model, average = (centred[key][name] - exact[key][name] for key in ("current_model_state", "state_dict"))
        assert bool(model.any()) == (name in ("net.layers.1.weight", "net.layers.2.weight"))
        torch.testing.assert_close(average, model.float(), rtol=0, atol=1e-6)
        for key in ("current_model_state", "state_dict"):
            assert torch.equal(centred[key][name], recorded[key][name])
