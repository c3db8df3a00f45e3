"""Model folders read as data: what is refused, in one line, before anything of it is used."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import edit, llama, save

import mupscale
from mupscale.errors import UserError
from mupscale.hf.config import wide_config
from mupscale.hf.family import on_meta
from mupscale.hf.folder import read_folder
from mupscale.hf.names import growing_tensors
from mupscale.hf.widened_folder import refuse_unlike_twins
from mupscale.widening.plan import plan

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(llama(), tmp_path_factory.mktemp("folders") / "narrow", shard="20KB")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    copy = tmp_path / "narrow"
    copy.mkdir()
    for path in saved.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def index_without_a_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].popitem()
    (folder / INDEX).write_text(json.dumps(index))


def index_of(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(folder / INDEX, weight_map=dict.fromkeys(index["weight_map"], file))

    return change


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def only_pickles(folder: Path) -> None:
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")


def half_a_shard(folder: Path) -> None:
    content = shards(folder)[0].read_bytes()
    shards(folder)[0].write_bytes(content[: len(content) // 2])


def linked_shard(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes(shards(folder)[0].read_bytes())
    shards(folder)[0].unlink()
    os.symlink(outside, folder / "model-00001-of-00005.safetensors")


KERNELS: dict[str, dict[str, Any]] = {
    "by part": {"_attn_implementation": {"": "somebody/kernel"}},
    "by a part of parts": {"attn_implementation": {"": {"": "somebody/kernel"}}},
    "in a list": {"attn_implementation": ["somebody/kernel"]},
    "without a slash": {"_attn_implementation": "somebody"},
    "with a revision": {"attn_implementation": "paged|somebody/kernel@main:run"},
    "of experts": {"experts_implementation": "somebody/kernel"},
    "inside": {"text_config": {"attn_implementation": "somebody/kernel"}},
    "under another name": {"attribute_map": {"x": "_attn_implementation"}, "x": "somebody/kernel"},
}


def second_configuration(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.4.0.0.json").write_text(json.dumps({**content, "_attn_implementation": "somebody/kernel"}))
    edit(folder / "config.json", configuration_files=["config.4.0.0.json"])


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "is not a model folder: it has no config.json"),
    "half a configuration": (lambda f: (f / "config.json").write_text('{"a":'), "cannot be read as JSON"),
    "no such family": (lambda f: edit(f / "config.json", model_type="lama"), "has model_type 'lama'"),
    "no such class": (lambda f: edit(f / "config.json", architectures=["os"]), "has architectures ['os']"),
    "another class": (
        lambda f: edit(f / "config.json", architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel is no architecture of a llama model",
    ),
    "bad values": (lambda f: edit(f / "config.json", hidden_size="wide"), "is not a configuration of a llama model"),
    "remote code": (
        lambda f: edit(f / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.Llama"}),
        "needs code of its own (auto_map), which is never run",
    ),
    "remote kernels": (
        lambda f: edit(f / "config.json", attn_implementation="somebody/kernel"),
        "names code from elsewhere (attn_implementation: 'somebody/kernel')",
    ),
    **{
        f"remote kernels, {form}": (
            lambda f, fields=fields: edit(f / "config.json", **fields),
            "names code from elsewhere",
        )
        for form, fields in KERNELS.items()
    },
    "a second configuration": (second_configuration, "names other configurations (configuration_files)"),
    "quantised": (lambda f: edit(f / "config.json", quantization_config={"bits": 4}), "is quantised"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "pickled weights": (only_pickles, "has its weights in pytorch_model.bin, which may hold code"),
    "no weights": (lambda f: [p.unlink() for p in (*shards(f), f / INDEX)], "has no weights: wanted"),
    "a missing shard": (lambda f: shards(f)[1].unlink(), "lacks model-00002-of-00005.safetensors"),
    "half a shard": (half_a_shard, "is not a safetensors file, or is damaged"),
    "a link out of the folder": (linked_shard, "is a link out of its folder"),
    "an empty index": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "an index that lacks a tensor": (index_without_a_tensor, "does not say so; get both again"),
    "an index that leads out": (index_of("../x.safetensors"), "wanted a safetensors file in the folder"),
    "an index of another file": (index_of("model-00001-of-00005.safetensors"), "which model.safetensors.index.json"),
}


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", {"": "flex_attention"}])
def test_known_attention_passes_and_is_chosen_anew(name: Any, folder: Path) -> None:
    edit(folder / "config.json", attn_implementation=name)
    assert read_folder(folder).config._attn_implementation is None


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_folder_is_refused(case: str, folder: Path) -> None:
    spoil, message = SPOILED[case]
    spoil(folder)
    with pytest.raises(UserError) as refusal:
        read_folder(folder)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, problem in {"nowhere": "does not exist", "file": "is a file"}.items():
        with pytest.raises(UserError, match=f"{problem}; name a model folder"):
            read_folder(tmp_path / name)


def test_a_snapshot_of_a_hub_cache_may_link_to_its_blobs(saved: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1f3a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(saved.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blobs / str(number))
    assert read_folder(snapshot).tensors.keys() == read_folder(saved).tensors.keys()
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "secret.json").symlink_to(tmp_path / "secret.json")
    assert [path.name for path in read_folder(snapshot).companions()] == ["generation_config.json", "tokenizer.json"]


def matched(folder: Path):
    """The tensors of a folder that grows twofold."""
    read = read_folder(folder)
    narrow, wide = (on_meta(read.model_class, config) for config in (read.config, wide_config(read.config, 2)))
    return growing_tensors(read.tensors, plan(narrow, wide), narrow, wide)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The folder with changed tensors, in one file."""
    from safetensors.torch import load_file, save_file

    tensors = {name: value for path in shards(folder) for name, value in load_file(path).items()}
    change(tensors)
    for path in [*shards(folder), folder / INDEX]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_every_tensor_and_every_parameter_is_accounted_for(folder: Path) -> None:
    growing, unused = matched(folder)
    assert len(growing) == 21
    assert unused == []
    _, unused = matched(rewritten(folder, lambda tensors: tensors.update(stray=torch.ones(2))))
    assert unused == ["stray"]
    with pytest.raises(UserError, match=r"the folder lacks 'model\.norm\.weight', which a LlamaForCausalLM has"):
        matched(rewritten(folder, lambda tensors: tensors.pop("model.norm.weight")))


def test_a_tied_parameter_may_be_in_the_folder_once_or_twice(folder: Path, tmp_path: Path) -> None:
    """Twice only with the same values."""
    tied = llama(tie_word_embeddings=True)
    save(tied, tmp_path / "tied", shard="20KB")
    read = read_folder(tmp_path / "tied")
    model = on_meta(read.model_class, read.config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    narrow = on_meta(read.model_class, read.config)
    wide = on_meta(read.model_class, wide_config(read.config, 2))
    once = plan(
        narrow,
        wide,
        hints=mupscale.Hints(roles={"model.norm.weight": "readout", "model.embed_tokens.weight": "vector"}),
    )
    growing, _ = growing_tensors(read.tensors, once, narrow, wide)
    assert "lm_head.weight" not in {tensor.name for tensor in growing}
    embedding = tied.model.embed_tokens.weight.detach()
    for copy, message in ((embedding.clone(), None), (embedding + 1, "are one parameter by the configuration")):
        rewritten(tmp_path / "tied", lambda tensors, copy=copy: tensors.update({"lm_head.weight": copy}))
        twice, _ = growing_tensors(read_folder(tmp_path / "tied").tensors, once, narrow, wide)
        assert len(twice) == len(growing) + 1
        with pytest.raises(UserError, match=message) if message else nullcontext():
            refuse_unlike_twins(twice)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"'lm_head\.weight' has shape \(64, 31\) in the folder"):
        matched(rewritten(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 31)})))


def test_tensors_of_the_base_model_and_of_old_versions_are_found(folder: Path) -> None:
    """Without the prefix of the head's class, and with the rotary table that transformers once saved."""

    def old(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    growing, unused = matched(rewritten(folder, old))
    assert len(growing) == 21
    assert "layers.0.self_attn.q_proj.weight" in {tensor.name for tensor in growing}
    assert unused == ["layers.0.self_attn.rotary_emb.inv_freq"]
