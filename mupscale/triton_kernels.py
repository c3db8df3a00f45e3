"""Triton kernels for the passes over the largest tensors of a language model.

Each reads its input once from device memory and writes its result once. Triton comes with torch's builds for CUDA.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- the loss
#
# Logits become losses and, in their place, the gradients of these: a row either stays in registers, or is read a second
# time while it is still in the cache.

LOG2_E = tl.constexpr(1.4426950408889634)
"""Exponentials are powers of two on the device."""

LOWEST = tl.constexpr(-3e38)
"""Below every logit, and finite: its difference to a logit, or to -inf, is not nan."""

WHOLE_ROW, BLOCK = 16384, 8192
"""Up to so many logits a row stays in registers; longer rows are read in blocks."""

WARPS = 16
"""For a row in blocks. A row in registers has one for each 512 logits, up to as many as there can be."""


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
        warps = min(max(block // 512, 1), 32)
    else:
        block, warps = BLOCK, WARPS
    _losses_and_slopes[rows,](logits_NV, targets_N, losses_N, vocabulary, block, num_warps=warps)
    return losses_N


# --- gradients that are summed over the rows while they are written


ROWS, COLUMNS = 16, 256
"""The tile of a program at a time."""


@triton.jit
def _gelu_gradient(
    gradient_NC,
    hidden_NC,
    result_NC,
    sums_GC,
    N,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """A program for each K columns and each group of rows."""
    columns = tl.program_id(0) * K + tl.arange(0, K)[None, :]
    sums = tl.zeros([R, K], tl.float32)
    for start in range(0, GROUP, R):
        rows = start + tl.arange(0, R)[:, None]
        inside = (rows < GROUP) & (tl.program_id(1) * GROUP + rows < N) & (columns < C)
        rows = (tl.program_id(1) * GROUP + rows).to(tl.int64)
        at = rows * C + columns
        x = tl.load(hidden_NC + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_NC + at, mask=inside, other=0.0).to(tl.float32)
        square = 0.07135481282 * x * x  # of 0.044715 · 2 sqrt(2 / π)
        sigmoid = 1 / (1 + _exp(-x * (1.5957691216 + square)))
        slope = sigmoid + x * sigmoid * (1 - sigmoid) * (1.5957691216 + 3 * square)
        result = gradient * slope
        sums += result
        tl.store(result_NC + at, result.to(result_NC.dtype.element_ty), mask=inside)
    columns = tl.program_id(0) * K + tl.arange(0, K)
    tl.store(sums_GC + tl.program_id(1) * C + columns, tl.sum(sums, 0), mask=columns < C)


@triton.jit
def _join_gradients(
    q_ND, k_ND, v_ND, result_NC, sums_GC, N, D: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, K: tl.constexpr
):
    """A program for each K columns, each group of rows, and q, k and v."""
    chunk = tl.program_id(2)
    if chunk == 0:
        source_ND = q_ND
    elif chunk == 1:
        source_ND = k_ND
    else:
        source_ND = v_ND
    columns = tl.program_id(0) * K + tl.arange(0, K)[None, :]
    sums = tl.zeros([R, K], tl.float32)
    for start in range(0, GROUP, R):
        rows = start + tl.arange(0, R)[:, None]
        inside = (rows < GROUP) & (tl.program_id(1) * GROUP + rows < N) & (columns < D)
        rows = (tl.program_id(1) * GROUP + rows).to(tl.int64)
        gradient = tl.load(source_ND + rows * D + columns, mask=inside, other=0.0)
        sums += gradient.to(tl.float32)
        tl.store(result_NC + rows * (3 * D) + chunk * D + columns, gradient, mask=inside)
    columns = tl.program_id(0) * K + tl.arange(0, K)
    tl.store(sums_GC + tl.program_id(1) * (3 * D) + chunk * D + columns, tl.sum(sums, 0), mask=columns < D)


def gelu_gradient(gradient_NC: Tensor, hidden_NC: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    rows, columns = hidden_NC.shape
    result_NC = torch.empty_like(hidden_NC)
    sums_GC = hidden_NC.new_empty(groups, columns, dtype=torch.float32)
    grid, group = (triton.cdiv(columns, COLUMNS), groups), triton.cdiv(rows, groups)
    _gelu_gradient[grid](gradient_NC, hidden_NC, result_NC, sums_GC, rows, columns, group, ROWS, COLUMNS)
    return result_NC, sums_GC


def join_gradients(q_ND: Tensor, k_ND: Tensor, v_ND: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    rows, columns = q_ND.shape
    result_NC = q_ND.new_empty(rows, 3 * columns)
    sums_GC = q_ND.new_empty(groups, 3 * columns, dtype=torch.float32)
    grid, group = (triton.cdiv(columns, COLUMNS), groups, 3), triton.cdiv(rows, groups)
    _join_gradients[grid](q_ND, k_ND, v_ND, result_NC, sums_GC, rows, columns, group, ROWS, COLUMNS)
    return result_NC, sums_GC
