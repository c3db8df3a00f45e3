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
from sweeps import changed

from mupscale.__main__ import main

VALUES = [
    "-1", "0", "1", "-7", "0.5", "1.5", ".nan", ".inf", "-.inf", "1e308", "1e-320", "1" + "0" * 400, "null", "true",
    "[]", "{}", "[1,2]", "[[]]", "{a: 1}", "text", "", "loop", "folder", "run", "text.txt", "base.ckpt", "s3://b/x",
    "/proc/x", "{class_path: X}", "{class_path: torch.nn.Linear}", "{class_path: SGD, init_args: {lr: -1}}", "{step",
    "→", "a b", "%s", "2020-01-01", "!!python/name:os.system", "&a [*a]", '"', "AdamW", "auto",
]  # fmt: skip
"""Values that some option may take for another kind than was meant; `loop` is a link to itself."""

COMMANDS = [
    "upscale base.ckpt --width 16 --out o",
    "upscale deep.ckpt --layers 4 --depth stack --out o",
    "upscale hf --factor 2 --out o",
    "upscale hf --layers 4 --depth interleave --out o",
    "coord-check --config c.yaml --widths 8,16,32 --steps 1 --seeds 1",
    "sweep --config c.yaml --out s --metric last_2% --sweep model.optimizer.lr=0.1",
    "experiment e.yaml --plan",
    "experiment e.yaml --out made",
    "report run",
    "report swept made",
    "prepare text text.txt --vocab 260 --out p",
    "export llama.ckpt --out e",
]
"""Command lines that are right as they are, for commands with options of their own."""

SWEEP = "sweep --config c.yaml --out swept --sweep model.optimizer.lr=0.1,0.2 --metric last_2% --stack off"

CONFIGURED = [
    "fit --config c.yaml",
    "fit --config deep.yaml",
    "fit --config llama.yaml",
    "validate --config c.yaml --ckpt_path base.ckpt",
    "test --config c.yaml --ckpt_path base.ckpt",
    "predict --config c.yaml --ckpt_path base.ckpt",
    "plan --config grown.yaml",
    "plan --config deep.yaml",
    "verify --config grown.yaml",
    "resume run",
    "resume grown",
]
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
        quick = {"max_steps": 2, "enable_progress_bar": False}
        deepen = {"class_path": "UpscaleCallback", "init_args": {"at_step": 1, "layers": 4}}
        small(Path("c.yaml"), **quick, logger=False, default_root_dir="new")
        small(Path("grown.yaml"), upscale(1, 16), **quick)
        changed(small(Path("deep.yaml"), deepen, **quick, logger=False), model=_model("MLP", width=8, layers=2))
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = _model("HFCausalLM", config={"model_type": "llama", "vocab_size": 4096, **sizes})
        data = {"class_path": "FineWeb", "init_args": {"batch_size": 2, "context": 8}}
        changed(small(Path("llama.yaml"), **quick, logger=False), model=model, data=data)
        (Path("text.txt")).write_text("plain " * 500)
        (Path("folder")).mkdir()
        Path("loop").symlink_to("loop")
        noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
        widths = {"small": [8, 16], "target": [16, 32]}
        experiment = {"protocol": "upscale", "config": "c.yaml", **widths, "seeds": [0], "noise": noise}
        experiment |= {"sweep_2": {"model.optimizer.lr": [0.01]}, "metric": "last_2%"}
        Path("e.yaml").write_text(yaml.safe_dump(experiment))
        for name, config in {"run": "c.yaml", "base": "c.yaml", "deep": "deep.yaml", "llama": "llama.yaml"}.items():
            main(["fit", "--config", config, f"--trainer.default_root_dir={name}"])
            if name != "run":
                next(Path(name).rglob("resume/*.ckpt")).rename(f"{name}.ckpt")
        main(shlex.split("fit --config grown.yaml --trainer.logger=false --trainer.default_root_dir=grown"))
        main(shlex.split("upscale base.ckpt --width 16 --noise 0.1 --save-noise noise.json --out w.ckpt"))
        main(shlex.split(SWEEP))
        main(shlex.split("experiment e.yaml --out made --stack off"))
        save(llama(), Path("hf"))
    return folder


def _model(name: str, **arguments: Any) -> dict[str, Any]:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
    return {"class_path": name, "init_args": {**arguments, "optimizer": optimizer}}


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


def options_of_command(line: str) -> list[str]:
    """The options that the help of a command lists."""
    with quietly() as printed, contextlib.suppress(SystemExit):
        main([*shlex.split(line), "--help"])
    return sorted(set(re.findall(r"--[\w-]+", printed.getvalue())))


def command_lines(count: int, seed: int) -> Iterator[str]:
    """Command lines that are right but for one or two options."""
    chosen = random.Random(seed)
    of_configurations = [option for option in options_of_configurations() if not SKIPPED.search(option)]
    of_commands = {line: [o for o in options_of_command(line) if not SKIPPED.search(o)] for line in COMMANDS}
    for _ in range(count):
        line = chosen.choice([*CONFIGURED, *COMMANDS])
        words = shlex.split(line)
        if chosen.random() < 0.1:  # another value for one that is there
            place = chosen.randrange(1, len(words))
            words[place] = chosen.choice(VALUES)
        if line in CONFIGURED:
            wrong = chosen.sample(of_configurations, chosen.choice([1, 1, 2]))
            words += [f"{option}={chosen.choice(VALUES)}" for option in wrong]
        else:
            words += [chosen.choice(of_commands[line]), chosen.choice(VALUES)]
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
    "deep.ckpt": ["upscale deep.ckpt --layers 8 --out o", "fit --config deep.yaml --model.init_from=deep.ckpt"],
    "llama.ckpt": ["export llama.ckpt --out e"],
    "c.yaml": ["fit --config c.yaml --trainer.max_steps=2", "plan --config c.yaml"],
    "deep.yaml": ["fit --config deep.yaml", "plan --config deep.yaml"],
    "e.yaml": ["experiment e.yaml --plan", "experiment e.yaml --out made"],
    "noise.json": ["upscale base.ckpt --width 16 --recorded-noise noise.json --out o"],
    "run/config.yaml": ["resume run --trainer.max_steps=3", "report run"],
    "run/run.json": ["resume run --trainer.max_steps=3", "report run"],
    "run/result.json": ["resume run --trainer.max_steps=3", "report run"],
    "swept/sweep.json": ["report swept", SWEEP],
    "swept/trials.csv": ["report swept"],
    "swept/best.yaml": ["fit --config c.yaml --config swept/best.yaml"],
    "swept/trials/*/result.json": ["report swept", SWEEP],
    "swept/trials/*/run.json": ["report swept", SWEEP],
    "swept/trials/*/config.yaml": ["report swept", SWEEP],
    "swept/trials/*/events.*": ["report swept", "report swept --trials"],
    "made/experiment.json": ["report made", "experiment e.yaml --out made"],
    "made/**/result.json": ["report made", "experiment e.yaml --out made"],
    "made/**/config.yaml": ["report made"],
    "hf/config.json": ["upscale hf --factor 2 --out o", "upscale hf --layers 4 --out o"],
    "hf/model.safetensors": ["upscale hf --factor 2 --out o"],
    "text.txt": ["prepare text text.txt --vocab 260 --out p"],
}
"""Files, and the commands that read them."""


def damaged_files(count: int, seed: int) -> Iterator[tuple[str, Callable[[], None], list[str]]]:
    """A name, a function that damages a file of the workshop, and the words of a command that reads it."""
    chosen = random.Random(seed)
    for number in range(count):
        name = chosen.choice(list(READERS))
        is_readable = Path(name).suffix in (".ckpt", ".yaml", ".json")
        damage = chosen.choice(DAMAGES if is_readable else DAMAGES[:2])
        command, own = chosen.choice(READERS[name]), random.Random(f"{seed} {number}")

        def spoil(damage: Any = damage, name: str = name, own: random.Random = own) -> None:
            damage(own.choice(sorted(Path().glob(name))), own)

        yield f"{number}: {name}", spoil, shlex.split(command)
