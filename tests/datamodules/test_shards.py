"""Tokens on disk: the bytes of the format, cutting back to what was committed, one array over several shards, damage by
name.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from corpus import split_documents

from mupscale.atomic import write_durably
from mupscale.datamodules.shards import (
    INDEX,
    TOKENIZER,
    Index,
    MappedTokens,
    ShardWriter,
    file_entry,
    read_index,
)
from mupscale.errors import UserError

DOCUMENTS = [[5, 6, 65535], [7], [8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18, 19, 20, 21, 22], [23]]
EVERYTHING = [token for document in DOCUMENTS for token in document]


def append(writer: ShardWriter, documents: list[list[int]]) -> None:
    tokens = np.array([token for document in documents for token in document], np.uint16)
    writer.append(tokens, np.array([len(document) for document in documents], np.int64))


def written(folder: Path, documents: list[list[int]] = DOCUMENTS, shard_tokens: int = 4) -> ShardWriter:
    writer = ShardWriter(folder, "train", shard_tokens)
    append(writer, documents)
    writer.close()
    return writer


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mapped(folder: Path) -> MappedTokens:
    return MappedTokens(sorted(folder.glob("train-*.tokens")))


def finished(folder: Path) -> Index:
    (folder / TOKENIZER).write_bytes(b"YQ== 0\n")
    splits = {}
    for split in ("train", "val"):
        writer = ShardWriter(folder, split, 4)
        append(writer, DOCUMENTS)
        splits[split] = writer.index()
    content = {"version": 1, "vocabulary": 65536, "tokenizer": file_entry(folder / TOKENIZER), **splits}
    write_durably(folder / INDEX, json.dumps(content).encode())
    return read_index(folder)


# ---- writing


def test_the_bytes_of_the_format(tmp_path: Path):
    assert written(tmp_path).counts == [(4, 2), (4, 1), (11, 2), (1, 1)]  # the document that fills a shard is its last
    assert contents(tmp_path) == {
        "train-00000.tokens": bytes.fromhex("0500 0600 ffff 0700"),
        "train-00000.documents": bytes.fromhex("0000000000000000 0300000000000000"),
        "train-00001.tokens": bytes.fromhex("0800 0900 0a00 0b00"),
        "train-00001.documents": bytes.fromhex("0000000000000000"),
        "train-00002.tokens": bytes.fromhex("0c00 0d00 0e00 0f00 1000 1100 1200 1300 1400 1500 1600"),
        "train-00002.documents": bytes.fromhex("0000000000000000 0200000000000000"),
        "train-00003.tokens": bytes.fromhex("1700"),
        "train-00003.documents": bytes.fromhex("0000000000000000"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("shard_tokens", [1, 4, 5, 1000])
def test_the_shards_do_not_depend_on_how_documents_come(tmp_path: Path, size: int, shard_tokens: int):
    once, bit_by_bit = tmp_path / "once", tmp_path / "bits"
    for folder in (once, bit_by_bit):
        folder.mkdir()
    whole = written(once, shard_tokens=shard_tokens)
    writer = ShardWriter(bit_by_bit, "train", shard_tokens)
    for first in range(0, len(DOCUMENTS), size):
        append(writer, DOCUMENTS[first : first + size])
        writer.close()
    assert writer.counts == whole.counts
    assert contents(bit_by_bit) == contents(once)


@pytest.mark.slow
@pytest.mark.parametrize("kept", range(7))
@pytest.mark.parametrize("more", range(7))
def test_a_new_writer_goes_on_from_what_was_committed(tmp_path: Path, kept: int, more: int):
    interrupted, straight = tmp_path / "interrupted", tmp_path / "straight"
    for folder in (interrupted, straight):
        folder.mkdir()
    first = ShardWriter(interrupted, "train", 4)
    append(first, DOCUMENTS[:kept])
    first.close()
    committed = list(first.counts)
    append(first, DOCUMENTS[kept : kept + more])  # reaches the disk, but no journal
    first.close()
    second = ShardWriter(interrupted, "train", 4, committed)
    assert (second.documents, second.tokens) == (
        kept,
        len([token for document in DOCUMENTS[:kept] for token in document]),
    )
    append(second, DOCUMENTS[kept:])
    second.close()
    written(straight)
    assert contents(interrupted) == contents(straight)


def test_a_writer_leaves_the_other_split_alone(tmp_path: Path):
    written(tmp_path)
    before = contents(tmp_path)
    ShardWriter(tmp_path, "val", 4)
    assert contents(tmp_path) == before


def test_lost_data_are_not_passed_over(tmp_path: Path):
    counts = written(tmp_path).counts
    (tmp_path / "train-00002.tokens").write_bytes(b"\0" * 21)
    with pytest.raises(
        ValueError, match=r"train-00002\.tokens has lost data: 21 bytes of 22\. Delete the folder and prepare it again"
    ):
        ShardWriter(tmp_path, "train", 4, counts)


# ---- reading


@pytest.mark.parametrize("shard_tokens", [1, 4, 1000])
def test_shards_read_as_one_array(tmp_path: Path, shard_tokens: int):
    written(tmp_path, shard_tokens=shard_tokens)
    tokens = mapped(tmp_path)
    assert len(tokens) == 20
    for start in range(20):
        for size in range(1, 21 - start):
            out = np.full(size, -1, np.int64)
            tokens.read(start, out)
            assert out.tolist() == EVERYTHING[start : start + size]
    for begin, shard in tokens.shards():
        assert shard.tolist() == EVERYTHING[begin : begin + len(shard)]


def test_documents_are_found_again(tmp_path: Path):
    written(tmp_path)
    assert split_documents(tmp_path, "train") == DOCUMENTS


def test_mapping_reads_nothing(tmp_path: Path):
    """Four thousand million tokens, of which the disk has none."""
    file = tmp_path / "train-00000.tokens"
    file.touch()
    with file.open("r+b") as stream:
        stream.truncate(2 * 4 * 10**9)
    tokens = MappedTokens([file, file])
    out = np.ones(3, np.uint16)
    tokens.read(4 * 10**9 - 1, out)
    assert (len(tokens), out.tolist()) == (8 * 10**9, [0, 0, 0])


# ---- the index


def test_the_index_finds_both_splits(tmp_path: Path):
    index = finished(tmp_path)
    index.verify()
    for split in ("train", "val"):
        out = np.zeros(len(EVERYTHING), np.int64)
        index.tokens(split).read(0, out)
        assert out.tolist() == EVERYTHING
        assert split_documents(tmp_path, split) == DOCUMENTS
    assert index.content["train"]["shards"][2]["documents"] == {
        "count": 2,
        "file": "train-00002.documents",
        "bytes": 16,
        "sha256": hashlib.sha256(bytes.fromhex("0000000000000000 0200000000000000")).hexdigest(),
    }


def test_no_index_no_data(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"there is no .*index\.json: prepare the folder by `python -m mupscale prepare`"
    ):
        read_index(tmp_path)
    written(tmp_path)
    with pytest.raises(ValueError, match=r"is not finished: run the same .* command again"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", [TOKENIZER, "train-00001.tokens", "val-00000.documents"])
def test_a_missing_a_truncated_and_a_damaged_file_are_named(tmp_path: Path, name: str):
    finished(tmp_path)
    file, content = tmp_path / name, (tmp_path / name).read_bytes()
    file.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        read_index(tmp_path)
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{name} has {len(content) - 1} bytes, index.json says {len(content)}"):
        read_index(tmp_path)
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    index = read_index(tmp_path)  # of the right size
    with pytest.raises(ValueError, match=f"{name} is damaged: its sha256 is"):
        index.verify()
    file.write_bytes(content)
    read_index(tmp_path).verify()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"version": 1}', b'{"version": 1, "train": 3, "val": 4}', b"\xff\xfe"]
)
def test_a_damaged_index_is_named(tmp_path: Path, content: bytes):
    finished(tmp_path)
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ValueError, match=r"index\.json is damaged, or is not the index of a prepared folder"):
        read_index(tmp_path)


def test_an_index_of_another_version_is_named(tmp_path: Path):
    content = finished(tmp_path).content
    (tmp_path / INDEX).write_text(json.dumps({**content, "version": 2, "train": "otherwise"}))
    with pytest.raises(
        ValueError,
        match=r"index\.json is of version 2, this mupscale reads version 1: delete the folder and prepare it again",
    ):
        read_index(tmp_path)


def renamed(folder: Path, entry: str, name: str) -> None:
    """Lets the index name another file."""
    path = folder / INDEX
    path.write_text(path.read_text().replace(f'"file": "{entry}"', f'"file": {json.dumps(name)}'))


@pytest.mark.parametrize("entry", [TOKENIZER, "train-00001.tokens", "val-00000.documents"])
@pytest.mark.parametrize("place", ["../{}", "{absolute}", "sub/../{}", "..", ""])
def test_the_index_names_no_file_outside_of_its_folder(tmp_path: Path, entry: str, place: str):
    folder = tmp_path / "data"
    folder.mkdir()
    finished(folder)
    outside = tmp_path / entry
    outside.write_bytes((folder / entry).read_bytes())
    renamed(folder, entry, place.format(entry, absolute=outside))
    with pytest.raises(UserError, match=r"index\.json names a file outside of its folder: ") as caught:
        read_index(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", [TOKENIZER, "train-00001.tokens", "val-00000.documents"])
def test_a_link_that_leaves_the_folder_is_not_read(tmp_path: Path, entry: str):
    folder = tmp_path / "data"
    folder.mkdir()
    finished(folder)
    (folder / entry).rename(tmp_path / entry)
    (folder / entry).symlink_to(tmp_path / entry)
    with pytest.raises(UserError, match=f"{entry} is a link to a file outside of its folder; copy the file into it"):
        read_index(folder)
    (folder / entry).unlink()
    (tmp_path / entry).rename(folder / "other")
    (folder / entry).symlink_to("other")
    read_index(folder).verify()
    (tmp_path / "linked").symlink_to(folder)  # the folder itself may be one
    read_index(tmp_path / "linked").verify()


@pytest.mark.parametrize(("vocabulary", "named"), [(65535, "train-00000.tokens has the token 65535"), (65536, None)])
def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path, vocabulary: int, named: str | None):
    content = finished(tmp_path).content
    (tmp_path / INDEX).write_text(json.dumps({**content, "vocabulary": vocabulary}))
    index = read_index(tmp_path)
    if named is None:
        index.verify()
        return
    with pytest.raises(UserError, match=f"{named}, beyond the vocabulary of {vocabulary} in {INDEX}"):
        index.verify()


@pytest.mark.parametrize("vocabulary", [None, "many", 0, -1, 65537])
def test_a_vocabulary_that_is_none_is_named(tmp_path: Path, vocabulary: object):
    content = finished(tmp_path).content
    (tmp_path / INDEX).write_text(json.dumps({**content, "vocabulary": vocabulary}))
    with pytest.raises(UserError, match=r"index\.json is damaged, or is not the index of a prepared folder"):
        read_index(tmp_path)
