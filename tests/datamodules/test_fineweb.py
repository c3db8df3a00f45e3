"""Rows of tokens: windows in order or anywhere, mapped or resident, the same for any number of ranks, resumable at any
batch.
"""

import json
import re
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_position import check_positions
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from mupscale.datamodules.fineweb import JARGON, FineWeb, MappedWindows, ResidentWindows, WindowLoader
from mupscale.datamodules.mapped_tokens import MappedTokens
from mupscale.datamodules.token_writer import TOKEN, TokenWriter
from mupscale.errors import UserError
from mupscale.models.gpt2 import GPT2

# Lightning 2.6 itself, on torch 2.13
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")

CONTEXT, BATCH = 7, 4
TOKENS = {"train": 211, "val": 100}  # 30 windows of seven targets each, and 14 with one token over
CPU = torch.device("cpu")


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


# ---- ranks, and Lightning's way with loaders


def trainer_stub(rank: int = 0, ranks: int = 1, **options) -> SimpleNamespace:
    return SimpleNamespace(
        strategy=SimpleNamespace(
            root_device=CPU,
            broadcast=lambda value: value,
            reduce_boolean_decision=lambda decision, all: decision,
        ),
        distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks},
        lightning_module=SimpleNamespace(hparams=options.pop("hparams", {})),
        overfit_batches=options.pop("overfit_batches", 0),
    )


def attached(folder: str, stub: SimpleNamespace, **options) -> FineWeb:
    data = FineWeb(folder, **{"batch_size": BATCH, "context": CONTEXT, **options})
    data.trainer = stub
    data.setup("fit")
    return data


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("order", ["random", "sequential"])
def test_all_ranks_together_see_the_batches_of_one(folder: str, ranks: int, order: str, resident: bool):
    alone = module(folder, order=order).train_dataloader()
    shares = [
        attached(folder, trainer_stub(rank, ranks), order=order, resident=resident).train_dataloader()
        for rank in range(ranks)
    ]
    for _ in range(2):
        whole, parts = starts(alone), [starts(share) for share in shares]
        assert [list(chain(*batch)) for batch in zip(*parts, strict=True)] == whole
        assert {len(batch) for part in parts for batch in part} == {BATCH // ranks}


def test_overfitting_sees_the_same_rows_every_epoch(folder: str):
    data = attached(folder, trainer_stub(overfit_batches=1))
    assert starts(data.train_dataloader()) == starts(data.train_dataloader())
    assert starts(data.train_dataloader())[0] == [0, 7, 14, 21]


@pytest.mark.parametrize("seen", range(0, 16, 3))
@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_resumed_loader_yields_the_very_next_batch(folder: str, seen: int, order: str, resident: bool):
    straight = module(folder, order=order).train_dataloader()
    expected = [*starts(straight), *starts(straight), *starts(straight)]
    interrupted, drawn = module(folder, order=order).train_dataloader(), 0
    while drawn < seen:
        for _batch in interrupted:
            drawn += 1
            if drawn == seen:
                break
    resumed = module(folder, order=order, resident=resident).train_dataloader()
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert [*starts(resumed), *starts(resumed), *starts(resumed)][: 21 - seen] == expected[seen:]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"order": "sequential"}, "order=sequential, this run's loader order=random"),
        ({"context": 5}, "rows=42"),
        ({"seed": 1}, "seed=1"),
        ({"batch_size": 2}, "batch_size=2"),
    ],
)
def test_a_state_of_another_order_is_refused(folder: str, other: dict, named: str):
    state = module(folder, **other).train_dataloader().state_dict()
    with pytest.raises(ValueError, match=f"checkpoint's data order has {named}"):
        module(folder).train_dataloader().load_state_dict(state)


def test_a_state_of_other_tokens_is_refused(folder: str, tmp_path: Path):
    other = write_folder(tmp_path / "other", {"train": 212, "val": 100})  # as many windows
    with pytest.raises(ValueError, match="tokens=212, this run's loader tokens=211"):
        module(folder).train_dataloader().load_state_dict(module(other).train_dataloader().state_dict())


class Recorder(LightningModule):
    """Remembers its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.validated = 0

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append(batch[:, 0].tolist())
        return self.weight * batch.float().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.validated += batch[:, 1:].numel()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: str, saved: Path, *, resident: bool, ckpt_path: Path | None = None) -> Recorder:
    model = Recorder()
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saver = ModelCheckpoint(saved, "{step}", save_top_k=-1, every_n_train_steps=3)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, num_sanity_val_steps=0, callbacks=[saver], **off)
    trainer.fit(
        model, datamodule=FineWeb(folder, BATCH, CONTEXT, resident=resident), ckpt_path=ckpt_path, weights_only=True
    )
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["random", "sequential"])
def test_on_a_gpu_the_rows_are_the_same(folder: str, order: str, resident: bool):
    expected = module(folder, order=order).train_dataloader()
    stub = trainer_stub()
    stub.strategy.root_device = torch.device("cuda", 0)
    found = attached(folder, stub, order=order, resident=resident).train_dataloader()
    for _ in range(2):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.device.type, ours.dtype) == ("cuda", torch.int64)
            assert torch.equal(ours.cpu(), theirs)
    assert isinstance(attached(folder, stub).train_dataloader().windows, ResidentWindows)  # so few fit


# ---- data and model that do not go together


def test_the_model_must_know_the_vocabulary_and_the_positions(folder: str):
    with pytest.raises(
        UserError, match=r"train/00005\.ds has the token 60210 at place 10, beyond model\.vocabulary = 50304: set"
    ):
        attached(folder, trainer_stub(hparams={"vocabulary": 50304}))
    with pytest.raises(ValueError, match=r"data\.context = 7: the model has model\.context = 6 positions"):
        attached(folder, trainer_stub(hparams={"vocabulary": 65536, "context": 6}))
    attached(folder, trainer_stub(hparams={"vocabulary": 65536, "context": 7, "width": 8}))


@pytest.mark.parametrize("context", [100, 101, 5000, 0, -1])
def test_fewer_tokens_than_the_context(folder: str, context: int):
    with pytest.raises(
        ValueError, match=rf"data\.context = {context}: .* has (211|100) tokens for (train|val), wanted 1 to (210|99)"
    ):
        module(folder, context=context)


# ---- memory


def own_memory() -> int:
    """Bytes of this process that are no pages of files, which the system drops when it needs room."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


def test_mapped_tokens_stay_on_disk(tmp_path: Path):
    """Half a thousand million tokens, a gigabyte: the rows drawn from it and their order are all that is in memory."""
    file = tmp_path / "tokens"
    file.touch()
    with file.open("r+b") as stream:
        stream.truncate(10**9)
    before = own_memory()
    loader = WindowLoader(
        MappedWindows(MappedTokens([file], [(0, 5 * 10**8)], TOKEN), 1025, CPU), 64, order="random", drop_last=True
    )
    assert len(loader) == 5 * 10**8 // (64 * 1024)
    drawn = iter(loader)
    for _ in range(200):
        assert next(drawn).sum() == 0
    assert own_memory() - before < 50e6


# ---- the embedded sample


@pytest.mark.slow
def test_a_model_learns_from_the_embedded_sample(tmp_path: Path):
    data = FineWeb(batch_size=8, context=32)
    model = GPT2(
        32,
        32,
        layers=1,
        heads=2,
        vocabulary=4096,
        context=32,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.005),
    )
    losses: list[float] = []
    model.on_train_batch_end = lambda outputs, *_: losses.append(outputs["loss"].item())
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=300, limit_val_batches=20, val_check_interval=300, **off)
    trainer.fit(model, datamodule=data)
    assert losses[0] == pytest.approx(np.log(4096), abs=0.2)
    assert trainer.callback_metrics["val/loss"] < 6.75  # uniform is 8.32; the frequencies of the tokens alone give 6.81
    assert len(data.train_dataloader()) == 368_157 // (8 * 32)


def test_the_sample_is_found_where_it_is_installed():
    data = FineWeb()
    data.prepare_data()
    data.setup()
    assert (len(data.train_dataloader()), len(data.val_dataloader())) == (11, 1)
    assert JARGON.name == "jargon"


@pytest.mark.parametrize(
    ("order", "draw", "follows_seed"),
    [
        ("random", "train", True),
        ("sequential", "train", False),
        ("random", "val", False),
        ("random", "predict", False),
    ],
)
def test_by_position_batches_are_those_of_iteration(
    folder: str, resident: bool, order: str, draw: str, follows_seed: bool
):
    data = module(folder, order=order, resident=resident)

    def make(seed: int) -> WindowLoader:
        return getattr(module(folder, order=order, resident=resident, seed=seed), f"{draw}_dataloader")()

    check_positions(make, follows_seed=follows_seed)
    assert getattr(data, f"{draw}_dataloader")().order == make(0).order
