"""Short runs whose losses are written down: a change that is not meant to change the mathematics must not change them.

The numbers are those of version 0.1.0, in which data.seed was 0 unless it was given. If a change is meant to change
them, say so in CHANGELOG.md and write them anew.
"""

from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mupscale.__main__ import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

NOISE = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
SIGNAL = {"class_path": "mupscale.SignalNoise", "init_args": {"t": 0.2}}
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003, "weight_decay": 0.1}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.2, "momentum": 0.9}}

RUNS = {
    "mlp": (
        {"class_path": "MLP", "init_args": {"width": 8, "base_width": 4, "optimizer": ADAMW}},
        {"class_path": "Covertype", "init_args": {"batch_size": 50, "seed": 0}},
        {"width": 32, "noise": NOISE},
    ),
    "mlp, sgd": (
        {"class_path": "MLP", "init_args": {"width": 8, "base_width": 4, "optimizer": SGD}},
        {"class_path": "Covertype", "init_args": {"batch_size": 50, "seed": 0}},
        {"width": 16, "noise": SIGNAL},
    ),
    "gpt2": (
        {
            "class_path": "GPT2",
            "init_args": {
                "width": 8, "base_width": 4, "layers": 2, "heads": 2, "vocabulary": 4096, "context": 16,
                "optimizer": ADAMW,
                "lr_scheduler": {"class_path": "CosineAnnealingLR", "init_args": {"T_max": 24}},
            },
        },
        {"class_path": "FineWeb", "init_args": {"batch_size": 4, "context": 16, "seed": 0}},
        {"width": 16, "noise": NOISE},
    ),
}  # fmt: skip

LOSSES = {
    "mlp": [1.94591, 1.930762, 1.91414, 1.891992, 1.877253, 1.870142],
    "mlp, sgd": [1.94591, 1.612981, 1.329652, 1.100507, 1.262271, 1.457774],
    "gpt2": [8.312583, 8.315634, 8.290519, 8.29524, 8.299433, 8.266917],
}
"""The training loss of steps 1, 5, 9, … of each run; the network grows after step 12."""


def losses(name: str) -> list[float]:
    model, data, growth = RUNS[name]
    config = {
        "seed_everything": 3,
        "trainer": {
            "accelerator": "cpu", "max_steps": 24, "log_every_n_steps": 1, "gradient_clip_val": 1.0,
            "limit_val_batches": 0, "enable_progress_bar": False,
            "callbacks": [{"class_path": "UpscaleCallback", "init_args": {"at_step": 12, **growth}}],
        },
        "model": model,
        "data": data,
    }  # fmt: skip
    Path("config.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "config.yaml"])
    events = EventAccumulator("runs/default/version_0")
    events.Reload()
    return [event.value for event in events.Scalars("train/loss")][::4]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_first_version(name: str) -> None:
    assert losses(name) == pytest.approx(LOSSES[name], rel=1e-5)
