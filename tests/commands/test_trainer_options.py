"""Options of Lightning in a run that grows: each works, and the run resumes exactly, or is refused at the start."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, small, upscale
from lightning.pytorch import Callback, LightningModule, Trainer
from tiers import slow_except
from tiny_modules import mlp
from training_runs import fit

from mupscale.__main__ import main
from mupscale.callbacks.swap import CALLBACKS
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.errors import UserError

pytestmark = [
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of most of these options
]

STEP = 13
"""After this step a run is interrupted: after the swap, and after its newest checkpoint."""


class Interrupt(Callback):
    """Ends a run by SIGTERM, unless it was resumed."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == STEP and trainer.ckpt_path is None:
            os.kill(os.getpid(), signal.SIGTERM)


def callback(name: str, **arguments: Any) -> dict[str, Any]:
    return {"callbacks": [{"class_path": name, "init_args": arguments}]}


WORK: dict[str, dict[str, Any]] = {
    "detect_anomaly": {"detect_anomaly": True},
    "log_every_n_steps": {"log_every_n_steps": 0},
    "Timer": callback("Timer", duration="00:01:00:00"),
    "profiler simple": {"profiler": "simple"},
    "profiler advanced": {"profiler": "advanced"},
    "profiler pytorch": {"profiler": "pytorch"},
    "overfit_batches": {"overfit_batches": 2, "val_check_interval": 1.0},
    "limit_train_batches": {"limit_train_batches": 3, "val_check_interval": 3},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "gradient_clip_val": {"gradient_clip_val": 0.01},
    "gradient_clip_algorithm": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
    "deterministic": {"deterministic": True},
    "max_epochs": {"max_steps": -1, "max_epochs": 4},
    "what hardly matters": {
        "max_time": "00:01:00:00",
        "num_sanity_val_steps": 0,
        "enable_model_summary": True,
        "use_distributed_sampler": False,
        "inference_mode": False,
        "benchmark": True,
        "min_steps": 10,
        **callback("LambdaCallback"),
    },
    "EarlyStopping": callback("EarlyStopping", monitor="val/loss", patience=50),
    "GradientAccumulationScheduler": callback("GradientAccumulationScheduler", scheduling={0: 1, 2: 2}),
    "RichProgressBar": callback("RichProgressBar") | {"enable_progress_bar": True},
    "EMAWeightAveraging": callback("EMAWeightAveraging", decay=0.9),
    "OnExceptionCheckpoint": callback("OnExceptionCheckpoint", dirpath="on_exception"),
}
"""Settings of the trainer under which a run that grows must resume to the same end."""


@pytest.fixture(autouse=True)
def _global_settings() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(WORK, kept=["detect_anomaly", "overfit_batches", "profiler pytorch"]))
def test_works_and_resumes(name: str, tmp_path: Path) -> None:
    options = {"enable_progress_bar": False} | WORK[name]
    given = options.pop("callbacks", [])
    whole = small(tmp_path / "whole.yaml", upscale(10, 16), *given, **options)
    stops = {"class_path": f"{Interrupt.__module__}.Interrupt"}
    stopped = small(tmp_path / "stopped.yaml", upscale(10, 16), *given, stops, **options)
    main(["fit", "--config", whole])
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", stopped])
    assert exit.value.code == 143
    runs = tmp_path / "runs" / "default"
    main(["resume", str(runs / "version_1")])
    theirs, ours = (newest_checkpoint(runs / f"version_{index}")[1] for index in (0, 1))
    assert theirs["global_step"] == ours["global_step"] >= 20
    assert ours["hyper_parameters"]["width"] == 16
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for key, tensor in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], tensor), key


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "barebones": ({"barebones": True}, "Trainer(barebones=True, "),
    "enable_checkpointing": (
        {"enable_checkpointing": False},
        "`enable_checkpointing=False` but found",
    ),
    "AsyncCheckpointIO": (
        {"plugins": {"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO"}},
        "trainer.plugins: leave AsyncCheckpointIO out",
    ),
    "StochasticWeightAveraging": (
        callback("StochasticWeightAveraging", swa_lrs=0.01),
        "StochasticWeightAveraging does not work here: it sets absolute learning rates",
    ),
    "ModelPruning": (
        callback("ModelPruning", pruning_fn="l1_unstructured"),
        "ModelPruning does not work here: its masks",
    ),
    "BackboneFinetuning": (callback("BackboneFinetuning"), "BackboneFinetuning does not work here: it adds parameter"),
    "LearningRateFinder": (callback("LearningRateFinder"), "find the learning rate in a Trainer without"),
    "BatchSizeFinder": (callback("BatchSizeFinder"), "set data.batch_size"),
    "SpikeDetection": (callback("lightning.pytorch.callbacks.spike.SpikeDetection"), "could not be resumed"),
    "val_check_interval": ({"limit_train_batches": 2}, "`val_check_interval` (6) must be less than or equal"),
}
"""Settings that are refused before anything is written, and what the line holds."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_start_in_one_line(name: str, tmp_path: Path) -> None:
    settings, text = REFUSED[name]
    options = {"enable_progress_bar": False} | settings
    config = small(tmp_path / "c.yaml", upscale(10, 16), *options.pop("callbacks", []), **options)
    line = refused("fit", "--config", config)
    assert text in line
    assert line.startswith("error: ")
    if name != "val_check_interval":  # which Lightning finds when it has data
        assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_every_incompatible_callback_is_tried() -> None:
    tried = {name for name in REFUSED if "callbacks" in REFUSED[name][0]}
    assert {"BackboneFinetuning" if kind.__name__ == "BaseFinetuning" else kind.__name__ for kind in CALLBACKS} == tried


@pytest.mark.parametrize("kind", ["StochasticWeightAveraging", "ModelPruning"])
def test_the_library_refuses_them_as_well(kind: str, tmp_path: Path) -> None:
    arguments = {"StochasticWeightAveraging": {"swa_lrs": 0.01}, "ModelPruning": {"pruning_fn": "l1_unstructured"}}
    made = next(each for each in CALLBACKS if each.__name__ == kind)(**arguments[kind])
    with pytest.raises(UserError, match=f"{kind} does not work here"):
        fit(mlp(), tmp_path, made, UpscaleCallback(5, 16, noise=None), steps=10)
