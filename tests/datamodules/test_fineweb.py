"""Rows of tokens: windows in order or anywhere, mapped or resident."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_ins import trainer_stub

from mupscale.datamodules.fineweb import JARGON, FineWeb, WindowLoader
from mupscale.datamodules.token_writer import TokenWriter

CONTEXT, BATCH = 7, 4
TOKENS = {"train": 211, "val": 100}  # 30 windows of seven targets each, and 14 with one token over


def write_folder(folder: Path, sizes: dict[str, int] = TOKENS, file_tokens: int = 40) -> str:
    """Each token of the training split is 60,000 + its place, so that a row tells where it is from, above what int16
    can hold.
    """
    folder.mkdir(exist_ok=True)
    for split, size in sizes.items():
        writer = TokenWriter(folder / split, file_tokens)
        tokens = (np.arange(size) + (60_000 if split == "train" else 0)).astype(np.uint16)
        writer.append(tokens, np.array([10] * (size // 10) + [size % 10] * (size % 10 > 0)))
        writer.finish("test")
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_folder(tmp_path / "tokens")


def module(folder: str | None, **options) -> FineWeb:
    data = FineWeb(folder, **{"batch_size": BATCH, "context": CONTEXT, **options})
    data.setup()
    return data


def starts(loader: WindowLoader) -> list[list[int]]:
    """The places of an epoch's rows, which are checked to be whole windows."""
    answer = []
    for batch in loader:
        assert (batch.dtype, batch.shape[1]) == (torch.int64, CONTEXT + 1)
        assert torch.equal(batch, batch[:, :1] + torch.arange(CONTEXT + 1))
        answer.append((batch[:, 0] % 60_000).tolist())
    return answer


@pytest.fixture(params=[False, True], ids=["mapped", "resident"])
def resident(request: pytest.FixtureRequest) -> bool:
    return request.param


# ---- windows


def test_in_order_every_token_is_predicted_once(folder: str, resident: bool):
    data = module(folder, order="sequential", resident=resident)
    for _ in range(2):
        rows = list(chain(*starts(data.train_dataloader())))
        assert rows == [7 * number for number in range(28)]  # thirty windows; two are dropped with the ragged batch
        targets = [start + 1 + place for start in rows for place in range(CONTEXT)]
        assert targets == list(range(1, 197))
    assert len(data.train_dataloader()) == (211 - 1) // (4 * 7) == 7


def test_validation_and_test_see_all_that_is_held_out(folder: str, resident: bool):
    data = module(folder, resident=resident)
    for loader in (data.val_dataloader(), data.test_dataloader()):
        assert starts(loader) == [
            [0, 7, 14, 21],
            [28, 35, 42, 49],
            [56, 63, 70, 77],
            [84, 91],
        ]  # the last token is 98; one is over
        assert len(loader) == 4


def test_prediction_sees_the_inputs(folder: str, resident: bool):
    data = module(folder, resident=resident)
    inputs = torch.cat(list(data.predict_dataloader()))
    assert torch.equal(inputs, torch.cat(list(data.val_dataloader()))[:, :-1])


def test_random_crops_begin_anywhere_and_are_as_many(folder: str, resident: bool):
    loader = module(folder, resident=resident).train_dataloader()
    assert len(loader) == 7
    epochs = [list(chain(*starts(loader))) for _ in range(200)]
    assert {len(epoch) for epoch in epochs} == {28}
    assert set(chain(*epochs)) == set(range(211 - CONTEXT))  # the last window ends with the last token
    counts = np.bincount(list(chain(*epochs)), minlength=204)
    # 5600 draws into 204 places: 27.5 each, with a standard deviation of 5.2
    assert (counts.min() > 6, counts.max() < 55) == (True, True)
    assert 150 < ((counts - 5600 / 204) ** 2 / (5600 / 204)).sum() < 260  # chi squared, 203 ± 20


def test_the_crops_of_a_seed_stay_what_they_are(folder: str):
    """A run resumed under another version of this project must go on with the same rows."""
    assert starts(module(folder, seed=3).train_dataloader())[0] == [163, 145, 31, 133]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"order": "sequential"}, "order=sequential, this run's loader order=random"),
        ({"context": 5}, "rows=42"),
        ({"seed": 1}, "seed=1"),
        ({"batch_size": 2}, "batch_size=2"),
        ({"folder": {"train": 212, "val": 100}}, "tokens=212, this run's loader tokens=211"),  # as many windows
    ],
)
def test_a_state_of_another_order_is_refused(folder: str, tmp_path: Path, other: dict, named: str):
    options = dict(other)
    theirs = write_folder(tmp_path / "other", options.pop("folder", TOKENS))
    state = module(theirs, **options).train_dataloader().state_dict()
    with pytest.raises(ValueError, match=f"checkpoint's data order has {named}"):
        module(folder).train_dataloader().load_state_dict(state)


# ---- data and model that do not go together


def test_the_model_must_know_the_positions(folder: str):
    def attach(**hparams: int) -> None:
        data = FineWeb(folder, BATCH, CONTEXT)
        data.trainer = trainer_stub(lightning_module=SimpleNamespace(hparams=hparams))
        data.setup("fit")

    with pytest.raises(ValueError, match=r"data\.context = 7: the model has model\.context = 6; make"):
        attach(vocabulary=65536, context=6)
    attach(vocabulary=65536, context=7, width=8)


@pytest.mark.parametrize("context", [100, 101, 5000, 0, -1])
def test_fewer_tokens_than_the_context(folder: str, context: int):
    with pytest.raises(
        ValueError, match=rf"data\.context = {context}: wanted 1 to (210|99), (train|val) has (211|100) tokens"
    ):
        module(folder, context=context)


# ---- the embedded sample


def test_the_sample_is_found_where_it_is_installed():
    data = FineWeb()
    data.prepare_data()
    data.setup()
    assert (len(data.train_dataloader()), len(data.val_dataloader())) == (11, 1)
    assert JARGON.name == "jargon"
