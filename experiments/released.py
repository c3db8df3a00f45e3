"""The owner of a released checkpoint asks: train it on as it is, or twice as large, for the same compute?

    python -m experiments.released --data data/wikipedia --out runs/released --workers 8

A small Llama is trained until its learning rate is zero and saved as a folder of transformers, without the state of its
optimizer, as released models are. Then it is trained on, as it is and twice as large, for a quarter of its compute and
for all of it: warm-up, constant rate, and a fall to zero over the last fifth. OUT/released.csv has the losses.
"""

import argparse
import csv
from collections.abc import Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale.hf
from experiments.ladder import Ladder, read_ladder, read_text
from experiments.steps import ADAMW, CLIP, DECAY, Runner, Text, fall, processes

FULL, QUICK = read_ladder("full"), read_ladder("quick")
NOISE = mupscale.SignalNoise(0.3, centred=True)
"""The noise of `upscale FOLDER --noise auto`."""
ARMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "twice as wide": {"factor": 2, "noise": NOISE},
    "twice as deep, identity": {"depth": "identity"},
    "twice as deep, stack": {"depth": "stack"},
}
SHARES = (0.25, 1.0)
"""Budgets, as shares of the compute of the base."""
HEADER = ("arm", "lr", "seed", "share", "steps", "tokens", "flops", "loss_before", "loss")


def make_base(ladder: Ladder, seed: int, width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ladder.vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 32, max_position_embeddings=ladder.context, tie_word_embeddings=False,
        )
    )  # fmt: skip


def flops_of_step(ladder: Ladder, model: Any) -> float:
    config, tokens = model.config, ladder.rows * ladder.context
    matrices = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    return tokens * (6 * matrices + 12 * config.num_hidden_layers * config.hidden_size * ladder.context)


def text_of(options: argparse.Namespace) -> Text:
    return read_text("quick" if options.quick else "full", options.data, options.device)


def make_runner(text: Text, model: Any, optimizer: Optimizer) -> Runner:
    def loss(batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    return Runner(text, model, [optimizer], loss, lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP))


def train_branches(runner: Runner, seed: int, first: int, ends: list[int], warm_up: int) -> Iterator[float]:
    """Losses at the ends, each after a fall of the rate of its own; `first` is the number of the first batch."""
    step = first
    for end in sorted(ends):
        until = first + round((1 - DECAY) * end)
        runner.train(seed, range(step, until), [1.0], lambda step: min(1.0, (step - first + 1) / warm_up))
        step, state = until, runner.copy()
        runner.train(seed, range(until, first + end), [1.0], partial(fall, until, first + end))
        yield runner.validate()
        runner.load(state)


def make_optimizer(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=next(model.parameters()).is_cuda, **ADAMW)


def train_base(options: argparse.Namespace, seed: int) -> None:
    """Trains for `--tokens` per parameter and saves the model as it would be released."""
    ladder, device = QUICK if options.quick else FULL, torch.device(options.device)
    model: Any = make_base(ladder, seed, *((32, 1) if options.quick else (128, 4))).to(device)
    runner = make_runner(text_of(options), model, make_optimizer(model, options.base_lr))
    steps = base_steps(options, ladder, model)
    loss = next(train_branches(runner, seed, 0, [steps], ladder.warm_up))
    print(f"base, seed {seed}: {steps} steps, {loss:.4f}", flush=True)
    model.save_pretrained(options.out / f"base-{seed}")


def base_steps(options: argparse.Namespace, ladder: Ladder, model: nn.Module) -> int:
    return round(options.tokens * sum(p.numel() for p in model.parameters()) / (ladder.rows * ladder.context))


def train_on(options: argparse.Namespace, arm: str, lr: float, seed: int) -> list[tuple[Any, ...]]:
    from transformers import AutoModelForCausalLM

    ladder, device = QUICK if options.quick else FULL, torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    base: Any = AutoModelForCausalLM.from_pretrained(options.out / f"base-{seed}", dtype=torch.float32).to(device)
    first, budget = base_steps(options, ladder, base), flops_of_step(ladder, base)
    model, optimizer = base, make_optimizer(base, lr)
    if ARMS[arm]:
        how = dict(ARMS[arm])
        if "depth" in how:
            how["layers"] = 2 * base.config.num_hidden_layers
        model, report = mupscale.hf.upscale(base, how.pop("factor", 1), optimizer=optimizer, seed=seed, **how)
        assert isinstance(report.optimizer, Optimizer)
        optimizer = report.optimizer
    runner = make_runner(text_of(options), model, optimizer)
    before, cost, tokens = runner.validate(), flops_of_step(ladder, model), ladder.rows * ladder.context
    ends = [round(share * first * budget / cost) for share in SHARES]
    losses = list(train_branches(runner, seed, first, ends, ladder.warm_up))
    print(f"{arm}, lr {lr}, seed {seed}: {before:.4f}, {[round(loss, 4) for loss in losses]}", flush=True)
    return [
        (arm, lr, seed, share, end, end * tokens, f"{end * cost:.4g}", f"{before:.4f}", f"{loss:.4f}")
        for share, end, loss in zip(SHARES, ends, losses, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder of the prepared text; by default the embedded sample")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the base and of released.csv")
    parser.add_argument("--tokens", type=float, help="tokens per parameter of the base; by default 20")
    parser.add_argument("--base-lr", type=float, default=0.004)
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.002, 0.004], help="peak rates of the training on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--quick", action="store_true", help="a tiny model and the embedded sample, as a test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or (0.002 if options.quick else 20)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = product(ARMS, options.lrs, options.seeds)
    with processes(options.workers) as executor:
        missing = [seed for seed in options.seeds if not (options.out / f"base-{seed}").exists()]
        list(executor.map(partial(train_base, options), missing))
        rows = chain.from_iterable(list(executor.map(partial(train_on, options), *zip(*jobs, strict=True))))
    with (options.out / "released.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()
