"""How much memory a device has left for this process."""

from pathlib import Path

import pytest
import torch

from mupscale.device_memory import free_bytes, free_in_groups


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


@pytest.mark.parametrize(
    ("line", "kind", "names"),
    [
        ("0::/job/step", "", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/job/step", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_a_job_has_the_memory_of_its_control_groups(
    line: str, kind: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    (tmp_path / "groups").write_text(f"1:cpu:/elsewhere\n{line}\n")
    limit, used, cached = names
    for folder, most in (("job/step", "max"), ("job", "1000"), ("", "5000")):
        place = tmp_path / kind / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / limit).write_text(f"{most}\n")
        (place / used).write_text("700\n")
        (place / "memory.stat").write_text(f"anon 600\n{cached} 100\n")
    assert list(free_in_groups(tmp_path, tmp_path / "groups")) == [400, 4400]
    assert list(free_in_groups(tmp_path, tmp_path / "none")) == []
