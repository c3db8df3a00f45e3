"""Configurations that are made of one that was parsed: as if they had been parsed themselves."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import small, upscale

from mupscale.commands.cli import described, parsed
from mupscale.commands.config import Config, Parsed, at, derive, known, temporary_file
from mupscale.commands.lab.space import Axis, for_trials, refuse_invalid
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def configuration(name: str) -> Config:
    swap = upscale(1, 16)
    swap["init_args"]["method"] = {"class_path": "mupscale.methods.Duplication"}
    swap["init_args"]["noise"] = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
    config = described(["--config", small(Path("c.yaml"), swap, max_steps=3)], "sweep")[0]
    config["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": name, "version": "one"}}
    return config


def made(config: Config) -> Config:
    """What the config.yaml of a run holds."""
    return parsed(config, "fit").journal.config


def made_of_file(config: Config) -> Config:
    with temporary_file(config) as file:
        return parsed(["--config", file], "fit").journal.config


@pytest.mark.slow
def test_numbers_and_texts_need_no_parsing() -> None:
    known.clear()
    first = configuration("a")
    made(first)
    values = {"model.optimizer.lr": 1.5, "UpscaleCallback.noise.std": 0.5, "model.optimizer.eps": 1e-6}
    other = at(configuration("b"), {**values, "seed_everything": 7})
    derived = made(other)
    assert len(known) == 1
    other["trainer"]["logger"]["init_args"]["version"] = "two"
    assert repr(derived).replace("'one'", "'two'") == repr(made_of_file(other))


@pytest.mark.slow
def test_a_configuration_is_parsed_as_a_file_with_it() -> None:
    config = configuration("a")
    with temporary_file(config) as file:
        whole, of_file = parsed(config), parsed(["--config", file])
    del whole.config["config"], of_file.config["config"]
    assert repr(whole.config) == repr(of_file.config)


@pytest.fixture
def first() -> Config:
    """A configuration that was parsed, and is known."""
    first = configuration("a")
    first["trainer"]["limit_val_batches"] = 1.0
    known.clear()
    config = parsed(first).config
    known.append(Parsed(first, config, first))
    return first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("UpscaleCallback.method", {"class_path": "mupscale.methods.HyperCloning"}),
        ("UpscaleCallback.noise", None),
        ("UpscaleCallback.width", [16, 16]),
        ("model.optimizer.betas", [0.5, 0.9]),
        ("model.optimizer.lr", 1),
        ("trainer.limit_val_batches", 1),
    ],
)
def test_all_else_is_parsed(key: str, value: Any, first: Config) -> None:
    """Another class has other defaults, and 1.0 is all batches, 1 one of them."""
    derived = derive(at(first, {"model.optimizer.lr": 0.5, "model.width": 16, "trainer.limit_val_batches": 0.5}))
    assert derived is not None
    assert (derived.config["model.init_args.width"], derived.saved["trainer"]["limit_val_batches"]) == (16, 0.5)
    assert derive(at(first, {key: value})) is None


@pytest.mark.slow
def test_a_sweep_over_methods_has_the_defaults_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    from mupscale.__main__ import main

    swap = upscale(2, 16)
    methods = "{class_path: mupscale.methods.Duplication},{class_path: mupscale.methods.HyperCloning}"
    arguments = ["--config", small(Path("c.yaml"), swap, max_steps=4), "--sweep", f"UpscaleCallback.method={methods}"]
    main(["sweep", *arguments, "--metric", "last_50%", "--out", "out"])
    defaults = set()
    for path in Path("out/trials").glob("*/config.yaml"):
        method = yaml.safe_load(path.read_text())["trainer"]["callbacks"][0]["init_args"]["method"]
        defaults.add((method["class_path"].rpartition(".")[2], method["init_args"].get("variant")))
    assert defaults == {("Duplication", None), ("HyperCloning", "symmetric")}


METHODS = [{"class_path": f"mupscale.methods.{name}"} for name in ("Duplication", "HyperDuplication", "HyperCloning")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "values", "bad"),
    [
        ("model.optimizer.lr", [0.1, -1, 2], "-1"),
        ("model.hidden_layers", [1, True, 3], "True"),
        ("UpscaleCallback.method", METHODS, "HyperDuplication"),
    ],
)
def test_a_bad_value_in_the_middle_is_refused(key: str, values: list[Any], bad: str) -> None:
    config = for_trials(configuration("a"))
    with pytest.raises(UserError, match=f"^here: {key}=.*{bad}"):
        refuse_invalid(config, [Axis("seed_everything", (0, 1)), Axis(key, tuple(values))], "here:")
