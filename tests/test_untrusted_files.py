"""Files of strangers, of every kind that a command reads: none runs code, or leads out of its folder.

Safetensors are not here: nothing reads them. Sharded checkpoints and CIFAR-100's pickles have more tests beside their
modules.
"""

import io
import json
import os
import pickle
import shlex
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from command_line import refused, small
from saved import save_mlp
from stand_ins import Attack
from synthetic_runs import CONFIG, write_run

from mupscale.commands.lab.run import read_ending
from mupscale.commands.sweep import parser as sweep_parser
from mupscale.commands.sweep import sweep_settings
from mupscale.data_files import refuse_endless, yaml_of
from mupscale.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

BOMB = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12)) + "\n"
"""Twelve lines that stand for 9¹¹ values."""

DEEP = "[" * 100_000
"""Ends the process, where yaml's C library reads it."""

TAG = 'model: !!python/object/apply:os.system ["touch marker"]\n'

GPT2 = (
    "verify --model=GPT2 --model.width=8 --model.heads=2 --model.layers=1 --model.context=8 "
    "--data=FineWeb --data.context=8 --data.data_dir=theirs"
)
RESNET = "verify --model=ResNet18 --model.width=4 --model.base_width=4 --data=CIFAR100 --data.data_dir=theirs"
SWEEP = "sweep --config c.yaml --sweep model.optimizer.lr=0.1:0.2 --sampler random --trials 2 --out theirs"
PREPARE = "prepare text text.txt --vocab 300 --out theirs"

OPENED: list[str] = []
"""Files outside of the working folder that were opened."""


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.truncate", "os.remove") and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fspath(arguments[0])
        path = os.fsdecode(path)
        if os.path.basename(os.path.realpath(path)) == "secret" or os.path.basename(path) == "secret":
            OPENED.append(path)


sys.addaudithook(_note_opened)


def put(files: Mapping[str, bytes | str | None]) -> Callable[[Path], None]:
    """Makes files with these contents; None is a link to the secret file."""

    def make(secret: Path) -> None:
        for name, content in files.items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif isinstance(content, str):
                path.write_text(content.replace("OUTSIDE", str(secret.parent)))
            else:
                path.symlink_to(secret)

    return make


def saved_by_torch(content: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


EVIL = pickle.dumps(Attack())
CHECKPOINT = {"evil.ckpt": saved_by_torch({"state_dict": {}, "global_step": 3, "optimizer_states": [Attack()]})}
CONFIGURED = yaml.safe_dump(CONFIG)
"""The configuration of a run."""


def run(_: Path) -> None:
    Path("theirs").mkdir()
    small(Path("theirs/config.yaml"))
    torch.save({"global_step": 3, "optimizer_states": [Attack()]}, "theirs/step=3.ckpt")


def covertype(_: Path) -> None:
    Path("theirs").mkdir()
    np.savez("theirs/covertype.npz", X=np.array([[Attack()] * 54], dtype=object), y=np.array([1]))


def cifar_npz(_: Path) -> None:
    Path("theirs").mkdir()
    arrays = {name: np.array([Attack()], dtype=object) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez("theirs/cifar100.npz", **arrays)


def archive(secret: Path) -> None:
    Path("theirs").mkdir()
    with tarfile.open("theirs/cifar-100-python.tar.gz", "w:gz") as tar:
        for name in ("../marker", "/marker", f"../../{secret.name}"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            tar.addfile(entry, io.BytesIO(b"x"))
        pointer = tarfile.TarInfo("cifar-100-python")
        pointer.type, pointer.linkname = tarfile.SYMTYPE, str(secret.parent)
        tar.addfile(pointer)


def parquet(_: Path) -> None:
    """With a type of pyarrow that is a pickle (CVE-2023-47248), and no column of texts."""
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": EVIL}
    schema = pa.schema([pa.field("text", pa.int64(), metadata=extension)], metadata={"pandas": b"{}"})
    pq.write_table(pa.table({"text": [1, 2]}, schema=schema), "evil.parquet")


def token_files(link: str = "", end: int = 1000, metadata: str | None = None) -> Callable[[Path], None]:
    """A file of datatrove, changed in one respect."""

    def make(secret: Path) -> None:
        Path("theirs").mkdir()
        Path("theirs/0.ds").write_bytes(bytes(2000))
        Path("theirs/0.ds.index").write_bytes(struct.pack("<2Q", 990, end))
        if metadata is not None:
            Path("theirs/0.ds.metadata").write_text(metadata)
        if link:
            Path(f"theirs/0{link}").unlink()
            Path(f"theirs/0{link}").symlink_to(secret)

    return make


def pipe(name: str, files: Mapping[str, bytes | str | None] | None = None) -> Callable[[Path], None]:
    """A file that never ends, beside others."""

    def make(secret: Path) -> None:
        put(files or {})(secret)
        Path(name).parent.mkdir(exist_ok=True)
        os.mkfifo(name)

    return make


def begun_sweep(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A sweep of the same settings that was interrupted in a stack, changed in one respect."""

    def make(secret: Path) -> None:
        options, rest = sweep_parser().parse_known_args(shlex.split(SWEEP)[1:])
        settings = sweep_settings(options, rest).description()
        put({"theirs/sweep.json": json.dumps(settings), "theirs/run.lock": "", "theirs/stacks/000/runs.json": "{}"})(
            secret
        )
        Path("theirs/stacks/000/step=3.ckpt").write_bytes(Path("mlp.ckpt").read_bytes())  # so that it would go on
        change(secret)

    return make


def link_trials(secret: Path) -> None:
    Path("theirs/trials").symlink_to(secret.parent)


EVENTS = "theirs/events.out.tfevents.1.x"
ATTACKS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "checkpoint: upscale": (
        put(CHECKPOINT), "upscale evil.ckpt --width 16 --out o", "is not a checkpoint, or is damaged",
    ),
    "checkpoint: validate": (
        put(CHECKPOINT), "validate --config c.yaml --ckpt_path evil.ckpt", "nothing of it was loaded",
    ),
    "checkpoint: fit": (put(CHECKPOINT), "fit --config c.yaml --model.init_from=evil.ckpt", "is not a checkpoint"),
    "checkpoint: resume": (run, "resume theirs", "has no checkpoint that can be read"),
    "sharded: metadata": (
        put({
            "evil.ckpt/meta.pt": saved_by_torch({"global_step": 3, "optimizer_states": []}),
            "evil.ckpt/.metadata": EVIL,
        }),
        "test --config c.yaml --ckpt_path evil.ckpt", "which no checkpoint needs",
    ),
    "sharded: a link": (
        put({"evil.ckpt/meta.pt": None}), "fit --config c.yaml --ckpt_path evil.ckpt", "something outside of it",
    ),
    "YAML: a tag": (put({"evil.yaml": TAG}), "plan --config evil.yaml", "python/object/apply:os.system"),
    "YAML: aliases": (put({"evil.yaml": BOMB}), "fit --config evil.yaml", "more than 100,000 values"),
    "YAML: depth": (put({"evil.yaml": DEEP}), "verify --config evil.yaml", "nested more than 100 levels"),
    "YAML: itself": (
        put({"evil.yaml": "a: &a [*a]\n"}), "sweep --config evil.yaml --sweep a=1 --out s", "refers to itself",
    ),
    "YAML: experiment": (put({"evil.yaml": BOMB}), "experiment evil.yaml", "more than 100,000 values"),
    "YAML: report": (put({"theirs/config.yaml": BOMB}), "report theirs", "more than 100,000 values"),
    "YAML: a tag in a report": (
        put({"theirs/config.yaml": TAG}), "report theirs", "theirs/config.yaml is not YAML that can be read",
    ),
    "YAML: types in a report": (
        put({"theirs/config.yaml": yaml.safe_dump(CONFIG | {"trainer": CONFIG["trainer"] | {"max_steps": "many"}})}),
        "report theirs", "is not the configuration of a run",
    ),
    "events: a link": (
        put({"theirs/config.yaml": CONFIGURED, EVENTS: None}),
        "report theirs", "something outside of it",
    ),
    "events: another length": (
        put({"theirs/config.yaml": CONFIGURED, EVENTS: struct.pack("<QI", 2**62, 0) + b"train/loss" + EVIL}),
        "report theirs", "there is nothing to report",
    ),
    "JSON: how a model generates": (
        put({"theirs/config.json": "{}", "theirs/generation_config.json": DEEP}),
        "upscale theirs --factor 2 --out o", "theirs/generation_config.json cannot be read as JSON",
    ),
    "JSON: noise": (
        put({"evil.json": DEEP}),
        "upscale mlp.ckpt --width 16 --out o --recorded-noise evil.json", "nested too deep",
    ),
    "YAML: a pipe": (
        pipe("theirs/run/config.yaml", {f"theirs/run/{Path(EVENTS).name}": b""}), "report theirs", "theirs",
    ),
    "YAML: a pipe that the user names": (pipe("pipe"), "plan --config pipe", "pipe is not a file"),
    "JSON: a pipe": (pipe("theirs/experiment.json"), "report theirs", "theirs"),
    "checkpoint: a pipe": (
        pipe("theirs/step=3.ckpt", {"theirs/config.yaml": CONFIGURED}), "resume theirs", "has no checkpoint that can",
    ),
    "checkpoint: a pipe that the user names": (
        pipe("pipe"), "fit --config c.yaml --ckpt_path pipe", "ckpt_path: pipe is not a file",
    ),
    "run: a pipe": (
        pipe("theirs/run.json", {"theirs/config.yaml": CONFIGURED}), "resume theirs", "has no checkpoint that can",
    ),
    "sharded: a pipe": (
        pipe("evil.ckpt/.metadata", {"evil.ckpt/meta.pt": b""}),
        "fit --config c.yaml --ckpt_path evil.ckpt", "evil.ckpt/.metadata is not a file",
    ),
    "preparation: a pipe": (pipe("theirs/progress.json"), PREPARE, "theirs/progress.json is not a file"),
    "JSON: a pipe of a model": (
        pipe("theirs/config.json"), "upscale theirs --factor 2 --out o", "theirs is not a model folder",
    ),
    "trials: a link": (begun_sweep(link_trials), SWEEP, "theirs/trials is a link"),
    "trials: a link in a folder without a sweep": (
        put({"theirs/trials": None}), SWEEP, "theirs is not empty and has no sweep; name a new folder",
    ),
    "stack: a pickle": (begun_sweep(put({"theirs/stacks/000/runs.json": EVIL})), SWEEP, "runs.json is damaged"),
    "stack: depth": (begun_sweep(put({"theirs/stacks/000/runs.json": DEEP})), SWEEP, "runs.json is damaged"),
    "preparation: a pickle": (put({"theirs/progress.json": EVIL}), PREPARE, "progress.json is damaged"),
    "preparation: depth": (put({"theirs/progress.json": DEEP}), PREPARE, "progress.json is damaged"),
    "preparation: below 0": (
        put({"theirs/progress.json": '{"preparation": {}, "files": {"train": [[-1, 0]], "val": []}}'}),
        PREPARE, "progress.json is damaged",
    ),
    "preparation: a linked split": (put({"theirs/train": None}), PREPARE, "train is a link"),
    "preparation: a linked vocabulary": (put({"theirs/tokenizer.json": None}), PREPARE, "tokenizer.json is a link"),
    "preparation: finished": (
        put({"theirs/preparation.json": '{"vocabulary": "many"}'}), PREPARE, "preparation.json is damaged",
    ),
    "preparation: a linked lock": (put({"theirs/.lock": None}), PREPARE, ".lock is a link"),
    "npz: Covertype": (covertype, "fit --config c.yaml --data.data_dir=theirs", "is not a whole npz file"),
    "npz: CIFAR-100": (cifar_npz, RESNET, "is not a whole npz file"),
    "CIFAR-100: pickles": (
        put({f"theirs/cifar-100-python/{name}": EVIL for name in ("train", "test", "meta")}),
        RESNET, "its checksums are not the published ones",
    ),
    "CIFAR-100: an archive": (archive, RESNET, "is cut short, damaged or another file"),
    "parquet: a pickle": (parquet, "prepare text evil.parquet --vocab 300 --out p", "needs a column `text` of strings"),
    "token files: a link": (token_files(link=".ds"), GPT2, "is a link: copy the files into the folder"),
    "token files: an end beyond all": (token_files(end=2**64 - 1), GPT2, "its index says 18446744073709551615 tokens"),
    "token files: a number too long": (token_files(metadata="x|2\n" + "9" * 10_000), GPT2, "metadata is damaged"),
}  # fmt: skip
"""What makes the file, the command that reads it, and what the message must contain."""

FAST = ("checkpoint: upscale", "YAML: depth", "JSON: runs elsewhere", "JSON: noise")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mlp(tmp_path_factory.mktemp("saved") / "mlp.ckpt")


@pytest.fixture
def secret(tmp_path: Path, saved: Path, in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file beside the working folder, which nothing may open."""
    home, hidden = tmp_path / "work" / "home", tmp_path / "secret"
    home.mkdir(parents=True)
    hidden.write_text("hidden")
    monkeypatch.chdir(home)
    small(Path("c.yaml"))
    Path("text.txt").write_text("plain")
    Path("mlp.ckpt").write_bytes(saved.read_bytes())
    OPENED.clear()
    yield hidden
    opened = list(OPENED)
    assert not opened
    assert hidden.read_text() == "hidden"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "work"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["home"]
    assert not list(tmp_path.rglob("marker"))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS]
)
def test_an_untrusted_file(name: str, secret: Path) -> None:
    make, command, fragment = ATTACKS[name]
    make(secret)
    assert fragment in refused(*shlex.split(command))


@pytest.mark.slow
def test_lightning_reads_a_checkpoint_as_data_too(secret: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check beforehand sees another file. torch reads no more than data, unless it is asked to."""
    put(CHECKPOINT)(secret)
    monkeypatch.setattr("mupscale.commands.cli.load_validated", lambda path: torch.load(saved, weights_only=True))
    assert "eights_only" in refused("validate", "--config", "c.yaml", "--ckpt_path", "evil.ckpt")


def test_results_of_other_types(tmp_path: Path) -> None:
    huge = f'{{"value": 1{"0" * 400}}}'
    for content in ('{"value": "x"}', '{"value": []}', '{"seconds": 1}', huge, "[" * 100_000, "3"):
        (tmp_path / "result.json").write_text(content)
        with pytest.raises(UserError, match=r"result\.json is damaged"):
            read_ending(tmp_path)


JOURNALS = {
    "a text": b'"many"',
    "beyond floats": b"1" + b"0" * 400,
    "deep": b"[" * 100_000,
    "steps that no run reaches": b'{"steps": 36893488147419103232}',
    "a text as a value": b'{"steps": "many", "train_loss": "x", "flops": [], "growths": 3}',
    "values beyond floats": b'{"steps": 1%s, "train_loss": 1%s, "seconds": 1%s, "flops": 1%s}' % ((b"0" * 400,) * 4),
}


@pytest.mark.parametrize("kind", JOURNALS)
def test_a_journal_that_a_report_cannot_read_is_one_line(kind: str, secret: Path) -> None:
    write_run(Path("theirs/run"), [0.5] * 10)
    Path("theirs/run/result.json").write_bytes(JOURNALS[kind])
    assert refused("report", "theirs").startswith("error: theirs/run/result.json is ")


TABLES = {
    "a cell too few": b"trial,run\n0\n",
    "a cell too many": b"trial,run\n0,a,b\n",
    "a NUL": b"trial,run\n0,\0\n",
    "other letters": b"trial,run\n0,\xff\n",
    "a long cell": b"trial,run\n0," + b"a" * 200_000,
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_cannot_be_read_is_named(kind: str, secret: Path) -> None:
    put({"theirs/sweep.json": '{"sweep": [{"key": "a", "values": [1, 2]}]}', "theirs/trials.csv": TABLES[kind]})(secret)
    assert refused("report", "theirs").startswith("error: theirs/trials.csv is not a table that can be read: ")


def test_a_folder_whose_name_is_no_text_is_named(secret: Path) -> None:
    odd = os.fsdecode(b"run-\xff")
    write_run(Path("theirs") / odd, [0.5] * 10)
    assert refused("report", "theirs") == r"error: 'theirs/run-\udcff' is not a name in UTF-8; rename it"
    assert "is not a name in UTF-8" in refused("report", "theirs", "--out", odd)


def test_aliases_within_bounds_are_read() -> None:
    text = "a: &a {lr: 0.1}\nb: [*a, *a]\n"
    refuse_endless(text)
    assert yaml_of(text) == {"a": {"lr": 0.1}, "b": [{"lr": 0.1}, {"lr": 0.1}]}
    assert yaml_of("a: &a {lr: 0.1}\nb: {<<: *a, lr: 0.2}\n") == {"a": {"lr": 0.1}, "b": {"lr": 0.2}}
    assert yaml_of("") is None


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("trainer:\n  callbacks:\n  - {a: {b: 1, b: 2}}\n")
    assert "it has the key trainer.callbacks.a.b twice, in lines 3 and 3" in refused("fit", "--config", str(path))
    path.write_text("trainer: {max_steps: 60}\nmodel: {}\ntrainer: {max_steps: 5}\n")
    assert "it has the key trainer twice, in lines 1 and 3" in refused("plan", f"--config={path}")
