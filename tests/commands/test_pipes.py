"""A named pipe in the place of a file is refused, and nothing waits for its other end."""

import os
from pathlib import Path

import pytest
from command_line import small
from fuzz import outcome
from saved import save_mlp
from training_runs import LIGHTNING_WARNINGS

from mupscale.commands.pipes import refuse_pipes
from mupscale.errors import UserError

pytestmark = [
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings(*LIGHTNING_WARNINGS, "ignore:You defined a `validation_step` but have no:UserWarning"),
]

COMMANDS = {
    "a configuration": "fit --config pipe",
    "a checkpoint": "validate --config c.yaml --ckpt_path pipe",
    "a base": "fit --config c.yaml --model.init_from=pipe",
    "noise": "upscale mlp.ckpt --width 16 --recorded-noise pipe --out o",
    "an output": "upscale mlp.ckpt --width 16 --noise 0.1 --save-noise pipe --out o",
    "an experiment": "experiment pipe --plan",
    "text": "prepare text pipe --vocab 300 --out p",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_is_refused(name: str) -> None:
    small(Path("c.yaml"))
    save_mlp(Path("mlp.ckpt"))
    os.mkfifo("pipe")
    found = outcome(COMMANDS[name].split())
    assert found.startswith("error: ")
    assert "pipe" in found


def test_opening_a_pipe_by_its_path_is_refused_and_by_its_number_it_is_not() -> None:
    refuse_pipes()
    os.mkfifo("pipe")
    with pytest.raises(UserError, match="pipe is a pipe; name a file"):
        open("pipe")  # noqa: SIM115
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    with open(f"/dev/fd/{reading}") as given_by_shell:
        assert given_by_shell.read() == "text"
    os.close(reading)
