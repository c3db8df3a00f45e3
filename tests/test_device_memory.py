"""How much memory a device has left for this process."""

import pytest
import torch

from mupscale.device_memory import free_bytes


@pytest.mark.parametrize(("share", "free"), [(1.0, 55), (0.6, 50), (0.25, 15)])
def test_a_process_has_what_is_left_of_its_share(share: float, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 bytes 50 are free; this process has 10 of its 15 in use."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    assert free_bytes(torch.device("cuda", 0)) == free


def test_the_memory_of_the_machine() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < 2**50
