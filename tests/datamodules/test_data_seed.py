"""The order of the data follows the seed of the run, unless the data module has a seed of its own; what is held out
does not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from by_position import assert_same
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor

from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.covertype import Covertype
from mupscale.datamodules.fineweb import FineWeb
from mupscale.datamodules.resident import ResidentLoader

Make = Callable[..., LightningDataModule]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 70), ("test", 20)):
        arrays[f"x_{part}"] = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = draw.integers(0, 100, count, dtype=np.uint8)
    np.savez(folder / "cifar100.npz", **arrays)
    return str(folder)


@pytest.fixture(params=["Covertype", "CIFAR100", "FineWeb"])
def make(request: pytest.FixtureRequest, images: str) -> Make:
    """Makes a data module that is set up."""
    classes: dict[str, Make] = {
        "Covertype": lambda **options: Covertype(**options),
        "CIFAR100": lambda **options: CIFAR100(images, batch_size=16, **options),
        "FineWeb": lambda **options: FineWeb(context=512, **options),
    }

    def made(**options: Any) -> LightningDataModule:
        data = classes[request.param](**options)
        data.setup()
        return data

    return made


def loaders(data: LightningDataModule) -> list[ResidentLoader]:
    return [data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]


def assert_same_data(ours: LightningDataModule, theirs: LightningDataModule) -> None:
    for mine, other in zip(loaders(ours), loaders(theirs), strict=True):
        assert mine.state_dict() == other.state_dict()
        for _ in range(2):
            for batch, expected in zip(mine, other, strict=True):
                assert_same(batch, expected)


@pytest.mark.parametrize("seed", [None, 0])
def test_with_the_seed_0_all_is_as_with_the_data_seed_0(make: Make, seed: int | None):
    if seed is not None:
        seed_everything(seed, verbose=False)
    assert_same_data(make(), make(seed=0))


def test_the_order_follows_the_seed_of_the_run(make: Make):
    orders = []
    for seed in (5, 6, 5):
        seed_everything(seed, verbose=False)
        data = make()
        assert data.train_dataloader().state_dict()["seed"] == seed
        orders.append([batch if isinstance(batch, Tensor) else batch[0] for batch in data.train_dataloader()])
    first, other, again = (torch.cat(order) for order in orders)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_seed_of_the_data_is_not_that_of_the_run(make: Make):
    before = make(seed=3)
    seed_everything(5, verbose=False)
    assert_same_data(make(seed=3), before)


def test_what_is_held_out_does_not_follow_the_seed_of_the_run(make: Make):
    zero = make()
    seed_everything(5, verbose=False)
    five = make()
    for mine, other in zip(loaders(five)[1:], loaders(zero)[1:], strict=True):
        assert mine.order == other.order  # which names the very tensors
    assert five.train_dataloader()._made_of() == zero.train_dataloader()._made_of()


def test_the_split_of_covertype_follows_its_own_seed_alone():
    seed_everything(5, verbose=False)
    default, zero, five = Covertype(), Covertype(seed=0), Covertype(seed=5)
    for data in (default, zero, five):
        data.setup()
    held_out = [torch.cat([features for features, _ in data.val_dataloader()]) for data in (default, zero, five)]
    assert torch.equal(held_out[0], held_out[1])
    assert not torch.equal(held_out[0], held_out[2])
    order = default.train_dataloader()
    assert_same(order.batch_at(0, 0), ResidentLoader(order.tensors, 2000, shuffle=True, seed=5).batch_at(0, 0))


def test_the_seed_is_read_at_the_first_setup_and_kept(make: Make):
    seed_everything(3, verbose=False)
    data = make()
    assert data.seed is None
    seed_everything(4, verbose=False)
    data.setup("validate")
    assert data.train_dataloader().state_dict()["seed"] == 3


@pytest.mark.parametrize("kind", [Covertype, CIFAR100, FineWeb])
@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_a_seed_that_is_none_is_refused(kind: Make, seed: Any):
    with pytest.raises(ValueError, match=r"data\.seed"):
        kind(seed=seed)
