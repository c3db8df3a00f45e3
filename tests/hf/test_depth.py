"""Models of the transformers library with more layers: configurations, in memory, and after loading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_folders import llama, load, logits, save

import mupscale.hf
from mupscale.__main__ import main
from mupscale.errors import UserError
from mupscale.hf.config import deep_config, numbers_of_layers
from mupscale.hf.depth import find_deepenings
from mupscale.hf.family import Family
from mupscale.widening.layers import orders

INTERLEAVED, STACKED = [0, 0, 1, 1], [0, 1, 0, 1]
LAYERS = "num_hidden_layers"


def deep_field(config: Any, field: str, sources: list[int], number: str = LAYERS) -> Any:
    return getattr(deep_config(config, number, sources, numbers_of_layers(config)), field)


def test_fields_with_an_entry_for_each_layer_follow_the_sources() -> None:
    kinds = ["sliding_attention", "full_attention"]
    qwen = hf.Qwen2Config(num_hidden_layers=2, layer_types=kinds)
    assert deep_field(qwen, "layer_types", STACKED) == kinds * 2
    assert deep_field(qwen, "layer_types", [0, 1, 1]) == [*kinds, kinds[1]]
    smol = hf.SmolLM3Config(num_hidden_layers=2, no_rope_layers=[0, 1])
    assert deep_field(smol, "no_rope_layers", INTERLEAVED) == [0, 0, 1, 1]
    windows = hf.LongformerConfig(num_hidden_layers=2, attention_window=[4, 8])
    assert deep_field(windows, "attention_window", INTERLEAVED) == [4, 4, 8, 8]
    led = hf.LEDConfig(encoder_layers=2, decoder_layers=2, attention_window=[4, 8])
    assert deep_field(led, "attention_window", INTERLEAVED, "decoder_layers") == [4, 8]
    nemotron = hf.NemotronHConfig(layers_block_type=["linear_attention", "moe"])
    assert numbers_of_layers(nemotron) == {"layers_block_type": 2}
    kinds = ["linear_attention", "linear_attention", "moe", "moe"]
    assert deep_field(nemotron, "layers_block_type", INTERLEAVED, "layers_block_type") == kinds


def test_numbers_prefixes_and_patterns_of_layers_follow_the_sources() -> None:
    moe = hf.Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[1])
    assert deep_field(moe, "mlp_only_layers", INTERLEAVED) == [2, 3]
    assert deep_field(moe, "mlp_only_layers", STACKED) == [1, 3]
    deepseek = hf.DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=1)
    assert deep_field(deepseek, "first_k_dense_replace", INTERLEAVED) == 2
    ernie = hf.Ernie4_5_MoeConfig(num_hidden_layers=3, moe_layer_start_index=1, moe_layer_end_index=1)
    deep = deep_config(ernie, LAYERS, [0, 0, 1, 1, 2, 2])
    assert (deep.moe_layer_start_index, deep.moe_layer_end_index) == (2, 3)
    recurrent = hf.RecurrentGemmaConfig(num_hidden_layers=3, block_types=["recurrent", "attention"])
    kinds = ["recurrent", "recurrent", "attention", "attention", "recurrent", "recurrent"]
    assert deep_field(recurrent, "block_types", [0, 0, 1, 1, 2, 2]) == kinds
    neo = hf.GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]])
    assert deep_field(neo, "attention_layers", INTERLEAVED, "num_layers") == ["global", "global", "local", "local"]


def test_branches_divided_by_the_number_of_layers_keep_their_size() -> None:
    mini = hf.MiniCPM3Config(num_hidden_layers=2, scale_depth=1.4)
    assert deep_field(mini, "scale_depth", INTERLEAVED) / 4**0.5 == pytest.approx(1.4 / 2**0.5, rel=1e-15)


def test_an_encoder_and_a_decoder_have_their_own_numbers() -> None:
    t5 = hf.T5Config(num_layers=2, num_decoder_layers=2)
    deep = deep_config(t5, "num_layers", INTERLEAVED, numbers_of_layers(t5))
    assert (deep.num_layers, deep.num_decoder_layers) == (4, 2)
    clip = hf.CLIPConfig(text_config={LAYERS: 2}, vision_config={LAYERS: 3})
    deep = deep_config(clip, f"text_config.{LAYERS}", INTERLEAVED, numbers_of_layers(clip))
    assert (deep.text_config.num_hidden_layers, deep.vision_config.num_hidden_layers) == (4, 3)


def test_new_layers_are_spread_then_whole_periods_then_at_one_end() -> None:
    assert list(map(tuple, orders(2, 4, "identity"))) == [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1)]
    assert list(map(tuple, orders(4, 6, "identity")))[:2] == [(0, 0, 1, 2, 2, 3), (0, 1, 0, 1, 2, 3)]
    assert list(map(tuple, orders(2, 3, "identity"))) == [(0, 0, 1), (0, 1, 1), (0, 0, 1)]
    assert list(map(tuple, orders(2, 4, "interleave"))) == [(0, 0, 1, 1)]
    assert list(map(tuple, orders(2, 4, "stack"))) == [(0, 1, 0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "layers"), [(1, 3), (2, 4)])
def test_a_deep_model_computes_as_the_shallow_one_after_loading(tmp_path: Path, factor: int, layers: int) -> None:
    shallow = llama()
    optimizer = torch.optim.AdamW(shallow.parameters(), lr=1e-3)
    deep, report = mupscale.hf.upscale(shallow, factor, layers=layers, optimizer=optimizer)
    assert report.exact
    assert (deep.config.num_hidden_layers, deep.config.hidden_size) == (layers, 32 * factor)
    new = {f"model.layers.{i}." for i in ((1,) if layers == 3 else (1, 3))}
    assert {name[:15] for name in report.new_parameters} == new
    assert len(report.new_parameters) == 9 * len(new)
    after = logits(load(save(deep, tmp_path / "deep")))
    torch.testing.assert_close(after, logits(shallow), rtol=0, atol=0 if factor == 1 else 1e-6)
    assert report.optimizer is not None
    assert sum(len(group["params"]) for group in report.optimizer.param_groups) == len(list(deep.parameters()))


@pytest.mark.slow
def test_interleaved_layers_change_the_function_and_the_report_says_by_how_much() -> None:
    shallow = llama(hidden_size=64)
    for depth, sources in (("interleave", INTERLEAVED), ("stack", STACKED)):
        deep, report = mupscale.hf.upscale(shallow, layers=4, depth=depth)
        assert report.exact is False
        before, after = logits(shallow).double(), logits(deep).double()
        assert float(((after - before).square().sum() / before.square().sum()).sqrt()) > 0.01
        assert "the new layers change what call returns by" in report.check
        for index, source in enumerate(sources):
            copied = deep.model.layers[index].mlp.down_proj.weight
            assert torch.equal(copied, shallow.model.layers[source].mlp.down_proj.weight)


TINY = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 40}
T5 = hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2, num_decoder_layers=2, vocab_size=40)
T5_3 = hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2, num_decoder_layers=3, vocab_size=40)


@pytest.mark.parametrize(
    ("config", "model_class", "layers", "how", "message"),
    [
        (hf.LlamaConfig(**TINY), hf.LlamaForCausalLM, 2, "identity", "layers: 2 is not more than the model has now"),
        (hf.LlamaConfig(**TINY), hf.LlamaForCausalLM, 2.5, "identity", "layers must be a whole number"),
        (hf.LlamaConfig(**TINY), hf.LlamaForCausalLM, 3, "interleave", "interleave needs a multiple of num_hidden_"),
        (hf.LlamaConfig(**TINY), hf.LlamaForCausalLM, 4, "random", "depth must be identity, interleave, stack; got"),
        (hf.LlamaConfig(**TINY), hf.LlamaForCausalLM, {"layers": 4}, "identity", "no field 'layers' with a number of"),
        (T5_3, hf.T5ForConditionalGeneration, 4, "identity", "has num_layers=2, num_decoder_layers=3; say which"),
        (hf.AlbertConfig(**TINY), hf.AlbertForMaskedLM, 4, "identity", "this albert cannot become deeper: no list of"),
        (hf.BertConfig(**TINY), hf.BertForMaskedLM, 4, "identity", "'bert.encoder.layer.0' .BertLayer. changes what"),
        (hf.ConvNextConfig(), hf.ConvNextForImageClassification, 4, "identity", "no list of layers becomes longer"),
    ],
)  # fmt: skip
def test_refusals(config: Any, model_class: Any, layers: Any, how: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        find_deepenings(Family(model_class), config, layers, how)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_an_encoder_grows_alone_by_the_name_of_its_field() -> None:
    shallow = hf.T5ForConditionalGeneration(T5).eval()
    deep, report = mupscale.hf.upscale(shallow, layers={"num_layers": 3, "num_decoder_layers": 4})
    assert report.exact
    assert (len(deep.encoder.block), len(deep.decoder.block)) == (3, 4)


def upscale(folder: Path, out: Path, *options: str) -> Path:
    main(["upscale", str(folder), "--out", str(out), *options])
    return out


@pytest.mark.slow
def test_a_deep_folder_loads_and_computes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From several files, byte by byte; the command says what it has checked and how to train it."""
    shallow = save(llama(num_hidden_layers=3), tmp_path / "shallow", shard="20KB")
    deep = upscale(shallow, tmp_path / "deep", "--layers", "6")
    told = capsys.readouterr().out
    assert "51 tensors are, byte by byte, the narrow ones duplicated; 6 make new layers add" in told
    assert "outputs of both models differ by 0.0e+00 in float32" in told
    assert f"mupscale.hf.freeze_old_parameters(model, {str(deep)!r})" in told
    model = load(deep)
    assert torch.equal(logits(model), logits(load(shallow)))
    assert json.loads((deep / "config.json").read_text())["num_hidden_layers"] == 6
    record = json.loads((deep / "mupscale.json").read_text())
    assert record["growth"]["layers"] == {LAYERS: {"depth": "identity", "sources": [0, 0, 1, 1, 2, 2]}}
    new = tuple(f"model.layers.{layer}." for layer in (1, 3, 5))
    assert record["new_parameters"] == [name for name, _ in model.named_parameters() if name.startswith(new)]
    in_memory, _ = mupscale.hf.upscale(load(shallow), layers=6)
    assert all(torch.equal(p, in_memory.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.slow
def test_wider_and_deeper_in_one_command(tmp_path: Path) -> None:
    shallow = save(llama(), tmp_path / "shallow")
    model = load(upscale(shallow, tmp_path / "deep", "--layers", "4", "--factor", "2"))
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (4, 64)
    torch.testing.assert_close(logits(model), logits(load(shallow)), rtol=0, atol=1e-6)
    groups = mupscale.hf.parameter_groups(model, tmp_path / "deep", lr=1e-3)
    assert sorted({group["lr"] for group in groups}) == [0.0005, 0.001]


@pytest.mark.slow
def test_old_parameters_can_be_frozen(tmp_path: Path) -> None:
    shallow = save(llama(), tmp_path / "shallow")
    model = load(upscale(shallow, tmp_path / "deep", "--layers", "4"))
    mupscale.hf.freeze_old_parameters(model, tmp_path / "deep")
    trained = {name.split(".")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"1", "3"}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(mupscale.hf.parameter_groups(model, tmp_path / "deep", lr=1.0, optimizer="SGD"))
    tokens = torch.arange(20).reshape(2, 10)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    ends = "self_attn.o_proj.weight", "mlp.down_proj.weight"
    assert changed == {f"model.layers.{layer}.{name}" for layer in (1, 3) for name in ends}
    wide = upscale(shallow, tmp_path / "wide", "--factor", "2")
    with pytest.raises(UserError, match="the growth has added no layers"):
        mupscale.hf.freeze_old_parameters(load(wide), wide)
    with pytest.raises(UserError, match=r"another model: 'model.layers.3.* is not in the model"):
        mupscale.hf.freeze_old_parameters(load(shallow), tmp_path / "deep")
