"""What token numbers stand for: GPT-2's vocabulary, or a byte-level BPE trained on text, both in GPT-2's layout and
encoded by tiktoken.
"""

import base64
import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mupscale.datamodules.documents import reason

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # every text can be written with these alone

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's rule for cutting text into words, as tiktoken spells it; no token reaches across two of them."""

PIECE = 2**20
"""Characters encoded at once, so that memory does not grow with the length of documents."""

Ranks = dict[bytes, int]
"""The tokens by their bytes; the end of text, which no text contains, has the number after the last."""


def gpt2_ranks() -> Ranks:
    """GPT-2's 50,256 tokens, which tiktoken downloads once and keeps in a cache."""
    from tiktoken_ext import openai_public

    try:
        return openai_public.gpt2()["mergeable_ranks"]
    except Exception as error:  # requests' and the operating system's, of many kinds
        base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or "a folder named by the environment variable TIKTOKEN_CACHE_DIR"
        files = [
            f"{base}{name} as {hashlib.sha1(f'{base}{name}'.encode()).hexdigest()}"
            for name in ("vocab.bpe", "encoder.json")
        ]
        raise ConnectionError(
            f"--vocab gpt2: fetching GPT-2's vocabulary failed ({reason(error)}). Download it elsewhere and put it "
            f"into {folder}: "
            f"{' and '.join(files)}; or let --vocab 8192 train one on the text"
        ) from error


def trained_ranks(documents: Iterable[str], size: int) -> Ranks:
    """The tokens of a byte-level BPE of `size` tokens, end of text included, trained on the documents.

    The same on any number of cores.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # its first tokens are the bytes; those after them, which merge others, are numbered in the order in which they are
    # to be merged
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    byte_of = _bytes_by_letter()
    return {bytes(byte_of[letter] for letter in token): number for token, number in tokenizer.get_vocab().items()}


def dumped(ranks: Ranks) -> bytes:
    """The vocabulary in tiktoken's file format."""
    lines = (
        base64.b64encode(token) + f" {number}\n".encode()
        for token, number in sorted(ranks.items(), key=lambda item: item[1])
    )
    return b"".join(lines)


def loaded(content: bytes) -> "tiktoken.Encoding":
    """The encoding of a dumped vocabulary; its `eot_token` is the end of text."""
    import tiktoken

    ranks = {base64.b64decode(token): int(number) for token, number in map(bytes.split, content.splitlines())}
    return tiktoken.Encoding(
        "mupscale",
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )


def encoded(encoding: "tiktoken.Encoding", documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the documents one after another, each with the end of text as its last, and how many each has."""
    end = np.array([encoding.eot_token], np.uint16)
    parts, lengths = [], np.zeros(len(documents), np.int64)
    for number, document in enumerate(documents):
        for piece in pieces(document):
            # the name of the end of text, where a document spells it, is text like any other
            parts.append(encoding.encode_to_numpy(piece, disallowed_special=()).astype(np.uint16))
            lengths[number] += len(parts[-1])
        parts.append(end)
        lengths[number] += 1
    return np.concatenate(parts), lengths


def pieces(document: str) -> list[str]:
    """The document in parts of at most PIECE characters, cut after a line where there is one."""
    answer, start = [], 0
    while len(document) - start > PIECE:
        cut = document.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        answer.append(document[start:cut])
        start = cut
    return [*answer, document[start:]]


def _bytes_by_letter() -> dict[str, int]:
    """The byte behind each letter in which byte-level BPE writes tokens: printable ones stand for themselves, others
    from 256 on.
    """
    printable = [byte for byte in range(BYTES) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(BYTES + place): byte for place, byte in enumerate(others)}
