"""What jsonargparse says of mistakes, in a line: a release that changes its wording fails here."""

from pathlib import Path

import pytest
import yaml
from command_line import refused

from mupscale.commands import _jsonargparse
from mupscale.commands.cli import run_cli
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

RIGHT = {
    "model": {"class_path": "MLP", "init_args": {"width": 8, "base_width": 4}},
    "data": {"class_path": "Covertype"},
}

SWAP = {"at_step": 1, "width": 8}


def mlp(**arguments: object) -> dict[str, object]:
    return {"model": {"class_path": "MLP", "init_args": {"width": 8, "base_width": 4} | arguments}}


def adamw(**arguments: object) -> dict[str, object]:
    return mlp(optimizer={"class_path": "torch.optim.AdamW", "init_args": arguments})


def callback(name: str, **arguments: object) -> dict[str, object]:
    return {"trainer": {"callbacks": [{"class_path": name, "init_args": SWAP | arguments}]}}


REMEDIES: dict[str, tuple[dict[str, object], str]] = {
    "noise that is a number": (
        callback("UpscaleCallback", noise=0.1),
        "trainer.callbacks.noise: give class_path and init_args of a Noise, or 'auto'; got 0.1",
    ),
    "a wrong type": (mlp(width="wide"), "model.width: Expected a int; Expected a list; got wide"),
    "a model that is a number": ({"model": 3}, "model: give class_path and init_args of a Growable; got 3"),
    "an unknown data class": ({"data": {"class_path": "Nothing"}}, "data: there is no class Nothing. There are CIFAR"),
    "a typo in an argument": (mlp(widht=8), "'widht' is not accepted. Did you mean width?"),
    "a typo in an argument of an optimizer": (
        adamw(wieght_decay=1),
        "model.optimizer: Option 'wieght_decay' is not accepted. Did you mean weight_decay?",
    ),
    "a typo in the name of a callback": (callback("UpscaleCalback"), ". Did you mean UpscaleCallback?"),
    "a typo in a key of the trainer": ({"trainer": {"max_stps": 3}}, "Did you mean trainer.max_steps"),
    "a pair that is a number": (adamw(betas=3), "model.optimizer.betas: Expected a tuple. Got value: 3"),
    "arguments without a class": (
        {"model": {"init_args": {"width": 8}}},
        "the configuration has no model.class_path. If it is one to lay over another, give both",
    ),
    "a class inside a class": (mlp(optimizer="Nothing"), "model.optimizer: there is no class Nothing"),
}


def message(change: dict[str, object]) -> str:
    Path("c.yaml").write_text(yaml.safe_dump(RIGHT | change))
    with pytest.raises(UserError) as caught:
        run_cli(["--config", "c.yaml"])
    return str(caught.value)


def test_every_phrase_that_is_left_out_is_one_that_jsonargparse_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    key_and_problem = _jsonargparse.key_and_problem

    def noted(text: str) -> tuple[str, str]:
        said.append(text)
        return key_and_problem(text)

    monkeypatch.setattr(_jsonargparse, "key_and_problem", noted)
    for name in ("noise that is a number", "a class inside a class"):
        message(REMEDIES[name][0])
    unused = [phrase for phrase in _jsonargparse.GENERIC if not any(phrase in text for text in said)]
    assert not unused


@pytest.mark.parametrize("name", REMEDIES)
def test_a_mistake_comes_with_the_remedy(name: str) -> None:
    change, remedy = REMEDIES[name]
    text = message(change)
    assert remedy in text
    assert "\n" not in text


def test_models_are_listed_for_a_model_alone() -> None:
    assert "There are GPT2, MLP" not in message(REMEDIES["a class inside a class"][0])


@pytest.mark.parametrize(("content", "given"), [("", "nothing"), ("5\n", "5")])
def test_a_configuration_without_keys(content: str, given: str) -> None:
    Path("c.yaml").write_text(content)
    assert refused("fit", "--config", "c.yaml") == (
        f"error: config: give a YAML file with keys (model:, data:, trainer:), got {given}"
    )
