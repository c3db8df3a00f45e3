"""Notes on constants of a model that depend on its width, and on head counts."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import mupscale


def notes(narrow: nn.Module, wide: nn.Module, **given: Any) -> list[str]:
    return list(mupscale.plan(narrow, wide, **given).notes)


class Model(nn.Module):
    """A layer, and what a test adds to it."""

    def __init__(self, width: int, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, width)
        for name, value in attributes.items():
            setattr(self, name, value)


class Attention(Model):
    pass


def test_a_number_that_changes_is_noted():
    narrow, wide = Model(4, embed_scale=2.0, p=0.5), Model(16, embed_scale=4.0, p=0.5)
    assert notes(narrow, wide) == [
        "(the model): its constant embed_scale changes 2 → 4; if it multiplies something that grows, compensate "
        "for it with Hints(rescale=...)"
    ]
    assert notes(narrow, wide, hints=mupscale.Hints(rescale={"layer.*": 0.5})) == []


def test_a_logit_scale_is_noted():
    (note,) = notes(Attention(4, scale=0.5), Attention(8, scale=0.25))
    assert note.startswith("(the model): its constant scale changes 0.5 → 0.25; if it multiplies something that grows")


def test_a_table_that_grows_and_is_not_saved_is_noted_unless_it_is_a_duplicate():
    def build(table: Tensor) -> nn.Module:
        model = Model(4 * len(table))
        model.register_buffer("table", table, persistent=False)
        return model

    table = torch.arange(3.0)
    for same in (table.repeat(2), table.repeat_interleave(2)):
        assert notes(build(table), build(same)) == []
    (note,) = notes(build(table), build(torch.arange(6.0)))
    assert note.startswith("table: this buffer (3,) → (6,) is not saved with the model, and the wide one is not a")


def test_head_counts_are_noted_only_where_there_are_heads():
    """A configuration is handed to every module: to norms, feed-forward layers and tables without parameters too."""

    def build(heads: int) -> nn.Module:
        config = SimpleNamespace(num_attention_heads=heads)
        model = Model(4 * heads, config=config)
        model.mlp, model.attention = Model(4 * heads, config=config), Attention(4 * heads, config=config)
        model.core = nn.Module()
        model.core.num_heads = heads
        return model

    assert [note.partition(":")[0] for note in notes(build(2), build(4))] == ["(the model)", "attention"]
    assert notes(build(2), build(4), hints=mupscale.Hints(blocks={"attention.layer.weight": {0: 4}})) == []
