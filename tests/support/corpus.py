"""Text to prepare: the embedded Jargon File as documents, in the formats that documents come in."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mupscale.datamodules import documents
from mupscale.datamodules.documents import TextFiles
from mupscale.datamodules.fineweb import JARGON
from mupscale.datamodules.preparation import END_OF_TEXT, Prepared, load_tokenizer, prepare, read_prepared
from mupscale.datamodules.token_files import END
from mupscale.datamodules.token_writer import TOKEN


def split_documents(folder: Path, split: str) -> list[list[int]]:
    """The tokens of each document of a split, end-of-text included."""
    found = []
    for file in sorted((folder / split).glob("*.ds")):
        ends = np.fromfile(f"{file}.index", END).astype(np.int64)
        tokens = np.fromfile(file, TOKEN)
        assert ends[-1] == len(tokens)
        found += [document.tolist() for document in np.split(tokens, ends[:-1])]
    return found


def texts(folder: Path, split: str) -> list[str]:
    tokenizer = load_tokenizer((folder / "tokenizer.json").read_bytes())
    found = split_documents(folder, split)
    assert len(found) == read_prepared(folder)[split]["documents"]
    assert all(document[-1] == tokenizer.token_to_id(END_OF_TEXT) for document in found)
    return tokenizer.decode_batch([document[:-1] for document in found])


ENTRIES = [text for split in ("train", "val") for text in texts(JARGON, split)]
"""Training documents first."""


def write_jsonl(file: Path, content: list[str]) -> Path:
    lines = "\n\n".join(json.dumps({"id": number, "text": text}) for number, text in enumerate(content))
    file.write_bytes(gzip.compress(lines.encode()) if file.suffix.lower() == ".gz" else lines.encode())
    return file


def write_parquet(file: Path, content: list[str | None]) -> Path:
    """As FineWeb-Edu has it: the text among other columns, in row groups."""
    columns = {
        "text": content,
        "id": [f"<urn:uuid:{number}>" for number in range(len(content))],
        "score": [3.5] * len(content),
    }
    pq.write_table(pa.table(columns), file, row_group_size=7)
    return file


def write_text(file: Path, content: list[str]) -> Path:
    text = "\n<|endoftext|>\n".join(content).encode()
    file.write_bytes(gzip.compress(text) if file.suffix.lower() == ".gz" else text)
    return file


def write_article(file: Path) -> Path:
    """A plain text of 120 documents, 80 kB."""
    return write_text(file, ENTRIES[:120])


def write_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository laid out like FineWeb-Edu's, and taken for it, so that the real `datasets` streams it."""
    configs = []
    for subset in ("CC-MAIN-2013-20", "CC-MAIN-2013-48"):
        (folder / "data" / subset).mkdir(parents=True)
        for number in range(3):
            write_parquet(
                folder / "data" / subset / f"train-{number:05d}-of-00003.parquet",
                ENTRIES[number * 40 : number * 40 + 40],
            )
        configs.append(f"- config_name: {subset}\n  data_files:\n  - split: train\n    path: data/{subset}/*\n")
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    monkeypatch.setattr(documents, "REPOSITORY", str(folder))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha="0123456789abcdef"))


def refused(*arguments: Any) -> str:
    """The one line of a preparation that fails."""
    return command_line.refused("prepare", *map(str, arguments))


def prepared(source: Path, out: Path, **options: Any) -> Prepared:
    return prepare(
        TextFiles([source]), out, **{"vocabulary": 300, "val_fraction": 0.2, "file_tokens": 10_000, **options}
    )
