"""LiGO's learned maps: where they start, what a fit changes, and what it leaves alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import CASES, cross_entropy
from bad_input import assert_refused, linear, snapshot
from method_maps import maps
from nets import features, mlp
from torch import Tensor, nn

import mupscale
from mupscale.errors import UserError
from mupscale.methods import LiGO


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.to(next(model.parameters()).dtype)).sub(0.3).square().mean()


def value(model: nn.Module, batch: Tensor) -> float:
    return loss(model, batch).item()


def models(width: int = 4) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return mlp(width).double(), mlp(3 * width).double()


def batches(count: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [features() for _ in range(count)]


def fitted(method: LiGO, narrow: nn.Module, wide: nn.Module, **settings: Any) -> LiGO:
    method.fit(narrow, wide, batches(), loss, **settings)
    return method


def test_the_first_maps_preserve_the_function():
    """At a rate of next to nothing they stay, and innᵀ · out = 1, although copies are consumed unequally."""
    narrow, wide = models()
    method = fitted(LiGO(steps=1, lr=1e-300), narrow, wide)
    plan = mupscale.upscale(narrow, wide, method=method).plan
    for batch in batches():
        torch.testing.assert_close(loss(wide, batch), loss(narrow, batch), rtol=1e-14, atol=0)
    entry = plan.parameters["layers.1.weight"]
    out, inn = maps(method, entry, 1)
    torch.testing.assert_close(inn.T @ out, torch.eye(4).double())
    assert (inn - out / 3).abs().max() > 1e-3
    torch.testing.assert_close(
        wide.layers[1].weight.detach(), maps(method, entry, 0)[0] @ narrow.layers[1].weight.detach() @ inn.T
    )


def test_the_first_maps_of_whole_heads_preserve_the_function():
    case = CASES["llama"]
    torch.manual_seed(0)
    narrow, wide = case.build(case.narrow).double(), case.build(case.wide).double()
    method = LiGO(steps=1, lr=1e-300)
    method.fit(narrow, wide, case.batches(1), cross_entropy)
    mupscale.upscale(narrow, wide, method=method)
    (batch,) = case.batches(1)
    torch.testing.assert_close(cross_entropy(wide, batch), cross_entropy(narrow, batch), rtol=1e-14, atol=0)


def test_a_fit_lowers_the_loss_and_parts_the_copies():
    narrow, wide = models()
    method = fitted(LiGO(steps=60, lr=0.04), narrow, wide)
    assert len(method.losses) == 60
    mupscale.upscale(narrow, wide, method=method)
    before, after = (sum(value(model, batch) for batch in batches()) for model in (narrow, wide))
    assert after < 0.9 * before
    # the weights are those of the last step of the fit
    assert value(wide, batches()[0]) == pytest.approx(method.losses[-4], rel=0.1)
    assert (wide.layers[0].weight[::3] - wide.layers[0].weight[1::3]).abs().max() > 1e-3
    assert (wide.layers[0].bias[::3] - wide.layers[0].bias[1::3]).abs().max() > 1e-3


@pytest.mark.parametrize("width", [4, 64])
def test_the_rate_is_for_a_single_unit(width: int):
    """A new unit is a sum over all units, so what one step of Adam adds to it does not depend on their number."""
    narrow, wide = models(width)
    moved, first = (fitted(LiGO(steps=1, lr=lr), narrow, wide) for lr in (0.5, 1e-300))
    plan = mupscale.upscale(narrow, wide, method=moved).plan
    for side in (0, 1):
        entry = plan.parameters["layers.1.weight"]
        step = (maps(moved, entry, 1)[side] - maps(first, entry, 1)[side]).abs()
        assert step.max() == pytest.approx(0.5 / width, rel=1e-3)


def test_a_fit_changes_neither_model_nor_the_random_numbers():
    def drawn(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * torch.rand(())

    narrow, wide = CASES["resnet18"].build(2), CASES["resnet18"].build(4)
    with torch.device("meta"):
        on_meta = CASES["resnet18"].build(4)
    data = CASES["resnet18"].batches(2)
    before, state = snapshot(narrow, wide), torch.get_rng_state()
    methods = [LiGO(steps=3, lr=0.01) for _ in range(3)]
    methods[0].fit(narrow, wide, data, drawn)
    assert snapshot(narrow, wide) == before
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)  # a fit is a function of its own seed
    methods[1].fit(narrow, on_meta, data, drawn)
    assert methods[0].losses == methods[1].losses
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    methods[2].seed = 1
    methods[2].fit(narrow, wide, data, drawn)
    assert methods[2].losses != methods[0].losses


# --- bad input


def fit_of(method: LiGO, data: Any, function: Any = loss, build: Callable[[], Any] = models) -> Callable[[], None]:
    return lambda: method.fit(*build(), data, function)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (fit_of(LiGO(), []), "LiGO: there are too few batches to learn from. Give a list"),
        (fit_of(LiGO(steps=5), iter(batches(2))), "LiGO: there are too few batches to learn from. Give a list"),
        (
            fit_of(LiGO(), batches(), build=lambda: linear(4, 8)),
            "LiGO: Sequential does not declare which axes hold the same units",
        ),
        (fit_of(LiGO(lr=1e300), batches()), r"LiGO: the fit diverged at lr = 1e\+300. Give a lower lr"),
        (lambda: LiGO(steps=0), "LiGO: steps must be"),
        (lambda: LiGO(lr=0.0), "LiGO: lr must be a finite number above 0, got 0.0"),
        (lambda: LiGO(lr=float("inf")), "LiGO: lr must be a finite number above 0, got inf"),
    ],
)
def test_bad_input(call: Callable[[], None], message: str):
    with pytest.raises(UserError, match=message):
        call()


def test_maps_that_are_not_learned_or_of_other_models_are_refused_before_anything_is_written():
    assert_refused(lambda: (*models(), {"method": LiGO()}), ("LiGO: its maps are not learned yet", "method.fit"))
    method = fitted(LiGO(steps=1), *models())
    assert_refused(lambda: (*models(5), {"method": method}), ("LiGO: its maps were learned for other models",))
