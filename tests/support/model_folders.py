"""Small model folders of the transformers library."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mupscale.hf.forward_pass import quiet


def llama(**settings: Any) -> PreTrainedModel:
    """An untied Llama with grouped heads, the same one every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **{**sizes, "num_hidden_layers": 2, "vocab_size": 64, "tie_word_embeddings": False, **settings}
    )
    return AutoModelForCausalLM.from_config(config).eval()


def save(model: PreTrainedModel, folder: Path, shard: str = "5GB") -> Path:
    """Saves a model as transformers does, with files that travel and files that do not."""
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_llama.py").write_text("raise SystemExit('this must never run')\n")
    return folder


def load(folder: Path, **options: Any) -> PreTrainedModel:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(20).reshape(2, 10) % 64).logits


def edit(path: Path, **values: Any) -> None:
    """Changes values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
