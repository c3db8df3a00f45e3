"""Vocabularies: GPT-2's, or a byte-level BPE trained on text, both as a `Tokenizer` of the library tokenizers."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mupscale.errors import UserError, needs_extra, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # every text can be written with these alone
GPT2 = "openai-community/gpt2"

PIECE = 2**20
"""Characters encoded as one text, so that memory does not grow with the length of documents."""


def download_gpt2() -> "Tokenizer":
    """GPT-2's 50,257 tokens, which are downloaded once and kept in the cache of the Hugging Face Hub."""
    with needs_extra("data"):
        from tokenizers import Tokenizer

    try:
        return Tokenizer.from_pretrained(GPT2)
    except Exception as error:  # many exception types: from the Hub, the HTTP client and the operating system
        raise ConnectionError(
            f"--vocab gpt2: fetching GPT-2's vocabulary failed ({one_line(error, 200)}). Run "
            f"`hf download {GPT2} tokenizer.json` where there is a network and copy its cache, ~/.cache/huggingface or "
            "the folder that the environment variable HF_HOME names; or let --vocab 8192 train a vocabulary on the text"
        ) from error


def train_tokenizer(documents: Iterable[str], size: int) -> "Tokenizer":
    """A byte-level BPE of `size` tokens, fewer if the text has no more; the same on any number of cores."""
    with needs_extra("data"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # which cuts words as GPT-2 does
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])  # the last number, as in GPT-2
    return tokenizer


def load_tokenizer(content: bytes) -> "Tokenizer":
    """The tokenizer of a tokenizer.json. The string <|endoftext|> inside a document is plain text to it."""
    with needs_extra("data"):
        from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        problem = one_line(error, 200)
        raise UserError(f"the vocabulary is damaged ({problem}); delete the folder and prepare it again") from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(f"the vocabulary has no {END_OF_TEXT}; delete the folder and prepare it again")
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: "Tokenizer", documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the documents one after another, the end of text after each, and how many each document has."""
    parts = [cut_into_pieces(document) for document in documents]
    texts = [piece for pieces in parts for piece in pieces]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    tokens: list[np.ndarray] = []
    lengths = np.zeros(len(documents), np.int64)
    for number, pieces in enumerate(parts):
        found = [*(np.array(next(encoded).ids, np.uint16) for _ in pieces), np.array(end, np.uint16)]
        lengths[number] = sum(map(len, found))
        tokens += found
    return np.concatenate(tokens), lengths


def cut_into_pieces(document: str) -> list[str]:
    """The document in parts of at most PIECE characters, cut after the last line that fits, if any does."""
    parts, start = [], 0
    while len(document) - start > PIECE:
        cut = document.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        parts.append(document[start:cut])
        start = cut
    return [*parts, document[start:]]
