"""`python -m mupscale upscale FOLDER --factor 2 --out WIDE`, and continuing elsewhere from what it writes."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from command_line import refused
from crashes import kill_and_repeat
from model_folders import edit, llama, load, logits, names, save
from tiers import slow_except
from transformers import MixtralConfig, MixtralForCausalLM

import mupscale.hf as hf
from mupscale.__main__ import main
from mupscale.atomic import whole_folder
from mupscale.discovery.found import Found
from mupscale.errors import UserError
from mupscale.hf import in_memory as in_memory_module
from mupscale.hf import widened_folder
from mupscale.hf.config import wide_config
from mupscale.hf.family import Family
from mupscale.hf.folder import read_folder
from mupscale.methods.noise import AUTO_LEVEL, AdditiveNoise


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    return save(llama(), tmp_path_factory.mktemp("command") / "narrow")


@pytest.fixture(scope="module")
def grown(narrow: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("grown") / "wide"
    upscale(narrow, out)
    return out


def upscale(narrow: Path, out: Path, *options: str) -> None:
    """Without noise, unless options say otherwise."""
    exact = () if any("noise" in option or option == "--method" for option in options) else ("--noise", "none")
    main(["upscale", str(narrow), "--factor", "2", "--out", str(out), *exact, *options])


@pytest.mark.parametrize("factor", [2, 3])
def test_one_file(narrow: Path, tmp_path: Path, factor: int, capsys) -> None:
    """The wide folder loads, computes the same, and has what the narrow one had but for code."""
    exact = ["--factor", str(factor), "--noise", "none"]
    main(["upscale", str(narrow), *exact, "--out", str(tmp_path / "wide")])
    told = capsys.readouterr()
    assert "21 tensors are, byte by byte, the narrow ones duplicated" in told.out
    assert "outputs of both models differ by" in told.out
    wide = load(tmp_path / "wide")
    assert wide.config.hidden_size == 32 * factor
    torch.testing.assert_close(logits(wide), logits(load(narrow)), rtol=0, atol=1e-6)
    assert names(tmp_path) == ["wide"]
    assert names(tmp_path / "wide") == [
        "config.json", "generation_config.json", "model.safetensors", "mupscale.json", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_shards_in_bfloat16(tmp_path: Path, monkeypatch) -> None:
    """The dtype stays, and so does every key of the configuration that is no width."""
    monkeypatch.setattr(widened_folder, "MOST_SHARD_BYTES", 50_000)
    narrow = save(llama().bfloat16(), tmp_path / "narrow", shard="20KB")
    edit(narrow / "config.json", torch_dtype="bfloat16", of_its_own={"a": [1]})
    upscale(narrow, tmp_path / "wide")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("narrow", "wide"))
    assert {key for key in after if after[key] != before.get(key)} == {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    }  # fmt: skip
    assert after.keys() == before.keys()
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    wide = load(tmp_path / "wide", dtype="auto")
    assert wide.dtype == torch.bfloat16
    exact, answer = (logits(load(tmp_path / name, dtype=torch.float32)) for name in ("narrow", "wide"))
    torch.testing.assert_close(answer, exact, rtol=0, atol=1e-6)
    in_memory, report = hf.upscale(load(narrow, dtype="auto"), 2)
    assert report.exact is True
    assert "exact: a training step in float64" in str(report)
    for name, parameter in in_memory.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(name)), name


@pytest.mark.slow
def test_a_model_in_memory_is_compared_at_its_full_size(narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = hf.upscale(narrow, 2, call=lambda model: model(None))
    assert report.exact is None
    assert report.check.startswith("not checked: no input is known (")
    monkeypatch.setattr(in_memory_module, "_found", lambda *_: Found({}, {}, {}, 0, {}, ()))
    _, report = hf.upscale(narrow, 2)
    assert report.exact
    assert "with a plan that discover found" in report.check, "what is found for the family is not trusted"


def test_noise_auto_keeps_the_outputs_and_other_noise_says_how_it_changes_them(
    narrow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["upscale", str(narrow), "--factor", "2", "--out", str(tmp_path / "auto")])
    assert re.search(r"checked: outputs of both models differ by \d\.\de-0[78] in float32", capsys.readouterr().out)
    exact, wide = logits(load(narrow)), load(tmp_path / "auto")
    torch.testing.assert_close(logits(wide), exact, rtol=0, atol=1e-6)
    weight = wide.get_parameter("model.layers.0.self_attn.q_proj.weight").detach()
    signal = (weight[:, :32] + weight[:, 32:]).repeat(1, 2) / 2  # two copies of every input
    strength = torch.linalg.matrix_norm(weight - signal, 2) / torch.linalg.matrix_norm(signal, 2)
    assert float(strength) == pytest.approx(AUTO_LEVEL, rel=0.05)
    upscale(narrow, tmp_path / "plain", "--noise", "0.05")
    said = re.search(r"outputs of both models differ by ([\d.]+) %: noise that is not centred", capsys.readouterr().out)
    change = (logits(load(tmp_path / "plain")) - exact).abs().max() / exact.abs().max()
    assert float(said[1]) > 10
    assert float(change) > 0.1
    upscale(narrow, tmp_path / "padded", "--method", "shrink-and-pad")
    assert "%: ShrinkAndPad changes them" in capsys.readouterr().out


@pytest.mark.slow
def test_noise_is_that_of_a_model_in_memory(narrow: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise.json"
    upscale(narrow, tmp_path / "wide", "--noise", "0.1", "--seed", "3", "--save-noise", str(noise))
    upscale(narrow, tmp_path / "again", "--recorded-noise", str(noise), "--seed", "3")
    upscale(narrow, tmp_path / "centred", "--noise", "0.1", "--centred")
    in_memory, report = hf.upscale(narrow, 2, noise=AdditiveNoise(0.1), seed=3)
    wide, again = load(tmp_path / "wide"), load(tmp_path / "again")
    for name, parameter in in_memory.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(name)), name
        assert torch.equal(parameter, again.get_parameter(name)), name
    assert json.loads(noise.read_text())["constants"] == report.noise
    exact = logits(load(narrow))
    assert float((logits(wide) - exact).abs().max()) > 1e-3
    torch.testing.assert_close(logits(load(tmp_path / "centred")), exact, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_experts_in_separate_tensors(tmp_path: Path) -> None:
    """Mixtral's folder has each expert's projections; the model in memory has them in one parameter a layer."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=64, num_local_experts=3, tie_word_embeddings=False,
    )  # fmt: skip
    save(MixtralForCausalLM(config), tmp_path / "narrow")
    upscale(tmp_path / "narrow", tmp_path / "wide")
    torch.testing.assert_close(logits(load(tmp_path / "wide")), logits(load(tmp_path / "narrow")), rtol=0, atol=1e-6)


ODD_HEADS = "a llama whose fields grow by these factors cannot be used"
BAD = {
    "not a model folder": ("{empty} --factor 2 --out {out}", "is not a model folder: it has no config.json"),
    "no folder": ("nowhere --factor 2 --out {out}", "nowhere does not exist; name a model folder"),
    "no factor": ("{narrow} --out {out}", "give --factor, by how much all widths grow, --layers"),
    "a factor of a word": ("{narrow} --factor two --out {out}", "invalid float value: 'two'"),
    "a factor below 1": ("{narrow} --factor 0.5 --out {out}", "give a number of at least 1"),
    "a factor of nan": ("{narrow} --factor nan --out {out}", "give a number of at least 1"),
    "a factor of 1": ("{narrow} --factor 1 --out {out}", "give a larger one"),
    "odd sizes": ("{narrow} --factor 1.3 --out {out}", "whole"),
    "a fraction under a norm": ("{narrow} --factor 1.5 --out {out}", "hidden_size 32 → 48, intermediate_size 48 → 72"),
    "--out exists": ("{narrow} --factor 2 --out {empty}", "exists; name another folder"),
    "--out inside the folder": ("{narrow} --factor 2 --out {narrow}/wide", "lies inside the folder that is read"),
    "--out in a file": ("{narrow} --factor 2 --out {narrow}/config.json/wide", "config.json is not a folder; name one"),
    "a method across layers": ("{narrow} --factor 2 --out {out} --method aki", "changes weights across layers"),
    "a method with data": ("{narrow} --factor 2 --out {out} --method ligo", "learns from data"),
    "a bad field": ("{narrow} --factor 2 --out {out} --set intermediate_size", "such as intermediate_size=3"),
    "layers of a word": ("{narrow} --layers four --out {out}", "--layers four: give a whole number"),
    "layers twice": ("{narrow} --layers 4 --layers 5 --out {out}", "--layers 5: give a whole number, or"),
    "depth without layers": (
        "{narrow} --factor 2 --depth stack --out {out}",
        "--depth stack says how a model becomes deeper",
    ),
    "odd heads": ("{narrow} --factor 2 --set num_attention_heads=1.5 --out {out}", ODD_HEADS),
    "odd heads alone": ("{narrow} --factor 1 --set num_attention_heads=1.5 --out {out}", ODD_HEADS),
    "--save-noise without noise": (
        "{narrow} --factor 2 --out {out} --noise none --save-noise n",
        "there is no noise to save",
    ),
    "noise nan": ("{narrow} --factor 2 --out {out} --noise nan", "std must be a finite number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(case: str, narrow: Path, tmp_path: Path) -> None:
    line, message = BAD[case]
    (tmp_path / "empty").mkdir()
    before = names(narrow)
    places = {"narrow": narrow, "empty": tmp_path / "empty", "out": tmp_path / "out"}
    assert message in refused("upscale", *line.format(**places).split())
    assert names(tmp_path) == ["empty"]
    assert names(tmp_path / "empty") == []
    assert names(narrow) == before


def test_a_full_disk_is_found_before_it_starts(narrow: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(widened_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    monkeypatch.setattr(widened_folder.FolderWriter, "write", lambda *_: pytest.fail("it started"))
    line = refused("upscale", str(narrow), "--factor", "2", "--out", str(tmp_path / "wide"))
    assert "needs 0.0 GB" in line
    assert names(tmp_path) == []


def test_a_model_that_computes_something_else_is_not_written(narrow: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(widened_folder, "largest_difference", lambda *_: 0.25)
    line = refused("upscale", str(narrow), "--factor", "2", "--out", str(tmp_path / "wide"))
    assert "differ from the narrow one's by 2.5e-01" in line
    assert names(tmp_path) == []


def test_two_processes_do_not_write_one_folder(narrow: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    with whole_folder(out) as new:
        (new / "file").touch()
        assert "another process is writing" in refused("upscale", str(narrow), "--factor", "2", "--out", str(out))
        assert names(new) == ["file"]
    assert names(out) == ["file"]


def test_parameter_groups_of_the_wrong_model_are_refused(narrow: Path, tmp_path: Path) -> None:
    upscale(narrow, tmp_path / "wide")
    with pytest.raises(ValueError, match="the growth is one of another model"):
        hf.parameter_groups(llama(num_hidden_layers=1), tmp_path / "wide", lr=0.1)
    with pytest.raises(ValueError, match="optimizer must be one of SGD, Adam, AdamW"):
        hf.parameter_groups(llama(), tmp_path / "wide", lr=0.1, optimizer="Lion")
    with pytest.raises(ValueError, match="cannot be read as the record of a growth"):
        hf.parameter_groups(llama(), narrow, lr=0.1)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(64, 32\), and \(64, 64\) in the growth"):
        hf.parameter_groups(llama(), tmp_path / "wide", lr=0.1)
    for patterns in (["*"], iter(["*"])):
        groups = hf.parameter_groups(
            load(tmp_path / "wide"), tmp_path / "wide", lr=1, weight_decay=1, no_decay=patterns
        )
        assert {group["weight_decay"] for group in groups} == {0.0}


def of_norm(record: dict[str, Any]) -> dict[str, Any]:
    return record["parameters"]["model.norm.weight"]


BAD_RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nan": (lambda r: of_norm(r)["factors"]["AdamW"].update(lr=math.nan), "factor of lr for AdamW must be a finite"),
    "no factor": (lambda r: of_norm(r)["factors"]["AdamW"].pop("lr"), "is damaged: it has no 'lr'"),
    "no shape": (lambda r: of_norm(r).pop("wide_shape"), "is damaged: it has no 'wide_shape'"),
    "no parameters": (lambda r: r.pop("parameters"), "this is not the record of a growth"),
    "a list of parameters": (lambda r: r.update(parameters=[]), "this is not the record of a growth"),
    "a parameter too few": (lambda r: r["parameters"].pop("model.norm.weight"), "is one of another model"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_parameter_groups_refuse_a_damaged_record(case: str, grown: Path, tmp_path: Path) -> None:
    spoil, message = BAD_RECORDS[case]
    record = json.loads((grown / "mupscale.json").read_text())
    spoil(record)
    (tmp_path / "mupscale.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=re.escape(message)):
        hf.parameter_groups(load(grown), tmp_path, lr=0.1)


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_nothing_that_looks_whole(
    narrow: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Killed before an operation on files or in the middle of a write; run again, it finishes."""
    source = read_folder(narrow)
    # a search of seconds, which each fork would repeat
    Family(source.model_class).found_for(source.config, wide_config(source.config, 2))

    def widen(folder: Path) -> None:
        widened_folder.CHUNK_BYTES, widened_folder.MOST_SHARD_BYTES = 4096, 40_000
        folder.mkdir(exist_ok=True)
        if (folder / "wide").exists():  # it is whole; its lock is an empty file, which is deleted last
            (folder / ".wide.lock").unlink(missing_ok=True)
        else:
            widened_folder.upscale_folder(narrow, 2, folder / "wide")

    moments = 20 if pytestconfig.getoption("--all") else 3
    assert kill_and_repeat(widen, tmp_path, moments) > 100
    shutil.rmtree(tmp_path)


# --- growth by a fraction

SIZES = {"num_hidden_layers": 1, "vocab_size": 64}
HEADS = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}

FRACTIONAL: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**HEADS, **SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**HEADS, num_key_value_heads=1, **SIZES)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**HEADS, **SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_ff=24, d_kv=8, num_heads=2, num_layers=1, vocab_size=64)
    ),
}


@pytest.mark.parametrize("family_name", slow_except(FRACTIONAL, "llama", kept=["t5"]))
def test_a_fractional_growth_of_the_feed_forward_part(family_name: str, tmp_path: Path, capsys) -> None:
    save(FRACTIONAL[family_name](), tmp_path / "narrow")
    options = ["--factor", "1.5", "--only", "feed_forward", "--noise", "none"]
    main(["upscale", str(tmp_path / "narrow"), *options, "--out", str(tmp_path / "wide")])
    told = re.search(r"outputs of both models differ by ([\d.e+-]+)", capsys.readouterr().out)
    assert told is not None
    assert float(told[1].rstrip(".")) < 1e-5
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("narrow", "wide"))
    grown = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert grown == {"d_ff" if family_name == "t5" else "intermediate_size": (24, 36)}
