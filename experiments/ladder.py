"""Does growing pay? GPT-2 of fixed sizes, and grown in width, in depth and in both, at equal FLOPs.

    python -m mupscale prepare text wikipedia.txt --vocab 8192 --out data/wikipedia
    python -m experiments.ladder full --data data/wikipedia --out runs/ladder --workers 8
    python -m experiments.ladder muon --data data/wikipedia --out runs/muon --workers 8 --only 'seed0$'
    python -m experiments.ladder full --collect runs/ladder --out docs/results/ladder

A run is a trunk at a constant learning rate. For each of its budgets a branch leaves the trunk at 80 % of the FLOPs,
and its rate falls linearly to zero over the rest. A grown run starts from a saved state of a small trunk, whose FLOPs
count. docs/results/ladder.md has the measure and the results. Sizes and budgets are in experiments/ladder/NAME.yaml.
The second command can be stopped and started again: finished runs are kept. The last writes the two CSV files from
which the page's tables are computed.

Under Muon the matrices of the blocks are trained by torch.optim.Muon, and all else by AdamW. Rates and weight decay are
those of width 64; muP gives those of other widths. At width 256 Muon has half its rate and twice its decay.
"""

import argparse
import csv
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn
from torch.optim import Optimizer

import mupscale
from experiments.steps import ADAMW, CLIP, DECAY, MUON, Runner, State, Text, fall, processes, state_of
from mupscale.atomic import replacing, write_text
from mupscale.cuda_graph import use_fused
from mupscale.models.gpt2 import GPT2

FOLDER = Path(__file__).with_suffix("")
POINTS = 48
"""Points of the curve of a trunk; a branch has an eighth of them."""
RUNS_HEADER = (
    "run", "width", "layers", "base_layers", "from_width", "from_layers", "grown_at", "depth", "method", "noise", "lr",
    "muon_lr", "seed", "budget", "tokens", "flops", "loss", "loss_before_decay", "train_loss", "loss_before_growth",
    "loss_after_growth",
)  # fmt: skip
"""`grown_at` and `budget` are binary logarithms of shares of the largest budget; in `sunk`, `grown_at` is that of its
start in tokens per parameter. `base_layers` of a run that grows is that of its start. Only `train_loss` is not held
out."""
CURVES_HEADER = ("run", "branch", "tokens", "flops", "train_loss")
"""`branch` is the budget for which the rate falls; a trunk has none."""
METHODS = {"duplication": mupscale.methods.Duplication, "diagonal": partial(mupscale.methods.HyperCloning, "diagonal")}


class Size(NamedTuple):
    """The size of a GPT-2. With `base_layers`, residual branches are multiplied by base_layers / layers (CompleteP)."""

    width: int
    layers: int
    base_layers: int = 0

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}" + (f"-base{self.base_layers}" if self.base_layers else "")


def read_size(text: str) -> Size:
    return Size(*map(int, re.split("x|-base", text)))


class Way(NamedTuple):
    """How a run grows: `depth` of upscale, if its layers grow; a method and centred noise, if its width does.

    A depth such as "0,1,2,1,2,3" gives the source of each layer.
    """

    depth: str = ""
    method: str = ""
    noise: float = 0.0

    def __str__(self) -> str:
        width = f"{self.method}-{self.noise:g}" if self.method else ""
        return "-".join(part for part in (self.depth, width) if part)


AS_IT_IS = Way()


def read_way(text: str) -> Way:
    """Parses "stack", "diagonal-1" or "interleave-diagonal-1"; "" trains the small size on as it is."""
    depth, method, noise = re.fullmatch(r"([a-z]+|[\d,]+)??-?(?:(duplication|diagonal)-([\d.]+))?", text).groups("")  # type: ignore[union-attr]
    return Way(depth, method, float(noise or 0))


class Rates(NamedTuple):
    """Learning rates at width 64; without `muon`, AdamW trains everything."""

    adamw: float
    muon: float = 0.0

    def __str__(self) -> str:
        return f"lr{self.adamw:g}" + (f"-muon{self.muon:g}" if self.muon else "")


@dataclass(frozen=True)
class Ladder:
    """Sizes and budgets. A budget is 2^n times that of the `top` size in so many steps."""

    top: Size
    steps: float
    plans: list[dict[str, Any]]
    """The plans of the file. `fixed`: budgets by size, none for one that only grows; `grown`: ways between sizes,
    and budgets by point of growth; `factors` on the tuned rates, those of Muon where it trains."""
    rows: int
    context: int
    vocabulary: int
    warm_up: int
    validated: int
    """Rows of the held-out text that a validation reads."""
    lr: float
    muon_lr: float = 0.0
    muon_lrs: dict[Size, float] = field(default_factory=dict)
    """Rates of Muon of the sizes for which another one is best."""
    sunk: bool = False
    """A start exists already: points of growth are its tokens per parameter, and budgets do not include it."""

    def rates(self, size: Size, factor: float) -> Rates:
        if not self.muon_lr:
            return Rates(factor * self.lr)
        return Rates(self.lr, factor * self.muon_lrs.get(size, self.muon_lr))

    def flops(self, size: Size) -> int:
        """FLOPs of a step: 6N + 12 · layers · width · context a token. N counts the readout, but not the tables of
        tokens and positions, since looking up costs nothing."""
        matrices = self.parameters(size) - (self.vocabulary + self.context) * size.width
        return self.rows * self.context * (6 * matrices + 12 * size.layers * size.width * self.context)

    def parameters(self, size: Size) -> int:
        """The number of all parameters, embeddings and readout included."""
        block = 12 * size.width**2 + 13 * size.width
        return (2 * self.vocabulary + self.context + 2) * size.width + size.layers * block

    def budget(self, power: float) -> float:
        return 2**power * self.steps * self.flops(self.top)

    def start_cost(self, size: Size, point: float) -> float:
        """What a start of this size has cost at a point of growth."""
        if not self.sunk:
            return self.budget(point)
        return point * self.parameters(size) / (self.rows * self.context) * self.flops(size)


def read_ladder(name: str) -> Ladder:
    """Reads a file of experiments/ladder. Budgets are in `steps` of the top size, or in tokens per parameter."""
    content = read_content(name)
    content["top"] = read_size(content["top"])
    content["muon_lrs"] = {read_size(size): rate for size, rate in content.get("muon_lrs", {}).items()}
    tokens = content.pop("tokens_per_parameter", None)
    ladder = Ladder(**{"steps": 0.0} | content)
    if tokens is None:
        return ladder
    return replace(ladder, steps=tokens * ladder.parameters(ladder.top) / (ladder.rows * ladder.context))


def read_content(name: str) -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    return read_content(content.pop("base")) | content if "base" in content else content


@dataclass(frozen=True)
class Run:
    """One trunk with its branches. With `start`, it grows from that size's trunk, at the budget `grown_at`."""

    size: Size
    rates: Rates
    seed: int
    budgets: tuple[float, ...]
    start: Size | None = None
    start_rates: Rates | None = None
    grown_at: float = 0
    way: Way = AS_IT_IS
    saved_at: tuple[float, ...] = ()
    """Points at which others grow from it."""

    @property
    def name(self) -> str:
        trunk = f"{self.size}-{self.rates}-seed{self.seed}"
        if self.start is None:
            return trunk
        start = self.start if self.way.depth else self.start.width
        return f"{start}-{trunk}-at{self.grown_at}-{self.way if self.way != AS_IT_IS else 'as-it-is'}"

    def state_file(self, folder: Path) -> Path:
        """The file with the state from which it grows."""
        return state_file(folder, (self.start, self.start_rates, self.seed), self.grown_at)

    def result_file(self, folder: Path) -> Path:
        """A size that others only grow from has another name than one with ends, which is trained further."""
        return folder / "runs" / f"{self.name}{'' if self.budgets else '-start'}.json"


def state_file(folder: Path, trunk: tuple[Any, ...], point: float) -> Path:
    size, rates, seed = trunk
    return folder / "states" / f"{size}-{rates}-seed{seed}-at{point}.pt"


def plan_runs(ladder: Ladder, seeds: Sequence[int]) -> list[Run]:
    """Returns all runs, in the order of the file; where a size is in several plans, the first counts."""
    runs: dict[str, Run] = {}

    def add(run: Run) -> None:
        runs.setdefault(run.name, run)

    for plan in ladder.plans:
        for seed, factor in product(seeds[: 1 if plan.get("first_seed_only") else None], plan.get("factors", [1.0])):
            for name, budgets in plan.get("fixed", {}).items():
                size = read_size(name)
                add(Run(size, ladder.rates(size, factor), seed, tuple(budgets)))
            for row in plan.get("grown", []):
                start, size = read_size(row["from"]), read_size(row["to"])
                rates = ladder.rates(size, factor), ladder.rates(start, factor)
                for way, (point, budgets) in product(row["ways"], row["at"].items()):
                    add(Run(size, rates[0], seed, tuple(budgets), start, rates[1], point, read_way(way)))
    grown = [run for run in runs.values() if run.start]
    points: dict[Any, set[float]] = defaultdict(set)
    for run in grown:
        points[run.start, run.start_rates, run.seed].add(run.grown_at)
    fixed = [run for run in runs.values() if not run.start]
    saved = {run.name: replace(run, saved_at=tuple(points[run.size, run.rates, run.seed])) for run in fixed}
    return [saved.get(name, run) for name, run in runs.items()]


def make_model(ladder: Ladder, size: Size, device: torch.device) -> tuple[nn.Module, list[Optimizer]]:
    """Returns the model of configs/gpt2/reduced, and AdamW and perhaps Muon, at rate 1 for the base width."""
    module = GPT2(
        size.width, base_width=64, layers=size.layers, base_layers=size.base_layers or None, heads=8,
        vocabulary=ladder.vocabulary, context=ladder.context, tied=False, gain=0.5, embedding_std=0.1,
        output_mult=4.0, readout_zero_init=True,
    )  # fmt: skip
    with device:
        module.configure_model()
    net = module.net
    assert net is not None
    hidden = [name for name, each in net.named_parameters() if ladder.muon_lr and "blocks." in name and each.ndim == 2]
    parts = [[p for name, p in net.named_parameters() if (name in hidden) == is_hidden] for is_hidden in (False, True)]
    optimizers: list[Optimizer] = [torch.optim.AdamW(parts[0], lr=1.0, **ADAMW)]  # type: ignore[arg-type]
    if hidden:
        optimizers.append(torch.optim.Muon(parts[1], lr=1.0, **MUON))  # type: ignore[arg-type]
    for optimizer in optimizers:
        mupscale.apply_mup(optimizer, net)
        use_fused(optimizer)
    return net, optimizers


@cache
def read_text(ladder: str, folder: str | None, device: str) -> Text:
    of = read_ladder(ladder)
    return Text(folder, of.rows, of.context, of.validated, device)


_RUNNERS: dict[Size, Runner] = {}


def make_runner(ladder: Ladder, text: Text, size: Size) -> Runner:
    """Returns that of a size, which a process keeps. On a GPU its step is compiled and captured once."""
    if size not in _RUNNERS:
        torch.set_float32_matmul_precision("high")
        net, optimizers = make_model(ladder, size, text.tokens.device)
        clip = partial(mupscale.clip_grad_norm_, net, CLIP)
        runner = _RUNNERS[size] = Runner(text, net, optimizers, lambda batch: net(batch[:, :-1], batch[:, 1:]), clip)
        if runner.device.type == "cuda":
            for part in (*net.blocks, net.head):  # type: ignore[misc]
                part.compile(dynamic=False)
        runner.train(0, range(3), (0.0, 0.0), lambda step: 1.0)
        if runner.device.type == "cuda":
            runner.capture()
    return _RUNNERS[size]


def grow(ladder: Ladder, run: Run, start_state: State, device: torch.device) -> State:
    """Returns the state of the large network, as `upscale` makes it from that of the small one."""
    assert run.start is not None
    if run.way == AS_IT_IS:
        return start_state
    size = run.size._replace(base_layers=run.start.base_layers)
    (narrow, narrow_optimizers), (wide, wide_optimizers) = (
        make_model(ladder, each, device) for each in (run.start, size)
    )
    for name, parameter in narrow.named_parameters():
        parameter.data.copy_(start_state[name])
    by_id = {id(parameter): name for name, parameter in narrow.named_parameters()}
    for optimizer in narrow_optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            prefix = f"{by_id[id(parameter)]}/"
            kept = {name.removeprefix(prefix): each for name, each in start_state.items() if name.startswith(prefix)}
            optimizer.state[parameter] = kept
    depth, method, noise = run.way
    sources: Any = {"blocks": [int(each) for each in depth.split(",")]} if "," in depth else depth or None
    mupscale.upscale(
        narrow, wide, narrow_optimizers, wide_optimizers, depth=sources,
        method=METHODS[method or "duplication"](state="carry", hyperparameters="table"),
        noise=mupscale.AdditiveNoise(noise, centred=True) if method else None, seed=run.seed,
    )  # fmt: skip
    return state_of(wide, wide_optimizers)


def train_run(ladder: Ladder, run: Run, runner: Runner, folder: Path) -> dict[str, Any]:
    """Trains a trunk and its branches; returns the losses at the ends, and the curves."""
    started = time.perf_counter()
    cost, tokens = ladder.flops(run.size), ladder.rows * ladder.context
    first, spent, around_growth = 0, 0.0, None
    torch.manual_seed(run.seed)
    if run.start is None:
        runner.load(state_of(*make_model(ladder, run.size, runner.device)))
    else:
        saved = torch.load(run.state_file(folder), map_location=runner.device)
        first, spent = saved["steps"], ladder.start_cost(run.start, run.grown_at)
        runner.load(grow(ladder, run, saved["state"], runner.device))
        around_growth = [saved["loss"], runner.validate()]
    curve: list[tuple[float | None, int, float, float]] = []

    def flops_at(step: int) -> float:
        return spent + (step - first) * cost

    def train(steps: range, factor: Callable[[int], float], points: int, power: float | None) -> None:
        def share(step: int) -> float:
            return min(1.0, (step + 1) / ladder.warm_up) * factor(step)

        for step, loss in runner.train(run.seed, steps, run.rates, share, points):
            curve.append((power, step * tokens, flops_at(step), loss))

    sunk = spent if ladder.sunk else 0.0
    branches = {sunk + (1 - DECAY) * ladder.budget(power): power for power in run.budgets}
    growths = {ladder.start_cost(run.size, point): point for point in run.saved_at}
    stops = sorted({*branches, *growths})
    ends, step = [], first
    for stop in stops:
        until = first + round((stop - spent) / cost)
        train(range(step, until), lambda _: 1.0, max(1, round(POINTS * (until - step) * cost / stops[-1])), None)
        step = until
        state = runner.copy()
        loss = runner.validate()
        if stop in growths:
            with replacing(state_file(folder, (run.size, run.rates, run.seed), growths[stop])) as stream:
                torch.save({"state": state, "steps": step, "loss": loss}, stream)
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


def make_run(options: argparse.Namespace, ladder: Ladder, run: Run) -> None:
    """Makes one run, in a process of the pool."""
    runner = make_runner(ladder, read_text(options.ladder, options.data, options.device), run.size)
    result = train_run(ladder, run, runner, options.out)
    write_text(run.result_file(options.out), json.dumps(result))
    ends = ", ".join(f"2^{end['power']:g}: {end['loss']:.4f}" for end in result["ends"])
    print(f"{run.name} in {result['seconds']:.1f} s  {ends}", flush=True)


def collect(folder: Path, out: Path) -> None:
    """Writes runs.csv, a row for each branch, and curves.csv, the training losses of all trunks and branches."""
    ends, points = [], []
    for path in sorted(folder.glob("runs/*.json")):
        result = json.loads(path.read_text("utf-8"))
        run = result["run"]
        (width, layers, base_layers), start = run["size"], run["start"]
        size = width, layers, (start[2] if start else base_layers) or ""
        growth = (*start[:2], run["grown_at"], *run["way"]) if start else ("",) * 6
        around = [f"{loss:.4f}" for loss in result["around_growth"] or ()] or ["", ""]
        rate, muon_rate = run["rates"]
        for end in result["ends"]:
            cost = end["power"], end["tokens"], f"{end['flops']:.5g}"
            losses = [f"{end[key]:.4f}" for key in ("loss", "loss_before_decay", "train_loss")]
            ends.append((path.stem, *size, *growth, rate, muon_rate or "", run["seed"], *cost, *losses, *around))
        for power, tokens, flops, loss in result["curve"]:
            points.append((path.stem, power, tokens, f"{flops:.3g}", f"{loss:.3f}"))
    for name, header, rows in (("runs", RUNS_HEADER, ends), ("curves", CURVES_HEADER, points)):
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ladder", help="a file of experiments/ladder; quick has tiny sizes")
    parser.add_argument("--data", help="the folder of the prepared text; by default the embedded sample")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs, or of the CSV files")
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="write the CSV files from this folder of runs")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--only", default="", help="the runs in whose names this pattern is found")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.collect:
        collect(options.collect, options.out)
        return
    ladder = read_ladder(options.ladder)
    runs = [run for run in plan_runs(ladder, options.seeds) if re.search(options.only, run.name)]
    for name in ("runs", "states"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    runs = [run for run in runs if not run.result_file(options.out).exists()]
    with processes(options.workers) as executor:
        for is_grown in (False, True):  # a run that grows begins with a state that one of fixed size has saved
            ready = [run for run in runs if bool(run.start) == is_grown]
            ready = [run for run in ready if not is_grown or run.state_file(options.out).exists()]
            list(executor.map(partial(make_run, options, ladder), ready))


if __name__ == "__main__":
    main()
