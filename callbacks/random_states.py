"""The states of random number generators: the global ones, and those of data loaders."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the global random number generators, as tensors and primitives."""
    version, internal, gauss = random.getstate()
    generator = np.random.get_state(legacy=True)
    assert isinstance(generator, tuple)
    name, keys, position, has_gauss, cached = generator
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(integers(internal)), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(integers(keys), dtype=np.uint32), *rest))


def integers(tensor: Tensor) -> list[int]:
    return [int(x) for x in tensor.tolist()]


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that data loaders and their samplers were given, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        for holder in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
