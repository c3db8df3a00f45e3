"""Does growing pay? GPT-2 of fixed sizes, and grown in width, in depth and in both, at equal FLOPs.

    python -m mupscale prepare text wikipedia.txt --vocab 8192 --out data/wikipedia
    python -m benchmarks ladder --data data/wikipedia --out runs/ladder --workers 8
    python -m benchmarks ladder --collect runs/ladder --out docs/results/ladder

A run is a trunk at a constant learning rate. For each of its budgets a branch leaves the trunk at 80 % of the FLOPs,
and its rate falls linearly to zero over the rest. A grown run starts from a saved state of a small trunk, whose FLOPs
count. docs/results/ladder.md has the measure and the results. The second command can be stopped and started again:
finished runs are kept. The third writes the two CSV files from which the page's tables are computed. `--ladder` chooses
other sizes and budgets: large_batch, depths (of rates), rung, sunk and sunk_slow. Their CSV files are in folders of
these names, those of the last two in one.
"""

import argparse
import csv
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from benchmarks.training import BareStep
from mupscale.atomic import replacing, write_text
from mupscale.datamodules.fineweb import FineWeb
from mupscale.models.gpt2 import GPT2

DECAY, CLIP = 0.2, 1.0
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
POINTS = 48
"""Points of the curve of a trunk; a branch has an eighth of them."""
RUNS_HEADER = (
    "run", "width", "layers", "base_layers", "from_width", "from_layers", "grown_at", "depth", "method", "noise", "lr",
    "seed", "budget", "tokens", "flops", "loss", "loss_before_decay", "train_loss", "loss_before_growth",
    "loss_after_growth",
)  # fmt: skip
"""`grown_at` and `budget` are binary logarithms of shares of the largest budget; in `sunk`, `grown_at` is that of its
start in tokens per parameter. `base_layers` of a run that grows is that of its start. Only `train_loss` is not held
out."""
CURVES_HEADER = ("run", "branch", "tokens", "flops", "train_loss")
"""`branch` is the budget for which the rate falls; a trunk has none."""
METHODS = {"duplication": mupscale.methods.Duplication, "diagonal": partial(mupscale.methods.HyperCloning, "diagonal")}


class Size(NamedTuple):
    """With `base_layers`, residual branches are multiplied by base_layers / layers (CompleteP)."""

    width: int
    layers: int
    base_layers: int = 0

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}" + (f"-base{self.base_layers}" if self.base_layers else "")


class Way(NamedTuple):
    """How a run grows: `depth` of upscale, if its layers grow; a method and centred noise, if its width does."""

    depth: str = ""
    method: str = ""
    noise: float = 0.0

    def __str__(self) -> str:
        width = f"{self.method}-{self.noise:g}" if self.method else ""
        return "-".join(part for part in (self.depth, width) if part)


FIXED = Way()
WIDTH = (Way("", "diagonal", 1.0), Way("", "duplication", 1.0), Way("", "duplication", 0.24))
STACKS = (Way("stack"), Way("identity"))
INTERLEAVES = (Way("interleave"),)
BOTH = (Way("interleave", "diagonal", 1.0),)

Growths = dict[tuple[Size, Size], tuple[tuple[Way, ...], dict[float, tuple[float, ...]]]]
"""For a small and a large size: ways to grow, n of the points of growth, and for each of them n of the budgets."""


@dataclass(frozen=True)
class Ladder:
    """Sizes and budgets. A budget is 2^n times that of the `top` size with so many tokens per parameter."""

    fixed: dict[Size, tuple[float, ...]]
    """For each size, n of its budgets; none for a size that only grows."""
    grown: Growths
    top: Size
    tokens_per_parameter: float
    rows: int
    context: int
    vocabulary: int
    warm_up: int
    validated: int
    """Rows of the held-out text that a validation reads."""
    lr: float = 0.0078
    other_rates: tuple[float, ...] = ()
    """Factors on the rate for fixed sizes, one seed, up to their third budget."""
    noises: tuple[Way, ...] = ()
    """Other ways of the growths in width, one seed."""
    sunk: bool = False
    """A start exists already: points of growth are its tokens per parameter, and budgets do not include it."""

    def flops(self, size: Size) -> int:
        """FLOPs of a step: 6N + 12 · layers · width · context a token. N counts the readout, but not the tables of
        tokens and positions, since looking up costs nothing."""
        matrices = self.parameters(size) - (self.vocabulary + self.context) * size.width
        return self.rows * self.context * (6 * matrices + 12 * size.layers * size.width * self.context)

    def parameters(self, size: Size) -> int:
        """All of them, embeddings and readout included."""
        block = 12 * size.width**2 + 13 * size.width
        return (2 * self.vocabulary + self.context + 2) * size.width + size.layers * block

    def budget(self, power: float) -> float:
        return 2**power * self.cost(self.top, self.tokens_per_parameter)

    def cost(self, size: Size, tokens_per_parameter: float) -> float:
        steps = tokens_per_parameter * self.parameters(size) / (self.rows * self.context)
        return steps * self.flops(size)

    def start_cost(self, size: Size, point: float) -> float:
        """What a start of this size has cost at a point of growth."""
        return self.cost(size, point) if self.sunk else self.budget(point)


FULL = Ladder(
    fixed={  # from 2.5 to 65 tokens per parameter, and at most 4.6 times the text, except the last budget of 256 × 2
        Size(64, 2): (-5, -6, -7, -8),
        Size(64, 4): (-5, -6, -7, -8),
        Size(64, 8): (-3, -4, -5, -6, -7),
        Size(128, 2): (-3, -4, -5, -6),
        Size(128, 4): (-2, -3, -4, -5, -6),
        Size(128, 8): (-1, -2, -3, -4, -5),
        Size(256, 2): (0, -1, -2, -3, -4),
        Size(256, 4): (0, -1, -2, -3),
        Size(256, 8): (0.5, 0, -1, -2),
        Size(64, 4, 8): (-5, -6),
        Size(128, 2, 8): (-3, -4, -5, -6),
        Size(128, 4, 8): (-2, -3, -4, -5),
        Size(256, 2, 8): (0, -1, -2, -3),
        Size(256, 4, 8): (0, -1, -2, -3),
    },
    grown={
        (Size(256, 4, 8), Size(256, 8)): (INTERLEAVES, {-3: (-1,), -2: (-1, 0), -1: (0,)}),
        (Size(256, 4), Size(256, 8)): (STACKS, {-3: (-1,), -2: (-1, 0), -1: (0,)}),
        (Size(256, 2, 8), Size(256, 8)): (INTERLEAVES, {-3: (-1,), -2: (-1, 0)}),
        (Size(256, 2), Size(256, 8)): (STACKS[:1], {-3: (-1,), -2: (-1, 0)}),
        (Size(128, 4, 8), Size(256, 8)): (BOTH, {-3: (-1, 0), -2: (-1,)}),
        (Size(128, 8), Size(256, 8)): (WIDTH, {-3: (-1,), -2: (-1, 0)}),
        (Size(128, 4, 8), Size(128, 8)): (INTERLEAVES, {-6: (-4,), -5: (-4, -3), -4: (-3, -2), -3: (-2,)}),
        (Size(128, 4), Size(128, 8)): (STACKS[:1], {-6: (-4,), -5: (-4, -3), -4: (-3, -2), -3: (-2,)}),
        (Size(128, 2, 8), Size(128, 8)): (INTERLEAVES, {-6: (-4,), -5: (-4, -3), -4: (-3, -2), -3: (-2,)}),
        (Size(128, 2), Size(128, 8)): (STACKS[:1], {-6: (-4,), -5: (-4, -3), -4: (-3, -2), -3: (-2,)}),
        (Size(64, 4, 8), Size(128, 8)): (BOTH, {-6: (-4,), -5: (-4, -3), -4: (-3, -2)}),
        (Size(64, 8), Size(128, 8)): (WIDTH, {-6: (-4,), -5: (-4, -3), -4: (-3, -2), -3: (-2,)}),
    },
    top=Size(256, 8), tokens_per_parameter=10, rows=32, context=512, vocabulary=8192, warm_up=100, validated=896,
    other_rates=(2.0, 0.5),
    noises=(
        *(Way("", "duplication", noise) for noise in (2.0, 0.5, 4.0, 0.12)),
        *(Way("", "diagonal", noise) for noise in (2.0, 4.0)),
    ),
)  # fmt: skip
LARGE_BATCH = replace(  # 2,560 steps of twice the tokens for the largest size
    FULL, tokens_per_parameter=2560 * 2**15 / FULL.parameters(FULL.top), rows=64, lr=0.0156, other_rates=(),
    fixed={Size(256, 8): (0,), Size(256, 4): (0,), Size(256, 4, 8): (0,)},
    grown={
        (Size(256, 4, 8), Size(256, 8)): (INTERLEAVES, {-2: (0,), -1: (0,)}),
        (Size(256, 4), Size(256, 8)): (STACKS, {-2: (0,)}),
    },
)  # fmt: skip
_DEPTHS = [Size(256, layers, 2) for layers in (2, 4, 8, 16)]
DEPTHS = replace(  # 1,200 steps at every depth and rate
    FULL, tokens_per_parameter=1200 * 2**14 / FULL.parameters(_DEPTHS[-1]), top=_DEPTHS[-1], grown={},
    fixed={size: (round(math.log2(FULL.flops(size) / FULL.flops(_DEPTHS[-1])), 4),) for size in _DEPTHS},
    other_rates=(0.25, 0.5, 2.0, 4.0),
)  # fmt: skip
RUNG = replace(  # one step further: 5 tokens per parameter
    FULL, top=Size(512, 4), tokens_per_parameter=5, other_rates=(),
    fixed={Size(512, 4): (0.5, 0, -1), Size(256, 4): (), Size(512, 2): (), Size(512, 2, 4): ()},
    grown={
        (Size(256, 4), Size(512, 4)): (WIDTH[:1], {-2: (0,)}),
        (Size(512, 2), Size(512, 4)): (STACKS[:1], {-2: (0,)}),
        (Size(512, 2, 4), Size(512, 4)): (INTERLEAVES, {-2: (0,)}),
    },
)  # fmt: skip
_SUNK = {5: (0, -1, -2, -3), 20: (0, -1, -2, -3), 80: (0, -1, -2, -3)}
SUNK = replace(
    FULL, top=Size(128, 4), tokens_per_parameter=15, other_rates=(), noises=(), sunk=True,
    fixed={
        Size(128, 8): (0, -1, -2, -3), Size(128, 4): (0.5, 0, -1, -2, -3), Size(64, 8): (0, -1, -2, -3),
        Size(64, 4): (),
    },
    grown={
        (Size(64, 4), Size(128, 8)): ((Way("stack", "diagonal", 1.0),), _SUNK),
        (Size(64, 4), Size(128, 4)): (WIDTH[:1], _SUNK),
        (Size(64, 4), Size(64, 8)): (STACKS[:1], _SUNK),
        (Size(64, 4), Size(64, 4)): ((FIXED,), _SUNK),
    },
)  # fmt: skip
SUNK_SLOW = replace(SUNK, lr=SUNK.lr / 2)  # at which a start of 80 tokens per parameter is stable a little longer
QUICK = Ladder(  # for the embedded sample of text
    fixed={Size(16, 1): (-1, -2), Size(32, 1): (0, -1), Size(32, 2): (0, -1), Size(16, 1, 2): (), Size(32, 1, 2): ()},
    grown={
        (Size(16, 1), Size(32, 1)): (WIDTH, {-2: (-1, 0)}),
        (Size(32, 1), Size(32, 2)): (STACKS, {-2: (-1, 0)}),
        (Size(32, 1, 2), Size(32, 2)): (INTERLEAVES, {-2: (-1, 0)}),
        (Size(16, 1, 2), Size(32, 2)): (BOTH, {-2: (-1, 0)}),
    },
    top=Size(32, 2), tokens_per_parameter=0.005, rows=2, context=16, vocabulary=4096, warm_up=4, validated=16,
    other_rates=(2.0, 0.5), noises=(Way("", "duplication", 0.12),),
)  # fmt: skip
LADDERS = {
    "full": FULL, "large_batch": LARGE_BATCH, "depths": DEPTHS, "rung": RUNG, "sunk": SUNK, "sunk_slow": SUNK_SLOW,
    "quick": QUICK,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One trunk with its branches. With `start`, it grows from that size's trunk, at the budget `grown_at`."""

    size: Size
    lr: float
    seed: int
    budgets: tuple[float, ...]
    start: Size | None = None
    grown_at: float = 0
    way: Way = FIXED

    @property
    def name(self) -> str:
        trunk = trunk_name(self.size, self.lr, self.seed)
        if self.start is None:
            return trunk
        start = self.start if self.way.depth else self.start.width
        return f"{start}-{trunk}-at{self.grown_at}-{self.way if self.way != FIXED else 'as-it-is'}"

    def is_ready(self, folder: Path) -> bool:
        return self.start is None or self.start_state(folder).exists()

    def start_state(self, folder: Path) -> Path:
        assert self.start is not None
        return state_file(folder, trunk_name(self.start, self.lr, self.seed), self.grown_at)


def trunk_name(size: Size, lr: float, seed: int) -> str:
    return f"{size}-lr{lr:g}-seed{seed}"


def state_file(folder: Path, trunk: str, power: float) -> Path:
    return folder / "states" / f"{trunk}-at{power}.pt"


def plan_runs(ladder: Ladder, seeds: Sequence[int]) -> list[Run]:
    """All runs: those of each seed, then those of the first seed alone: other rates, other levels of noise."""
    lr, first, runs = ladder.lr, seeds[0], []

    def grown(pair: tuple[Size, Size], rate: float, seed: int, ways: Iterable[Way]) -> list[Run]:
        start, size = pair
        points = ladder.grown[pair][1].items()
        return [Run(size, rate, seed, budgets, start, point, way) for way in ways for point, budgets in points]

    for seed in seeds:
        runs += [Run(size, lr, seed, budgets) for size, budgets in list(ladder.fixed.items())[::-1]]
        for pair, (ways, _) in ladder.grown.items():
            runs += grown(pair, lr, seed, [way for way in ways if seed == first or way.depth != "identity"])
    for factor in ladder.other_rates:  # up to about 10 tokens per parameter
        runs += [Run(size, factor * lr, first, budgets[-3:]) for size, budgets in ladder.fixed.items()]
    for pair, (ways, _) in ladder.grown.items():
        runs += grown(pair, lr, first, ladder.noises if ways == WIDTH else ())
        rates = [factor * lr for factor in ladder.other_rates if pair[1] == ladder.top]
        runs += [run for rate in rates for run in grown(pair, rate, first, ways[:1])]
    return runs


class Text:
    """The text on the training device: batches by seed and step, and the rows of the validation."""

    def __init__(self, folder: str | None, ladder: Ladder, device: torch.device) -> None:
        self.rows, context = ladder.rows, ladder.context
        data = FineWeb(folder, batch_size=self.rows, context=context, order="sequential")
        data.setup()
        train, held_out = (torch.cat(list(loader)) for loader in (data.train_dataloader(), data.val_dataloader()))
        self.validation = held_out[: ladder.validated].to(device)
        # consecutive rows share a token; ids fit into int16
        self.tokens = train[:, :-1].flatten().to(device, torch.int16)
        self.windows = self.tokens.unfold(0, context + 1, 1)
        self.per_pass = len(self.tokens) // context - 2
        self._starts: dict[tuple[int, int], Tensor] = {}

    def batch(self, seed: int, step: int) -> Tensor:
        """Each pass reads all windows once, in an order and from an offset of its own."""
        number, position = divmod(step, self.per_pass // self.rows)
        if (seed, number) not in self._starts:
            generator, context = torch.Generator().manual_seed(1_000 * seed + number), self.windows.shape[1] - 1
            offset = torch.randint(context, (), generator=generator)
            starts = offset + context * torch.randperm(self.per_pass, generator=generator)
            self._starts = {(seed, number): starts.to(self.tokens.device)}
        rows = self._starts[seed, number][position * self.rows : (position + 1) * self.rows]
        return self.windows[rows].long()


State = dict[str, Tensor]
"""Weights and optimizer state, by name."""


def make_model(ladder: Ladder, size: Size, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """The model of configs/gpt2/reduced and its optimizer, at lr 1 for the base width."""
    module = GPT2(
        size.width, base_width=64, layers=size.layers, base_layers=size.base_layers or None, heads=8,
        vocabulary=ladder.vocabulary, context=ladder.context, tied=False, gain=0.5, embedding_std=0.1,
        output_mult=4.0, readout_zero_init=True, optimizer=partial(torch.optim.AdamW, lr=1.0, **ADAMW),
    )  # fmt: skip
    with device:
        module.configure_model()
    assert module.net is not None
    return module.net, module.configure_optimizers()


def state_of(net: nn.Module, optimizer: Optimizer) -> State:
    """The tensors themselves; those of an optimizer that has not stepped are missing."""
    tensors = {name: parameter.data for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return tensors


class Runner:
    """Trains a network from any state on a text; the rates of its optimizer are those that each step has a share of."""

    def __init__(
        self,
        text: Text,
        net: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Tensor], Tensor],
        clip: Callable[[], Any],
    ) -> None:
        self.text, self.net, self.optimizer = text, net, optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]
        device = text.tokens.device
        self.step = BareStep(optimizer, loss, clip, device, bfloat16=device.type == "cuda")

    def load(self, state: State) -> None:
        """Takes weights and optimizer state; what is missing is zero."""
        for name, tensor in state_of(self.net, self.optimizer).items():
            tensor.copy_(state[name]) if name in state else tensor.zero_()

    def copy(self) -> State:
        return {name: tensor.clone() for name, tensor in state_of(self.net, self.optimizer).items()}

    def train(self, seed: int, steps: range, share: Callable[[int], float], points: int = 1) -> list[tuple[int, float]]:
        """Trains for these steps; `points` times, the number of steps so far and their mean loss."""
        curve: list[tuple[int, float]] = []
        losses: list[Tensor] = []
        for step in steps:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * share(step)
            losses.append(self.step(self.text.batch(seed, step)))
            if len(losses) >= len(steps) / points or step == steps[-1]:
                curve.append((step + 1, float(torch.stack(losses).mean())))
                losses = []
        return curve

    @torch.no_grad()
    def validate(self) -> float:
        with torch.compiler.set_stance("force_eager"):
            losses = [self.step.loss(batch) for batch in self.text.validation.split(self.text.rows)]
        return float(torch.stack(losses).mean())


@cache
def read_text(ladder: str, folder: str | None, device: str) -> Text:
    return Text(folder, LADDERS[ladder], torch.device(device))


@cache
def make_runner(ladder: str, folder: str | None, device: str, size: Size) -> Runner:
    """That of a size, which a process keeps from run to run. On a GPU its step is compiled and captured once."""
    torch.set_float32_matmul_precision("high")
    text = read_text(ladder, folder, device)
    net, optimizer = make_model(LADDERS[ladder], size, torch.device(device))
    clip = partial(mupscale.clip_grad_norm_, net, CLIP)
    runner = Runner(text, net, optimizer, lambda batch: net(batch[:, :-1], batch[:, 1:]), clip)
    if torch.device(device).type == "cuda":
        for part in (*net.blocks, net.head):  # type: ignore[misc]
            part.compile(dynamic=False)
    runner.train(0, range(3), lambda step: 0.0)
    if torch.device(device).type == "cuda":
        runner.step.capture(text.batch(0, 0))
    return runner


def grow(ladder: Ladder, run: Run, start_state: State, device: torch.device) -> State:
    assert run.start is not None
    if run.way == FIXED:
        return start_state
    size = run.size._replace(base_layers=run.start.base_layers)
    (narrow, narrow_optimizer), (wide, wide_optimizer) = (
        make_model(ladder, each, device) for each in (run.start, size)
    )
    for name, parameter in narrow.named_parameters():
        parameter.data.copy_(start_state[name])
        keys = ("step", "exp_avg", "exp_avg_sq")
        narrow_optimizer.state[parameter] = {key: start_state[f"{name}/{key}"].to(device) for key in keys}
    depth, method, noise = run.way
    mupscale.upscale(
        narrow, wide, narrow_optimizer, wide_optimizer, depth=depth or None,
        method=METHODS[method or "duplication"](state="carry", hyperparameters="table"),
        noise=mupscale.AdditiveNoise(noise, centred=True) if method else None, seed=run.seed,
    )  # fmt: skip
    return state_of(wide, wide_optimizer)


def train_run(ladder: Ladder, run: Run, runner: Runner, folder: Path) -> dict[str, Any]:
    """Trains a trunk and its branches; returns the losses at the ends, and the curves."""
    started, device = time.perf_counter(), runner.text.tokens.device
    cost, tokens = ladder.flops(run.size), ladder.rows * ladder.context
    first, spent, around_growth = 0, 0.0, None
    torch.manual_seed(run.seed)
    if run.start is None:
        runner.load(state_of(*make_model(ladder, run.size, device)))
    else:
        saved = torch.load(run.start_state(folder), map_location=device)
        first, spent = saved["steps"], ladder.start_cost(run.start, run.grown_at)
        runner.load(grow(ladder, run, saved["state"], device))
        around_growth = [saved["loss"], runner.validate()]
    curve: list[tuple[float | None, int, float, float]] = []

    def flops_at(step: int) -> float:
        return spent + (step - first) * cost

    def train(steps: range, factor: Callable[[int], float], points: int, power: float | None) -> None:
        def rate(step: int) -> float:
            return run.lr * min(1.0, (step + 1) / ladder.warm_up) * factor(step)

        for step, loss in runner.train(run.seed, steps, rate, points):
            curve.append((power, step * tokens, flops_at(step), loss))

    sunk = spent if ladder.sunk else 0.0
    branches = {sunk + (1 - DECAY) * ladder.budget(power): power for power in run.budgets}
    growths = [points for (size, _), (_, points) in ladder.grown.items() if size == run.size and run.start is None]
    saved_points = {ladder.start_cost(run.size, point): point for points in growths for point in points}
    stops = sorted({*branches, *saved_points})
    ends, step = [], first
    for stop in stops:
        until = first + round((stop - spent) / cost)
        train(range(step, until), lambda _: 1.0, max(1, round(POINTS * (until - step) * cost / stops[-1])), None)
        step = until
        state = runner.copy()
        loss = runner.validate()
        if stop in saved_points:
            path = state_file(folder, trunk_name(run.size, run.lr, run.seed), saved_points[stop])
            with replacing(path) as new:
                torch.save({"state": state, "steps": step, "loss": loss}, new)
        if stop in branches:
            end = step + round(DECAY * ladder.budget(branches[stop]) / cost)
            train(range(step, end), partial(fall, step, end), POINTS // 8, branches[stop])
            ends.append({
                "power": branches[stop], "flops": flops_at(end), "tokens": end * tokens, "loss": runner.validate(),
                "loss_before_decay": loss, "train_loss": curve[-1][-1],
            })  # fmt: skip
            runner.load(state)
    seconds = time.perf_counter() - started
    return {"run": asdict(run), "ends": ends, "curve": curve, "around_growth": around_growth, "seconds": seconds}


def fall(start: int, end: int, step: int) -> float:
    """From 1 at the step `start` to 0 at `end`."""
    return (end - step) / (end - start)


def make_run(options: argparse.Namespace, run: Run) -> None:
    """In a process of the pool."""
    runner = make_runner(options.ladder, options.data, options.device, run.size)
    result = train_run(LADDERS[options.ladder], run, runner, options.out)
    write_text(result_file(run, options.out), json.dumps(result))
    ends = ", ".join(f"2^{end['power']:g}: {end['loss']:.4f}" for end in result["ends"])
    print(f"{run.name} in {result['seconds']:.1f} s  {ends}", flush=True)


def result_file(run: Run, folder: Path) -> Path:
    """A size that others only grow from has another name than one with ends, which is trained further."""
    return folder / "runs" / f"{run.name}{'' if run.budgets else '-start'}.json"


def collect(folder: Path, out: Path) -> None:
    """Writes runs.csv, a row for each branch, and curves.csv, the training losses of all trunks and branches."""
    ends, points = [], []
    for path in sorted(folder.glob("runs/*.json")):
        result = json.loads(path.read_text())
        run = result["run"]
        (width, layers, base_layers), start = run["size"], run["start"]
        size = width, layers, (start[2] if start else base_layers) or ""
        growth = (*start[:2], run["grown_at"], *run["way"]) if start else ("",) * 6
        around = [f"{loss:.4f}" for loss in result["around_growth"] or ()] or ["", ""]
        for end in result["ends"]:
            cost = end["power"], end["tokens"], f"{end['flops']:.5g}"
            losses = [f"{end[key]:.4f}" for key in ("loss", "loss_before_decay", "train_loss")]
            ends.append((path.stem, *size, *growth, run["lr"], run["seed"], *cost, *losses, *around))
        for power, tokens, flops, loss in result["curve"]:
            points.append((path.stem, power, tokens, f"{flops:.3g}", f"{loss:.3f}"))
    for name, header, rows in (("runs", RUNS_HEADER, ends), ("curves", CURVES_HEADER, points)):
        with (out / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder of the prepared text; by default the embedded sample")
    parser.add_argument("--ladder", choices=LADDERS, default="full", help="quick: tiny sizes, to test the benchmark")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs, or of the CSV files")
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="write the CSV files from this folder of runs")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--only", default="", help="the runs in whose names this pattern is found")
    parser.add_argument(
        "--starts", action="store_true", help="train fixed sizes only as far as others grow from them: no ends"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.collect:
        collect(options.collect, options.out)
        return
    for name in ("runs", "states"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    ladder = LADDERS[options.ladder]
    if options.starts:
        ladder = replace(ladder, fixed=dict.fromkeys([start for start, _ in ladder.grown], ()))
    runs = [run for run in plan_runs(ladder, options.seeds) if re.search(options.only, run.name)]
    runs = [run for run in runs if not result_file(run, options.out).exists()]
    with processes(options.workers) as executor:
        for is_grown in (False, True):  # a run that grows begins with a state that one of fixed size has saved
            ready = [run for run in runs if bool(run.start) == is_grown and run.is_ready(options.out)]
            list(executor.map(partial(make_run, options), ready))


def processes(workers: int) -> ProcessPoolExecutor:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(workers, get_context("spawn"))
