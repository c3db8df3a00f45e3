"""Trains networks on a prepared text, from any state: what the scripts about growth at equal FLOPs share."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.cuda_graph import CapturedStep
from mupscale.datamodules.fineweb import FineWeb

CLIP, DECAY = 1.0, 0.2
"""The norm of gradients, and the part of a budget over which the rate falls."""
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.05}


State = dict[str, Tensor]
"""Weights and optimizer state, by name."""


class Text:
    """A text on the training device: batches by seed and step, and so many rows of the validation."""

    def __init__(self, folder: str | None, rows: int, context: int, validated: int, device: str) -> None:
        self.rows = rows
        data = FineWeb(folder, batch_size=rows, context=context, order="sequential")
        data.setup()
        train, held_out = (torch.cat(list(loader)) for loader in (data.train_dataloader(), data.val_dataloader()))
        self.validation = held_out[:validated].to(device)
        # consecutive rows share a token; ids fit into int16
        self.tokens = train[:, :-1].flatten().to(device, torch.int16)
        self.windows = self.tokens.unfold(0, context + 1, 1)
        self.per_pass = len(self.tokens) // context - 2
        self._starts: dict[tuple[int, int], Tensor] = {}

    def batch(self, seed: int, step: int) -> Tensor:
        """Each pass reads all windows once, in an order and from an offset of its own."""
        number, position = divmod(step, self.per_pass // self.rows)
        if (seed, number) not in self._starts:
            generator, context = torch.Generator().manual_seed(1_000 * seed + number), self.windows.shape[1] - 1
            offset = torch.randint(context, (), generator=generator)
            starts = offset + context * torch.randperm(self.per_pass, generator=generator)
            self._starts = {(seed, number): starts.to(self.tokens.device)}
        rows = self._starts[seed, number][position * self.rows : (position + 1) * self.rows]
        return self.windows[rows].long()


def state_of(net: nn.Module, optimizers: Iterable[Optimizer]) -> State:
    """Returns the tensors themselves; those of an optimizer that has not stepped are missing."""
    tensors = {name: parameter.data for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():
        for optimizer in optimizers:
            values = optimizer.state.get(parameter, {})
            tensors |= {f"{name}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return tensors


@torch.no_grad()
def step_muon(optimizer: Optimizer, rates: Tensor) -> None:
    """Takes a step of torch's Muon at rates in memory, one for each group.

    torch's takes them as numbers, which a CUDA graph would keep. So it steps from zero at rate 1, without decay, and
    its update is added here.
    """
    kept = [dict(group) for group in optimizer.param_groups]
    before = [[parameter.clone() for parameter in group["params"]] for group in kept]
    for group in optimizer.param_groups:
        group.update(lr=1.0, weight_decay=0.0)
        for parameter in group["params"]:
            parameter.zero_()
    optimizer.step()
    for group, was, weights, rate in zip(optimizer.param_groups, kept, before, rates.unbind(), strict=True):
        group.update(was)
        for parameter, weight in zip(group["params"], weights, strict=True):
            parameter.mul_(rate).add_(weight * (1 - rate * was["weight_decay"]))


class Runner:
    """Trains a network from any state on a text; the rates of its optimizers are those that each step has a share of.

    On a GPU the whole step, of one optimizer or both, is one CUDA graph.
    """

    def __init__(
        self,
        text: Text,
        net: nn.Module,
        optimizers: Sequence[Optimizer],
        loss: Callable[[Tensor], Tensor],
        clip: Callable[[], Any],
    ) -> None:
        self.text, self.net, self.optimizers, self._loss, self._clip = text, net, optimizers, loss, clip
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.device = text.tokens.device
        self._muon_rates = torch.zeros(len(self.rates[-1]), device=self.device)
        self._captured: CapturedStep | None = None

    def capture(self) -> None:
        self._captured = CapturedStep(self._gradients, self.optimizers[0], self.text.batch(0, 0))

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False):
            return self._loss(batch)

    def _gradients(self, batch: Tensor) -> Tensor:
        """Leaves the gradients to AdamW, and takes Muon's step."""
        for optimizer in self.optimizers[1:]:
            optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self._clip()
        for optimizer in self.optimizers[1:]:
            step_muon(optimizer, self._muon_rates)
        return loss

    def step(self, batch: Tensor) -> Tensor:
        if self._captured is not None:
            return self._captured(batch)
        self.optimizers[0].zero_grad()
        loss = self._gradients(batch).detach()
        self.optimizers[0].step()
        return loss

    def load(self, state: State) -> None:
        """Takes weights and optimizer state; what is missing is zero."""
        for name, tensor in state_of(self.net, self.optimizers).items():
            tensor.copy_(state[name]) if name in state else tensor.zero_()

    def copy(self) -> State:
        return {name: tensor.clone() for name, tensor in state_of(self.net, self.optimizers).items()}

    def set_rates(self, shares: Sequence[float]) -> None:
        """Gives each optimizer a share of its rates."""
        for optimizer, rates, share in zip(self.optimizers, self.rates, shares, strict=False):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
        for place, group in zip(self._muon_rates, self.optimizers[-1].param_groups, strict=True):
            place.fill_(group["lr"])  # without a wait for the device

    def train(
        self, seed: int, steps: range, rates: Sequence[float], share: Callable[[int], float], points: int = 1
    ) -> list[tuple[int, float]]:
        """Trains for these steps; `points` times, the number of steps so far and their mean loss."""
        curve: list[tuple[int, float]] = []
        losses: list[Tensor] = []
        last = None
        for step in steps:
            if (now := share(step)) != last:
                self.set_rates([rate * now for rate in rates])
                last = now
            losses.append(self.step(self.text.batch(seed, step)))
            if len(losses) >= len(steps) / points or step == steps[-1]:
                curve.append((step + 1, float(torch.stack(losses).mean())))
                losses = []
        return curve

    @torch.no_grad()
    def validate(self) -> float:
        with torch.compiler.set_stance("force_eager"):
            losses = [self.loss(batch) for batch in self.text.validation.split(self.text.rows)]
        return float(torch.stack(losses).mean())


def fall(start: int, end: int, step: int) -> float:
    """A factor that falls from 1 at the step `start` to 0 at `end`."""
    return (end - step) / (end - start)


def processes(workers: int) -> ProcessPoolExecutor:
    """A pool whose processes share the device."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(workers, get_context("spawn"))
