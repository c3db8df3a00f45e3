"""Checkpoints of a small MLP, as a run saves it, and of a GPT-2, and changed copies of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_runs import quiet_trainer

from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.checkpoint import CHECKPOINT_KEY, growth_metadata
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.sharded import ShardWriter

Change = Callable[[dict[str, Any]], Any]
"""Changes a checkpoint in place."""


def save_mlp(path: Path) -> Path:
    """Writes a checkpoint of an MLP of width 8 after one step, and returns its path."""
    torch.manual_seed(0)
    rows = torch.randn(32, 54), torch.randint(7, (32,))
    module = MLP(8, base_width=4, optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9))
    trainer = quiet_trainer(max_steps=1, default_root_dir=path.parent)
    trainer.fit(module, ResidentLoader(rows, 16, shuffle=True))
    trainer.save_checkpoint(path)
    return path


def save_gpt2(path: Path) -> None:
    """Writes a checkpoint of a GPT-2 of two heads of 4, without an optimizer."""
    module = GPT2(8, layers=1, head_dim=4, vocabulary=11, context=8)
    module.configure_model()
    arguments = {key: value for key, value in module.hparams.items() if not key.startswith("_")}
    ours = growth_metadata(module, module.net, [])
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": arguments, CHECKPOINT_KEY: ours}, path)


def save_changed(source: Path, target: Path, change: Change) -> None:
    """Writes a copy of a checkpoint that was changed."""
    checkpoint = torch.load(source, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, target)


def save_sharded(source: Path, folder: Path, shards: int) -> None:
    """Writes a checkpoint file as the folder that so many processes under FSDP2 would have written."""
    checkpoint = torch.load(source, weights_only=True)
    weights, states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states")
    folder.mkdir()
    with ShardWriter(folder, shards) as writer:
        for name, value in weights.items():
            writer.add(("state_dict", name), value)
        for number, (names, saved) in enumerate(
            zip(checkpoint[CHECKPOINT_KEY]["optimizer_names"], states, strict=True)
        ):
            first = f"optimizer_{number}"
            for index, state in saved["state"].items():
                for key, value in state.items():
                    writer.add((first, "state", names[index], key), value)
            for index, group in enumerate(saved["param_groups"]):
                for key, value in (group | {"params": [names[i] for i in group["params"]]}).items():
                    writer.add((first, "param_groups", index, key), value)
        writer.finish(checkpoint)
