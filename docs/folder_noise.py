"""Measures which noise to add to a released checkpoint that is made twice as wide; prints the table of docs/hf.md.

python docs/folder_noise.py --images data/cifar100

Small models of transformers are trained without noise, widened with each noise, and trained on with `parameter_groups`,
without the state of an optimizer, as a released checkpoint is. Text is the embedded sample, images are CIFAR-100's.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import mupscale.hf
from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.fineweb import FineWeb
from mupscale.hf.forward_pass import difference
from mupscale.methods.noise import AdditiveNoise, Noise, SignalNoise

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 4096, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "qwen2": {**TEXT, "tie_word_embeddings": True},
    "gpt2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 4096, "n_positions": 128, **NO_DROPOUT},
    "vit": {**SIZES, "intermediate_size": 96, "image_size": 32, "patch_size": 4, "num_labels": 100},
}
NOISES: dict[str, Noise | None] = {
    "none": None,
    "plain, std 0.05": AdditiveNoise(0.05),
    "centred, std 0.05": AdditiveNoise(0.05, centred=True),
    **{f"centred, t {t}": SignalNoise(t, centred=True) for t in (0.1, 0.3, 1.0)},
}
RATE, STEPS = 2e-3, 200


def batches(kind: str, images: Path | None, seed: int) -> tuple[Iterator[Any], list[Any]]:
    """Training batches without end, and eight held-out ones."""
    torch.manual_seed(seed)
    data = CIFAR100(data_dir=images, batch_size=32) if kind == "vit" else FineWeb(batch_size=8, context=32)
    data.prepare_data()
    data.setup("fit")

    def endless() -> Iterator[Any]:
        while True:
            yield from data.train_dataloader()

    held_out = [batch for batch, _ in zip(data.val_dataloader(), range(8), strict=False)]
    return endless(), held_out


def loss_of(model: Any, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
    return model(pixel_values=batch[0].float(), labels=batch[1].long()).loss


def train(model: Any, groups: Any, data: Iterator[Any]) -> None:
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.1)
    model.train()
    for _ in range(STEPS):
        loss = loss_of(model, next(data))
        optimizer.zero_grad()
        loss.backward()
        mupscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
    model.eval()


@torch.no_grad()
def held_out_loss(model: Any, held_out: list[Any]) -> float:
    return fmean(float(loss_of(model, batch)) for batch in held_out)


def measure(kind: str, images: Path | None) -> None:
    """Prints, for each noise, the change of the outputs at the growth, and the held-out loss after the training."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

    family = AutoModelForImageClassification if kind == "vit" else AutoModelForCausalLM
    torch.manual_seed(0)
    narrow = family.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
    data, held_out = batches(kind, images, seed=0)
    train(narrow, narrow.parameters(), data)
    before = held_out_loss(narrow, held_out)
    probe = held_out[0][:2, :-1] if kind != "vit" else held_out[0][0][:2].float()
    wide, found = mupscale.hf.upscale(narrow, 2)
    for name, noise in NOISES.items():
        wide = family.from_config(wide.config)
        report = mupscale.upscale(narrow, wide, plan=found.plan, noise=noise, call=lambda model: model(probe))
        with torch.no_grad():
            change = difference(narrow(probe), wide(probe))
        at_once = held_out_loss(wide, held_out)
        data, _ = batches(kind, images, seed=100)
        train(wide, mupscale.hf.parameter_groups(wide, report, lr=RATE, weight_decay=0.1), data)
        after = held_out_loss(wide, held_out)
        print(f"{kind} | {name} | {change:.1%} | {before:.3f} | {at_once:.3f} | {after:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in CONFIGS:
        measure(kind, options.images)
