"""Resident batches: the same for any number of ranks, another order each epoch, and resumable at any batch, in
Lightning too.
"""

import shutil
import threading
from copy import deepcopy
from itertools import chain
from pathlib import Path

import pytest
import torch
from by_position import check_positions
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from training_runs import quiet_trainer

from mupscale.datamodules import resident
from mupscale.datamodules.resident import ResidentLoader, joint_batch
from mupscale.errors import UserError

ROWS, BATCH = 26, 4  # six whole batches and two rows over


def loader(rows: int = ROWS, batch_size: int = BATCH, **options) -> ResidentLoader:
    """Each row is its own number, so that a batch is the list of rows it was made of."""
    return ResidentLoader((torch.arange(rows),), batch_size, **{"shuffle": True, "drop_last": True, **options})


def epoch(batches: ResidentLoader) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# ---- batches


def test_one_index_selects_the_same_rows_of_every_tensor():
    labels = torch.arange(ROWS)
    features = labels[:, None] * torch.tensor([1.0, 10.0])
    for x, y in ResidentLoader((features, labels), BATCH, shuffle=True):
        assert torch.equal(x, y[:, None] * torch.tensor([1.0, 10.0]))
        x.zero_()
    assert features[-1, 1] == 250  # a batch is a copy


@pytest.mark.parametrize(("drop_last", "batches", "last"), [(True, 6, 4), (False, 7, 2)])
def test_length_and_last_batch(drop_last: bool, batches: int, last: int):
    data = loader(drop_last=drop_last)
    drawn = epoch(data)
    assert len(data) == len(drawn) == batches
    assert len(drawn[-1]) == last
    assert len(set(chain(*drawn))) == (batches - 1) * BATCH + last


def test_without_shuffling_the_rows_come_in_order_every_epoch():
    data = loader(shuffle=False, drop_last=False)
    assert [*chain(*epoch(data))] == [*chain(*epoch(data))] == list(range(ROWS))


def test_the_order_is_a_function_of_seed_and_epoch():
    data, again, other = loader(seed=0), loader(seed=0), loader(seed=1)
    epochs = [epoch(data) for _ in range(3)]
    assert epochs == [epoch(again) for _ in range(3)]
    others = [epoch(other) for _ in range(3)]
    # seed + epoch would make epoch 1 of seed 0 the epoch 0 of seed 1
    assert len({str(order) for order in epochs + others}) == 6


def test_a_thread_draws_the_next_order_while_an_epoch_is_used(monkeypatch: pytest.MonkeyPatch):
    """Each order once; from the second epoch on, no step waits for it. A copy draws for itself."""
    expected, batches = loader(), loader()
    epochs = [epoch(expected) for _ in range(3)]
    draw, drawn = ResidentLoader._draw_plan, []

    def note(self: ResidentLoader, number: int) -> tuple[Tensor, ...]:
        drawn.append((number, threading.current_thread() is threading.main_thread()))
        return draw(self, number)

    monkeypatch.setattr(resident, "LONG", ROWS)
    monkeypatch.setattr(ResidentLoader, "_draw_plan", note)
    assert [epoch(batches), epoch(batches)] == epochs[:2]
    batches._ahead.join()
    assert not batches._ahead.daemon, "a program that ends meanwhile would be aborted"
    assert drawn == [(0, True), (1, False), (2, False)]
    copied = deepcopy(batches)
    assert epoch(copied) == epoch(batches) == epochs[2]
    assert (2, True) in drawn

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    alone = loader()
    assert [epoch(alone), epoch(alone)] == epochs[:2]


def test_a_copy_with_other_data_has_another_order():
    first = loader()
    copied = deepcopy(first)
    copied.tensors[0].add_(1000)
    assert copied.order != first.order
    assert joint_batch([first, copied], 0, 0).tolist() == [
        first.batch_at(0, 0).tolist(),
        (first.batch_at(0, 0) + 1000).tolist(),
    ]


def test_a_plan_that_a_validation_draws_can_be_trained_with():
    class Numbered(ResidentLoader):
        def _batch(self, rows: torch.Tensor, *chances: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (rows,)

    data = Numbered(loader().tensors, BATCH, shuffle=True)
    with torch.inference_mode():
        data.batch_at(0, 0)
    assert not data.batch_at(0, 0).is_inference()


def test_the_order_ignores_and_leaves_the_global_generator():
    torch.manual_seed(0)
    first, drawn = epoch(loader()), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))
    assert epoch(loader()) == first


# ---- ranks


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("rows", "drop_last"), [(26, True), (28, False), (31, False)])
def test_all_ranks_together_see_the_batches_of_one(world_size: int, rows: int, drop_last: bool):
    options = {"rows": rows, "batch_size": 8, "drop_last": drop_last}
    alone = loader(**options)
    ranks = [loader(**options, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(2):
        whole, shares = epoch(alone), [epoch(rank) for rank in ranks]
        assert {len(share) for share in shares} == {len(whole)} == {len(alone)}
        for index, batch in enumerate(whole):
            parts = [share[index] for share in shares]
            assert [*chain(*parts)] == batch
            sizes = [len(part) for part in parts]
            assert min(sizes) > 0
            assert max(sizes) - min(sizes) <= (len(batch) < 8)  # only a ragged batch may be shared unevenly


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 6, "world_size": 4}, "batch_size=6, .* multiple of the 4 ranks"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 32}, "batch_size=32 leaves no batch of 26 rows"),
        ({"rows": 0, "drop_last": False}, "leaves no batch of 0 rows"),
        ({"batch_size": 8, "world_size": 4, "drop_last": False}, "leaves 2 of 26 rows .* too few for 4 ranks"),
        ({"rank": 2, "world_size": 2}, "rank must lie in 0..1"),
    ],
)
def test_refused_arguments(options: dict, named: str):
    with pytest.raises(ValueError, match=named):
        loader(**options)


# ---- resume


@pytest.mark.parametrize("seen", [0, 1, 6, 8])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_loader_yields_the_very_next_batch(seen: int, world_size: int):
    straight = loader()
    expected = [*epoch(straight), *epoch(straight), *epoch(straight)]
    interrupted, drawn = loader(), 0
    while drawn < seen:
        for _batch in interrupted:
            drawn += 1
            if drawn == seen:
                break
    state = interrupted.state_dict()
    ranks = [loader(rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = []
    for rank in ranks:
        epoch(rank)  # whatever it did before is forgotten
        rank.load_state_dict(state)
        shares.append([*epoch(rank), *epoch(rank), *epoch(rank)][: len(expected) - seen])
    assert [[*chain(*parts)] for parts in zip(*shares, strict=True)] == expected[seen:]


def test_iter_after_drawing_abandons_the_epoch():
    straight, data = loader(), loader()
    epoch(straight)
    next(iter(data))
    assert epoch(data) == epoch(straight)


@pytest.mark.parametrize(
    "other", [{"batch_size": 2}, {"rows": 27}, {"seed": 1}, {"shuffle": False}, {"drop_last": False}]
)
def test_a_state_of_another_order_is_refused(other: dict):
    data, name = loader(), next(iter(other))
    state = loader(**other).state_dict()
    with pytest.raises(
        ValueError, match=f"checkpoint's data order has {name}={other[name]}, this run's loader {name}="
    ):
        data.load_state_dict(state)
    assert epoch(data) == epoch(loader())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": None}, "rows=None"),
        ({"position": None}, "the data order in the checkpoint: "),
        ({"position": 10**30}, "the data order in the checkpoint: "),
        ({"epoch": "x"}, "the data order in the checkpoint: "),
    ],
)
def test_a_foreign_state_is_refused(change: dict, named: str):
    with pytest.raises(UserError, match=named):
        loader().load_state_dict(loader().state_dict() | change)


# ---- by position


class Differences(ResidentLoader):
    """Each row less the first of its batch: a batch of several loaders must not be made as one."""

    def _batch(self, rows: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        return tuple(part - part[0] for part in super()._batch(rows))


NUMBERS, PAIRS = torch.arange(ROWS), torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("tensors", [(NUMBERS,), (PAIRS, NUMBERS)], ids=["tensor", "tuple"])
@pytest.mark.parametrize("kind", [ResidentLoader, Differences])
def test_by_position_batches_are_those_of_iteration(
    kind: type[ResidentLoader], tensors: tuple[Tensor, ...], shuffle: bool, drop_last: bool
):
    def make(seed: int) -> ResidentLoader:
        return kind(tensors, BATCH, shuffle=shuffle, seed=seed, drop_last=drop_last)

    check_positions(make, follows_seed=shuffle)


@pytest.mark.parametrize("batch_size", [8, 32])
@pytest.mark.parametrize("rank", [0, 1])
def test_by_position_a_rank_gets_its_share(rank: int, batch_size: int):
    def make(seed: int) -> ResidentLoader:
        return ResidentLoader((PAIRS, NUMBERS), batch_size, shuffle=True, seed=seed, rank=rank, world_size=2)

    check_positions(make, follows_seed=True)


class Other(ResidentLoader):
    """Of another class."""


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"batch_size": 2},
        {"shuffle": False},
        {"drop_last": False},
        {"world_size": 2},
        {"world_size": 2, "rank": 1},
        {"tensors": (NUMBERS.clone(),)},
        {"tensors": (NUMBERS, NUMBERS)},
        {"kind": Other},
    ],
    ids=str,
)
def test_loaders_that_differ_in_anything_have_another_order(other: dict):
    def make(kind=ResidentLoader, tensors=(NUMBERS,), batch_size=BATCH, **options) -> ResidentLoader:
        return kind(tensors, batch_size, **{"shuffle": True, "seed": 0, "drop_last": True, **options})

    assert make().order == make().order
    assert hash(make().order) == hash(make().order)
    assert make().order != make(**other).order


@pytest.mark.parametrize("position", [-1, ROWS])
def test_there_is_nothing_outside_of_an_epoch(position: int):
    for go in (loader().batch_at, loader().go_to):
        with pytest.raises(IndexError, match=f"no (batch|position) {position}"):
            go(0, position)


@pytest.mark.parametrize("seen", range(13))
def test_going_to_a_place_is_as_drawing_up_to_it(seen: int):
    drawing, going = loader(), loader()
    existing = iter(going)
    drawn_by = iter(drawing)
    at_epoch, position = divmod(seen, len(going))
    for _ in range(at_epoch):
        epoch(drawing)
        drawn_by = iter(drawing)
    for _ in range(position):
        next(drawn_by)
    going.go_to(at_epoch, position)
    assert (going.epoch, going.position) == (drawing.epoch, drawing.position) == (at_epoch, position)
    state = drawing.state_dict()
    assert going.state_dict() == state

    resumed, straight = loader(), loader()
    resumed.load_state_dict(going.state_dict())
    straight.load_state_dict(state)
    assert [epoch(resumed), epoch(resumed)] == [epoch(straight), epoch(straight)]
    assert [batch.tolist() for batch in existing] == [batch.tolist() for batch in drawn_by]
    assert epoch(going) == epoch(drawing)


# ---- Lightning


class Recorder(LightningModule):
    """Remembers the training batches with the counters they came under."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, int, int, list[int]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_idx, self.global_step, batch.tolist()))
        return self.weight * batch.float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert batch.tolist() == [2 * batch_idx, 2 * batch_idx + 1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, *, ckpt_path: Path | None = None, checkpoint: dict, **options) -> Recorder:
    model = Recorder()
    trainer = quiet_trainer(
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, **checkpoint)], enable_checkpointing=True, **options
    )
    trainer.fit(model, loader(), loader(6, 2, shuffle=False), ckpt_path=ckpt_path, weights_only=True)
    return model


EVERY_STEP, EPOCH_END = {"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "options", "checkpoints"),
    [
        (EVERY_STEP, {"max_epochs": 3}, 18),
        (EVERY_STEP, {"max_epochs": 3, "limit_train_batches": 4}, 12),
        (EVERY_STEP, {"max_epochs": 2, "accumulate_grad_batches": 2}, 6),
        # Lightning does not load the loader's state from these
        (EPOCH_END, {"max_epochs": 3}, 3),
        (EPOCH_END, {"max_epochs": 3, "limit_train_batches": 4}, 3),
    ],
)
def test_a_resumed_fit_sees_the_batches_of_the_uninterrupted_one(
    tmp_path: Path, checkpoint: dict, options: dict, checkpoints: int
):
    run, saved = tmp_path / "run", tmp_path / "saved"
    whole = fit(run, checkpoint=checkpoint, **options)
    run.rename(saved)  # Lightning warns of a folder that is not empty, and of another one
    assert len({str(batch) for *_, batch in whole.seen}) == len(whole.seen)
    files = sorted(saved.glob("*.ckpt"))
    assert len(files) == checkpoints
    for file in files:
        loops = torch.load(file, weights_only=True)["loops"]["fit_loop"]
        seen = loops["epoch_loop.batch_progress"]["total"]["processed"]
        assert loops["state_dict"]["combined_loader"][0]["batch_size"] == BATCH
        resumed = fit(run, ckpt_path=file, checkpoint=checkpoint, **options)
        assert resumed.seen == whole.seen[seen:], file.name
        shutil.rmtree(run, ignore_errors=True)
