"""Checkpoints, YAML and journals of strangers: none of them chooses code to run, and each is refused in one line."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused
from saved import save_mlp

from mupscale.__main__ import main

WIDEN = ["--width", "16", "--out", "wide.ckpt"]

EVIL = """
from pathlib import Path
Path("marker").touch()
"""
"""A module that notes that it was imported."""

MINE = """
import torch
import mupscale
from mupscale.models.mlp import MLP

class Own(MLP):
    pass

class OwnSGD(torch.optim.SGD):
    pass

mupscale.register_optimizer(OwnSGD, degree=1, state={"momentum_buffer": 1})

def function():
    pass
"""
"""A module of the user, with a model and an optimizer."""

HUB = """
from pathlib import Path
def model(**arguments):
    Path("marker").touch()
"""
"""A hubconf.py, which torch.hub runs."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an MLP after one step."""
    return save_mlp(tmp_path_factory.mktemp("saved") / "mlp.ckpt")


@pytest.fixture
def changed(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[dict[str, Any]], None]], str]]:
    """Writes a changed copy of the checkpoint beside the modules above, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {"evil": EVIL, "mine": MINE, "hubconf": HUB}.items():
        Path(f"{name}.py").write_text(text)
    modules = set(sys.modules)

    def change(by: Callable[[dict[str, Any]], None]) -> str:
        checkpoint = torch.load(saved, weights_only=True)
        by(checkpoint)
        torch.save(checkpoint, "some.ckpt")
        return "some.ckpt"

    yield change
    for name in ("evil", "mine", "hubconf"):
        if name not in modules:
            sys.modules.pop(name, None)


def assert_untouched() -> None:
    assert not Path("marker").exists()
    assert not Path("wide.ckpt").exists()
    assert not {"evil", "hubconf"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("class_path", "arguments"),
    [
        ("torch.hub.load", {"repo_or_dir": ".", "model": "model", "source": "local", "trust_repo": True}),
        ("logging.basicConfig", {"filename": "marker", "filemode": "w", "force": True}),
        ("os.system", {"command": "touch marker"}),
        ("evil.Denoiser", {}),
        ("mupscale.models.base.Growable", {}),
        ("mupscale.models.mlp.torch.hub.load", {}),
        (None, {}),
    ],
)
def test_the_class_of_a_checkpoint_is_not_imported(class_path: Any, arguments: dict[str, Any], changed):
    def by(checkpoint: dict[str, Any]) -> None:
        checkpoint["mupscale"]["class_path"] = class_path
        checkpoint["hyper_parameters"] = arguments or checkpoint["hyper_parameters"]

    handlers = list(logging.getLogger().handlers)
    message = refused("upscale", changed(by), *WIDEN)
    assert f"is of {class_path}, which is no class of mupscale" in message
    assert "--model" in message
    assert logging.getLogger().handlers == handlers
    assert_untouched()


@pytest.mark.parametrize("class_path", ["evil.SGD", "os.system", "torch.hub.load", "logging.basicConfig", ""])
def test_the_optimizer_of_a_checkpoint_is_not_imported(class_path: str, changed):
    def by(checkpoint: dict[str, Any]) -> None:
        checkpoint["mupscale"]["optimizer_classes"] = [class_path]

    message = refused("upscale", changed(by), *WIDEN)
    assert f"optimizer {class_path} is not registered" in message
    assert "--no-optimizer" in message
    assert_untouched()


def test_a_model_and_an_optimizer_of_ones_own_are_named_by_the_user(changed):
    def by(checkpoint: dict[str, Any]) -> None:
        checkpoint["mupscale"]["class_path"] = "__main__.Own"
        checkpoint["mupscale"]["optimizer_classes"] = ["mine.OwnSGD"]

    narrow = changed(by)
    assert "__main__.Own, which is no class of mupscale" in refused("upscale", narrow, *WIDEN)
    assert "mine" not in sys.modules
    main(["upscale", narrow, *WIDEN, "--model", "mine.Own"])
    wide = torch.load("wide.ckpt", weights_only=True)
    assert wide["hyper_parameters"]["width"] == 16
    assert wide["mupscale"]["class_path"] == "__main__.Own"
    assert wide["state_dict"]["net.readout.weight"].shape == (7, 16)
    assert len(wide["optimizer_states"]) == 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("mine.Missing", "there is no such class"),
        ("Own", "there is no such class"),
        ("mine.function", "is not a model: wanted a subclass of mupscale.models.base.Growable"),
        ("torch.nn.Linear", "is not a model: wanted a subclass of mupscale.models.base.Growable"),
        ("mine.Own", "the checkpoint is of another class, mupscale.models.mlp.MLP"),
    ],
)
def test_the_user_must_name_the_class_of_the_checkpoint(model: str, reason: str, changed):
    message = refused("upscale", changed(lambda checkpoint: None), *WIDEN, "--model", model)
    assert f"--model {model}" in message
    assert reason in message
    assert_untouched()
