"""What every growable module refuses when it is made, and does whatever a subclass overrides."""

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_modules import mlp
from torch import nn

from mupscale.errors import UserError
from mupscale.models.base import WithoutDraws
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP


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


class Weighted(MLP):
    """Its loss uses all that a module can hold beside its network, and logs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 8, inputs=3, outputs=2)
        self.register_buffer("weights", torch.tensor([1.0, 2.0]))
        self.register_buffer("seen", torch.tensor(0))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
        self.shift = torch.tensor([0.0, 1.0])
        self.losses: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def loss(self, batch: Any) -> torch.Tensor:
        loss = self.criterion(self.scale * (self(batch[0]) + self.shift) * self.weights, batch[1])
        self.log("mine", loss)
        self.log_dict({"theirs": loss})
        self.losses.append(loss)
        self.last = loss
        self.seen += 1
        return loss


def test_flops_are_counted_with_all_that_a_module_holds_and_leave_no_trace() -> None:
    batch = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
    plain = MLP(16, 8, inputs=3, outputs=2)
    module = Weighted(16)
    assert module.training_flops(batch) == plain.training_flops(batch)  # before there is a network
    module.configure_model()
    before, net = dict(vars(module)), module.net
    assert module.training_flops(batch) == plain.training_flops(batch)
    assert vars(module).keys() == before.keys()
    assert all(vars(module)[name] is value for name, value in before.items())
    assert module.net is net
    assert (module.losses, module.last, module.scale.grad) == ([], None, None)
    assert module.seen == 0


def test_flops_are_those_of_training_also_while_a_run_validates() -> None:
    class Twice(MLP):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) + (super().loss(batch) if self.training else 0)

    batch, module = (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)), Twice(8, 8, inputs=3, outputs=2)
    flops = module.training_flops(batch)
    assert module.eval().training_flops(batch) == flops
    assert not module.training


def test_a_loss_that_needs_values_has_no_flops() -> None:
    class Masked(MLP):
        def loss(self, batch: Any) -> torch.Tensor:
            return self(batch[0])[batch[0] > 0].mean()

    module = Masked(8, 8, inputs=3, outputs=3)
    module.configure_model()
    net = module.net
    reason = r"^the FLOPs of Masked cannot be counted, because its `loss` does not run on the meta device, .*\(Not"
    with pytest.raises(UserError, match=reason):
        module.training_flops((torch.ones(5, 3), torch.zeros(5, dtype=torch.long)))
    assert module.net is net
    assert not {"log", "log_dict"} & vars(module).keys()


@dataclass
class Rows:
    weight: float
    inputs: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 3), 5),
        ((torch.zeros(5, 3), torch.zeros(5)), 5),
        ({"inputs": torch.zeros(5, 3), "labels": torch.zeros(5), "mask": torch.zeros(5)}, 5),
        ([[torch.zeros(5, 3), torch.zeros(5)], [torch.zeros(7, 3), torch.zeros(7)]], 5),
        ({"first": [torch.zeros(5, 3)], "second": [torch.zeros(7, 3)]}, 5),
        (UserDict(inputs=torch.zeros(5, 3), labels=torch.zeros(5), mask=torch.zeros(5)), 5),
        (Rows(0.5, torch.zeros(5, 3)), 5),
        ((torch.tensor(0.5), ["a", "b"], torch.zeros(5, 3)), 5),
        ((["a", "b", "c"], None), 3),
        (range(4), 4),
    ],
)
def test_the_size_of_a_batch_is_the_length_of_its_first_tensor(batch: Any, size: int) -> None:
    assert mlp().batch_size(batch) == size


def test_a_batch_without_a_length_is_named() -> None:
    with pytest.raises(UserError, match=r"MLP has batches of object, .*: define batch_size\(self, batch\), which"):
        mlp().batch_size(object())


class Noting:
    """Has hooks that do not call super()."""

    def on_fit_start(self) -> None:
        self.seen = ["start"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 3

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = [checkpoint["mine"], self.width]  # type: ignore[attr-defined]


class Own(Noting, MLP):
    pass


class Nested(Own):
    """Calls super(), which runs what the base class does no second time."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.seen.append("nested")

    def rebuild(self, *arguments: Any, **options: Any) -> nn.Module:
        self.rebuilt = getattr(self, "rebuilt", 0) + 1
        return super().rebuild(*arguments, **options)


@pytest.mark.parametrize(("kind", "seen"), [(Own, [3, 16]), (Nested, [3, 16, "nested"])])
def test_hooks_of_a_subclass_need_not_call_super(kind: type[Own], seen: list[Any]) -> None:
    wide, narrow = kind(16, 4, 6, 3), kind(8, 4, 6, 3)
    wide.configure_model()
    narrow.configure_model()
    checkpoint = {"hyper_parameters": dict(wide.hparams, init_from="a.ckpt"), "state_dict": wide.state_dict()}
    for _ in range(2):
        wide.on_save_checkpoint(checkpoint)
        assert (checkpoint["mine"], checkpoint["hyper_parameters"]["init_from"]) == (3, None)
        narrow.on_load_checkpoint(checkpoint)
        assert (narrow.width, narrow.seen) == (16, seen)
    assert getattr(narrow, "rebuilt", 1) == 1
    narrow.hparams["init_from"] = "nowhere.ckpt"
    narrow.trainer = SimpleNamespace(ckpt_path=None)
    with pytest.raises(UserError, match=r"model\.init_from = nowhere\.ckpt"):
        narrow.on_fit_start()


def test_what_was_frozen_is_frozen_in_the_network_of_a_wider_checkpoint() -> None:
    wide, narrow = mlp(16), mlp(8)
    for module in (wide, narrow):
        module.configure_model()
    checkpoint = {"hyper_parameters": dict(wide.hparams), "state_dict": wide.state_dict()}
    wide.on_save_checkpoint(checkpoint)
    assert narrow.net is not None
    next(narrow.net.parameters()).requires_grad_(False)
    narrow.on_load_checkpoint(checkpoint)
    assert narrow.width == 16
    assert [parameter.requires_grad for parameter in narrow.net.parameters()][:2] == [False, True]


def test_a_parameter_that_no_optimizer_trains_is_reported() -> None:
    module = mlp()
    module.temperature = nn.Parameter(torch.ones(()))
    module.configure_model()
    with pytest.warns(UserWarning, match="'temperature' of MLP is not in the network, so the optimizer does not train"):
        module.configure_optimizers()
    module.temperature.requires_grad_(False)
    module.configure_optimizers()


def test_a_network_without_shapes_is_refused() -> None:
    class Lazy(MLP):
        def build(self, width: int) -> nn.Module:
            return nn.Sequential(nn.LazyLinear(width), nn.LazyLinear(3))

    with pytest.raises(UserError, match=r"parameter '0\.weight' is a lazy one without a shape"):
        Lazy(8, base_width=4, inputs=6, outputs=3).configure_model()


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
