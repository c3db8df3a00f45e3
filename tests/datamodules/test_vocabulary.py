"""Two vocabularies, one encoder: tokens as the libraries they come from have them, and text again when decoded."""

import os
from pathlib import Path

import numpy as np
import pytest
from corpus import ENTRIES
from tiktoken_ext import openai_public

from mupscale.datamodules import vocabulary
from mupscale.datamodules.vocabulary import PATTERN, dumped, encoded, loaded, pieces, trained_ranks


def test_a_trained_vocabulary_encodes_as_the_library_that_trained_it(monkeypatch: pytest.MonkeyPatch):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    theirs.train_from_iterator(
        ENTRIES[:300], trainers.BpeTrainer(vocab_size=999, initial_alphabet=alphabet, show_progress=False)
    )
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    ours = loaded(dumped(trained_ranks(ENTRIES[:300], 1000)))
    assert (ours.n_vocab, ours.eot_token) == (1000, 999)
    for document in [*ENTRIES[300:600], "Ünïcödé 😀\r\n\t  x  ", "\0", "don't WE'LL 123456"]:
        tokens = ours.encode_ordinary(document)
        assert tokens == theirs.encode(document).ids
        assert ours.decode(tokens) == document


def test_gpt2_tokens_are_the_published_ones():
    """Where they are in tiktoken's cache; the rest of this file needs a network no more than they do."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", "")
    if not (Path(cache) / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").is_file():
        pytest.skip("GPT-2's vocabulary is not in TIKTOKEN_CACHE_DIR")
    encoding = loaded(dumped(vocabulary.gpt2_ranks()))
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    assert encoding.encode_ordinary("Hello world, don't stop") == [15496, 995, 11, 836, 470, 2245]


def test_words_are_cut_as_gpt2_cuts_them():
    assert openai_public.r50k_pat_str == PATTERN


def test_documents_end_with_the_end_of_text_and_may_spell_it():
    encoding = loaded(dumped(trained_ranks(ENTRIES[:50], 300)))
    tokens, lengths = encoded(encoding, ["ab", "<|endoftext|>", ""])
    assert (tokens.dtype, tokens[[2, -2, -1]].tolist(), lengths.tolist()) == (
        np.uint16,
        [299, 299, 299],
        [3, lengths[1], 1],
    )
    assert 299 not in tokens[3:-2]
    assert encoding.decode(tokens[3:-2].tolist()) == "<|endoftext|>"


def test_long_documents_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vocabulary, "PIECE", 10)
    assert pieces("0123456789") == ["0123456789"]
    assert pieces("0123\n567\n901\n") == ["0123\n567\n", "901\n"]
    assert pieces("01234567890123") == ["0123456789", "0123"]
    encoding = loaded(dumped(trained_ranks(ENTRIES[:50], 300)))
    text = "".join(ENTRIES[:9])
    tokens, lengths = encoded(encoding, [text, "x"])
    assert encoding.decode(tokens[: lengths[0] - 1].tolist()) == text
