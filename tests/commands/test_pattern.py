"""Configurations that are made of one that was parsed: as if they had been parsed themselves."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import small, upscale

from mupscale.commands.cli import Parser, parsed
from mupscale.commands.config import Config, at, temporary_file
from mupscale.commands.configured import described
from mupscale.commands.lab.space import Axis, Tried, for_trials, refuse_invalid
from mupscale.commands.pattern import Pattern, Patterns
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def configuration(name: str) -> Config:
    swap = upscale(1, 16)
    swap["init_args"]["method"] = {"class_path": "mupscale.methods.Duplication"}
    swap["init_args"]["noise"] = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
    config = described(["--config", small(Path("c.yaml"), swap, max_steps=3)], "sweep")[0]
    config["trainer"]["logger"] = {"class_path": "CSVLogger", "init_args": {"save_dir": name, "version": "one"}}
    return config


def made(config: Config, pattern: Pattern | None) -> str:
    """The config.yaml of a run."""
    with temporary_file(config) as file:
        return parsed(["fit", "--config", file], pattern=pattern, plain=config).text


@pytest.mark.slow
def test_numbers_and_texts_need_no_parsing() -> None:
    pattern = Pattern()
    first = configuration("a")
    made(first, pattern)
    other = at(
        configuration("b"),
        {"model.optimizer.lr": 1, "UpscaleCallback.noise.std": 0.5, "seed_everything": 7, "model.optimizer.eps": 1e-6},
    )
    changes = pattern.changes(other)
    assert changes is not None
    assert changes["model.init_args.optimizer.init_args.lr"] == 1.0
    by_pattern = made(other, pattern)
    other["trainer"]["logger"]["init_args"]["version"] = "two"
    assert by_pattern == made(other, None).replace("version: two", "version: one")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("UpscaleCallback.method", {"class_path": "mupscale.methods.HyperCloning"}),
        ("UpscaleCallback.noise", None),
        ("UpscaleCallback.noise", {"class_path": "mupscale.SignalNoise", "init_args": {"t": 0.1}}),
        ("UpscaleCallback.width", [16, 16]),
        ("model.optimizer.betas", None),
    ],
)
def test_all_else_is_parsed(key: str, value: Any) -> None:
    """Above all another class: it has other defaults."""
    pattern = Pattern()
    first = configuration("a")
    with temporary_file(first) as file:
        cli = parsed(["--config", file], run=False)
    cli.config = type(cli.config)(subcommand="fit", fit=cli.config)
    assert pattern.note(cli.config, first)
    assert pattern.changes(at(first, {"model.optimizer.lr": 0.5})) is not None
    assert pattern.changes(at(first, {key: value})) is None


def test_patterns_fit_values_of_the_same_kinds() -> None:
    """1.0 is all batches, and 1 is one of them."""
    first = configuration("a")
    first["trainer"]["limit_val_batches"] = 1.0
    patterns = Patterns()
    pattern = patterns.like(first)
    with temporary_file(first) as file:
        assert pattern.note(parsed(["--config", file], run=False).config, first)
    pattern.first_text = "one"
    alike, unlike = deepcopy(first), deepcopy(first)
    alike["trainer"]["limit_val_batches"] = 0.5
    alike["model"]["init_args"]["width"] = 16
    unlike["trainer"]["limit_val_batches"] = 1
    unlike["model"]["init_args"]["width"] = 16
    assert not pattern.note(None, alike)  # which is not the first
    assert patterns.like(alike) is pattern
    assert patterns.like(unlike) is not pattern
    failed = Patterns()
    assert failed.like(first) is not failed.like(first)  # the first one never came to run


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
        ("model.hidden_layers", [1, 2.5, 3], "2.5"),
        ("model.hidden_layers", [1, True, 3], "True"),
        ("UpscaleCallback.method", METHODS, "HyperDuplication"),
    ],
)
def test_a_bad_value_in_the_middle_is_refused(key: str, values: list[Any], bad: str) -> None:
    config = for_trials(configuration("a"))
    with pytest.raises(UserError, match=f"^here: {key}=.*{bad}"):
        refuse_invalid(config, [Axis("seed_everything", (0, 1)), Axis(key, tuple(values))], "here:")


@pytest.mark.slow
def test_values_are_checked_without_parsing_each(monkeypatch: pytest.MonkeyPatch) -> None:
    config = for_trials(configuration("a"))
    files: list[Any] = []
    original = Parser.parse_args

    def counted(self: Parser, args: Any = None, *more: Any, **named: Any) -> Any:
        files.append(args)
        return original(self, args, *more, **named)

    monkeypatch.setattr(Parser, "parse_args", counted)
    numbers = [Axis("model.optimizer.lr", (1e-3, 0.01, 1)), Axis("model.hidden_layers", (1, 2, 3))]
    tried = Tried()
    refuse_invalid(config, [*numbers, Axis("UpscaleCallback.noise.std", (0.1, 0.2))], "one:", tried)
    refuse_invalid(config, numbers, "two:", tried)
    assert len(files) == 1
    refuse_invalid(config, [Axis("UpscaleCallback.method", (METHODS[0], METHODS[2])), *numbers], "three:", tried)
    assert len(files) == 3
