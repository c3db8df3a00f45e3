"""Models that nobody prepared: what is found makes them train exactly as before."""

import copy

import pytest
import torch
from tiers import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from unprepared import MODELS, TOKENS, Build, Decoder, Sinusoid

import mupscale
from mupscale.discovery.discover import cuts_between
from mupscale.errors import UserError

WIDTH = 8


def pair(build: Build, factor: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return build(WIDTH), build(factor * WIDTH)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, steps: int) -> list[float]:
    answer = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(inputs)
        loss = F.cross_entropy(output.flatten(0, -2), torch.arange(output.flatten(0, -2).shape[0]) % 2)
        loss.backward()
        optimizer.step()
        answer.append(loss.item())
    return answer


def drift_of_training(narrow: nn.Module, wide: nn.Module, found: mupscale.Found, inputs: Tensor, kind: type) -> float:
    """The largest relative difference of the losses in twelve steps after growing."""
    narrow, wide = narrow.double(), wide.double()
    optimizer = kind(narrow.parameters(), lr=0.01, weight_decay=0.1)
    losses(narrow, optimizer, inputs, 4)
    report = mupscale.upscale(narrow, wide, optimizer, **found.hints)
    before = losses(narrow, optimizer, inputs, 12)
    after = losses(wide, report.optimizer, inputs, 12)
    return max(abs(a / b - 1) for a, b in zip(after, before, strict=True))


PAIRS = [(factor, kind) for factor in (2, 3) for kind in (torch.optim.AdamW, torch.optim.SGD)]
CELLS = [(name, *pair) for name in MODELS for pair in PAIRS]
OFTEN = [(name, *PAIRS[(row + 1) % len(PAIRS)]) for row, name in enumerate(MODELS)]
"""One cell of each model, and each pair of a factor and an optimizer several times."""


@pytest.mark.parametrize(
    ("name", "factor", "kind"),
    slow_except(CELLS, *((name, 2, torch.optim.AdamW) for name in list(MODELS)[::3]), kept=OFTEN),
)
def test_what_is_found_trains_exactly(name: str, factor: int, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    build, inputs = MODELS[name]
    narrow, wide = pair(build, factor)
    found = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert found.untested == ()
    assert drift_of_training(narrow, wide, found, inputs, kind) < 1e-10


def test_nothing_is_changed_and_the_answer_is_always_the_same() -> None:
    build, inputs = MODELS["tied"]
    narrow, wide = pair(build, 2)
    before = copy.deepcopy((narrow.state_dict(), wide.state_dict()))
    state = torch.get_rng_state()
    first = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert torch.equal(torch.get_rng_state(), state)
    for saved, model in zip(before, (narrow, wide), strict=True):
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    torch.manual_seed(5)
    assert mupscale.discover(narrow, wide, lambda model: model(inputs)) == first
    assert narrow.training


def test_it_prints_one_line_for_all_layers() -> None:
    build, inputs = MODELS["tied, scaled, gain 1 + w"]
    text = str(mupscale.discover(*pair(build, 2), lambda model: model(inputs)))
    assert "  embed.weight: 0.707107\n" in text
    assert "  last.weight: 1.41421, of 1 + the weight\n" in text
    assert "  attentions.*.qkv.weight: {0: 8, 1: 8} (2 of them)\n" in text


def test_a_table_that_depends_on_the_width_is_refused_by_name() -> None:
    narrow, wide = pair(Sinusoid, 2)
    with pytest.raises(UserError, match=r"stuck at 'read' \(Linear\): what 'read' reads differs.* changes were tried"):
        mupscale.discover(narrow, wide, lambda model: model(TOKENS))


def test_an_unused_parameter_is_named() -> None:
    class Unused(Decoder):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.pooler = nn.Linear(width, width)

    found = mupscale.discover(*pair(Unused, 2), lambda model: model(TOKENS))
    assert found.untested == ("pooler.weight", "pooler.bias")
    assert "not tested, because what the model returns does not depend on them: pooler.weight, pooler.bias" in str(
        found
    )


def test_bad_arguments() -> None:
    narrow, wide = pair(Decoder, 2)
    with pytest.raises(UserError, match=r"discover: wide must be a torch\.nn\.Module"):
        mupscale.discover(narrow, None, lambda model: model(TOKENS))
    with pytest.raises(UserError, match="discover: call must be a function"):
        mupscale.discover(narrow, wide, TOKENS)
    with pytest.raises(UserError, match="does not run the model"):
        mupscale.discover(narrow, wide, lambda model: None)
    with pytest.raises(UserError, match="wide is on the meta device"):
        mupscale.discover(narrow, Decoder(16).to("meta"), lambda model: model(TOKENS))


@pytest.mark.parametrize("name", ["heads side by side", "grouped queries", "tied, scaled, gain 1 + w", "convolutions"])
def test_a_finding_is_carried_over_to_another_size(name: str) -> None:
    build, inputs = MODELS[name]
    found = mupscale.discover(*pair(build, 2), lambda model: model(inputs))
    torch.manual_seed(1)
    narrow, wide = build(16), build(32)
    with torch.device("meta"):
        shapes = build(16), build(32)
    resolved = found.resolved(*shapes, lambda: cuts_between(*shapes, lambda model: model(inputs.to("meta"))))
    again = mupscale.discover(narrow, wide, lambda model: model(inputs))
    assert (resolved.roles, resolved.blocks, resolved.units) == (again.roles, again.blocks, again.units)
