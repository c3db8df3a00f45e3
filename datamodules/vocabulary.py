"""Vocabularies: GPT-2's, or a byte-level BPE trained on text. Both have GPT-2's layout; tiktoken encodes with them."""

import base64
import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mupscale.datamodules.documents import reason
from mupscale.errors import UserError, needs_extra

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # every text can be written with these alone

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's rule for cutting text into words, in tiktoken's spelling; no token spans two words."""

PIECE = 2**20
"""Characters encoded at once, so that memory does not grow with the length of documents."""

Ranks = dict[bytes, int]
"""The number of each token, by its bytes; the end of text is not among them and has the number after the last."""


def gpt2_ranks() -> Ranks:
    """GPT-2's 50,256 tokens, which tiktoken downloads once and keeps in a cache."""
    with needs_extra("data"):
        from tiktoken_ext import openai_public

    try:
        return openai_public.gpt2()["mergeable_ranks"]
    except Exception as error:  # many exception types: from requests and the operating system
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or "a folder named by the environment variable TIKTOKEN_CACHE_DIR"
        files = []
        for name in ("vocab.bpe", "encoder.json"):
            url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
            in_cache = hashlib.sha1(url.encode()).hexdigest()
            files.append(f"{url} as {in_cache}")
        raise ConnectionError(
            f"--vocab gpt2: fetching GPT-2's vocabulary failed ({reason(error)}). "
            f"Download it elsewhere and put it into {folder}: {' and '.join(files)}; "
            "or let --vocab 8192 train one on the text"
        ) from error


def trained_ranks(documents: Iterable[str], size: int) -> Ranks:
    """The tokens of a byte-level BPE of `size` tokens, end of text included, trained on the documents.

    The result does not depend on the number of cores.
    """
    with needs_extra("data"):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # the first tokens are the bytes; the others are merges, numbered in the order in which tiktoken applies them
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    byte_of = _bytes_by_letter()
    ranks = {}
    for token, number in tokenizer.get_vocab().items():
        ranks[bytes(byte_of[letter] for letter in token)] = number
    return ranks


def dumped(ranks: Ranks) -> bytes:
    """The vocabulary in tiktoken's file format."""
    by_number = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + f" {number}\n".encode() for token, number in by_number)


def loaded(content: bytes) -> "tiktoken.Encoding":
    """The encoding of a dumped vocabulary; its `eot_token` is the end of text."""
    with needs_extra("data"):
        import tiktoken

    ranks = {}
    try:
        for line in content.splitlines():
            token, number = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(number)
        if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < BYTES:
            raise UserError(f"it has {len(ranks)} tokens, not numbered in order")
    except ValueError as error:
        raise UserError(f"the vocabulary is damaged ({error}); delete the folder and prepare it again") from error
    return tiktoken.Encoding(
        "mupscale",
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )


def encoded(encoding: "tiktoken.Encoding", documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the documents one after another, the end of text after each, and how many each document has."""
    end = np.array([encoding.eot_token], np.uint16)
    parts, lengths = [], np.zeros(len(documents), np.int64)
    for number, document in enumerate(documents):
        for piece in pieces(document):
            # a document that contains the string <|endoftext|> gets the tokens of these characters
            parts.append(encoding.encode_to_numpy(piece, disallowed_special=()).astype(np.uint16))
            lengths[number] += len(parts[-1])
        parts.append(end)
        lengths[number] += 1
    return np.concatenate(parts), lengths


def pieces(document: str) -> list[str]:
    """The document in parts of at most PIECE characters, cut after the last line that fits, if any does."""
    parts, start = [], 0
    while len(document) - start > PIECE:
        cut = document.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        parts.append(document[start:cut])
        start = cut
    return [*parts, document[start:]]


def _bytes_by_letter() -> dict[str, int]:
    """The byte that each letter of a byte-level BPE token stands for.

    A printable byte is its own letter; the letters of the others are numbered from 256 on.
    """
    printable = [byte for byte in range(BYTES) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(BYTES + place): byte for place, byte in enumerate(others)}
