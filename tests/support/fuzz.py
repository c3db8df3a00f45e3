"""Random command lines and random damage to files, by a seed; and what a command makes of them."""

import contextlib
import copy
import io
import json
import random
import re
import shlex
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from command_line import small, upscale
from model_folders import llama, save

from mupscale.__main__ import main

VALUES = [
    "-1", "0", "1", "-7", "0.5", "1.5", ".nan", ".inf", "-.inf", "1e308", "1e-320", "1" + "0" * 400, "null", "true",
    "[]", "{}", "[1,2]", "[[]]", "{a: 1}", "text", "", "loop", "folder", "run", "text.txt", "base.ckpt", "s3://b/x",
    "/proc/x", "{class_path: X}", "{class_path: torch.nn.Linear}", "{class_path: SGD, init_args: {lr: -1}}", "{step",
    "→", "a b", "%s", "2020-01-01", "!!python/name:os.system", "&a [*a]", '"', "AdamW", "auto",
]  # fmt: skip
"""Values that some option may take for another kind than was meant; `loop` is a link to itself."""

COMMANDS = {
    "upscale": "base.ckpt --width 16 --out o",
    "coord-check": "--config c.yaml --widths 8,16,32 --steps 1 --seeds 1",
    "sweep": "--config c.yaml --out s --sweep model.optimizer.lr=0.1",
    "experiment": "e.yaml --plan",
    "report": "run",
    "prepare": "text text.txt --vocab 300 --out p",
    "export": "base.ckpt --out e",
}
"""Command lines that are right as they are, for commands with options of their own."""

CONFIGURED = {
    "fit": "--config c.yaml",
    "validate": "--config c.yaml --ckpt_path base.ckpt",
    "plan": "--config grown.yaml",
    "verify": "--config grown.yaml",
    "resume": "run",
}
"""Command lines that are right as they are, for commands with the options of a configuration."""

SKIPPED = re.compile(r"trainer\.(devices|num_nodes|strategy|max_epochs|max_steps|max_time)$|--help|--ray")
"""Options that start other processes, or train for long."""

JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2.5,
    float("nan"),
    10**40,
    10**400,
    "text",
    "",
    [],
    {},
    [[]],
    {"a": 1},
    {1: 2},
    b"x",
]
"""Values that take the place of one in a file."""

PATIENCE = 60
"""Seconds after which a command hangs."""


def make_workshop(folder: Path) -> Path:
    """A folder with every file that the command lines name."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder), quietly():
        small(Path("c.yaml"), max_steps=2, enable_progress_bar=False, logger=False, default_root_dir="new")
        small(Path("grown.yaml"), upscale(1, 16), max_steps=2, enable_progress_bar=False)
        (Path("text.txt")).write_text("plain " * 500)
        (Path("folder")).mkdir()
        Path("loop").symlink_to("loop")
        noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
        sizes = {"small": [8, 16], "target": [16, 32]}
        experiment = {"protocol": "upscale", "config": "c.yaml", **sizes, "seeds": [0], "noise": noise}
        Path("e.yaml").write_text(yaml.safe_dump({**experiment, "sweep_2": {"model.optimizer.lr": [0.01]}}))
        main(["fit", "--config", "c.yaml", "--trainer.default_root_dir=run"])
        (next(Path("run").rglob("resume/*.ckpt"))).rename("base.ckpt")
        main(["fit", "--config", "c.yaml", "--trainer.default_root_dir=one"])
        Path("run").rename("two")
        Path("one").rename("run")
        main(
            ["upscale", "base.ckpt", "--width", "16", "--noise", "0.1", "--save-noise", "noise.json", "--out", "w.ckpt"]
        )
        save(llama(), Path("hf"))
    return folder


@contextlib.contextmanager
def quietly() -> Iterator[io.StringIO]:
    """Keeps what is printed."""
    kept = io.StringIO()
    with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(kept), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield kept


def options_of_configurations() -> list[str]:
    """Every key of the configuration c.yaml with its defaults, as an option."""
    with quietly() as printed, contextlib.suppress(SystemExit):
        main(["fit", "--config", "c.yaml", "--print_config"])
    return [f"--{key}" for key in _keys(yaml.safe_load(printed.getvalue()), "")]


def _keys(section: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in section.items():
        if key == "init_args":
            yield from _keys(value, prefix)
        elif key != "class_path":
            yield prefix + key
            if isinstance(value, dict):
                yield from _keys(value, f"{prefix}{key}.")


def options_of_command(command: str) -> list[str]:
    """The options that the help of a command lists."""
    with quietly() as printed, contextlib.suppress(SystemExit):
        main([command, *(["text"] if command == "prepare" else []), "--help"])
    return sorted(set(re.findall(r"--[\w-]+", printed.getvalue())))


def command_lines(count: int, seed: int) -> Iterator[str]:
    """Command lines that are right but for one or two options."""
    chosen = random.Random(seed)
    of_configurations = [option for option in options_of_configurations() if not SKIPPED.search(option)]
    of_commands = {name: [o for o in options_of_command(name) if not SKIPPED.search(o)] for name in COMMANDS}
    for _ in range(count):
        command = chosen.choice([*CONFIGURED, "fit", "fit", "fit", *COMMANDS])
        words = [command, *shlex.split((CONFIGURED | COMMANDS)[command])]
        if chosen.random() < 0.1:  # another value for one that is there
            place = chosen.randrange(1, len(words))
            words[place] = chosen.choice(VALUES)
        if command in CONFIGURED:
            wrong = chosen.sample(of_configurations, chosen.choice([1, 1, 2]))
            words += [f"{option}={chosen.choice(VALUES)}" for option in wrong]
        else:
            words += [chosen.choice(of_commands[command]), chosen.choice(VALUES)]
        yield shlex.join(words)


def outcome(words: list[str]) -> str:
    """What a command does: `done`, the one line of its error, or what is wrong with how it ends."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"hangs: {PATIENCE} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        with quietly() as printed:
            main(words)
        answer = "done"
    except SystemExit as exit:
        answer = str(exit.code) if isinstance(exit.code, str) else "done"
        if answer != "done" and (not answer.startswith("error: ") or "\n" in answer):
            answer = f"WRONG: not one line: {answer}"
    except BaseException as error:
        answer = f"WRONG: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return f"WRONG: prints a traceback: {answer}" if "Traceback (most" in printed.getvalue() else answer


# --- files


def _bytes(change: Callable[[bytearray, random.Random], object]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, chosen: random.Random) -> None:
        content = bytearray(path.read_bytes())
        change(content, chosen)
        path.write_bytes(bytes(content))

    return damage


def _cut(content: bytearray, chosen: random.Random) -> None:
    del content[chosen.randrange(len(content)) :]


def _flip(content: bytearray, chosen: random.Random) -> None:
    for _ in range(chosen.choice([1, 5, 50])):
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)


def _replace_value(path: Path, chosen: random.Random) -> None:
    """Puts junk in the place of one value, however deep, of a file that stays valid."""
    is_checkpoint = path.suffix == ".ckpt"
    if is_checkpoint:
        content: Any = torch.load(path, weights_only=True)
    else:
        content = yaml.safe_load(path.read_text())
    holder, key = chosen.choice(list(_places(content)))
    junk = [*JUNK, *([torch.ones(3), torch.ones(2, 2).to_sparse(), torch.empty(8, device="meta")] * is_checkpoint)]
    value = copy.copy(chosen.choice(junk))
    if chosen.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = value if is_checkpoint or not isinstance(value, bytes) else "x"
    if is_checkpoint:
        torch.save(content, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_text(yaml.safe_dump(content))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of nested dictionaries and lists, as what holds it and its key; shallow ones more often."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from list(_places(inner))[:20]


DAMAGES = [_bytes(_cut), _bytes(_flip), _replace_value, _replace_value, _replace_value, _replace_value]

READERS = {
    "base.ckpt": [
        "validate --config c.yaml --ckpt_path base.ckpt",
        "fit --config c.yaml --ckpt_path base.ckpt --trainer.max_steps=3",
        "fit --config c.yaml --model.init_from=base.ckpt",
        "upscale base.ckpt --width 16 --out o",
    ],
    "c.yaml": ["fit --config c.yaml --trainer.max_steps=2", "plan --config c.yaml"],
    "e.yaml": ["experiment e.yaml --plan"],
    "noise.json": ["upscale base.ckpt --width 16 --recorded-noise noise.json --out o"],
    "run/config.yaml": ["resume run --trainer.max_steps=3", "report run"],
    "run/run.json": ["resume run --trainer.max_steps=3"],
    "hf/config.json": ["upscale hf --factor 2 --out o"],
    "hf/model.safetensors": ["upscale hf --factor 2 --out o"],
}
"""Files, and the commands that read them."""


def damaged_files(count: int, seed: int) -> Iterator[tuple[str, Callable[[], None], list[str]]]:
    """A name, a function that damages a file of the workshop, and the words of a command that reads it."""
    chosen = random.Random(seed)
    for number in range(count):
        name = chosen.choice(list(READERS))
        damage = chosen.choice(DAMAGES[:2] if name.endswith(".safetensors") else DAMAGES)
        command, own = chosen.choice(READERS[name]), random.Random(f"{seed} {number}")

        def spoil(damage: Any = damage, name: str = name, own: random.Random = own) -> None:
            damage(Path(name), own)

        yield f"{number}: {name}", spoil, shlex.split(command)
