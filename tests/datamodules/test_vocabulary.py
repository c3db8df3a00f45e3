"""Vocabularies: text again when decoded, the end of text after every document, long documents in pieces."""

import numpy as np
import pytest
from corpus import ENTRIES

from mupscale.datamodules.preparation import encode, load_tokenizer, train_tokenizer
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
