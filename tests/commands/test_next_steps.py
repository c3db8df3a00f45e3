"""The commands that are printed at the end of a command: they run as they are, and only those that apply are there."""

import shlex
from pathlib import Path

import pytest
from command_line import small, upscale

from mupscale.__main__ import main
from mupscale.commands.run import WITHOUT_A_LOG
from mupscale.models.checkpoint import load_checkpoint

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
RUN = Path("runs/default/version_0")
LAST = RUN / "checkpoints" / "last.ckpt"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The arguments of the commands that a command prints at its end, by what they are for."""
    capsys.readouterr()
    main(list(arguments))
    answer = {}
    for line in capsys.readouterr().out.splitlines():
        purpose, colon, text = line.partition(": ")
        if line.startswith("  ") and colon and text.startswith("python -m mupscale "):
            answer[purpose.strip()] = shlex.split(text)[3:]
    return answer


def width_in(path: Path) -> int:
    return load_checkpoint(path)["hyper_parameters"]["width"]


@pytest.mark.slow
def test_a_run_is_evaluated_and_widened(capsys: pytest.CaptureFixture[str]) -> None:
    config = small(Path("c.yaml"), upscale(10, 16), enable_progress_bar=False)
    commands = printed(capsys, "fit", "--config", config)
    wide = Path("runs/default/version_0-wide-32.ckpt")
    assert commands == {
        "evaluate": ["validate", "--config", f"{RUN}/config.yaml", "--ckpt_path", str(LAST), *WITHOUT_A_LOG],
        "widen further": ["upscale", str(LAST), "--width", "32", "--noise", "0.1", "--centred", "--out", str(wide)],
    }
    main(commands["evaluate"])
    printed(capsys, *commands["widen further"])
    assert width_in(wide) == 32
    assert [path.name for path in RUN.parent.iterdir() if path.is_dir()] == [RUN.name]


@pytest.mark.slow
def test_a_finished_run_goes_on_from_its_folder_for_more_epochs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["fit", "--config", small(Path("c.yaml"), enable_progress_bar=False, max_steps=-1, max_epochs=1)])
    monkeypatch.chdir(RUN)
    capsys.readouterr()
    main(["resume", "."])
    assert "train it for longer: python -m mupscale resume . --trainer.max_epochs N" in capsys.readouterr().out
    wide = printed(capsys, "resume", ".", "--trainer.max_epochs", "2")["widen further"]
    assert Path(wide[-1]).resolve() == Path.cwd().with_name("version_0-wide-16.ckpt")


def test_without_a_checkpoint_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    config = small(Path("c.yaml"), enable_progress_bar=False, fast_dev_run=True)
    assert printed(capsys, "fit", "--config", config) == {}
