"""A larger vocabulary: old logits stay, new rows hardly take anything from them, and train on without a jump."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_folders import llama, load, save

import mupscale.hf
from mupscale.__main__ import main
from mupscale.errors import UserError

TOKENS = torch.randint(3, 64, (8, 12), generator=torch.Generator().manual_seed(1))


def trained(steps: int = 30, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = llama(**settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("tied", [True, False])
def test_old_logits_stay_and_the_shift_is_that_of_the_rarest(tied: bool) -> None:
    model, optimizer = trained(tie_word_embeddings=tied)
    larger = mupscale.hf.extend_vocabulary(model, 70, pad_to=16, optimizer=optimizer)
    assert (larger.tokens, larger.rows, larger.model.config.vocab_size) == (70, 80, 80)
    with torch.no_grad():
        before, after = (each.eval()(TOKENS).logits for each in (model, larger.model))
    assert torch.equal(after[..., :64], before)
    shift = (after[..., :70].double().logsumexp(-1) - before.double().logsumexp(-1)).mean()
    assert 0 < float(shift) < torch.log1p(torch.tensor(6 / 64))
    assert "logits of the 64 old tokens are the same, bit for bit" in larger.check
    squares = optimizer.state[model.get_input_embeddings().weight]["exp_avg_sq"]
    moved = larger.optimizer.state[larger.model.get_input_embeddings().weight]
    seen = squares[squares.any(1)]
    assert torch.equal(moved["exp_avg_sq"][65], seen.median(0).values)
    assert not moved["exp_avg"][64:].any()
    assert torch.equal(moved["exp_avg"][:64], optimizer.state[model.get_input_embeddings().weight]["exp_avg"])


def test_rare_rows_take_less_than_the_mean() -> None:
    model, optimizer = trained(200)
    rows = {
        kind: mupscale.hf.extend_vocabulary(model, 96, new_rows=kind, optimizer=optimizer) for kind in ("rare", "mean")
    }
    assert 0 < rows["rare"].shift <= rows["mean"].shift


def test_no_step_of_a_new_row_is_large() -> None:
    """At most 1.5 times the rate, where new tokens occur in the old run's next steps."""
    model, optimizer = trained(100, tie_word_embeddings=False)
    larger = mupscale.hf.extend_vocabulary(model, 70, optimizer=optimizer)
    table, made = larger.model.get_input_embeddings().weight, larger.optimizer
    assert made is not None
    tokens = TOKENS.clone()
    tokens[:, ::3] = torch.randint(64, 70, tokens[:, ::3].shape, generator=torch.Generator().manual_seed(2))
    for group in made.param_groups:
        group["weight_decay"] = 0.0
    for _ in range(5):
        before = table.detach().clone()
        made.zero_grad()
        larger.model(tokens, labels=tokens).loss.backward()
        made.step()
        steps = (table.detach() - before)[64:].square().mean(1).sqrt() / 1e-3
        assert float(steps.max()) <= 1.5


def test_padding_is_used_first_and_subwords_are_averaged() -> None:
    model, _ = trained(1)
    old = model.get_input_embeddings().weight.detach().clone()
    larger = mupscale.hf.extend_vocabulary(model, 62, used=60, new_rows="subwords", pieces={60: [5, 7], 61: []})
    table = larger.model.get_input_embeddings().weight
    assert larger.rows == 64
    torch.testing.assert_close(table[60], (old[5] + old[7]) / 2)
    assert torch.equal(table[:60], old[:60])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 60}, "60 is not more than the 64 tokens there are; a vocabulary never shrinks"),
        ({"tokens": 80, "new_rows": "subwords"}, "subwords needs a tokenizer"),
        ({"tokens": 80, "new_rows": "zero"}, "new_rows must be rare, mean or subwords"),
        ({"tokens": 80, "pad_to": 0}, "pad_to must be"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mupscale.hf.extend_vocabulary(llama(), **arguments)


def test_a_model_that_reads_no_tokens_is_refused() -> None:
    model = hf.ViTModel(hf.ViTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8))
    with pytest.raises(UserError, match="a ViTModel has no table with a row for each token"):
        mupscale.hf.extend_vocabulary(model, 80)


BIASED = {
    "a head with a bias": lambda: hf.GPTJForCausalLM(
        hf.GPTJConfig(n_embd=32, n_head=4, n_layer=1, rotary_dim=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
    ),
    "a bias that is no parameter": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BIASED)
def test_a_bias_of_each_token_grows(case: str, tmp_path: Path) -> None:
    """In a folder as by the library; inputs have no row of padding, which new tokens take."""
    model: Any = BIASED[case]().eval()
    biases = [x for name, x in model.state_dict().items() if name in ("lm_head.bias", "final_logits_bias")]
    biases[0].copy_(torch.linspace(-1, 1, 64))
    larger = mupscale.hf.extend_vocabulary(model, 70, used=60)
    assert "logits of the 60 old tokens are the same" in larger.check
    save(model, tmp_path / "narrow")
    report = mupscale.hf.remake_folder(tmp_path / "narrow", tmp_path / "wide", tokens=70)
    assert "logits of the 64 old tokens are the same" in str(report)
    loaded = type(model).from_pretrained(tmp_path / "wide").state_dict()
    for name, tensor in mupscale.hf.extend_vocabulary(model, 70).model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.slow
def test_a_folder_with_a_larger_tokenizer(tmp_path: Path, capsys: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    def tokenizer(words: list[str]) -> Any:
        made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        return made

    narrow = save(llama(), tmp_path / "narrow")
    old = ["[UNK]", *(f"w{number}" for number in range(60))]
    tokenizer(old).save(str(narrow / "tokenizer.json"))
    other = tmp_path / "tokens"
    other.mkdir()
    tokenizer([*old, "w1 w2", *(f"x{number}" for number in range(8))]).save(str(other / "tokenizer.json"))
    out = tmp_path / "larger"
    options = ["--tokenizer", str(other), "--pad-to", "16", "--new-rows", "subwords", "--out", str(out)]
    main(["upscale", str(narrow), *options])
    said = capsys.readouterr().out
    assert "logits of the 61 old tokens are the same" in said
    assert "70 tokens, 80 rows" in said
    before, after = (load(folder).get_input_embeddings().weight for folder in (narrow, out))
    torch.testing.assert_close(after[61], (before[2] + before[3]) / 2)
    assert json.loads((out / "tokenizer.json").read_text()) == json.loads((other / "tokenizer.json").read_text())
