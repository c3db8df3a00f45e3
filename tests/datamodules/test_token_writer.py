"""Token files that are written: the bytes of the format, cutting back to what was committed, read as one array."""

from pathlib import Path

import numpy as np
import pytest
from paths import contents

from mupscale.datamodules.token_writer import TokenWriter

DOCUMENTS = [[5, 6, 65535], [7], [8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18, 19, 20, 21, 22], [23]]


def append(writer: TokenWriter, documents: list[list[int]]) -> None:
    tokens = np.array([token for document in documents for token in document], np.uint16)
    writer.append(tokens, np.array([len(document) for document in documents], np.int64))


def written(folder: Path, file_tokens: int = 4) -> TokenWriter:
    writer = TokenWriter(folder, file_tokens)
    append(writer, DOCUMENTS)
    writer.flush()
    return writer


def test_the_bytes_of_the_format(tmp_path: Path):
    writer = written(tmp_path)
    assert writer.counts == [(4, 2), (4, 1), (11, 2), (1, 1)]  # the document that fills a file is its last
    writer.finish("mine")
    assert contents(tmp_path) == {
        "00000.ds": bytes.fromhex("0500 0600 ffff 0700"),
        "00000.ds.index": bytes.fromhex("0300000000000000 0400000000000000"),
        "00000.ds.metadata": b"mine|2\n4\n0.00 M tokens",
        "00001.ds": bytes.fromhex("0800 0900 0a00 0b00"),
        "00001.ds.index": bytes.fromhex("0400000000000000"),
        "00001.ds.metadata": b"mine|2\n4\n0.00 M tokens",
        "00002.ds": bytes.fromhex("0c00 0d00 0e00 0f00 1000 1100 1200 1300 1400 1500 1600"),
        "00002.ds.index": bytes.fromhex("0200000000000000 0b00000000000000"),
        "00002.ds.metadata": b"mine|2\n11\n0.00 M tokens",
        "00003.ds": bytes.fromhex("1700"),
        "00003.ds.index": bytes.fromhex("0100000000000000"),
        "00003.ds.metadata": b"mine|2\n1\n0.00 M tokens",
    }


@pytest.mark.parametrize("kept", range(7))
def test_a_new_writer_continues_from_what_was_committed(tmp_path: Path, kept: int):
    written(tmp_path / "straight")
    for more in range(7):
        folder = tmp_path / str(more)
        first = TokenWriter(folder, 4)
        append(first, DOCUMENTS[:kept])
        first.flush()
        committed = list(first.counts)
        append(first, DOCUMENTS[kept : kept + more])  # reaches the disk, but is not committed
        first.flush()
        second = TokenWriter(folder, 4, committed)
        assert second.documents == kept
        assert second.tokens == sum(len(document) for document in DOCUMENTS[:kept])
        append(second, DOCUMENTS[kept:])
        second.flush()
        assert contents(folder) == contents(tmp_path / "straight")


def test_lost_data_is_an_error(tmp_path: Path):
    counts = written(tmp_path).counts
    (tmp_path / "00002.ds").write_bytes(b"\0" * 21)
    with pytest.raises(ValueError, match=r"00002\.ds has 21 bytes of 22: delete the folder and prepare it again"):
        TokenWriter(tmp_path, 4, counts)
