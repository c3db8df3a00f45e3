"""`upscale` of a sharded checkpoint: what the file would have become, in a fraction of the memory."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import refused
from lightning.pytorch import seed_everything
from peak_memory import peak_bytes
from run_ends import differences
from saved import save_changed, save_sharded
from tiers import slow_except
from tiny_modules import gpt2, mlp, rows
from training_runs import quiet_trainer

from mupscale.__main__ import main
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import Growable
from mupscale.models.checkpoint import CHECKPOINT_KEY, growth_metadata, load_checkpoint
from mupscale.models.mlp import MLP
from mupscale.models.sharded import ShardedCheckpoint, ShardWriter


def saved(module: Growable, path: Path) -> Path:
    """A checkpoint of two steps, its schedule included."""
    seed_everything(0, verbose=False)
    trainer = quiet_trainer(max_steps=2, default_root_dir=path.parent, num_sanity_val_steps=0)
    trainer.fit(module, ResidentLoader(rows(module, 32, torch.float32), 8, shuffle=True, drop_last=True))
    trainer.save_checkpoint(path)
    return path


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same checkpoint as a file and in three shards, for two models."""
    folder = tmp_path_factory.mktemp("narrow")
    frozen = mlp()
    frozen.configure_model()
    assert frozen.net is not None
    next(frozen.net.parameters()).requires_grad_(False)
    for name, module in (("mlp", mlp(lr_scheduler=schedule)), ("gpt2", gpt2()), ("frozen", frozen)):
        save_sharded(saved(module, folder / f"{name}.ckpt"), folder / f"{name}.sharded", 3)
    return folder


CASES = {
    "mlp with noise": ("mlp", 24, ["--noise", "0.1", "--seed", "3"]),
    "mlp by a fraction": ("mlp", 20, ["--noise", "0.1", "--centred"]),
    "gpt2, tied": ("gpt2", 24, []),
    "gpt2 with noise of the signal's size": ("gpt2", 16, ["--signal-noise", "0.5", "--centred"]),
    "mlp with a frozen layer": ("frozen", 24, []),
    "unequal shares": ("mlp", 24, ["--method", "lemon"]),
    "state for first copies only": ("mlp", 16, ["--method", "zero-padding"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(CASES, "mlp with noise", "mlp with a frozen layer", "gpt2, tied"))
def test_it_is_what_the_file_becomes(name: str, narrow: Path, tmp_path: Path) -> None:
    model, width, options = CASES[name]
    for kind in ("ckpt", "sharded"):
        out = tmp_path / f"wide.{kind}"
        main(["upscale", str(narrow / f"{model}.{kind}"), "--width", str(width), "--out", str(out), *options])
    file, shards = (load_checkpoint(tmp_path / f"wide.{kind}") for kind in ("ckpt", "sharded"))
    assert ShardedCheckpoint(tmp_path / "wide.sharded").shards == 3
    assert_equal(file, shards)
    # and torch itself reads it
    again = {"state_dict": {key: torch.empty_like(value) for key, value in file["state_dict"].items()}}
    dcp.load(again, checkpoint_id=tmp_path / "wide.sharded", no_dist=True)
    assert_equal(file["state_dict"], again["state_dict"])


@pytest.mark.slow
def test_a_deeper_one_is_what_the_file_becomes(narrow: Path, tmp_path: Path) -> None:
    options = ["--layers", "4", "--width", "24", "--depth", "identity"]
    for kind in ("ckpt", "sharded"):
        main(["upscale", str(narrow / f"gpt2.{kind}"), *options, "--out", str(tmp_path / f"deep.{kind}")])
    file, shards = (load_checkpoint(tmp_path / f"deep.{kind}") for kind in ("ckpt", "sharded"))
    assert file["hyper_parameters"]["layers"] == 4
    (states,) = file["optimizer_states"]
    (sharded,) = shards["optimizer_states"]
    new = sharded["state"].keys() - states["state"].keys()  # of inserted layers: a file leaves out what is zero
    assert len(new) == 24
    for number in new:
        assert not any(torch.as_tensor(value).any() for value in sharded["state"].pop(number).values())
    assert_equal(file, shards)


def assert_equal(one: Any, other: Any) -> None:
    """Two checkpoints are equal to the bit."""
    assert list(differences(one, other)) == []


LAYERS, NARROW, WIDE = 9, 768, 1536


def write_large(folder: Path) -> int:
    """A narrow MLP with the state of AdamW in four shards; the bytes of what it becomes."""
    module = MLP(NARROW, base_width=64, inputs=8, outputs=4, hidden_layers=LAYERS)
    module.configure_model()
    assert module.net is not None
    made: Any = module.configure_optimizers()
    optimizer: torch.optim.Optimizer = made
    arguments = {key: value for key, value in module.hparams.items() if not key.startswith("_")}
    rest = {
        "global_step": 1,
        "hyper_parameters": arguments,
        CHECKPOINT_KEY: growth_metadata(module, module.net, [optimizer]),
    }
    folder.mkdir()
    with ShardWriter(folder, 4) as writer:
        for name, tensor in module.state_dict().items():
            for path in (("state_dict", name), *(("optimizer_0", "state", name, k) for k in ("exp_avg", "exp_avg_sq"))):
                writer.add(path, tensor.detach().abs())
            writer.add(("optimizer_0", "state", name, "step"), torch.tensor(1.0))
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            for key, value in (group | {"params": [names[id(p)] for p in group["params"]]}).items():
                writer.add(("optimizer_0", "param_groups", index, key), value)
        writer.finish(rest)
    wide = module.network(WIDE, meta=True)
    return 12 * sum(parameter.numel() for parameter in wide.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_memory_is_a_few_tensors(narrow: Path, tmp_path: Path) -> None:
    options = ["--noise", "0.1"]
    small = ["upscale", str(narrow / "mlp.sharded"), "--width", "24", "--out", str(tmp_path / "small.ckpt"), *options]
    whole = write_large(tmp_path / "narrow.ckpt")
    assert whole > 200e6
    out = tmp_path / "wide.ckpt"
    wide = ["upscale", str(tmp_path / "narrow.ckpt"), "--width", str(WIDE), "--out", str(out), *options]
    peak = peak_bytes(small, wide)
    largest = 4 * WIDE**2
    assert peak < 4.5 * largest < 0.25 * whole, f"{peak / 1e6:.0f} MB of {whole / 1e6:.0f} MB"
    written = sum(path.stat().st_size for path in out.iterdir())
    assert math.isclose(written, whole, rel_tol=0.01)


def test_a_missing_shard(narrow: Path, tmp_path: Path) -> None:
    shutil.copytree(narrow / "mlp.sharded", tmp_path / "narrow.ckpt")
    (tmp_path / "narrow.ckpt/__1_0.distcp").unlink()
    message = widen(tmp_path, "24")
    assert "narrow.ckpt is damaged: its shard __1_0.distcp is missing" in message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_layers": 2}, "net.layers.2.weight is (8, 8) in its shards and missing in the model"),
        ({"width": 4}, "net.layers.0.weight is (8, 6) in its shards and (4, 6) in the model"),
    ],
)
def test_another_model(change: dict[str, int], problem: str, narrow: Path, tmp_path: Path) -> None:
    shutil.copytree(narrow / "mlp.sharded", tmp_path / "narrow.ckpt")
    meta = tmp_path / "narrow.ckpt/meta.pt"
    save_changed(meta, meta, lambda content: content["hyper_parameters"].update(change))
    message = widen(tmp_path, "24")
    assert "is of another model than its arguments make" in message
    assert problem in message


def test_what_cannot_be_done_tensor_by_tensor(narrow: Path, tmp_path: Path) -> None:
    shutil.copytree(narrow / "mlp.sharded", tmp_path / "narrow.ckpt")
    assert "AKI changes weights across layers" in widen(tmp_path, "24", "--method", "aki")
    assert "--no-optimizer" in widen(tmp_path, "24", "--method", "hypercloning")
    assert "less than the 8" in widen(tmp_path, "4")
    meta = tmp_path / "narrow.ckpt/meta.pt"
    save_changed(meta, meta, lambda content: content.update(current_model_state={}))
    assert "has the weights of an EMA run" in widen(tmp_path, "24")
    meta.unlink()
    assert "was never finished: it has no meta.pt" in widen(tmp_path, "24")
    (tmp_path / "wide.ckpt").mkdir()
    assert "wide.ckpt exists; name another folder, or delete it" in widen(tmp_path, "24", "--force")


def widen(folder: Path, width: str, *options: str) -> str:
    """The line of a widening that is refused, and that leaves nothing behind."""
    before = set(folder.iterdir())
    message = refused(
        "upscale", str(folder / "narrow.ckpt"), "--width", width, "--out", str(folder / "wide.ckpt"), *options
    )
    assert set(folder.iterdir()) == before
    return message
