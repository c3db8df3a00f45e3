"""Numbers that make no sense, and commands without weights: refused in one line, before data is loaded."""

import re
from pathlib import Path

import pytest
from command_line import refused, small, upscale

from mupscale.datamodules.covertype import Covertype

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

SGD = "--model.optimizer=torch.optim.SGD"
NOISE = "--trainer.callbacks.init_args.noise"


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where data is loaded."""

    def loaded(*_: object) -> None:
        raise AssertionError("data was loaded")

    monkeypatch.setattr(Covertype, "prepare_data", loaded)
    monkeypatch.setattr(Covertype, "setup", loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.optimizer.lr=.nan"], "model.optimizer.lr must be a finite number of at least 0, got nan"),
        (["--model.optimizer.lr=.inf"], "model.optimizer.lr must be a finite number of at least 0, got inf"),
        (["--model.optimizer.lr=-0.1"], "model.optimizer.lr must be a finite number of at least 0, got -0.1"),
        (["--model.optimizer.eps=.nan"], "model.optimizer.eps must be a finite number of at least 0, got nan"),
        (["--model.optimizer.weight_decay=-1"], "model.optimizer.weight_decay must be a finite .*got -1"),
        (["--model.optimizer.weight_decay=.inf"], "model.optimizer.weight_decay must be a finite .*got inf"),
        (["--model.optimizer.betas=[0.9, -0.1]"], "model.optimizer.betas.1 must be a finite .*got -0.1"),
        ([SGD, "--model.optimizer.momentum=.nan"], "model.optimizer.momentum must be a finite .*got nan"),
        (
            ["--model.lr_scheduler=ExponentialLR", "--model.lr_scheduler.gamma=.nan"],
            "model.lr_scheduler.gamma must be a finite number, got nan",
        ),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val must be a finite .*got -1"),
        (["--trainer.gradient_clip_val=.nan"], "trainer.gradient_clip_val must be a finite .*got nan"),
        (["--trainer.gradient_clip_val=.inf"], "trainer.gradient_clip_val must be a finite .*got inf"),
        (["--trainer.callbacks.init_args.lr=.nan"], "UpscaleCallback.lr must be positive and finite, got nan"),
        (["--trainer.callbacks.init_args.width=0"], "UpscaleCallback.width must be a whole number .*got 0"),
        ([f"{NOISE}.init_args.std=.nan"], "UpscaleCallback.noise: AdditiveNoise: std must be a finite .*got nan"),
        ([f"{NOISE}.init_args.std=-1"], "UpscaleCallback.noise: AdditiveNoise: std must be a finite .*got -1"),
        (
            [f"{NOISE}=mupscale.SignalNoise", f"{NOISE}.init_args.t=.inf"],
            "UpscaleCallback.noise: SignalNoise: t must be a finite .*got inf",
        ),
        (["--model.width=0"], "model.width must be a whole number of at least 1, .*got 0"),
        (["--model.width=-8"], "model.width must be a whole number of at least 1, .*got -8"),
    ],
)
def test_numbers_that_make_no_sense(arguments: list[str], message: str) -> None:
    config = small(Path("c.yaml"), upscale(5, 16))
    line = refused("fit", "--config", config, *arguments)
    assert re.search(message, line), line
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("swaps", "message"),
    [
        ([upscale(5, 16), upscale(5, 32)], "UpscaleCallback.at_step = 5: two upscales to width 16 and to width 32"),
        ([upscale(5, 16), upscale(5, 16)], "UpscaleCallback.at_step = 5: two upscales to width 16, twice"),
    ],
)
def test_upscales_at_one_step(swaps: list[dict[str, object]], message: str) -> None:
    for command in ("fit", "plan"):
        assert message in refused(command, "--config", small(Path("c.yaml"), *swaps))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_random_weights_are_not_evaluated(command: str) -> None:
    config = small(Path("c.yaml"))
    line = refused(command, "--config", config)
    assert f"{command} needs a checkpoint" in line
    assert "--ckpt_path runs/NAME/version_0/checkpoints/last.ckpt" in line
    line = refused(command, "--config", config, "--model.init_from=base.ckpt")
    assert f"{command} needs a checkpoint" in line
    assert "--ckpt_path base.ckpt" in line
