"""What jsonargparse says of mistakes, in a line: a release that changes its wording fails here."""

from pathlib import Path

import pytest
import yaml

from mupscale.commands import _jsonargparse, cli
from mupscale.commands.cli import parsed
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

RIGHT = {
    "model": {"class_path": "MLP", "init_args": {"width": 8, "base_width": 4}},
    "data": {"class_path": "Covertype"},
}

MISTAKES = {
    "an unknown class": ({"model": {"class_path": "Nothing"}}, "model: ", "MLP"),
    "an unknown data class": ({"data": {"class_path": "Nothing"}}, "data: ", "Covertype"),
    "a wrong type": ({"model": {"class_path": "MLP", "init_args": {"width": "wide"}}}, "model", "width"),
    "an unknown argument": ({"model": {"class_path": "MLP", "init_args": {"widht": 8}}}, "model", "widht"),
    "a model that is a number": ({"model": 3}, "model", "3"),
    "an optimizer that is none": (
        {"model": {"class_path": "MLP", "init_args": {"width": 8, "base_width": 4, "optimizer": "torch.nn.Linear"}}},
        "model",
        "optimizer",
    ),
    "a callback that is a number": ({"trainer": {"callbacks": [3]}}, "trainer.callbacks", "3"),
    "noise that is a number": (
        {
            "trainer": {
                "callbacks": [{"class_path": "UpscaleCallback", "init_args": {"at_step": 1, "width": 8, "noise": 1}}]
            }
        },
        "trainer.callbacks",
        "noise",
    ),
}


def message(change: dict[str, object]) -> str:
    Path("c.yaml").write_text(yaml.safe_dump(RIGHT | change))
    with pytest.raises(UserError) as caught:
        parsed(["--config", "c.yaml"], run=False)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_key(name: str) -> None:
    change, start, fragment = MISTAKES[name]
    text = message(change)
    assert text.startswith(start), text
    assert fragment in text
    assert "\n" not in text
    assert not any(generic in text for generic in _jsonargparse.GENERIC), text


def test_every_phrase_that_is_left_out_is_one_that_jsonargparse_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def noted(text: str) -> tuple[str, str]:
        said.append(text)
        return _jsonargparse.key_and_problem(text)

    monkeypatch.setattr(cli, "key_and_problem", noted)
    for change, _, _ in MISTAKES.values():
        message(change)
    unused = [phrase for phrase in _jsonargparse.GENERIC if not any(phrase in text for text in said)]
    assert not unused
