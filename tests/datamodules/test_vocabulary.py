"""Vocabularies: text again when decoded, the end of text after every document, long documents in pieces."""

import numpy as np
import pytest
from corpus import ENTRIES

from mupscale.datamodules import preparation
from mupscale.datamodules.preparation import cut_long_words, encode, load_tokenizer, train_tokenizer
from mupscale.errors import UserError


def trained(documents: list[str], size: int):
    return load_tokenizer(train_tokenizer(documents, size).to_str().encode())


def test_a_trained_vocabulary_gives_the_text_again():
    tokenizer = trained(ENTRIES[:300], 1000)
    assert (tokenizer.get_vocab_size(), tokenizer.token_to_id("<|endoftext|>")) == (1000, 999)
    for document in [*ENTRIES[300:400], "Ünïcödé 😀\r\n\t  x  ", "\0", "don't WE'LL 123456"]:
        tokens, lengths = encode(tokenizer, [document])
        assert lengths.tolist() == [len(tokens)]
        assert tokens[-1] == 999
        assert tokenizer.decode(tokens[:-1].tolist()) == document


@pytest.mark.parametrize("text", ["a" * 2**20, " " * 2**20 + "b", "." * 2**20])
def test_a_word_of_a_megabyte_takes_no_longer_than_text(text: str):
    """Training takes time in the square of the length of a word: this one would take minutes."""
    assert trained([text], 270).get_vocab_size() <= 270


def test_only_long_words_are_cut(monkeypatch: pytest.MonkeyPatch):
    assert list(cut_long_words(ENTRIES[:50])) == ENTRIES[:50]
    document = f"short {'x' * 600} and {' ' * 300}end"
    parts = list(cut_long_words([document]))
    assert "".join(parts) == document
    assert [len(part) for part in parts] == [262, 256, 348, 48]
    monkeypatch.setattr(preparation, "LONG_TEXT", 400)  # of which the rest is left out
    assert "".join(cut_long_words([document, document])) == f"short {'x' * 400} andendshort  andend"


def test_documents_are_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    tokenizer, documents = trained(ENTRIES[:50], 300), [entry[:100] for entry in ENTRIES[:50]]
    expected = np.concatenate([encode(tokenizer, [document])[0] for document in documents])
    monkeypatch.setattr(preparation, "PIECE", 100)
    assert encode(tokenizer, documents)[0].tolist() == expected.tolist()


def test_words_are_cut_as_gpt2_cuts_them():
    """No token spans two words."""
    cut = trained(ENTRIES[:50], 300).pre_tokenizer.pre_tokenize_str("don't  stop 12ab,\n x")
    assert [word for word, _ in cut] == ["don", "'t", "Ġ", "Ġstop", "Ġ12", "ab", ",", "Ċ", "Ġx"]


def test_documents_end_with_the_end_of_text_and_may_spell_it():
    tokenizer = trained(ENTRIES[:50], 300)
    tokens, lengths = encode(tokenizer, ["ab", "<|endoftext|>", ""])
    assert (tokens.dtype, tokens[[2, -2, -1]].tolist(), lengths.tolist()) == (
        np.uint16,
        [299, 299, 299],
        [3, lengths[1], 1],
    )
    assert 299 not in tokens[3:-2]
    assert tokenizer.decode(tokens[3:-2].tolist()) == "<|endoftext|>"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {"type": "BPE"}}', b"\xff"])
def test_a_damaged_vocabulary_is_an_error(content: bytes):
    with pytest.raises(UserError, match=r"the vocabulary .*; delete the folder and prepare it again"):
        load_tokenizer(content)
