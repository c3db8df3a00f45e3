"""The coordinate check: the three models pass it; whatever scales wrongly with the width fails it by name."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from extensions import UnscaledMLP
from tiers import slow_except
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from mupscale.checks.coordinate_check import CoordCheck, Scan, _judged, coord_check, log_log_slope
from mupscale.commands.growth_plans import LossBySize
from mupscale.methods import noise
from mupscale.models.base import Growable
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP

WIDTHS = (32, 64, 128)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def samples(shape: tuple[int, ...], rows: int = 32, count: int = 4, classes: int = 7) -> list[tuple[Tensor, Tensor]]:
    """Noisy samples of a few prototypes, which a network can learn."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(classes, *shape, generator=generator)
    labels = [torch.randint(classes, (rows,), generator=generator) for _ in range(count)]
    return [(prototypes[y] + 0.5 * torch.randn(rows, *shape, generator=generator), y) for y in labels]


def tokens(vocabulary: int, rows: int = 4, length: int = 17) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(4)]


def check(module: Growable, batches: list[Any], widths: tuple[int, ...] = WIDTHS, **settings: Any) -> CoordCheck:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        module.net = net
        return module.loss(batch)

    def optimizer(net: nn.Module) -> Optimizer:
        module.net = net
        return module.configure_optimizers()

    return coord_check(module.network, widths, **{"optimizer": optimizer, "batches": batches, "loss": loss} | settings)


def check_mlp(kind: type[MLP] = MLP, optimizer: Callable[[Any], Optimizer] = adamw, **settings: Any) -> CoordCheck:
    return check(kind(width=32, base_width=32, inputs=20, optimizer=optimizer), samples((20,)), **settings)


def language_model(**settings: Any) -> GPT2:
    return GPT2(
        **{"width": 16, "layers": 1, "heads": 4, "vocabulary": 64, "context": 16, "optimizer": adamw} | settings
    )


def failing(answer: CoordCheck, scan: str) -> list[str]:
    return [layer for layer, scans in answer.layers.items() if scans[scan].problem("width")]


def largest(answer: CoordCheck, *quantities: str) -> float:
    """The slope that is farthest from zero, of all that are not zero throughout."""
    slopes = [
        getattr(s, quantity) for scans in answer.layers.values() for s in scans.values() for quantity in quantities
    ]
    return max(abs(slope) for slope in slopes if slope is not None)


# --- what is right


@pytest.mark.parametrize("optimizer", slow_except([adamw, sgd], adamw))
def test_the_mlp_passes(optimizer: Callable[[Any], Optimizer]) -> None:
    answer = check_mlp(optimizer=optimizer)
    assert answer.passed, str(answer)
    assert list(answer.layers) == ["layers.0", "layers.1", "layers.2", "readout"]
    assert answer.layers["readout"]["fresh"].output is None  # it begins at zero
    assert largest(answer, "output", "update") < 0.15
    assert [scan.widths for scan in answer.scans] == [(32, 64, 128), (64, 128, 256), (64, 128, 256)]


@pytest.mark.slow
@pytest.mark.parametrize("tied", slow_except([True, False], True, kept=[]))
def test_gpt2_passes(tied: bool) -> None:
    answer = check(language_model(tied=tied), tokens(64), noise=mupscale.AdditiveNoise(0.02))
    assert answer.passed, str(answer)
    assert largest(answer, "update") < 0.2
    logits = answer.layers["head.readout"]["fresh"].output  # it is fused with the loss, and measured all the same
    assert logits is not None
    # tied, a token's own logit is no sum of random signs, and does not shrink
    assert -0.45 < logits < -0.2 if tied else logits == pytest.approx(-0.5, abs=0.05)


def check_depth(module: Growable, batches: list[Any], depths: tuple[int, ...] = (2, 4, 8, 16)) -> CoordCheck:
    loss = LossBySize(module)

    def optimizer(net: nn.Module) -> Optimizer:
        module.net = net
        return module.configure_optimizers()

    network = lambda layers: loss.network(module.width, layers)  # noqa: E731
    settings: dict[str, Any] = {"optimizer": optimizer, "batches": batches, "loss": loss}
    return coord_check(network, depths, axis="depth", seeds=2, **settings)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.AdamW, lr=0.01), pytest.param(partial(torch.optim.SGD, lr=0.3), marks=pytest.mark.exhaustive)],
)
@pytest.mark.slow
def test_gpt2_passes_over_depths_under_completep(optimizer: Any) -> None:
    shape: dict[str, Any] = {"base_width": 16, "heads": 2, "vocabulary": 32, "context": 16}
    answer = check_depth(GPT2(16, layers=2, base_layers=2, optimizer=optimizer, **shape), tokens(32))
    assert answer.passed, answer
    assert [scan.name for scan in answer.scans] == ["fresh"]
    assert abs(answer.layers["blocks.*"]["fresh"].update) < 0.25


@pytest.mark.slow
def test_depths_without_completep_are_named() -> None:
    """The residual stream moves by as much as all layers together."""
    shape: dict[str, Any] = {"base_width": 16, "heads": 2, "vocabulary": 32, "context": 16}
    answer = check_depth(GPT2(16, layers=2, optimizer=partial(torch.optim.AdamW, lr=0.01), **shape), tokens(32))
    assert not answer.passed
    assert answer.layers["blocks.*"]["fresh"].update == pytest.approx(0.8, abs=0.25)
    assert "blocks.*: fresh: its update grows as depth^+0." in str(answer)


# --- what is not


class SummingMLP(MLP):
    """With a readout that sums over the width."""

    def network(self, width: Any, *, meta: bool = False) -> nn.Module:
        net = super().network(width, meta=meta)
        net.readout.multiplier = 1.0
        return net


@pytest.mark.slow
def test_a_readout_that_sums_is_named() -> None:
    answer = check_mlp(SummingMLP)
    assert list(answer.failing) == ["readout"]
    assert 0.7 < answer.layers["readout"]["fresh"].update < 1  # 1 but for the bias
    assert "readout: fresh: its update grows as width^+" in str(answer)
    assert "FAILED in 1 of 4 layers, look first at readout" in str(answer)


def test_unscaled_rates_are_named() -> None:
    answer = check_mlp(UnscaledMLP)
    # Adam's rate for the first layer is the same at every width
    assert failing(answer, "fresh")[:2] == ["layers.1", "layers.2"]
    assert answer.first == next(iter(answer.failing)) == "layers.1"
    assert answer.layers["layers.2"]["fresh"].update > 0.5


@pytest.mark.slow
def test_noise_of_the_wrong_scale_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "init_scale", lambda entry: 1.0)
    answer = check_mlp(noise=mupscale.AdditiveNoise(0.3))
    assert failing(answer, "fresh") == []
    assert failing(answer, "doubled")[0] == failing(answer, "grown")[0] == "layers.1"
    assert answer.layers["layers.1"]["doubled"].output == pytest.approx(0.5, abs=0.1)
    assert answer.layers["layers.1"]["doubled"].output_fails


# --- measuring


def test_a_slope_is_the_power_of_the_width() -> None:
    widths = torch.tensor([10.0, 20.0, 80.0])
    assert log_log_slope((10, 20, 80), 3 * widths**-0.5) == pytest.approx(-0.5)
    assert log_log_slope((10, 20, 80), torch.zeros(3)) is None
    assert log_log_slope((10, 20, 80), torch.tensor([1.0, 1.0, 0.0])) == -math.inf


def test_scatter_over_seeds_is_no_failure() -> None:
    """A slope fails where it is beyond the tolerance by more than its standard error."""
    widths = torch.tensor([10.0, 20.0, 40.0], dtype=torch.float64)

    def scan(*slopes: float) -> Scan:
        # equal in the middle, so that the mean's slope is the mean
        sizes = torch.stack([(widths / 20) ** slope for slope in slopes])
        return Scan("fresh", "", (10, 20, 40), {"layer": sizes[:, :, None, None].expand(-1, -1, 2, 2)})

    slope, error = scan(0.5, 0.2).slope("layer", 1)
    assert slope == pytest.approx(0.35, abs=0.01)
    assert error == pytest.approx(0.15, abs=1e-9)  # the deviation of two, 0.3 / sqrt(2), over sqrt(2)
    assert not _judged(scan(0.5, 0.2), "layer", False).update_fails
    assert _judged(scan(0.36, 0.34), "layer", False).update_fails
    assert not _judged(scan(-0.45, -0.45), "layer", False).update_fails
    assert _judged(scan(-0.55, -0.55), "layer", False).update_fails
    assert not _judged(scan(-0.7, -0.7), "layer", True).update_fails
    assert _judged(scan(-0.8, -0.8), "layer", True).update_fails
    assert _judged(scan(-0.36, -0.34), "layer", False).output_fails
    assert not _judged(scan(-0.36, -0.34), "layer", True).output_fails  # the network's own output may


@pytest.mark.parametrize("widths", [(), (32, 64), (32, 64, 64), (0, 32, 64)])
def test_too_few_widths_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="widths: a slope needs at least three different ones"):
        check_mlp(widths=widths)
