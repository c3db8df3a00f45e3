"""prepare: tokens that are the text, splits that share no document, and refusals that leave nothing behind."""

import gzip
import hashlib
import shlex
from pathlib import Path
from typing import Any

import pytest
from corpus import ENTRIES, prepared, refused, split_documents, texts, write_article, write_hub, write_text
from paths import contents
from programs import run_program

from mupscale.__main__ import main
from mupscale.commands.cli import run_cli
from mupscale.commands.configured import first_batches
from mupscale.datamodules import documents
from mupscale.datamodules.documents import TextFiles
from mupscale.datamodules.fineweb import JARGON
from mupscale.datamodules.preparation import is_held_out, prepare, read_prepared
from mupscale.datamodules.token_files import TokenFolder


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BATCH", 5000)


@pytest.fixture
def article(tmp_path: Path) -> Path:
    return write_article(tmp_path / "article.txt")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub(tmp_path / "hub", monkeypatch)


# ---- a whole preparation


def assert_trains(line: str) -> None:
    """The command that is printed at the end has a model for the data, and at least one batch."""
    words = shlex.split(line)
    assert words[:4] == ["python", "-m", "mupscale", "fit"]
    cli = run_cli([*words[4:], "--trainer.accelerator=cpu"])
    (batch,) = first_batches(cli.model, cli.datamodule, 1)
    assert batch.shape[1] == cli.model.hparams["context"] + 1
    assert int(batch.max()) < cli.model.hparams["vocabulary"]


def test_the_tokens_are_the_text(tmp_path: Path, article: Path, capsys: pytest.CaptureFixture[str]):
    main(["prepare", "text", str(article), "--vocab", "300", "--val-fraction", "0.2", "--out", str(tmp_path / "out")])
    prepared_folder = read_prepared(tmp_path / "out")
    TokenFolder(tmp_path / "out").verify()
    splits = {split: texts(tmp_path / "out", split) for split in ("train", "val")}
    held_out = [is_held_out(document, 0.2) for document in ENTRIES[:120]]
    assert splits["val"] == [document for document, out in zip(ENTRIES, held_out, strict=False) if out]
    assert splits["train"] == [document for document, out in zip(ENTRIES, held_out, strict=False) if not out]
    assert len(splits["val"]) == sum(held_out) == prepared_folder["val"]["documents"]
    assert prepared_folder["trained_on"] == {
        "documents": len(splits["train"]), "bytes": len("".join(splits["train"]).encode()),
    }  # fmt: skip
    assert prepared_folder["preparation"] == {
        "source": "text",
        "files": [
            {
                "name": "article.txt",
                "bytes": article.stat().st_size,
                "sha256": hashlib.sha256(article.read_bytes()).hexdigest(),
            }
        ],
        "separator": "<|endoftext|>",
        "vocab": 300,
        "tokens": None,
        "val-fraction": 0.2,
        "tokens of a file": 2**26,
    }
    *_, first, last = capsys.readouterr().out.splitlines()
    assert f"{len(splits['train'])} documents to train on" in first
    assert_trains(last.removeprefix("  train on it: "))
    files = [f"{split}/00000.ds{kind}" for split in ("train", "val") for kind in ("", ".index", ".metadata")]
    assert contents(tmp_path / "out").keys() == {"preparation.json", "tokenizer.json", *files}


def test_equal_documents_lie_on_one_side(tmp_path: Path):
    prepared(write_text(tmp_path / "twice", [*ENTRIES[:60], *ENTRIES[:60]]), tmp_path / "out")
    train, val = (texts(tmp_path / "out", split) for split in ("train", "val"))
    assert not set(train) & set(val)
    assert len(train) + len(val) == 120
    assert 0.1 < len(val) / 120 < 0.35


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(tmp_path: Path, article: Path):
    for workers in ("1", "3"):
        command = ["prepare", "text", article, "--vocab", "300", "--val-fraction", "0.2", "--workers", workers]
        run_program("-m", "mupscale", *command, "--out", tmp_path / workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_tokens_stop_with_the_document_that_reaches_them(tmp_path: Path, article: Path):
    prepared(article, tmp_path / "whole")
    whole = {split: split_documents(tmp_path / "whole", split) for split in ("train", "val")}
    ends = {}
    for wanted in (8000, 8001, 20_000):
        made = prepared(article, tmp_path / str(wanted), tokens=wanted)
        total = sum(made[split]["tokens"] for split in ("train", "val"))
        found = {split: split_documents(tmp_path / str(wanted), split) for split in ("train", "val")}
        assert total >= wanted
        assert total - max(len(found[split][-1]) for split in found) < wanted  # without it, too few
        for split in found:
            assert found[split] == whole[split][: len(found[split])]
        ends[wanted] = total
    assert ends[8000] < ends[20_000]
    assert len(list((tmp_path / "whole/train").glob("*.ds"))) > 2


@pytest.mark.slow
def test_a_stream_is_prepared_and_its_revision_kept(tmp_path: Path, hub: None):
    out = tmp_path / "out"
    options = "--subset CC-MAIN-2013-20 --tokens 15k --vocab 300 --val-fraction 0.2"
    main(["prepare", "fineweb", *options.split(), "--out", str(out)])
    made = read_prepared(out)
    assert made["preparation"]["revision"] == "0123456789abcdef"
    found = {text for split in ("train", "val") for text in texts(out, split)}
    assert found == set(ENTRIES[: len(found)])
    assert 15_000 <= made["train"]["tokens"] + made["val"]["tokens"] < 20_000


# ---- the embedded sample


@pytest.mark.slow
def test_the_sample_is_what_the_command_makes_of_its_text(tmp_path: Path):
    """Only the order between the splits is lost, and that changes no byte of them, nor the vocabulary."""
    made = prepare(
        TextFiles([write_text(tmp_path / "jargon.txt", ENTRIES)]), tmp_path / "out", vocabulary=4096, val_fraction=0.05
    )
    found, shipped = contents(tmp_path / "out"), contents(JARGON)
    assert found.keys() == shipped.keys()
    assert [name for name in found if found[name] != shipped[name]] == ["preparation.json"]  # it names the file
    asked = read_prepared(JARGON)["preparation"]
    assert {**asked, "files": None} == {**made["preparation"], "files": None}


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.txt", b"", "empty.txt: there is no text in it"),
        ("one.txt", b"a single document", "one.txt: none of its 1 documents falls to the split `val`"),
        ("late.txt", b"ok\n<|endoftext|>\nna\xefve", "late.txt cannot be read: byte 19 is not UTF-8"),
        (
            "no.jsonl",
            b'{"text": "a"}\n{"body": "b"}',
            "no.jsonl cannot be read: the line at byte 14 is not a JSON object with a string `text` (it has no 'text')",
        ),
        ("number.jsonl", b'{"text": 3}', "number.jsonl cannot be read: the line at byte 0"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}' * 99, mtime=0)[:-9], "cut.jsonl.gz cannot be read"),
        ("not.txt.gz", b"plain", "not.txt.gz cannot be read"),
        ("not.parquet", b"PAR1" + bytes(99), "not.parquet cannot be read"),
    ],
)
def test_bad_text_is_named_and_leaves_nothing(tmp_path: Path, name: str, content: bytes, told: str):
    (tmp_path / name).write_bytes(content)
    assert told in refused("text", tmp_path / name, "--vocab", "257", "--out", tmp_path / "new/out")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    assert told in refused("text", tmp_path / name, "--vocab", "257", "--out", tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--vocab", "65537"], "--vocab 65537: wanted 257, all bytes and the end of text, to 65536"),
        (["--vocab", "256"], "--vocab 256: wanted 257"),
        (["--vocab", "60000"], "--vocab 60000: article.txt has but "),
        (["--vocab", "300", "--val-fraction", "0"], "--val-fraction 0.0: wanted a number between 0 and 1"),
        (["--vocab", "300", "--val-fraction", "nan"], "--val-fraction nan"),
        (["--vocab", "300", "--val-fraction", "0.0001"], "none of its 120 documents falls to the split `val`"),
    ],
)
def test_bad_options_are_named_and_leave_nothing(tmp_path: Path, article: Path, options: list[str], told: str):
    assert told in refused("text", article, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_of_tokens():
    from mupscale.commands.prepare import number_of_tokens

    found = [number_of_tokens(text) for text in ("100M", "11.8B", "500k", "7", "1e6")]
    assert found == [10**8, 118 * 10**8, 500_000, 7, 10**6]


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, article: Path, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("tokenizers.Tokenizer.from_pretrained", unreachable)
    told = refused(
        "fineweb", "--subset", "CC-MAIN-2013-20", "--tokens", "100M", "--vocab", "gpt2", "--out", tmp_path / "out"
    )
    assert "(Name or service not known)" in told
    assert "https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/tree/main/data/CC-MAIN-2013-20" in told
    assert "`python -m mupscale prepare text FILES…`" in told
    told = refused("text", article, "--vocab", "gpt2", "--out", tmp_path / "out")
    assert "Run `hf download openai-community/gpt2 tokenizer.json` where there is a network and copy its cache" in told
    assert "HF_HOME" in told
    assert "--vocab 8192" in told
    assert not (tmp_path / "out").exists()
