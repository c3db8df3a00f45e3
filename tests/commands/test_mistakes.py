"""What is about the user's input ends with one line; the user's own code, training and bugs keep their traceback."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, small

from mupscale.__main__ import main
from mupscale.commands.mistakes import IN_TRAINING, TRACEBACK, line_about


def raised(call: Callable[[], object]) -> Exception:
    """What a call raises, with the traceback that it has in a command."""
    namespace: dict[str, Any] = {"__name__": "mupscale.commands.somewhere", "call": call}
    code = compile(
        "def run():\n    try:\n        call()\n    except Exception as error:\n        return error", "x", "exec"
    )
    exec(code, namespace)
    return namespace["run"]()


def of_library(source: str, module: str = "torch.optim.adam") -> Exception:
    """What code of a library raises."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(f"def call():\n    {source}", "x", "exec"), namespace)
    return raised(namespace["call"])


# --- the rule


def test_what_a_library_raises_is_one_line_with_its_section() -> None:
    line = line_about(of_library("raise RuntimeError('fused and\\n  foreach.')"))
    assert line == f"model.optimizer: fused and foreach (RuntimeError in torch.optim.adam; {TRACEBACK}=1 shows where)"
    line = line_about(of_library("{}['gelu_fsat']", "transformers.activations"))
    assert line is not None
    assert line.startswith("model: there is no 'gelu_fsat' (KeyError in transformers.activations; ")
    assert len(line_about(of_library("raise ValueError('x' * 10_000)")) or "") < 800


def test_what_mupscale_or_the_users_code_raises_keeps_its_traceback() -> None:
    assert line_about(of_library("raise KeyError('bug')", "mupscale.widening.plan")) is None
    assert line_about(of_library("raise RuntimeError('mine')", "my_model")) is None
    assert line_about(raised(lambda: torch.ones(2) @ torch.ones(3))) is None  # of this file, which is no library


def test_what_is_raised_in_training_keeps_its_traceback() -> None:
    for module, expected in (("torch.optim.adam", False), ("torch.optim.lr_scheduler", True)):
        error = of_library("1 / 0", module)
        error.add_note(IN_TRAINING)
        assert (line_about(error) is not None) is expected


def test_memory_and_the_system() -> None:
    assert "does not fit into memory" in (line_about(raised(lambda: bytearray(10**17))) or "")
    huge = raised(lambda: torch.empty(10**16))
    assert "does not fit into memory; choose smaller sizes" in (line_about(huge) or "")
    assert line_about(raised(lambda: open("/nowhere/x"))) == "/nowhere/x: no such file or directory"  # noqa: SIM115
    assert line_about(OSError(errno.ELOOP, "Too many links", "loop")) == "loop: too many links"


def test_the_traceback_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small(Path("c.yaml"))
    both = ["fit", "--config", "c.yaml", "--model.optimizer.fused=true", "--model.optimizer.foreach=true"]
    assert "`fused` and `foreach` cannot be `True` together" in refused(*both)
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(ValueError, match="cannot be `True` together") as caught:
        main(both)
    assert isinstance(caught.value.__cause__, RuntimeError)


# --- a run


@pytest.mark.slow
def test_the_users_own_code_keeps_its_traceback(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("failing.py").write_text(
        "import torch\n"
        "from mupscale.models.mlp import MLP\n"
        "class Mine(MLP):\n"
        "    def loss(self, batch):\n"
        "        return torch.ones(2) @ torch.ones(3)\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    with pytest.raises(RuntimeError) as caught:
        main(["fit", "--config", small(Path("c.yaml")), "--model=failing.Mine"])
    assert caught.traceback[-1].path.name == "failing.py"
