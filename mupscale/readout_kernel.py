"""A Triton kernel that turns logits into losses and, in their place, into the gradient of the losses.

Logits are the largest tensor of a language model. Device memory is read once and written once: a row either stays in
registers, or is read a second time while it is still in the cache.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
"""Exponentials are powers of two on the device."""

LOWEST = tl.constexpr(-3e38)
"""Below every logit, and finite: its difference to a logit, or to -inf, is not nan."""

WHOLE_ROW, BLOCK = 65536, 8192
"""Up to so many logits a row stays in registers; longer rows are read in blocks."""

WARPS = 16
"""Warps for a row in blocks. A row in registers has one for each 1,024 logits, up to as many as there can be."""


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _losses_and_slopes(logits_NV, targets_N, losses_N, V: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_NV + row * V
    target = tl.load(targets_N + row)
    # a target outside the vocabulary makes the loss nan; it must not read the logit of another row
    at_target = tl.load(logits_V + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    if BLOCK >= V:
        x = tl.load(logits_V + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        largest = tl.max(x, 0)
        powers = _exp(x - largest)
        total = tl.sum(powers, 0)
        inverse = 1 / total
        slope = powers * inverse - (columns == target).to(tl.float32)
        tl.store(logits_V + columns, slope.to(logits_NV.dtype.element_ty), mask=columns < V)
    else:
        # each lane has its own largest logit and sum, so that the loop needs no exchange between threads
        lane_largest = tl.full([BLOCK], LOWEST, tl.float32)
        lane_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(logits_V + start + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(
                tl.float32
            )
            ratio = _exp(-tl.abs(x - lane_largest))
            lane_sum = tl.where(x > lane_largest, lane_sum * ratio + 1, lane_sum + ratio)
            lane_largest = tl.maximum(lane_largest, x)
        largest = tl.max(lane_largest, 0)
        total = tl.sum(lane_sum * _exp(lane_largest - largest), 0)
        inverse = 1 / total
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(logits_V + start + columns, mask=inside, eviction_policy="evict_first").to(tl.float32)
            slope = _exp(x - largest) * inverse - (start + columns == target).to(tl.float32)
            tl.store(logits_V + start + columns, slope.to(logits_NV.dtype.element_ty), mask=inside)
    tl.store(losses_N + row, tl.log(total) + (largest - at_target))


def overwrite_with_slopes(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The cross-entropy of each row; `logits_NV` become the gradients of these losses."""
    rows, vocabulary = logits_NV.shape
    losses_N = torch.empty(rows, device=logits_NV.device)
    if vocabulary <= WHOLE_ROW:
        block = triton.next_power_of_2(vocabulary)
        warps = min(max(block // 1024, 1), 32)
    else:
        block, warps = BLOCK, WARPS
    with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
        _losses_and_slopes[rows,](logits_NV, targets_N, losses_N, vocabulary, block, num_warps=warps)
    return losses_N
