"""Token files as datatrove writes them, made without datatrove."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mupscale.datamodules.token_files import TokenFolder


def write_token_file(
    path: Path, documents: Iterable[Sequence[int]], token_bytes: int = 2, tokenizer: str | None = "mine"
) -> Path:
    """A .ds file of these documents, with its index and, if there is a tokenizer, its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [np.array(document, f"<u{token_bytes}") for document in documents]
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    ends = np.cumsum([len(array) for array in arrays], dtype="<u8")
    Path(f"{path}.index").write_bytes(ends.tobytes())
    if tokenizer is not None:
        tokens = sum(len(array) for array in arrays)
        Path(f"{path}.metadata").write_text(f"{tokenizer}|{token_bytes}\n{tokens}\n{tokens} T")
    return path


def write_numbered(folder: Path, files: int, documents: int = 10, length: int = 10, token_bytes: int = 2) -> Path:
    """Files whose tokens count on from file to file, in the order of their names; some of them in folders."""
    token = 0
    for number in range(files):
        content = []
        for _ in range(documents):
            content.append(range(token, token + length))
            token += length
        write_token_file(folder / f"{number // 10:02d}" / f"{number % 10}.ds", content, token_bytes)
    return folder


def split_tokens(tokens: TokenFolder, split: str) -> list[int]:
    out = np.empty(tokens.count(split), np.int64)
    tokens.tokens(split).read(0, out)
    return out.tolist()
