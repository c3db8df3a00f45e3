"""What is told of long work while it is done."""

import torch
from mup_optimizers import MuAdamW
from torch import nn

import mupscale
from mupscale.checks.coordinate_check import coord_check


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


BATCHES = [torch.ones(4, 3), -torch.ones(4, 3)]


def test_verify_counts_its_steps() -> None:
    told: list[tuple[str, int, int]] = []
    mupscale.verify(
        network(4), network(8), optimizer=torch.optim.AdamW, batches=BATCHES, loss=loss, steps=3,
        watch=lambda *words: told.append(words),
    )  # fmt: skip
    assert told == [("comparing training steps", done, 3) for done in (1, 2, 3)]


def test_a_coordinate_check_counts_its_networks() -> None:
    told: list[tuple[str, int, int]] = []
    coord_check(
        lambda width: mupscale.set_base_shapes(network(width), network(4), network(8)), [4, 8, 16],
        optimizer=lambda net: MuAdamW(net.parameters(), lr=1e-3),
        batches=BATCHES, loss=loss, steps=1, seeds=2, watch=lambda *words: told.append(words),
    )  # fmt: skip
    total = 2 * (3 + 3 + 2)  # three fresh, as many doubled, and the narrowest to two more widths
    assert told == [("networks trained", done, total) for done in range(1, total + 1)]


def test_a_search_tells_how_many_modules_agree() -> None:
    told: list[tuple[str, int, int]] = []
    mupscale.discover(network(4), network(8), lambda model: model(BATCHES[0]), watch=lambda *words: told.append(words))
    assert told
    assert told[-1][1] == told[-1][2]
    assert {words for words, _, _ in told} == {"calls of modules that agree"}
