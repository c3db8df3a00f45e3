"""UpscaleCallback on two processes, with DDP and FSDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_modules import SETTINGS
from distributed_run import SAVED, STEPS, Data, learned
from lightning.pytorch import seed_everything
from paths import SUPPORT
from programs import run_program
from tiny_modules import ADAMW, mlp
from torch import Tensor
from training_runs import Record, assert_identical, quiet_trainer

from mupscale.callbacks.upscale import UpscaleCallback

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two processes reports of its runs."""
    folder = tmp_path_factory.mktemp("distributed")
    run_program(SUPPORT / "distributed_run.py", folder)
    return [
        torch.load(folder / f"{rank}.pt", weights_only=True)
        | torch.load(folder / f"modules/{rank}.pt", weights_only=True)
        for rank in (0, 1)
    ]


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(("model", "kind"), [("mlp", "ddp"), ("mlp", "fsdp"), ("gpt2", "fsdp")])
def test_on_two_processes(model: str, kind: str, distributed: list[dict[Any, Any]]) -> None:
    mine, other = distributed
    narrow, wide = mine[kind, model, "narrow"], mine[kind, model, "wide"]
    assert wide["steps"] == list(range(1, STEPS + 1))
    assert wide["width"] > narrow["width"]
    assert float((narrow["losses"] - wide["losses"]).abs().max()) < 1e-4
    for part in ("weights", "state"):
        assert_identical(wide[part], other[kind, model, "wide"][part])


def test_on_two_processes_with_noise(distributed: list[dict[Any, Any]]) -> None:
    for kind in ("ddp", "fsdp"):
        mine, other = (rank[kind, "mlp", "noisy"] for rank in distributed)
        narrow = distributed[0][kind, "mlp", "narrow"]
        assert float((mine["losses"] - narrow["losses"]).abs().max()) > 1e-4, "noise must do something"
        for part in ("weights", "state"):
            assert_identical(mine[part], other[part])
    ddp, fsdp = (distributed[0][kind, "mlp", "noisy"] for kind in ("ddp", "fsdp"))
    for part in ("weights", "state"):
        assert largest_difference(ddp[part], fsdp[part]) < 1e-6


def test_on_two_processes_checkpoints_resume_exactly(distributed: list[dict[Any, Any]]) -> None:
    for rank in distributed:
        for kind in ("ddp", "fsdp", "fsdp, whole checkpoints"):
            whole = rank[kind, "mlp", "noisy"]
            for name, steps in (("pre-upscale-6", STEPS - 6), (f"step={SAVED}", STEPS - SAVED)):
                resumed = rank[kind, "mlp", name]
                assert torch.equal(resumed["losses"], whole["losses"][-steps:])
                for part in ("weights", "state"):
                    assert_identical(resumed[part], whole[part])


def test_on_two_processes_by_a_fraction(distributed: list[dict[Any, Any]]) -> None:
    for rank in distributed:
        narrow = rank["fsdp", "mlp", "narrow"]
        wide, resumed = (rank["fsdp", "mlp", name] for name in ("fraction", "fraction, resumed"))
        assert wide["width"] == 20
        assert float((narrow["losses"] - wide["losses"]).abs().max()) < 1e-6
        assert torch.equal(resumed["losses"], wide["losses"][SAVED:])
        for part in ("weights", "state"):
            assert_identical(resumed[part], wide[part])


def test_on_two_processes_in_depth(distributed: list[dict[Any, Any]]) -> None:
    mine, other = distributed
    ddp, fsdp = (mine[kind, "gpt2", "deeper"] for kind in ("ddp", "fsdp"))
    assert float((ddp["losses"] - fsdp["losses"]).abs().max()) < 1e-5
    for kind in ("ddp", "fsdp"):
        grown, resumed = mine[kind, "gpt2", "deeper"], mine[kind, "gpt2", "deeper, resumed"]
        assert sum(weight.endswith("qkv.weight") for weight in grown["weights"]) == 4
        assert torch.equal(resumed["losses"], grown["losses"][SAVED:])
        for part in ("weights", "state"):
            assert_identical(grown[part], other[kind, "gpt2", "deeper"][part])
            assert_identical(resumed[part], grown[part])
        assert largest_difference(grown["weights"], ddp["weights"]) < 1e-5


def test_on_two_processes_from_a_base(distributed: list[dict[Any, Any]]) -> None:
    base = distributed[0]["ddp", "mlp", "narrow"]
    ddp, fsdp = (distributed[0][kind, "mlp", "from base"] for kind in ("ddp", "fsdp"))
    assert float(ddp["losses"][:3].mean()) < float(base["losses"][:3].mean()) - 0.01
    for part in ("weights", "state"):
        assert largest_difference(ddp[part], fsdp[part]) < 1e-6


def test_a_method_that_learns_on_two_processes(distributed: list[dict[Any, Any]], tmp_path: Path) -> None:
    """Each has its share of a batch, and all learn what one process learns of the whole one."""
    mine, other = (rank["ddp", "mlp", "learned"] for rank in distributed)
    for part in ("weights", "state"):
        assert_identical(mine[part], other[part])
    seed_everything(1, verbose=False)
    module, record = mlp(optimizer=ADAMW), Record()
    trainer = quiet_trainer(
        max_steps=STEPS,
        gradient_clip_val=0.05,
        default_root_dir=tmp_path,
        callbacks=[record, UpscaleCallback(6, 24, method=learned())],
    )
    trainer.fit(module, datamodule=Data(module))
    assert float((mine["losses"] - torch.tensor(record.losses)).abs().max()) < 1e-4
    assert "LiGO cannot learn on sharded weights. Use another method" in distributed[0]["fsdp", "mlp", "refused"]


@pytest.mark.parametrize("name", SETTINGS)
def test_modules_that_do_not_know_mupscale_grow_as_on_one_process(name: str, distributed: list[dict[Any, Any]]) -> None:
    mine, other = distributed
    for rank in (mine, other):
        narrow, wide = rank[name, "narrow"]["losses"], rank[name, "wide"]["losses"]
        assert len(wide) == len(narrow) >= 12
        assert float((wide / narrow - 1).abs().max()) < 1e-9
        assert float((rank[name, "noisy"]["losses"] - narrow).abs().max()) > 1e-4
    assert not torch.equal(mine[name, "wide"]["losses"], other[name, "wide"]["losses"])  # of other batches
    for kind in ("wide", "noisy"):
        assert_identical(mine[name, kind]["weights"], other[name, kind]["weights"])
