"""GPT-2 as the paper's authors train it: their network and optimizer, from a checkout, in a loop like theirs.

The checkout is the user's: https://github.com/yuxinma98/mupscaling. This project contains none of it.
"""

import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mup
import numpy as np
import torch
from torch import Tensor, nn

NETWORK = "src/weight_transfer/GPT2/gpt2_model.py", ("GPT", "GPTConfig")
OPTIMIZER = "src/weight_transfer/optim.py", ("MuAdamW",)
"""Files of the checkout, and what is used of them."""

CLIP = 1.0


def load(checkout: Path, file: str, names: tuple[str, ...]) -> ModuleType:
    """A file of the checkout as a module, without its package, whose import needs the authors' accounts."""
    wanted = f"--against {checkout}: give a checkout of https://github.com/yuxinma98/mupscaling"
    if not (checkout / file).is_file():
        raise SystemExit(f"{wanted}; there is no {file}")
    spec = importlib.util.spec_from_file_location(f"authors_{Path(file).stem}", checkout / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise SystemExit(f"{wanted}; {file} has no {' and no '.join(missing)}")
    return module


def train(checkout: Path, shape: tuple[int, ...], context: int, device: torch.device) -> Iterator[None]:
    """Steps as in their `train_gpt2.py`, with muP, biases and a constant learning rate; the network is compiled."""
    width, layers, heads, vocabulary, rows = shape
    networks, optimizers = load(checkout, *NETWORK), load(checkout, *OPTIMIZER)

    def network(width: int) -> nn.Module:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, "block_size": context}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            return networks.GPT(networks.GPTConfig(**sizes, bias=True))

    with device:
        net = network(width)
    mup.set_base_shapes(net, network(2 * heads), delta=network(4 * heads))
    decayed = [parameter for parameter in net.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in net.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    optimizer = optimizers.MuAdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    compiled = torch.compile(net) if on_gpu else net
    torch.backends.cudnn.benchmark = True
    tokens = np.random.default_rng(0).integers(vocabulary, size=2_000_000, dtype=np.uint16)

    def batch() -> list[Tensor]:
        starts = torch.randint(len(tokens) - context, (rows,)).tolist()
        pair = (
            torch.stack(
                [torch.from_numpy(tokens[start + i : start + i + context].astype(np.int64)) for start in starts]
            )
            for i in (0, 1)
        )
        return [(part.pin_memory() if on_gpu else part).to(device, non_blocking=True) for part in pair]

    x, y = batch()
    total = torch.zeros((), device=device)
    while True:
        with torch.autocast(device.type, torch.bfloat16):
            _, loss = compiled(x, y)
        x, y = batch()  # while the device computes
        loss.backward()
        total += loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        yield
