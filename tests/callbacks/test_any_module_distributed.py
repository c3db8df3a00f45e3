"""Modules that do not know mupscale grow on two processes."""

from pathlib import Path

import pytest
import torch
from paths import SUPPORT
from programs import TORCHRUN, run_program
from training_runs import assert_identical

pytestmark = pytest.mark.slow


def test_modules_grow_on_two_processes_as_on_one(tmp_path: Path) -> None:
    run_program(*TORCHRUN, SUPPORT / "distributed_modules.py", tmp_path)
    mine, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name in ("groups without decay", "GAN", "vision transformer"):
        for rank in (mine, other):
            narrow, wide = rank[name, "narrow"]["losses"], rank[name, "wide"]["losses"]
            assert len(wide) == len(narrow) >= 12
            assert float((wide / narrow - 1).abs().max()) < 1e-9
            assert float((rank[name, "noisy"]["losses"] - narrow).abs().max()) > 1e-4
        assert not torch.equal(mine[name, "wide"]["losses"], other[name, "wide"]["losses"])  # of other batches
        for kind in ("wide", "noisy"):
            assert_identical(mine[name, kind]["weights"], other[name, kind]["weights"])
