"""What every width-scalable module refuses when it is made."""

import re
from typing import Any

import pytest
import torch
from tiny_modules import mlp
from torch import nn

from mupscale.errors import UserError
from mupscale.models.base import WidthScalable, WithoutDraws
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP


@pytest.mark.parametrize("width", [0, -8, 8.5, "8", None, True, [8, 0, 8]])
def test_a_width_that_is_none_is_shown(width: Any) -> None:
    message = f"must be a whole number of at least 1, or a list of them; got {width!r}"
    with pytest.raises(UserError, match=re.escape(f"model.width {message}")):
        mlp(width)
    with pytest.raises(UserError, match=re.escape(f"model.base_width {message}")):
        mlp(8, base_width=width)


@pytest.mark.parametrize("width", [10**7, 10**12, 10**19])
def test_a_width_that_does_not_fit_into_memory(width: int) -> None:
    with pytest.raises(UserError, match=f"model.width = {width}: a network of this width does not fit into memory"):
        mlp(width).network(width)


def test_a_width_that_no_tensor_can_have() -> None:
    with pytest.raises(UserError, match=r"model.base_width = 1000000000000: a network of this width does not fit"):
        mlp(8, base_width=10**12).network(8, meta=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 0}, "model.head_dim must be a whole number of at least 1, got 0"),
        ({"head_dim": 3}, "model.width = 8 is not divisible by model.head_dim = 3"),
        ({"head_dim": 4, "base_width": 6}, "model.base_width = 6 is not divisible by model.head_dim = 4"),
        ({"head_dim": 4, "heads": 2}, "model.heads = 2 and model.head_dim = 4: one of them stays"),
    ],
)
def test_gpt2_whose_heads_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GPT2(8, **settings)


@pytest.mark.parametrize("heads", [0, -2])
def test_gpt2_without_heads(heads: int) -> None:
    with pytest.raises(UserError, match=f"model.heads must be a whole number of at least 1, got {heads}"):
        GPT2(8, heads=heads)


def test_a_method_that_is_missing_is_named() -> None:
    class WithoutBuild(WidthScalable):
        pass

    class WithoutLoss(WidthScalable):
        def build(self, width: int) -> nn.Module:
            return nn.Linear(2, width)

    with pytest.raises(UserError, match=r"WithoutBuild has no method `build`: define build\(self, width\)"):
        WithoutBuild(8, 4)
    with pytest.raises(UserError, match=r"WithoutLoss has no method `loss`: define loss\(self, batch\)"):
        WithoutLoss(8, 4).training_step((), 0)


def test_only_the_meta_device_goes_without_random_numbers() -> None:
    def filled() -> list[torch.Tensor]:
        weights = [torch.empty(4, 4) for _ in range(4)]
        weights[0].normal_()
        nn.init.normal_(weights[1])
        nn.init.kaiming_uniform_(tensor=weights[2])
        nn.init.xavier_uniform_(weights[3])
        return [*weights, *nn.Linear(3, 3).parameters()]

    torch.manual_seed(0)
    expected = filled()
    torch.manual_seed(0)
    with torch.device("meta"), WithoutDraws():
        assert all(weight.is_meta for weight in filled())
    with WithoutDraws():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(filled(), expected, strict=True))


def test_flops_are_counted_once_for_the_same_arguments_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    count = WidthScalable._counted_flops

    def counted(self: WidthScalable, batch: Any) -> float:
        counts.append(len(batch[0]))
        return count(self, batch)

    monkeypatch.setattr("mupscale.models.base._FLOPS", {})
    monkeypatch.setattr(WidthScalable, "_counted_flops", counted)

    class Other(MLP):
        pass

    def flops(kind: type[MLP], width: int, rows: int, **arguments: Any) -> float:
        module = kind(width, 8, inputs=3, outputs=2, **arguments)
        return module.training_flops((torch.zeros(rows, 3), torch.zeros(rows, dtype=torch.long)))

    once = flops(MLP, 8, 5)
    assert flops(MLP, 8, 5, init_from="base.ckpt") == once
    assert counts == [5]
    assert flops(MLP, 8, 10) == 2 * once
    assert flops(MLP, 16, 5) > once
    assert flops(MLP, 8, 5, hidden_layers=5) > once
    assert flops(Other, 8, 5) == flops(Other, 8, 5) == once  # it might count anything
    assert counts == [5, 10, 5, 5, 5, 5]


def test_networks_at_the_base_width_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[Any] = []
    build = MLP.build
    monkeypatch.setattr(MLP, "build", lambda self, width: widths.append(width) or build(self, width))
    module = MLP(12, 4, inputs=3, outputs=2)
    module.network(12)
    module.network(24, meta=True)
    assert widths == [4, 8, 12, 24]
