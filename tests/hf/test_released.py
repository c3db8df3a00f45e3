"""Folders as they are released: with tensors that are not loaded, modules of other libraries, images beside text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_folders import edit, llama, load, logits, names, save
from safetensors.torch import load_file, save_file
from zoo_images import FAMILIES, images_trial

import mupscale.hf
from mupscale.__main__ import main
from mupscale.errors import UserError
from mupscale.hf.config_shrunken import shrunken
from mupscale.hf.family import Family
from mupscale.hf.folder import read_folder
from mupscale.hf.forward_pass import arguments_of, default_call, quiet

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 40}
TOWERS = {
    "text_config": {**SIZES, "projection_dim": 16},
    "vision_config": {**SIZES, "projection_dim": 16, "image_size": 16, "patch_size": 4},
}


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    return folder


def upscale(narrow: Path, *options: str) -> Path:
    out = narrow.parent / "wide"
    main(["upscale", str(narrow), "--factor", "2", "--noise", "none", "--out", str(out), *options])
    return out


@torch.no_grad()
def outputs(model_class: Any, folder: Path) -> Any:
    with quiet():
        model = model_class.from_pretrained(folder, dtype=torch.float64).eval()
    return default_call(model)


LEFT_BEHIND: dict[str, tuple[Any, Any, dict[str, tuple[int, ...]]]] = {
    "bert": (
        hf.BertForMaskedLM,
        hf.BertConfig(**SIZES),
        {"cls.seq_relationship.weight": (2, 32), "bert.embeddings.position_ids": (1, 512)},
    ),
    "roberta": (
        hf.RobertaForMaskedLM,
        hf.RobertaConfig(**SIZES, pad_token_id=1),
        {"roberta.pooler.dense.weight": (32, 32), "roberta.embeddings.position_ids": (1, 512)},
    ),
    "mpnet": (hf.MPNetForMaskedLM, hf.MPNetConfig(**SIZES), {"mpnet.embeddings.position_ids": (1, 512)}),
    "clip": (hf.CLIPModel, hf.CLIPConfig(**TOWERS), {"text_model.embeddings.position_ids": (1, 77)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", LEFT_BEHIND)
def test_tensors_that_are_not_loaded_stay_behind_with_a_line(family: str, tmp_path: Path, capsys: Any) -> None:
    model_class, config, extra = LEFT_BEHIND[family]
    narrow = save(model_class(config), tmp_path / "narrow")
    with_tensors(narrow, {name: torch.ones(shape) for name, shape in extra.items()})
    wide = upscale(narrow)
    said = capsys.readouterr().out
    assert all(f"{name} is not part of the model, and stays behind" in said for name in extra)
    before, after = outputs(model_class, narrow), outputs(model_class, wide)
    key = "logits_per_image" if family == "clip" else "logits"
    torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-6 * float(before[key].abs().max()))


def test_a_sentence_encoder_keeps_its_modules_and_its_cosines(tmp_path: Path, capsys: Any) -> None:
    narrow = save(hf.BertModel(hf.BertConfig(**SIZES)), tmp_path / "narrow")
    (narrow / "modules.json").write_text(json.dumps([{"idx": 1, "path": "1_Pooling"}]))
    for name in ("1_Pooling", "2_Normalize", "onnx"):
        (narrow / name).mkdir()
    (narrow / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, "mean": True}))
    (narrow / "onnx" / "model.onnx").write_bytes(b"weights")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").touch()
    (narrow / "linked").mkdir()
    (narrow / "linked" / "out").symlink_to(tmp_path / "secret")
    wide = upscale(narrow)
    said = capsys.readouterr().out
    assert "outputs of both models differ by" in said, "by the plan's duplicate of them"
    assert "onnx/ holds weights, code or links, and stays behind" in said
    assert "linked/ holds weights, code or links, and stays behind" in said
    assert {"1_Pooling", "2_Normalize", "modules.json"} <= set(names(wide))
    assert not {"onnx", "linked"} & set(names(wide))
    pooling = json.loads((wide / "1_Pooling" / "config.json").read_text())
    assert pooling == {"word_embedding_dimension": 64, "mean": True}

    def cosine(folder: Path) -> torch.Tensor:
        one, other = outputs(hf.BertModel, folder).last_hidden_state.mean(1)
        return torch.cosine_similarity(one, other, 0)

    torch.testing.assert_close(cosine(wide), cosine(narrow), rtol=0, atol=1e-6)
    (narrow / "onnx").rename(narrow / "2_Dense")
    (narrow / "modules.json").write_text(json.dumps([{"idx": 1, "path": "2_Dense"}]))
    with pytest.raises(UserError, match="2_Dense holds a layer behind the model"):
        mupscale.hf.upscale_folder(narrow, 2, tmp_path / "other")


def test_a_tied_model_without_architectures_grows_with_its_head(tmp_path: Path) -> None:
    """The names of its tensors say which class it is of."""
    narrow = save(llama(tie_word_embeddings=True), tmp_path / "narrow")
    edit(narrow / "config.json", architectures=None)
    assert read_folder(narrow).model_class is hf.LlamaForCausalLM
    wide = upscale(narrow)
    torch.testing.assert_close(logits(load(wide)), logits(load(narrow)), rtol=0, atol=1e-6)
    assert json.loads((wide / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    base = save(load(narrow).model, tmp_path / "base")
    edit(base / "config.json", architectures=None)
    assert read_folder(base).model_class is hf.LlamaModel


def test_a_class_is_found_by_the_names_that_transformers_saves(tmp_path: Path) -> None:
    """Qwen2-VL is saved under other names than it has; its base has the same ones but for the head."""
    for model_class in (hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLModel):
        folder = save(model_class(shrunken(FAMILIES["qwen2_vl"][1]())), tmp_path / model_class.__name__)
        edit(folder / "config.json", architectures=None)
        assert read_folder(folder).model_class is model_class


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "qwen2_audio", "voxtral"])
def test_models_of_images_or_sounds_and_text_are_right_with_them(family: str) -> None:
    outcome = images_trial(family)
    assert outcome.verdict == "exact", str(outcome)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_images_or_sounds_and_text_are_exact_or_refused(family: str) -> None:
    outcome = images_trial(family)
    assert outcome.verdict in ("exact", "refused"), str(outcome)


@pytest.mark.parametrize("family", ["internvl", "qwen2_audio"])
def test_an_image_or_a_sound_is_among_the_inputs(family: str) -> None:
    prefix, config = FAMILIES[family]
    model = getattr(hf, f"{prefix}ForConditionalGeneration")(shrunken(config())).eval()
    inputs = arguments_of(model)
    seen = next(name for name in ("pixel_values", "input_features") if name in inputs)
    with torch.no_grad():
        before, after = (model(**{**inputs, seen: inputs[seen] * factor}).logits for factor in (1, -1))
    assert not torch.allclose(before, after, atol=1e-5)


def test_tokens_are_of_the_smallest_vocabulary() -> None:
    """That of the sounds of Voxtral may be larger than that of its text."""
    config = hf.VoxtralConfig(
        text_config={**SIZES, "num_key_value_heads": 4},
        audio_config={**SIZES, "vocab_size": 999, "intermediate_size": 128, "max_source_positions": 8},
        audio_token_id=39,
    )
    inputs = arguments_of(hf.VoxtralForConditionalGeneration(config))
    assert "input_features" in inputs
    assert int(inputs["input_ids"].max()) == 39


def test_what_no_output_depends_on_is_refused_or_said_to_be_untested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, norm = save(llama(), tmp_path / "narrow"), "model.norm.weight"
    found_between = Family.found_between
    monkeypatch.setattr(
        Family, "found_between", lambda *arguments: replace(found_between(*arguments), untested=(norm,))
    )
    with pytest.raises(UserError, match=r"does not depend on 'model\.norm\.weight'.*--unchecked"):
        mupscale.hf.upscale_folder(narrow, 2, tmp_path / "wide")
    report = mupscale.hf.upscale_folder(narrow, 2, tmp_path / "wide", unchecked=True)
    assert f"untested, because what the model returns does not depend on it: {norm}" in str(report)
    _, in_memory = mupscale.hf.upscale(llama(), 2)
    assert in_memory.exact is None
    assert f"does not depend on {norm!r}" in in_memory.check


REFUSED: dict[str, tuple[list[str], str]] = {
    "a name of the hub": (["nowhere/llama", "--factor", "2"], "hf download nowhere/llama --local-dir llama"),
    "layers by --set": (["{narrow}", "--set", "num_hidden_layers=2", "--factor", "1"], "give --layers num_hidden_"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_how_to_go_on(case: str, tmp_path: Path, capsys: Any) -> None:
    arguments, message = REFUSED[case]
    narrow = save(llama(), tmp_path / "narrow")
    with pytest.raises((SystemExit, UserError)) as refusal:
        main(["upscale", *(each.format(narrow=narrow) for each in arguments), "--out", str(tmp_path / "wide")])
    assert message in capsys.readouterr().err + str(refusal.value)


@pytest.mark.slow
def test_one_number_of_layers_means_an_encoder_and_its_decoder() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "vocab_size": 40}
    deep, report = mupscale.hf.upscale(hf.T5ForConditionalGeneration(hf.T5Config(**sizes)).eval(), layers=3)
    assert report.exact
    assert (len(deep.encoder.block), len(deep.decoder.block)) == (3, 3)
