"""Operations for many models at once: as those of each model by itself."""

import pytest
import torch
from torch.nn import functional as F

from mupscale.stacking.dropout import FoldedAttention, batch_norm


@pytest.mark.parametrize("mask", [None, "of all", "of each row", "of each model", "of each model and row", "causal"])
@pytest.mark.parametrize("shared", [False, True])
def test_folded_attention_is_that_of_each_model(mask: str | None, shared: bool) -> None:
    torch.manual_seed(0)
    models, rows, heads, length, size = 3, 2, 4, 5, 6
    query, value = (torch.randn(models, rows, heads, length, size, dtype=torch.float64) for _ in range(2))
    key = torch.randn(*([] if shared else [models]), rows, heads, length, size, dtype=torch.float64)
    shapes = {
        "of all": (length, length),
        "of each row": (rows, 1, length, length),
        "of each model": (models, length, length),
        "of each model and row": (models, rows, 1, length, length),
    }
    weights = torch.randn(shapes[mask], dtype=torch.float64) if mask in shapes else None
    per_model = mask is not None and "model" in mask
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]

    def folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None) -> torch.Tensor:
        return FoldedAttention.apply(q, k, v, m, mask == "causal", 0.3, False)

    dims = (0, None if shared else 0, 0, 0 if per_model else None)
    found = torch.vmap(folded, in_dims=dims)(query, key, value, weights)
    alone = []
    for i in range(models):
        own = weights[i] if per_model and weights is not None else weights
        inputs_i = query[i], key if shared else key[i], value[i]
        alone.append(F.scaled_dot_product_attention(*inputs_i, own, is_causal=mask == "causal", scale=0.3))
    expected = torch.stack(alone)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    slope = torch.randn_like(found)
    for here, there in zip(
        torch.autograd.grad(found, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    ):
        assert torch.allclose(here, there, rtol=0, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_torchs(training: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.rand(3), torch.rand(3)
    here, there = ((torch.zeros(3), torch.ones(3)) for _ in range(2))
    arguments = (weight, bias, training, 0.3, 1e-3)
    assert torch.equal(batch_norm(x, *here, *arguments), F.batch_norm(x, *there, *arguments))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
