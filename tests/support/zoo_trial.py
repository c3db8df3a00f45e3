"""One trial of a zoo entry: find how it grows, widen it in the middle of training, follow both runs, reload it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from zoo_entry import Entry, in_its_dtype, loss, outputs

import mupscale
from mupscale.checks.precision import Precision
from mupscale.errors import UserError

WARM_UP = 4
STEPS = 12
EXACT = 1e-10
AS_SHIPPED = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: exact, refused, wrong, or broken where something other than a refusal was raised."""

    name: str
    verdict: str
    drift: float = float("nan")
    """The largest difference of the losses in the steps after the swap, relative."""
    reload: float = float("nan")
    """The largest difference of the logits after saving and loading, relative."""
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{self.verdict:8}{self.name:26}"
        if self.verdict in ("exact", "WRONG"):
            text += f"drift {self.drift:.1e}  reload {self.reload:.1e}"
        return text + f"  {self.seconds:.1f} s" + (f"  {self.reason}" if self.reason else "")


def outcome_of(
    name: str, run: Callable[[], tuple[float, float]], drift: float, reload: float, *, as_shipped: bool = False
) -> Outcome:
    """Runs a trial that returns drift and reload, which may be as large as given here.

    All is computed in float64; what a model casts to float32 inside stays float64 too, unless `as_shipped`.
    """
    start = time.perf_counter()
    try:
        with nullcontext() if as_shipped else Precision():
            found = run()
        verdict, reason = "exact" if found[0] <= drift and found[1] <= reload else "WRONG", ""
    except Exception as error:
        is_refusal, found = isinstance(error, UserError), (float("nan"), float("nan"))
        verdict, kind = ("refused", "") if is_refusal else ("BROKEN", f"{type(error).__name__}: ")
        reason = kind + str(error).replace("\n", " ")
    return Outcome(name, verdict, *found, reason, time.perf_counter() - start)


def perturb_(model: nn.Module, entry: Entry, seed: int = 5) -> None:
    """Moves every parameter, so that zeros and ones hide no mistake, and gives batch norms statistics of an input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            summed = parameter[0].numel() if parameter.ndim > 1 else 100
            parameter.add_(noise, alpha=summed**-0.5)
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train().momentum = 1.0
        if norms:
            entry.call(model)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.eval().momentum = momentum
            norm.running_var.add_(0.3 * norm.running_var.mean())  # two images are few: no channel may be magnified much


def tiled(narrow: nn.Module, wide: nn.Module) -> dict[str, dict[int, int]]:
    """Blocks as large as the narrow axis for every axis that grows by a whole factor."""
    blocks = {}
    after = dict(wide.named_parameters())
    for name, parameter in narrow.named_parameters():
        sizes = enumerate(zip(parameter.shape, after[name].shape, strict=True))
        axes = {axis: before for axis, (before, now) in sizes if now != before and now % before == 0}
        if axes:
            blocks[name] = axes
    return blocks


def step(model: nn.Module, optimizer: torch.optim.Optimizer, entry: Entry, seed: int) -> float:
    optimizer.zero_grad()
    value = loss(model, entry.batch(seed))
    value.backward()
    optimizer.step()
    return value.item()


def difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


def trial(entry: Entry, factor: float = 2, *, as_shipped: bool = False) -> Outcome:
    """Widens the entry's model after a few steps of AdamW and compares the twelve steps after it, then its reload."""
    limits = (AS_SHIPPED, 1e-4) if as_shipped else (EXACT, 1e-9)
    return outcome_of(entry.name, lambda: _run(entry, factor), *limits, as_shipped=as_shipped)


def built(entry: Entry, factor: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = entry.build(factor).double().eval()
    model.zoo_factor = factor
    return model


def _run(entry: Entry, factor: float) -> tuple[float, float]:
    narrow, wide = built(entry, 1, 0), built(entry, factor, 1)
    perturb_(narrow, entry)
    found = mupscale.discover(narrow, wide, entry.call)
    trained = [parameter for parameter in narrow.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    for seed in range(WARM_UP):
        step(narrow, optimizer, entry, seed)
    report = mupscale.upscale(narrow, wide, optimizer, hints=found)
    drift = 0.0
    for seed in range(WARM_UP, WARM_UP + STEPS):
        before, after = step(narrow, optimizer, entry, seed), step(wide, report.optimizer, entry, seed)
        drift = max(drift, abs(before - after) / max(abs(before), 1e-12))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        reloaded = entry.rebuild(wide, folder)
        answer = entry.call(narrow)
        if difference(answer[:1].expand_as(answer), answer) < 1e-4:
            raise RuntimeError("the outputs are the same for all inputs, so the trial shows nothing")
        reload = difference(answer, entry.call(reloaded))
    return (drift if drift == drift else float("inf")), reload


def depth_trials(entry: Entry) -> Iterator[Outcome]:
    """Doubles each number of layers of the entry's model by layers that add nothing, saves it and loads it again."""
    from mupscale.hf.config import numbers_of_layers
    from mupscale.hf.depth import growing_lists

    model = built(entry, 1, 0)
    numbers = numbers_of_layers(model.config)
    try:
        fields = list(growing_lists(model.config, type(model)))
    except UserError as refusal:
        yield Outcome(entry.name, "refused", reason=str(refusal))
        return
    for field in fields:
        deepen = partial(_deepen, entry, {field: 2 * numbers[field]})
        yield outcome_of(f"{entry.name} {field}", deepen, 1e-9, 1e-9)


def _deepen(entry: Entry, layers: dict[str, int]) -> tuple[float, float]:
    """The differences of the outputs in memory, and after loading. No new layer may be without a gradient."""
    import mupscale.hf

    shallow = built(entry, 1, 0)
    perturb_(shallow, entry)
    inputs = entry.batch(0)
    deep, report = mupscale.hf.upscale(
        shallow, layers=layers, call=lambda model: outputs(model(**in_its_dtype(model, inputs)))
    )
    loss(deep, inputs).backward()
    gradients = {name: deep.get_parameter(name).grad for name in report.new_parameters}
    alive = [name for name, gradient in gradients.items() if gradient is not None and bool(gradient.any())]
    rows = [row for rows in report.plan.layers.values() for row in rows]
    if len({_layer(report, name) for name in alive}) < sum(row.is_new for row in rows):
        raise RuntimeError("a new layer has no gradient")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        answer = entry.call(shallow)
        reloaded = entry.rebuild(deep.eval(), folder)
        return difference(answer, entry.call(deep)), difference(answer, entry.call(reloaded))


def _layer(report: mupscale.UpscaleReport, name: str) -> tuple[str, str]:
    """The list and the key of the layer of a parameter."""
    prefix = next(each for each in report.plan.layers if name.startswith(f"{each}."))
    return prefix, name.removeprefix(f"{prefix}.").split(".")[0]
