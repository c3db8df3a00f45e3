"""The width-invariant clip: the usual one at the base width, the same for a wider copy of the same function."""

import copy

import pytest
import torch
from architectures import CASES, cross_entropy
from torch import nn

import mupscale


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_without_widths_it_is_the_usual_clip(max_norm: float):
    torch.manual_seed(0)
    case = CASES["gpt2_untied"]
    ours, batch = case.build(8), case.batches()[0]
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        cross_entropy(model, batch).backward()
    norm = mupscale.clip_grad_norm_(ours, max_norm)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm).item(), rel=1e-6)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, gradients(theirs)[name], rtol=1e-5, atol=0)


def test_it_finds_the_table_inside_wrappers():
    case = CASES["mlp"]
    torch.manual_seed(0)
    narrow, wide = case.build(case.narrow), case.build(case.wide)
    mupscale.upscale(narrow, wide)
    wrapped = nn.ModuleDict({"net": copy.deepcopy(wide)})
    cross_entropy(wide, case.batches()[0]).backward()
    cross_entropy(wrapped["net"], case.batches()[0]).backward()
    assert mupscale.clip_grad_norm_(wrapped, 0.1).item() == mupscale.clip_grad_norm_(wide, 0.1).item()


def test_a_norm_of_zero_leaves_no_gradient():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    mupscale.clip_grad_norm_(model, 0)
    assert not any(bool(gradient.any()) for gradient in gradients(model).values())
