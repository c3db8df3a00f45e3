"""Learning-rate schedules: their numbers, and a growth in the middle of them."""

import pytest
import torch
from torch import nn

import mupscale
from mupscale.errors import UserError
from mupscale.models.optimizers import continue_optimizers_
from mupscale.schedules import spread_schedule_
from mupscale.widening.state import StateSource


def rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.5)])
    schedule, found = make(optimizer), []
    for _ in range(steps):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(first / 2)
        found.append(first)
        optimizer.step()
        schedule.step()
    return found


def test_warmup_stable_decay() -> None:
    found = rates(lambda optimizer: mupscale.schedules.WarmupStableDecay(optimizer, warmup=2, steps=8, decay=0.5), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates(lambda optimizer: mupscale.schedules.WarmupStableDecay(optimizer, warmup=4), 6) == [
        0.25,
        0.5,
        0.75,
        1,
        1,
        1,
    ]
    assert rates(mupscale.schedules.WarmupStableDecay, 3) == [1, 1, 1]


def test_warmup_cosine() -> None:
    found = rates(lambda optimizer: mupscale.schedules.WarmupCosine(optimizer, steps=6, warmup=2), 8)
    assert found == pytest.approx([0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup": -1}, "warmup must be a whole number of at least 0, got -1"),
        ({"warmup": 1.5}, "warmup must be a whole number"),
        ({"decay": 0.5}, "a decay of 0.5 needs steps"),
        ({"decay": 2, "steps": 10}, "from 0 to 1; got 2"),
        ({"warmup": 10, "steps": 10}, "a warm-up of 10 steps is as long as the run, which has 10"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rates(lambda optimizer: mupscale.schedules.WarmupStableDecay(optimizer, **arguments), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: mupscale.schedules.WarmupStableDecay(optimizer, warmup=3, steps=12, decay=0.4),
        lambda optimizer: mupscale.schedules.WarmupCosine(optimizer, steps=12, warmup=3),
    ],
)
def test_a_growth_goes_on_where_the_schedule_stands(make) -> None:
    def network(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule, x, y) -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    def losses(at_step: int) -> list[float]:
        torch.manual_seed(0)
        x, y = torch.randn(16, 3, dtype=torch.float64), torch.randint(0, 2, (16,))
        model, wide = network(4).double(), network(8).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        schedule, answer = make(optimizer), []
        for number in range(12):
            if number == at_step:
                report = mupscale.upscale(model, wide, optimizer)
                continue_optimizers_([optimizer], [schedule], model, wide, report)
                model = wide
            answer.append(step(model, optimizer, schedule, x, y))
        return answer

    assert losses(5) == pytest.approx(losses(12), rel=1e-12)


class OfItsOwn(torch.optim.lr_scheduler.LambdaLR):
    """Keeps its rates in a property."""

    @property
    def base_lrs(self) -> list[float]:
        return self._rates

    @base_lrs.setter
    def base_lrs(self, rates: list[float]) -> None:
        self._rates = rates


def test_groups_are_split_in_a_scheduler_with_properties() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = OfItsOwn(optimizer, lambda step: 0.9**step)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    spread_schedule_(scheduler, [StateSource(0, 1.0), StateSource(0, 0.5)])
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.09, 0.045])
