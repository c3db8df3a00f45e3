"""`noise="auto"`: what gets noise, where there is none and why, and what a run says."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import mlp
from tiny_modules import mlp as module_of_width
from torch import Tensor, nn
from training_runs import fit

import mupscale
from mupscale.methods.noise import AUTO_LEVEL, NO_NOISE


class Penalised(nn.Module):
    """Adds norms of some of its weights to its output, as a penalty in a loss does; copies keep these norms."""

    def __init__(self, width: int, *names: str) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        norms = {"hidden": self.hidden.weight.square().sum(), "last": self.last.weight.abs().sum()}
        return self.last(torch.tanh(self.hidden(torch.tanh(self.first(x))))) + sum(norms[name] for name in self.names)


class Zero(Penalised):
    """A readout that begins at zero hides what the weights before it do."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.hidden.weight.square().sum()
        return self.last(torch.tanh(scale * self.first(x)))


def layers(count: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))), nn.Linear(4, 2))


Case = tuple[Callable[[int], nn.Module], dict[str, Any], set[str], str]

ALL = {"hidden.weight", "last.weight"}
CASES: dict[str, Case] = {
    "all that sums over copies": (Penalised, {}, ALL, ""),
    "one weight is read nonlinearly": (
        lambda n: Penalised(n, "last"), {}, {"hidden.weight"},
        "auto leaves out 'last.weight', which the model does not read linearly",
    ),
    "all are": (
        lambda n: Penalised(n, "hidden", "last"), {}, set(),
        "auto adds none, because the model does not read 'hidden.weight', 'last.weight' linearly",
    ),
    "hidden by a zero": (Zero, {}, set(), "auto leaves out 'hidden.weight'"),
    "a method with noise": (
        Penalised, {"method": mupscale.methods.HyperCloning("noisy")}, ALL, "none, because HyperCloning has noise of",
    ),
    "unequal copies": (
        Penalised, {"method": mupscale.methods.ZeroPadding()}, set(), "the copies of ZeroPadding are not equal",
    ),
    "depth alone": (
        lambda n: layers(n // 4), {"depth": "random"}, set(), "none, because no weight sums over copies of a unit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_auto_is_centred_noise_where_that_keeps_the_function(case: str) -> None:
    build, arguments, noisy, note = CASES[case]
    torch.manual_seed(0)
    narrow, wide, x = build(4).double(), build(8).double(), torch.randn(6, 3).double()
    report = mupscale.upscale(narrow, wide, noise="auto", call=lambda model: model(x), **arguments)
    assert {name for name, constant in report.noise.items() if constant} == noisy
    assert any(note in each for each in report.notes) or not note
    if not arguments:
        torch.testing.assert_close(wide(x), narrow(x), rtol=0, atol=1e-12)
    for name in noisy if not arguments else ():
        weight = wide.get_parameter(name).detach()
        signal = weight.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, -1)  # two copies of each input
        norms = [torch.linalg.matrix_norm(each, 2) for each in (weight - signal, signal)]
        assert float(norms[0] / norms[1]) == pytest.approx(AUTO_LEVEL, rel=0.1)


def test_a_report_without_noise_says_what_that_means() -> None:
    report = mupscale.upscale(mlp(4), mlp(8), call=lambda model: model(torch.randn(5, 4)))
    assert NO_NOISE in str(report)


@pytest.mark.parametrize(("noise", "said"), [("auto", None), (None, NO_NOISE)])
def test_a_run_says_once_that_it_grows_without_noise(
    noise: Any, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    growth = mupscale.UpscaleCallback(3, 16, noise=noise)
    with caplog.at_level(logging.INFO):
        fit(module_of_width(8), tmp_path, growth, steps=5)
    assert caplog.text.count("no noise") == (0 if said is None else 1)
    assert growth.summary["loss_after"] == pytest.approx(growth.summary["loss_before"], rel=1e-9)
    assert any(growth.constants.values()) == (noise == "auto")


def test_the_default_of_a_run_is_auto() -> None:
    assert mupscale.UpscaleCallback(3, 16).noise == "auto"
    with pytest.raises(mupscale.UserError, match=r'UpscaleCallback.noise must be "auto", None, .*; got 0.1'):
        mupscale.UpscaleCallback(3, 16, noise=0.1)  # type: ignore[arg-type]
