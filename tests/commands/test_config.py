"""Whole configurations: parsed as a file with them, and their values checked before a sweep."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import small, upscale

from mupscale.commands.cli import load_configuration, run_cli
from mupscale.commands.config import Config
from mupscale.commands.lab.space import SweptAxis, for_trials, refuse_invalid
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def configuration(name: str) -> Config:
    swap = upscale(1, 16)
    swap["init_args"]["method"] = {"class_path": "mupscale.methods.Duplication"}
    swap["init_args"]["noise"] = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
    config = load_configuration(["--config", small(Path("c.yaml"), swap, max_steps=3)], "sweep")[0]
    config["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": name, "version": "one"}}
    return config


@pytest.mark.slow
def test_a_configuration_is_parsed_as_a_file_with_it() -> None:
    config = configuration("a")
    Path("whole.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    whole, of_file = run_cli(config), run_cli(["--config", "whole.yaml"])
    del whole.config["config"], of_file.config["config"]
    assert repr(whole.config) == repr(of_file.config)


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
    with pytest.raises(UserError, match=f"^--sweep {key}=.*{bad}"):
        refuse_invalid(run_cli(config), config, [SweptAxis("seed_everything", (0, 1)), SweptAxis(key, tuple(values))])
