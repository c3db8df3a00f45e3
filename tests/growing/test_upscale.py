"""`upscale` itself: what it checks before it writes, what it does where the models differ, and what its report says."""

import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bad_input import assert_refused, snapshot
from exactness import attention, batch, conv_flatten, mlp, softmax_over_width, tied_autoencoder
from torch import Tensor, nn

import mupscale
from mupscale.checks.check_step import Agreement
from mupscale.errors import UncheckedWarning, UserError
from mupscale.growing import upscale as module

VECTORS = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
IMAGES = batch("images").float()


def call(model: nn.Module) -> Tensor:
    return model(VECTORS)


def test_without_call_nothing_is_checked_and_a_warning_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_has_warned", False)
    words = r"without `call`, so nothing was compared. To check, pass call=lambda"
    with pytest.warns(UncheckedWarning, match=words) as seen:
        report = mupscale.upscale(mlp(8), mlp(16))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mupscale.upscale(mlp(8), mlp(16))
    assert report.exact is None
    assert "not checked: pass call=lambda model: model(batch)" in str(report)
    assert report.notes == ()


def test_the_check_is_before_noise():
    narrow, wide = mlp(8), mlp(16)
    report = mupscale.upscale(narrow, wide, call=call, noise=mupscale.AdditiveNoise(0.5))
    assert report.exact is True
    assert float((call(wide) - call(narrow)).detach().abs().max()) > 0.01


def test_a_wrong_guess_is_mended():
    narrow, wide = conv_flatten(4), conv_flatten(8)
    optimizer = torch.optim.AdamW(narrow.parameters())
    report = mupscale.upscale(narrow, wide, optimizer, call=lambda model: model(IMAGES))
    assert report.exact is True
    assert (
        "with a plan that discover found in 1 passes (as guessed, what call(model) returns differs by" in report.check
    )
    assert report.plan.parameters["4.weight"].layouts[1] == ((64, 64, 2),)
    assert torch.allclose(wide(IMAGES), narrow(IMAGES), atol=1e-6)
    assert isinstance(report.optimizer, torch.optim.AdamW)


def test_a_refused_plan_is_mended():
    """Roles of bare parameters are not known; a tied head is refused."""
    tokens = batch("tokens")

    def build(n: int) -> nn.Module:
        emb, head = nn.Embedding(11, n), nn.Linear(n, 11, bias=False)
        head.weight = emb.weight
        return nn.Sequential(emb, nn.LayerNorm(n), head)

    with pytest.raises(UserError, match="tied"):
        mupscale.upscale(build(8), build(16))
    report = mupscale.upscale(build(8), build(16), call=lambda model: model(tokens))
    assert report.exact is True
    assert "(as guessed, the plan is refused)" in report.check


def test_without_a_plan_nothing_is_written():
    narrow, wide = tied_autoencoder(8), tied_autoencoder(16)
    before = snapshot(narrow, wide)
    with pytest.raises(UserError) as error:
        mupscale.upscale(narrow, wide, torch.optim.AdamW(narrow.parameters()), call=call)
    assert "the wide model does not compute and train as the narrow one" in str(error.value)
    assert "First, what the model (Net) returns is multiplied by 2" in str(error.value)
    assert "A search for another plan failed: discover: stuck at the model (Net)" in str(error.value)
    assert snapshot(narrow, wide) == before


@pytest.mark.parametrize("message", ["The best plan of a search differs too: no memory", "plan failed: AssertionError"])
def test_a_search_without_a_check_or_a_word_writes_nothing(message: str, monkeypatch: pytest.MonkeyPatch):
    """A plan that is found, and cannot be compared, is a guess; and an exception may have no text."""
    agreements = [Agreement(False, reason="it differs"), Agreement(None, reason="no memory")]
    monkeypatch.setattr(module, "check_step", lambda *_: agreements.pop(0))
    if "Error" in message:
        monkeypatch.setattr("mupscale.discovery.discover.discover", Mock(side_effect=AssertionError))
    narrow, wide = conv_flatten(4), conv_flatten(8)
    before = snapshot(narrow, wide)
    with pytest.raises(UserError, match=message):
        mupscale.upscale(narrow, wide, call=lambda model: model(IMAGES))
    assert snapshot(narrow, wide) == before


def test_on_mismatch_error_does_not_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mupscale.discovery.discover.discover", lambda *_: pytest.fail("it searched"))
    assert_refused(
        lambda: (softmax_over_width(8), softmax_over_width(16), {"call": call, "on_mismatch": "error"}),
        ("'1' (Softmax) returns is multiplied by 0.5", 'Leave on_mismatch="discover"'),
    )


def test_on_mismatch_note_goes_on():
    narrow, wide = softmax_over_width(8), softmax_over_width(16)
    report = mupscale.upscale(narrow, wide, call=call, on_mismatch="note")
    assert report.exact is False
    assert report.notes[0].startswith("the wide model differs: what call(model) returns differs by")
    assert "not exact: " in str(report)


def test_a_given_plan_is_checked():
    narrow, wide = attention(8, dim=4), attention(16, dim=4)
    sequences = batch("sequences").float()
    found = mupscale.discover(narrow, wide, lambda model: model(sequences))
    plan = mupscale.plan(narrow, wide, hints=found)
    report = mupscale.upscale(narrow, wide, call=lambda model: model(sequences), plan=plan, on_mismatch="error")
    assert report.exact is True
    assert report.plan is plan
    wrong = mupscale.plan(narrow, wide)
    with pytest.raises(UserError, match="does not compute and train"):
        mupscale.upscale(narrow, wide, call=lambda model: model(sequences), plan=wrong, on_mismatch="error")


@pytest.mark.parametrize(
    ("method", "exact"),
    [
        (mupscale.methods.Duplication(), True),
        (mupscale.methods.HyperCloning("symmetric", state="carry", hyperparameters="table"), True),
        (mupscale.methods.HyperCloning("symmetric"), False),
    ],
)
def test_a_method_that_does_not_continue_training_is_not_exact(method: Any, exact: bool):
    report = mupscale.upscale(mlp(8), mlp(16), call=call, method=method)
    assert report.exact is exact
    assert ("HyperCloning does not continue the training; the check was by duplication" in report.notes) is not exact


def test_call_must_be_a_function():
    with pytest.raises(UserError, match=r"upscale: call\(model\) fails on the narrow model: TypeError"):
        mupscale.upscale(mlp(8), mlp(16), call=3)
