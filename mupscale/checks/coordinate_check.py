"""The coordinate check: do the outputs of layers, and their change in training, keep their scale as the width grows?

Under muP both are Θ(1) in the width, in a new network and in a grown one. The output of the network itself may
start smaller (as width^-1/2, or zero), but must not grow. Sizes are measured in three scans, and a slope is fitted to
each:

fresh     networks of every width, at initialisation and over their first steps
doubled   the same networks after these steps, grown twofold with noise and trained further
grown     the narrowest network, grown 2, 4 and 8 times. A mistake that depends only on the factor (optimizer state
          moved in the wrong units) has the same size at every width, so that only this scan shows it.

Over the depth there is the first scan only. What the layers of a list put out counts as one: `blocks.*.mlp.0`; the
outputs of whole layers, `blocks.*`, are the residual stream.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.base_shapes import clip_grad_norm_
from mupscale.checks.recording import refuse_unless_loss, state_kept
from mupscale.checks.trace import float_copies, hooked
from mupscale.errors import UserError, refuse_unless_level, refuse_unless_model, refuse_unless_whole
from mupscale.methods.grow import as_list, grow
from mupscale.methods.noise import AdditiveNoise, Noise
from mupscale.readout import Readout
from mupscale.text_tables import Paint, Style, Watch, folded, table, unpainted, unwatched

FACTORS = (2, 4, 8)
"""The factors by which the narrowest network grows; the others grow by the first."""

TOLERANCE = 0.25
"""The tolerance of a slope. A mistake changes the power by at least 1/2 (noise or initial weights) or 1 (rates, state);
the tolerance is half of the first. Correct models were within 0.2 for MLPs and GPT-2 from width 32, and within 0.24 for
ResNets from 16 channels, where two seeds vary as much. So a slope fails only if it exceeds the tolerance by more than
its standard error over the seeds.
"""

FALLING_TOLERANCE = 0.5
"""The tolerance of the slope of an update that falls, half of the power 1. The samples of a batch interfere with each
other's updates by an amount that falls as width^-1/2 and is large in narrow networks: correct transformers had slopes
down to -0.42 from width 32.
"""

DEFAULT_NOISE = AdditiveNoise(0.1)

ScannedAxis = Literal["width", "depth"]

NETWORK = "(the network)"
"""The name of the whole network among its layers, if it has parameters of its own."""


@dataclass(frozen=True)
class Scan:
    """What was measured at several widths, or numbers of layers."""

    name: str
    title: str
    widths: tuple[int, ...]
    """The widths of the measured networks (of grown ones after the growth), or their numbers of layers."""
    sizes: dict[str, Tensor]
    """Sizes of each layer, in the order of the forward pass: [seeds, widths, 1 + steps, 2], the root mean square of its
    output and of the change of its output since the first, on one batch.
    """

    def mean(self, layer: str) -> Tensor:
        """[widths, 1 + steps, 2]: the quadratic mean over seeds."""
        return self.sizes[layer].square().mean(0).sqrt()

    def slope(self, layer: str, quantity: int) -> tuple[float | None, float]:
        """The log-log slope of the first output (0) or its change (1), None if all is zero; and its standard error."""
        step = -1 if quantity else 0
        slope = log_log_slope(self.widths, self.mean(layer)[:, step, quantity])
        each = [log_log_slope(self.widths, sizes[:, step, quantity]) for sizes in self.sizes[layer]]
        finite = torch.tensor([x for x in each if x is not None and math.isfinite(x)], dtype=torch.float64)
        return slope, (finite.std() / math.sqrt(len(finite))).item() if len(finite) > 1 else 0.0


class Slopes(NamedTuple):
    """The slopes of one layer in one scan; None where there is nothing but zeros."""

    output: float | None
    update: float | None
    output_fails: bool
    update_fails: bool

    def problem(self, axis: ScannedAxis) -> str | None:
        """What is wrong with the layer in this scan, or None."""
        slopes = ("output", self.output, self.output_fails), ("update", self.update, self.update_fails)
        texts = [f"its {name} {_power(slope, axis)}" for name, slope, fails in slopes if fails and slope is not None]
        return " and ".join(texts) or None


@dataclass(frozen=True)
class CoordCheck:
    """The result of `coord_check`."""

    scans: tuple[Scan, ...]
    layers: dict[str, dict[str, Slopes]] = field(repr=False)
    """The slopes of each layer, in the order of the forward pass, by the name of the scan."""
    axis: ScannedAxis = "width"

    @property
    def failing(self) -> dict[str, str]:
        """What is wrong with each layer that fails."""
        answer = {}
        for name, scans in self.layers.items():
            problems = {scan: slopes.problem(self.axis) for scan, slopes in scans.items()}
            texts = [f"{scan}: {problem}" for scan, problem in problems.items() if problem]
            if texts:
                answer[name] = "; ".join(texts)
        return answer

    @property
    def first(self) -> str | None:
        """The layer to look at first.

        Outputs at the start of a scan inherit mistakes of earlier layers, updates also those of later layers.
        """
        fresh, *upscaled = (scan.name for scan in self.scans)
        for scans in ([fresh], upscaled):
            for quantity in ("output_fails", "update_fails"):
                for name, slopes in self.layers.items():
                    if any(getattr(slopes[scan], quantity) for scan in scans):
                        return name
        return None

    @property
    def passed(self) -> bool:
        return not self.failing

    def text(self, columns: int | None = None, paint: Paint = unpainted) -> str:
        """The slopes in a table, and what is wrong; for a terminal of `columns`."""
        failing = self.failing
        rows = [["layer"]]
        for scan in self.scans:
            rows[0] += [f"{scan.name}\noutput", f"{scan.name}\nupdate"]
        rows[0].append("")
        styles: dict[int, Style] = {}
        for name, scans in self.layers.items():
            both = [slope for slopes in scans.values() for slope in (slopes.output, slopes.update)]
            numbers = ["zero" if slope is None else f"{slope:+.2f}" for slope in both]
            if name in failing:
                styles[len(rows)] = "bad"
            rows.append([name, *numbers, "FAILS" if name in failing else "ok"])
        above = [f"slopes of log size against log {self.axis}"]
        above += [f"  {scan.name:<8} {scan.title}" for scan in self.scans]
        if self.passed:
            limits = f"tolerance {TOLERANCE}, {FALLING_TOLERANCE} where an update falls"
            below = [f"passed: no layer's output or update grows or vanishes with the {self.axis} ({limits})"]
        else:
            below = [f"FAILED in {len(failing)} of {len(self.layers)} layers, look first at {self.first}"]
        verdict = [paint(line, "good" if self.passed else "bad") for line in folded(below, columns)]
        problems = folded([f"  {name}: {problem}" for name, problem in failing.items()], columns)
        lines = table(rows, right=range(1, 1 + 2 * len(self.scans)), styles=styles, columns=columns, paint=paint)
        return "\n".join([*folded(above, columns), *lines, *verdict, *problems])

    __str__ = text


def coord_check(
    network: Callable[[int], nn.Module],
    widths: Sequence[int],
    *,
    optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]],
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int = 4,
    seeds: int = 3,
    noise: Noise | None = DEFAULT_NOISE,
    clip: float | None = None,
    axis: ScannedAxis = "width",
    watch: Watch = unwatched,
) -> CoordCheck:
    """Measures how the outputs of all layers, and their change in training, depend on the width, or on the depth.

    Networks are measured fresh, and across a growth; for the `axis` depth only fresh, and `widths` are numbers of
    layers.

    `network(width)` must return a new muP network, and `optimizer(network)` its muP-scaled optimizers. For each width,
    `seeds` networks are trained, cycling through `batches`; sizes are measured on the first batch.
    `watch(words, done, total)` is called after each network.
    """
    if clip is not None:
        refuse_unless_level("clip", clip)
    for width in widths:
        refuse_unless_whole("widths: each", width, least=0)
    widths = sorted(widths)
    if len(set(widths)) < 3 or len(set(widths)) < len(widths) or widths[0] < 1:
        raise UserError(
            f"{axis}s: a slope needs at least three different ones, got {', '.join(map(str, widths)) or 'none'}"
        )
    for name, value in (("steps", steps), ("seeds", seeds)):
        refuse_unless_whole(name, value)
    if not batches:
        raise UserError("batches is empty")

    small_and_large = _different(network, widths[:2], axis)
    lists = _lists(*small_and_large) if axis == "depth" else ()
    factors: tuple[int, ...] = FACTORS if axis == "width" else ()
    fresh: dict[int, list[_Sizes]] = {width: [] for width in widths}
    doubled: dict[int, list[_Sizes]] = {factor * width: [] for factor in factors[:1] for width in widths}
    grown: dict[int, list[_Sizes]] = {factor * widths[0]: [] for factor in factors}
    total, done = seeds * (len(widths) + len(doubled) + len(factors[1:])), 0
    with torch.random.fork_rng():
        for width in widths:
            for seed in range(seeds):
                torch.manual_seed(seed)
                narrow = network(width)
                refuse_unless_model(f"network({width})", narrow)
                narrow_opts = as_list(optimizer(narrow))
                if not narrow_opts:
                    raise UserError("optimizer must return the optimizer of the network, or a list of them; got none")
                train = _Training(batches, loss, steps, clip, f"{axis} {width}", lists)
                fresh[width].append(train(narrow, narrow_opts, first=0))
                done += 1
                watch("networks trained", done, total)
                for factor in factors if width == widths[0] else factors[:1]:
                    wide = network(factor * width)
                    report = grow(narrow, wide, narrow_opts, noise=noise, seed=seed)
                    assert isinstance(report.optimizer, list)
                    train = _Training(batches, loss, steps, clip, f"width {width} grown to {factor * width}")
                    sizes = train(wide, report.optimizer, first=steps)
                    done += 1
                    watch("networks trained", done, total)
                    if factor == factors[0]:
                        doubled[factor * width].append(sizes)
                    if width == widths[0]:
                        grown[factor * width].append(sizes)
    every = ", ".join(map(str, widths))
    scans = [_scan("fresh", f"{axis}s {every}, from the start over {steps} steps", fresh)]
    if factors:
        scans += [
            _scan("doubled", f"widths {every}, trained, grown twofold and trained on", doubled),
            _scan("grown", f"width {widths[0]}, trained, grown to {', '.join(map(str, grown))} and trained on", grown),
        ]
    small, large = (fresh[width][0] for width in widths[:2])
    outputs = {layer for layer in small if axis == "width" and small[layer].shapes == large[layer].shapes}
    slopes = {layer: {scan.name: _judged(scan, layer, layer in outputs) for scan in scans} for layer in small}
    return CoordCheck(tuple(scans), slopes, axis)


def _different(network: Callable[[int], nn.Module], widths: Sequence[int], axis: ScannedAxis) -> list[nn.Module]:
    """The network at two widths. Raises a UserError if it is the same: then nothing would be measured."""
    networks = []
    for width in widths:
        with torch.random.fork_rng():
            made = network(width)
        refuse_unless_model(f"network({width})", made)
        networks.append(made)
    shapes = [[parameter.shape for parameter in made.parameters()] for made in networks]
    if shapes[0] == shapes[1]:
        raise UserError(
            f"network: it has the same shapes at {axis}s {widths[0]} and {widths[1]}; it must use its {axis}"
        )
    return networks


def _lists(shallow: nn.Module, deep: nn.Module) -> tuple[str, ...]:
    """The names of the outermost modules that have more parts in the deep one."""
    parts = {name: len(list(module.children())) for name, module in deep.named_modules()}
    longer = [name for name, module in shallow.named_modules() if len(list(module.children())) != parts.get(name)]
    return tuple(name for name in longer if not any(name.startswith(f"{other}.") for other in longer))


def _pooled(name: str, lists: Sequence[str]) -> str:
    """The name that a layer shares with those of the same kind in its list: `blocks.*.mlp.0`."""
    for prefix in lists:
        if name.startswith(f"{prefix}."):
            _, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            return f"{prefix}.*.{rest}".rstrip(".")
    return name


def log_log_slope(widths: Iterable[int], sizes: Tensor) -> float | None:
    """The power of the width with which `sizes` grow; None if they are all zero, and infinite if some are."""
    if not sizes.any():
        return None
    if not sizes.all():
        return math.inf if sizes[-1] else -math.inf
    x = torch.tensor(list(widths), dtype=torch.float64).log()
    x -= x.mean()
    return (x @ sizes.double().log() / (x @ x)).item()


def _judged(scan: Scan, layer: str, is_output: bool) -> Slopes:
    (output, output_error), (update, update_error) = scan.slope(layer, 0), scan.slope(layer, 1)
    # The network's output may shrink to what training makes of it. So may any in the last scan: a duplicated weight
    # averages the noise of the layer before over the copies.
    may_shrink = is_output or scan.name == "grown"
    size = 0.0 if output is None else output if may_shrink else abs(output)
    output_fails = size > TOLERANCE + output_error
    # What the readout's initial weights make of changes before it shrinks as its output does.
    falling_tolerance = FALLING_TOLERANCE + (TOLERANCE if is_output else 0)
    update_fails = update is not None and (
        update > TOLERANCE + update_error or -update > falling_tolerance + update_error
    )
    return Slopes(output, update, output_fails, update_fails)


def _power(slope: float, axis: ScannedAxis) -> str:
    if math.isfinite(slope):
        return f"{'grows' if slope > 0 else 'vanishes'} as {axis}^{slope:+.2f}"
    return f"is zero at the {'small' if slope > 0 else 'large'} end only"


# --- measuring


class _LayerSizes(NamedTuple):
    sizes: list[tuple[float, float]]
    """The sizes of the output and of its change, at the start and after every step."""
    shapes: list[torch.Size]


_Sizes = dict[str, _LayerSizes]


@dataclass(frozen=True)
class _Training:
    """Trains a network for some steps and measures it before the first and after each."""

    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    steps: int
    clip: float | None
    where: str
    lists: Sequence[str] = ()
    """The lists of layers whose outputs count as one."""

    def __call__(self, net: nn.Module, optimizers: Sequence[Optimizer], first: int) -> _Sizes:
        start = self._outputs(net)
        answer = {name: _LayerSizes([], [x.shape for x in outputs]) for name, outputs in start.items()}
        for step in range(self.steps + 1):
            if step:
                self._step(net, optimizers, self.batches[(first + step - 1) % len(self.batches)])
            for name, outputs in self._outputs(net).items() if step else start.items():
                size = _rms(outputs), _rms([x - x0 for x, x0 in zip(outputs, start[name], strict=True)])
                if not math.isfinite(sum(size)):
                    remedy = "lower the learning rate (model.optimizer), or check that it is scaled with the width"
                    raise UserError(
                        f"at {self.where}, after {step} of {self.steps} steps, the output of {name} is not finite: "
                        + (remedy if step else "check the data and the initial weights")
                    )
                answer[name].sizes.append(size)
        return answer

    def _step(self, net: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> None:
        net.zero_grad()
        value = self.loss(net, batch)
        refuse_unless_loss(value)
        value.backward()
        if self.clip is not None:
            clip_grad_norm_(net, self.clip)
        for optimizer in optimizers:
            optimizer.step()

    @torch.no_grad()
    def _outputs(self, net: nn.Module) -> dict[str, list[Tensor]]:
        """The outputs of every module with parameters of its own for the first batch; buffers stay as they were."""
        layers = {id(layer) for name in self.lists for layer in net.get_submodule(name).children()}

        def wanted(module: nn.Module) -> bool:
            return id(module) in layers or any(True for _ in module.parameters(recurse=False))

        outputs: dict[str, list[Tensor]] = {}

        def ends(name: str, output: Any) -> None:
            outputs.setdefault(_pooled(name or NETWORK, self.lists), []).extend(float_copies(output))

        measured = {name: module for name, module in net.named_modules() if wanted(module)}
        with state_kept(net.modules()), torch.random.fork_rng(), hooked(measured, lambda *_: None, ends):
            torch.manual_seed(0)  # dropout must not count as an update
            self.loss(net, self.batches[0])
        for name, module in net.named_modules():
            if isinstance(module, Readout) and name not in outputs:
                # it was fused with the loss, and read what its neighbour put out
                beside = [other for other in outputs if other.rpartition(".")[0] == name.rpartition(".")[0]]
                read = outputs[beside[-1]][-1] if beside else None
                if read is not None and read.shape[-1] == module.in_features:
                    outputs[name] = [module(read)]
        return outputs


def _rms(values: list[Tensor]) -> float:
    return math.sqrt(sum(x.double().square().sum().item() for x in values) / max(1, sum(x.numel() for x in values)))


def _scan(name: str, title: str, runs: dict[int, list[_Sizes]]) -> Scan:
    sizes = {}
    for layer in next(iter(runs.values()))[0]:
        by_width = [[run[layer].sizes for run in at] for at in runs.values()]
        sizes[layer] = torch.tensor(by_width, dtype=torch.float64).transpose(0, 1)
    return Scan(name, title, tuple(runs), sizes)
