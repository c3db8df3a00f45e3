"""Documents of every format, from any position on."""

import json
from pathlib import Path

import pytest
from corpus import ENTRIES, write_hub, write_jsonl, write_parquet, write_text
from pyarrow.parquet import ParquetFile

from mupscale.datamodules import documents
from mupscale.datamodules.documents import FineWebEdu, TextFiles


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BATCH", 5000)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub(tmp_path / "hub", monkeypatch)


WRITERS = {
    "a.txt": write_text,
    "a.txt.gz": write_text,
    "a.jsonl": write_jsonl,
    "a.json.gz": write_jsonl,
    "A.JSON.GZ": write_jsonl,
    "a.parquet": write_parquet,
    "A.PARQUET": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_documents_and_goes_on_from_any_position(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(documents, "BATCH", 1500)
    content = [*ENTRIES[:20], "  \n ", *ENTRIES[20:40]]
    files = [WRITERS[name](tmp_path / name, content), write_text(tmp_path / "last", ["Ünïcödé 😀", "end"])]
    source = TextFiles(files)
    expected = [*ENTRIES[:40], "Ünïcödé 😀", "end"]
    batches = list(source.batches(None))
    assert [document for batch, _ in batches for document in batch] == expected
    assert len(batches) > 5
    for number, (_, position) in enumerate(batches):
        rest = list(source.batches(json.loads(json.dumps(position))))
        assert rest == batches[number + 1 :]
    done = [source.progress(position) for _, position in batches]
    assert done == sorted(done)
    assert done[-1] == (sum(file.stat().st_size for file in files),) * 2


def test_plain_text_is_cut_at_lines_that_are_the_separator(tmp_path: Path):
    def split(content: bytes, separator: str = "<|endoftext|>") -> list[str]:
        (tmp_path / "text").write_bytes(content)
        return [document for batch, _ in TextFiles([tmp_path / "text"], separator).batches(None) for document in batch]

    assert split(b"one\ntwo\n<|endoftext|>\n<|endoftext|>\n \n<|endoftext|>\nthree\n") == ["one\ntwo", "three"]
    assert split(b"\xef\xbb\xbfone\r\n<|endoftext|>\r\n\xef\xbb\xbftwo") == ["one", "\ufefftwo"]
    assert split(b" a <|endoftext|> b\n\n") == [" a <|endoftext|> b\n"]  # not alone on its line
    assert split(b"one\n\ntwo\nthree\n\n\nfour", "") == ["one", "two\nthree", "four"]


def test_half_a_surrogate_pair_and_nothing_at_all_are_no_reason_to_fail(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}')
    write_parquet(tmp_path / "b.parquet", ["c", None, "d"])
    files = [tmp_path / name for name in ("a.jsonl", "b.parquet")]
    assert [batch for batch, _ in TextFiles(files).batches(None)] == [["a? b", "😀", "c", "d"]]


def test_of_parquet_only_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_parquet(tmp_path / "a.parquet", [f"document {number}" for number in range(30)])  # groups of seven rows
    read: list[list[int]] = []
    iter_batches = ParquetFile.iter_batches

    def counted(table: ParquetFile, *arguments: object, row_groups: list[int], **options: object) -> object:
        read.append(row_groups)
        return iter_batches(table, *arguments, row_groups=row_groups, **options)

    monkeypatch.setattr(ParquetFile, "iter_batches", counted)
    for row in (0, 6, 7, 20, 28, 29, 30):
        rest = [document for batch, _ in TextFiles([file]).batches([0, row]) for document in batch]
        assert rest == [f"document {number}" for number in range(row, 30)]
    assert read == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4], [4], [4], []]


@pytest.mark.slow
def test_the_stream_gives_the_documents_and_goes_on_from_any_position(hub: None):
    source = FineWebEdu("CC-MAIN-2013-20")
    batches = list(source.batches(None))
    assert [document for batch, _ in batches for document in batch] == ENTRIES[:120]
    assert len(batches) > 8
    for number, (_, position) in enumerate(batches):
        rest = list(source.batches(json.loads(json.dumps(position))))
        assert [batch for batch, _ in rest] == [batch for batch, _ in batches[number + 1 :]]
