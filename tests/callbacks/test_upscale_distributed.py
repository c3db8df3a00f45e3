"""UpscaleCallback on two processes, with DDP and FSDP, and on 2, then 4, then 1 process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_modules import SETTINGS
from distributed_run import SAVED, STEPS, Data, learned
from lightning.pytorch import seed_everything
from paths import SUPPORT
from process_runs import AT, CASES, PARTS
from programs import run_program
from tiers import slow_except
from tiny_modules import ADAMW, mlp
from torch import Tensor
from training_runs import Record, assert_identical, quiet_trainer

from mupscale.callbacks.upscale import UpscaleCallback

pytestmark = pytest.mark.slow

KEPT = [name for name in CASES if name not in ("ddp", "fsdp2", "fsdp2 with noise")]
"""The last case has ddp, fsdp2 and noise, and the program above a GPT-2 whose weights are sharded."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The folder with what the processes report of all runs."""
    folder = tmp_path_factory.mktemp("distributed")
    names = CASES if pytestconfig.getoption("--all") else KEPT
    run_program(SUPPORT / "distributed_run.py", folder, *names, limit=600)
    return folder


@pytest.fixture(scope="module")
def distributed(reports: Path) -> list[dict[Any, Any]]:
    """What each of two processes reports of its runs."""
    return [
        torch.load(reports / f"{rank}.pt", weights_only=True)
        | torch.load(reports / f"modules/{rank}.pt", weights_only=True)
        for rank in (0, 1)
    ]


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_on_two_processes(distributed: list[dict[Any, Any]]) -> None:
    mine, other = distributed
    narrow, wide = mine["fsdp", "gpt2", "narrow"], mine["fsdp", "gpt2", "wide"]
    assert wide["steps"] == list(range(1, STEPS + 1))
    assert wide["width"] > narrow["width"]
    assert float((narrow["losses"] - wide["losses"]).abs().max()) < 1e-4
    assert_identical(wide["state"], other["fsdp", "gpt2", "wide"]["state"])


def test_on_two_processes_with_noise(distributed: list[dict[Any, Any]]) -> None:
    for kind in ("ddp", "fsdp"):
        mine, other = (rank[kind, "mlp", "noisy"] for rank in distributed)
        narrow = distributed[0][kind, "mlp", "narrow"]
        assert float((mine["losses"] - narrow["losses"]).abs().max()) > 1e-4, "noise must do something"
        assert_identical(mine["state"], other["state"])
    ddp, fsdp = (distributed[0][kind, "mlp", "noisy"] for kind in ("ddp", "fsdp"))
    assert largest_difference(ddp["state"], fsdp["state"]) < 1e-6


def test_on_two_processes_checkpoints_resume_exactly(distributed: list[dict[Any, Any]]) -> None:
    for rank in distributed:
        for kind in ("ddp", "fsdp", "fsdp, whole checkpoints"):
            whole = rank[kind, "mlp", "noisy"]
            for name, steps in (("pre-upscale-6", STEPS - 6), (f"step={SAVED}", STEPS - SAVED)):
                resumed = rank[kind, "mlp", name]
                assert torch.equal(resumed["losses"], whole["losses"][-steps:])
                assert_identical(resumed["state"], whole["state"])


def test_on_two_processes_by_a_fraction(distributed: list[dict[Any, Any]]) -> None:
    for rank in distributed:
        narrow = rank["fsdp", "mlp", "narrow"]
        wide, resumed = (rank["fsdp", "mlp", name] for name in ("fraction", "fraction, resumed"))
        assert wide["width"] == 20
        assert float((narrow["losses"] - wide["losses"]).abs().max()) < 1e-6
        assert torch.equal(resumed["losses"], wide["losses"][SAVED:])
        assert_identical(resumed["state"], wide["state"])


def test_on_two_processes_in_depth(distributed: list[dict[Any, Any]]) -> None:
    mine, other = distributed
    ddp, fsdp = (mine[kind, "gpt2", "deeper"] for kind in ("ddp", "fsdp"))
    assert float((ddp["losses"] - fsdp["losses"]).abs().max()) < 1e-5
    resumed = mine["fsdp", "gpt2", "deeper, resumed"]
    assert torch.equal(resumed["losses"], fsdp["losses"][SAVED:])
    assert sum(weight.endswith("qkv.weight") for weight in ddp["state"]) == 4
    assert_identical(resumed["state"], fsdp["state"])
    for kind in ("ddp", "fsdp"):
        assert_identical(mine[kind, "gpt2", "deeper"]["state"], other[kind, "gpt2", "deeper"]["state"])
    assert largest_difference(fsdp["state"], ddp["state"]) < 1e-5


def test_on_two_processes_from_a_base(distributed: list[dict[Any, Any]]) -> None:
    base, grown = (distributed[0][kind] for kind in (("ddp", "mlp", "narrow"), ("fsdp", "mlp", "from base")))
    assert float(grown["losses"][:3].mean()) < float(base["losses"][:3].mean()) - 0.01
    assert_identical(grown["state"], distributed[1]["fsdp", "mlp", "from base"]["state"])


def test_a_method_that_learns_on_two_processes(distributed: list[dict[Any, Any]], tmp_path: Path) -> None:
    """Each has its share of a batch, and all learn what one process learns of the whole one."""
    mine, other = (rank["ddp", "mlp", "learned"] for rank in distributed)
    assert_identical(mine["state"], other["state"])
    seed_everything(1, verbose=False)
    module, record = mlp(optimizer=ADAMW), Record()
    trainer = quiet_trainer(
        max_steps=STEPS,
        gradient_clip_val=0.05,
        default_root_dir=tmp_path,
        callbacks=[record, UpscaleCallback(6, 24, method=learned(), noise=None)],
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


# --- another number of processes


@pytest.mark.parametrize("name", slow_except(CASES, kept=KEPT))
def test_another_number_of_processes(name: str, reports: Path) -> None:
    answers = torch.load(reports / "cases.pt", weights_only=True)
    model, noise, precision, _ = CASES[name]
    (whole,) = answers[model, noise, precision, "whole"]
    parts = answers[name]
    for ranks, (processes, first, last, _) in zip(parts, PARTS, strict=True):
        assert len(ranks) == processes
        assert ranks[0]["steps"] == list(range(first + 1, last + 1))
        for rank in ranks[1:]:
            assert_identical(ranks[0]["state"], rank["state"])
    # the second part begins before the growth, at a checkpoint of the first one, and takes some of its steps again
    losses = torch.cat([parts[0][0]["losses"][:AT], parts[1][0]["losses"], parts[2][0]["losses"]])
    assert len(losses) == STEPS
    assert float((losses - whole["losses"]).abs().max()) < (1e-12 if precision == "64-true" else 1e-6)
    again = parts[0][0]["losses"][AT:] - parts[1][0]["losses"][: PARTS[0][2] - AT]
    assert float(again.abs().max()) < 1e-6, "the growth on 2 processes is that on 4"
    end = parts[2][0]["state"]
    assert end.keys() == whole["state"].keys()
    for key, tensor in whole["state"].items():
        assert torch.allclose(end[key], tensor, rtol=1e-4, atol=1e-6), key
