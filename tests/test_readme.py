"""What the README and the walk-through show runs, and does what they say."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

import mupscale
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.checks.coordinate_check import coord_check

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_walk_through_holds(capsys: pytest.CaptureFixture[str]):
    """Its own assertions are the test: exactness, the module named, the loss below the narrow one's."""
    runpy.run_path(str(ROOT / "docs/walkthrough.py"), run_name="__main__")
    assert "blocks.0.attention diverges first" in capsys.readouterr().out


def test_the_library_in_ten_lines():
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
    narrow_opt = torch.optim.AdamW(narrow.parameters())
    code = next(block for block in blocks("python") if "report.optimizer" in block).replace(
        "batch: ...", "batch: model(batch).square().mean()"
    )
    names = {"torch": torch, "narrow": narrow, "wide": wide, "narrow_opt": narrow_opt, "batches": [torch.randn(4, 3)]}
    exec(code, names)
    assert names["verdict"].passed
    assert isinstance(names["optimizer"], torch.optim.AdamW)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers:UserWarning")
def test_a_model_of_ones_own_grows(tmp_path):
    """The twenty lines of the README, in float64: a run that grows has the loss curve of one that does not."""
    names: dict = {}
    exec(next(block for block in blocks("python") if "class Denoiser" in block), names)
    torch.manual_seed(0)
    data = DataLoader([(torch.randn(4, 3, 16), torch.randn(4, 3, 16)) for _ in range(4)], batch_size=None)

    def final_loss(*callbacks) -> float:
        torch.manual_seed(1)
        module = names["Denoiser"](
            8, base_width=4, optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
        )
        trainer = Trainer(
            max_steps=20,
            accelerator="cpu",
            precision="64-true",
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, data)
        assert module.width == (24 if callbacks else 8)
        return float(module.train_loss)

    assert final_loss(UpscaleCallback(10, 24)) == pytest.approx(final_loss(), rel=1e-10)

    module = names["Denoiser"](32, optimizer=lambda params: torch.optim.AdamW(params, lr=0.003))

    def of(net: nn.Module) -> Any:
        module.net = net
        return module

    checked = coord_check(
        module.network, (32, 64, 128), batches=list(data), loss=lambda net, batch: of(net).loss(batch),
        optimizer=lambda net: of(net).configure_optimizers(),
    )  # fmt: skip
    assert checked.passed, str(checked)


def test_the_readme_names_what_there_is():
    for name in re.findall(r"mupscale\.(\w+)\(", README):
        assert hasattr(mupscale, name), name
    for path in re.findall(r"(?:configs|docs|benchmarks|models)/[\w./]+\.(?:yaml|py|md)", README):
        assert (ROOT / path).exists(), path


def quickstart(command: str) -> None:
    from mupscale.__main__ import main

    main([command, "--config", str(ROOT / "configs/quickstart.yaml")])


def test_the_plan_of_the_quickstart(capsys: pytest.CaptureFixture[str]):
    quickstart("plan")
    told = capsys.readouterr().out
    assert told.startswith("width 64 → 256")
    assert re.search(r"layers.1.weight +matrix +64×64 → 256×256 +4 +4 +dup / 4", told)


@pytest.mark.slow
def test_the_quickstart_is_exact(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    quickstart("verify")
    assert "width 64 → 256: exact" in capsys.readouterr().out
    monkeypatch.setattr(
        "mupscale.widening.rules.lr_factor", lambda *_: 1.0
    )  # a broken rule: the verdict is no, and so is the exit code
    with pytest.raises(SystemExit) as caught:
        quickstart("verify")
    assert caught.value.code == 1
    assert "NOT exact" in capsys.readouterr().out
