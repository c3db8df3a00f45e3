"""Checkpoints of growable modules: what is ours in them, what is refused, and state loaded by parameter name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_modules import gpt2, mlp
from torch import nn
from torch.optim import Optimizer

import mupscale
from mupscale.errors import UserError
from mupscale.growing.upscale import upscale
from mupscale.models.base import Growable
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    Size,
    checkpoint_size,
    growth_metadata,
    load_checkpoint,
    load_optimizer_state,
    load_weights,
    mixed_widths,
    optimizer_names,
    refuse_other_architecture,
    restore_mixed_widths,
)
from mupscale.widening.records import records_of


def built(module: Growable) -> Growable:
    torch.manual_seed(0)
    module.configure_model()
    return module


def stepped(module: nn.Module, optimizer: Optimizer) -> Optimizer:
    """After a step whose gradients differ from parameter to parameter."""
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + index)
    optimizer.step()
    return optimizer


def checkpoint(module: Growable, *optimizers: Optimizer) -> dict[str, Any]:
    """What Lightning and we save."""
    return {
        CHECKPOINT_KEY: growth_metadata(module, module.net, list(optimizers)),
        "hyper_parameters": dict(module.hparams),
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
    }


# --- the file


def test_a_file_is_loaded_onto_the_cpu(tmp_path: Path) -> None:
    module = built(mlp())
    torch.save(checkpoint(module, torch.optim.AdamW(module.parameters())), tmp_path / "x.ckpt")
    loaded = load_checkpoint(tmp_path / "x.ckpt")
    assert loaded[CHECKPOINT_KEY]["class_path"] == "mupscale.models.mlp.MLP"
    assert loaded[CHECKPOINT_KEY]["optimizer_classes"] == ["torch.optim.adamw.AdamW"]
    assert loaded[CHECKPOINT_KEY]["optimizer_names"] == [[name for name, _ in module.named_parameters()]]
    assert loaded[CHECKPOINT_KEY]["mixed_widths"] == {}


# --- which model it is of


def test_the_width_of_a_checkpoint() -> None:
    saved = checkpoint(built(mlp([8, 4, 12])))
    assert checkpoint_size(saved, "MLP") == Size([8, 4, 12])
    saved[CHECKPOINT_KEY]["class_path"] = "__main__.MLP"  # the module that defines the class may have another name
    assert checkpoint_size(saved, "MLP") == Size([8, 4, 12])
    with pytest.raises(UserError, match="this checkpoint is of a MLP, the configured model is a GPT2"):
        checkpoint_size(saved, "GPT2")
    for key in (CHECKPOINT_KEY, "hyper_parameters"):
        with pytest.raises(UserError, match="was not saved by a growable module"):
            checkpoint_size({**saved, key: {} if key == "hyper_parameters" else None}, "MLP")


def test_width_init_from_and_compile_may_differ() -> None:
    saved, module = checkpoint(built(mlp())), built(mlp())
    assert module.net is not None
    arguments = {**module.hparams, "width": 99, "init_from": "elsewhere.ckpt", "compile": True}
    refuse_other_architecture(module.net, arguments, saved)
    saved["state_dict"]["net.more"] = torch.zeros(1)
    with pytest.raises(UserError, match=r"it differs in \['net.more'\]"):
        refuse_other_architecture(module.net, arguments, saved)


# --- weights and state


def test_weights_are_written_into_the_network() -> None:
    saved, module = checkpoint(built(gpt2())), gpt2()
    module.configure_model()
    assert module.net is not None
    held = list(module.net.parameters())
    load_weights(module.net, saved)
    assert all(torch.equal(tensor, saved["state_dict"][name]) for name, tensor in module.state_dict().items())
    assert all(before is after for before, after in zip(held, module.net.parameters(), strict=True))


def test_state_is_loaded_by_parameter_name() -> None:
    """Into groups of another order and another number."""
    module = built(mlp())
    saved = checkpoint(module, before := stepped(module, torch.optim.AdamW(module.parameters(), lr=0.1)))
    biases, weights = ([p for p in module.parameters() if p.ndim == axes] for axes in (1, 2))
    groups: Any = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
    after = torch.optim.AdamW(groups, lr=0.2)
    assert optimizer_names(module, after) != optimizer_names(module, before)
    load_optimizer_state(module, [after], saved)
    for parameter in module.parameters():
        assert torch.equal(after.state[parameter]["exp_avg"], before.state[parameter]["exp_avg"])
        assert after.state[parameter]["step"] == 1
    assert [group["lr"] for group in after.param_groups] == [0.2, 0.2]  # hyperparameters are not state


# --- parameters whose pieces grew by different factors


def test_mixed_widths_survive_as_primitives(tmp_path: Path) -> None:
    narrow, wide, fresh = (nn.Sequential(nn.Linear(width + 3, 2)) for width in (4, 8, 8))
    upscale(narrow, wide, hints=mupscale.Hints(blocks={"0.weight": {1: [(4, 1, 2), (3, 1, 1)]}}))
    torch.save(mixed_widths(wide), tmp_path / "widths.pt")
    restore_mixed_widths(fresh, torch.load(tmp_path / "widths.pt", weights_only=True))
    assert records_of(fresh)["0.weight"] == records_of(wide)["0.weight"]
    assert mixed_widths(fresh).keys() == {"0.weight"}
    assert mixed_widths(narrow) == {}
