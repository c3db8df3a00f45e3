"""Token files of datatrove: read as they are, held out by a rule, refused by name, in bounded memory, resumable."""

import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from corpus import ENTRIES
from paths import ROOT
from stand_ins import trainer_stub
from token_folders import split_tokens, write_numbered, write_token_file

from mupscale.datamodules import token_files, windows
from mupscale.datamodules.fineweb import FineWeb
from mupscale.datamodules.token_files import MappedTokens, ModelVocabulary, TokenFolder
from mupscale.datamodules.token_writer import TOKEN
from mupscale.datamodules.windows import MappedWindows, RandomStarts, ResidentWindows, WindowLoader
from mupscale.errors import UserError

CONTEXT, BATCH, VOCABULARY = 16, 8, 300
CPU = torch.device("cpu")


def module(folder: Path, **options: Any) -> FineWeb:
    data = FineWeb(str(folder), **{"batch_size": BATCH, "context": CONTEXT, **options})
    data.setup()
    return data


# ---- what datatrove itself writes


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders written by pipelines of datatrove, over three tasks, the last of which has no documents."""
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
    from datatrove.utils.logging import logger
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    logger.disable("datatrove")
    out = tmp_path_factory.mktemp("datatrove")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(ENTRIES[:50], trainer)
    tokenizer.save(str(out / "tokenizer.json"))

    def documents(data: object, rank: int = 0, world_size: int = 1) -> Any:
        for number, text in enumerate(ENTRIES[rank:400:2] if rank < 2 else []):
            yield Document(text=text[:200], id=str(number))

    def run(name: str, *steps: Any, tasks: int = 1) -> None:
        LocalPipelineExecutor([*steps], tasks=tasks, workers=1, logging_dir=str(out / "logs" / name)).run()

    kinds: dict[str, dict[str, Any]] = {
        "plain": {"shuffle_documents": False},
        "shuffled": {"max_tokens_per_file": 3000},
        "chunks": {"shuffle_chunk_size": 50},
        "without_end": {"eos_token": None},
        "masked": {"save_loss_metadata": True},
    }
    for name, options in kinds.items():
        given = {"eos_token": "<|endoftext|>", "seed": 0, **options}
        run(name, documents, DocumentTokenizer(str(out / name), str(out / "tokenizer.json"), **given), tasks=3)
    merger = DocumentTokenizerMerger(str(out / "shuffled"), str(out / "merged"), "all", 9000, seed=0, progress=False)
    run("merger", merger)
    return out


def content(folder: Path) -> list[int]:
    """All tokens of a folder, file by file."""
    files = sorted(folder.rglob("*.ds"), key=lambda file: str(file.relative_to(folder)))
    return np.concatenate([np.fromfile(file, "<u2") for file in files]).tolist()


@pytest.mark.parametrize("kind", ["plain", "shuffled", "chunks", "without_end", "merged"])
def test_files_of_datatrove_are_read_as_they_are(tokenised: Path, kind: str):
    folder = TokenFolder(tokenised / kind)
    folder.verify()
    (tokenised / kind / "logs").mkdir(exist_ok=True)  # where a pipeline may keep its own
    assert (folder.token.itemsize, folder.tokenizer) == (2, str(tokenised / "tokenizer.json"))
    tokens = [split_tokens(folder, split) for split in ("train", "val")]
    assert sorted(tokens[0] + tokens[1]) == sorted(content(tokenised / kind))
    assert 0.005 < len(tokens[1]) / len(tokens[0] + tokens[1]) <= 0.01
    for span in folder.spans["val"]:
        documents = np.fromfile(f"{tokenised / kind / span.name}.index", "<u8").tolist()
        assert {span.begin, span.end} <= {0, *documents}, "documents are whole"


def test_a_missing_part_of_merged_files_is_noticed(tokenised: Path, tmp_path: Path):
    shutil.copytree(tokenised / "merged", tmp_path / "merged")
    (tmp_path / "merged" / "val").mkdir()
    for name in ("000_all.ds", "000_all.ds.index", "000_all.ds.metadata"):
        (tmp_path / "merged" / name).rename(tmp_path / "merged" / "val" / name)
    assert TokenFolder(tmp_path / "merged").spans["val"][0].name == "val/000_all.ds"
    shutil.rmtree(tmp_path / "merged" / "val")
    with pytest.raises(UserError, match=r"all\.ds\.metadata says \d+ tokens, the \d files NUMBER_all\.ds have \d+"):
        assert TokenFolder(tmp_path / "merged").files


@pytest.mark.slow
def test_the_script_of_the_guide_writes_what_its_configuration_reads(
    tokenised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import pyarrow
    from datatrove.executor import SlurmPipelineExecutor
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for number in range(2):
        parquet.write_table(pyarrow.table({"text": ENTRIES[number:300:2]}), f"text/{number}.parquet")
    page = (ROOT / "docs" / "cluster.md").read_text().partition("## Text at scale")[2]
    local, slurm, configuration = (text for _, text in re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL)[:3])
    for named, here in {'"gpt2"': repr(str(tokenised / "tokenizer.json")), "tasks=64": "tasks=2", "=8": "=1"}.items():
        assert local.count(named) == 1
        local = local.replace(named, here)
    names = {"__name__": "__main__"}
    exec(local, names)
    started = []
    monkeypatch.setattr(SlurmPipelineExecutor, "run", lambda self: started.append(self.tasks))
    exec(textwrap.dedent(slurm), names)
    assert started == [1000]
    options = yaml.safe_load(configuration)["data"]
    assert options["class_path"] == "FineWeb"
    data = FineWeb(**{**options["init_args"], "batch_size": 2, "context": 128})
    data.prepare_data()
    data.setup("fit")
    assert next(iter(data.train_dataloader())).shape == (2, 129)


# ---- which documents are held out


def test_the_last_documents_of_each_file_are_held_out(tmp_path: Path):
    folder = write_numbered(tmp_path, files=3, documents=200, length=10)  # 2,000 tokens each, 20 of them held out
    assert [(span.name, span.begin, span.end) for span in TokenFolder(folder).spans["val"]] == [
        ("00/0.ds", 1980, 2000),
        ("00/1.ds", 1980, 2000),
        ("00/2.ds", 1980, 2000),
    ]
    assert split_tokens(TokenFolder(folder), "val") == [*range(1980, 2000), *range(3980, 4000), *range(5980, 6000)]
    assert TokenFolder(folder).count("train") == 3 * 1980


def test_no_document_is_cut_and_none_is_held_out_beyond_a_hundredth(tmp_path: Path):
    lengths = np.random.default_rng(0).integers(1, 200, size=(20, 50))
    for number, documents in enumerate(lengths):
        write_token_file(tmp_path / f"{number:02d}.ds", [[7] * length for length in documents])
    folder = TokenFolder(tmp_path)
    held_out = so_far = 0
    spans = {span.name: span for span in folder.spans["val"]}
    for number, documents in enumerate(lengths):
        span = spans.get(f"{number:02d}.ds")
        so_far += documents.sum()
        if span is not None:
            assert span.begin in documents.cumsum()
            held_out += span.end - span.begin
        assert so_far / 100 - 200 < held_out <= so_far / 100


@pytest.mark.parametrize("name", ["val", "validation"])
def test_a_folder_of_its_own_is_held_out_whole(tmp_path: Path, name: str):
    write_numbered(tmp_path / "train", files=3)
    write_numbered(tmp_path / name, files=2)
    folder = TokenFolder(tmp_path)
    assert (folder.count("train"), folder.count("val")) == (300, 200)
    assert split_tokens(folder, "train") == list(range(300))


# ---- files that do not fit


def rewritten(change: Callable[[bytes], bytes], suffix: str = "") -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        path = Path(f"{file}{suffix}")
        path.write_bytes(change(path.read_bytes()))

    return damage


def removed(suffix: str) -> Callable[[Path], None]:
    return lambda file: Path(f"{file}{suffix}").unlink()


def beside(name: str, text: bytes = b"12345678") -> Callable[[Path], None]:
    return lambda file: file.with_name(name).write_bytes(text) and None  # type: ignore[func-returns-value]


def moved_index(file: Path) -> None:
    shutil.copy(f"{file.with_name('1.ds')}.index", f"{file}.index")


def linked(file: Path) -> None:
    file.rename(file.parent.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent.parent / "elsewhere")


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        for part in damages:
            part(file)

    return damage


def other_tokenizer(file: Path) -> None:
    write_token_file(file, [range(10)] * 20, tokenizer="another")


def wide_tokens(file: Path) -> None:
    write_token_file(file, [range(10)] * 20, token_bytes=4)


CUT = r"0\.ds has {} bytes, its index says 200 tokens of {} bytes: the file is cut short or compressed, or the"

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (rewritten(lambda b: b[:-2]), CUT.format(398, 2)),
    "no metadata, cut short": (both(removed(".metadata"), rewritten(lambda b: b[:-2])), CUT.format(398, "2 or 4")),
    "no index": (removed(".index"), r"there is no .*0\.ds\.index, which datatrove writes after the tokens"),
    "an index that is cut short": (
        rewritten(lambda b: b[:-3], ".index"),
        r"0\.ds\.index has 157 bytes, not a multiple of 8: it is cut short",
    ),
    "an index without its end": (
        rewritten(lambda b: b[:-8], ".index"),
        r"0\.ds\.index does not fit: its last document ends at token 190, 00/0\.ds\.metadata says 200 tokens",
    ),
    "the index of another file": (moved_index, "index does not fit: its last document ends at token 300"),
    "metadata of no token size": (
        rewritten(lambda b: b.replace(b"|2", b"|3"), ".metadata"),
        r"0\.ds\.metadata says tokens of 3 bytes, wanted 2 or 4",
    ),
    "damaged metadata": (
        rewritten(lambda b: b"\xff\xfe", ".metadata"),
        r"0\.ds\.metadata is damaged: its lines are .*, wanted TOKENIZER\|BYTES and the number of tokens",
    ),
    "tokens without a file": (removed(""), r"0\.ds is missing, and its index is there"),
    "compressed": (beside("0.ds.gz"), r"0\.ds\.gz is compressed and cannot be mapped: unpack it"),
    "a mask": (beside("0.ds.loss"), r"0\.ds\.loss has a mask"),
    "a link": (linked, r"0\.ds is a link: copy the files into the folder, or use hard links"),
    "two tokenizers": (
        other_tokenizer,
        r"mixes files of two tokenizers: tokenizer another in 00/0\.ds, mine in 00/1\.ds",
    ),
    "two sizes of tokens": (wide_tokens, r"two tokenizers: bytes of a token 4 in 00/0\.ds, 2 in 00/1\.ds"),
    "an interrupted task": (
        both(beside("00007_unshuffled.ds"), beside("00007_00000_doc_shuffled.ds")),
        r"00007_unshuffled\.ds has the documents of 00/00007_00000_doc_shuffled\.ds: the task was interrupted",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str):
    folder = tmp_path / "data"
    for number in range(3):
        write_token_file(folder / "00" / f"{number}.ds", [range(10)] * (20 + 10 * number))
    write_numbered(folder / "val", files=1)
    TokenFolder(folder).verify()
    damage(folder / "00" / "0.ds")
    with pytest.raises(UserError, match=message) as caught:
        FineWeb(str(folder), context=8).setup()
    assert str(caught.value).startswith("data_dir: ")
    assert "\n" not in str(caught.value)


def test_an_index_that_does_not_ascend_is_named(tmp_path: Path):
    folder = write_numbered(tmp_path, files=3, documents=200)
    path = folder / "00" / "1.ds.index"
    ends = np.fromfile(path, "<u8")
    ends[3], ends[5] = ends[5], ends[3]
    path.write_bytes(ends.tobytes())
    with pytest.raises(UserError, match=r"data_dir: .*1\.ds\.index is damaged: document 4 ends before it begins"):
        FineWeb(str(folder), context=8).prepare_data()


def test_a_file_that_shrinks_during_the_run_is_named(tmp_path: Path):
    folder = write_numbered(tmp_path, files=20, documents=20)
    loader = module(folder, order="sequential").train_dataloader()
    with (folder / "01" / "5.ds").open("r+b") as stream:
        stream.truncate(10)
    with pytest.raises(UserError, match=r"5\.ds became shorter after the run began"):
        list(loader)


# ---- tokens and vocabulary


def one_large_token(folder: Path, place: int) -> Path:
    """50 files with 1,000 tokens each that are below 100, but for one token of 500."""
    for number in range(50):
        tokens = np.full(1000, number)
        if number == place // 1000:
            tokens[place % 1000] = 500
        write_token_file(folder / f"{number:02d}.ds", tokens.reshape(-1, 10))
    return folder


def attached(folder: Path, vocabulary: int | None, **options: Any) -> FineWeb:
    data = FineWeb(str(folder), **{"batch_size": BATCH, "context": CONTEXT, **options})
    hparams = {} if vocabulary is None else {"vocabulary": vocabulary}
    data.trainer = trainer_stub(lightning_module=SimpleNamespace(hparams=hparams))  # type: ignore[assignment]
    data.setup("fit")
    return data


MESSAGE = r"^data_dir: .*12\.ds has the token 500 at place 345, beyond model\.vocabulary = 500: set model\.vocabulary"


def test_a_small_folder_is_compared_with_the_vocabulary_at_the_start(tmp_path: Path):
    one_large_token(tmp_path, 12_345)
    with pytest.raises(UserError, match=MESSAGE):
        attached(tmp_path, 500)
    attached(tmp_path, 501)
    attached(tmp_path, None)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "mapped"])
def test_a_large_folder_is_compared_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool):
    monkeypatch.setattr(token_files, "SAMPLES", 4)
    monkeypatch.setattr(token_files, "SAMPLE_TOKENS", 100)
    one_large_token(tmp_path, 12_345)
    if resident:
        with pytest.raises(UserError, match=MESSAGE):
            attached(tmp_path, 500, resident=True)
        return
    loader = attached(tmp_path, 500, resident=False, order="sequential").train_dataloader()
    last = (12_345 - 123) // (CONTEXT * BATCH)  # of each file 10 tokens are held out
    with pytest.raises(UserError, match=MESSAGE):
        list(loader)
    assert loader.position == last + 1, "the batches before it are drawn"


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "mapped"])
def test_tokens_of_four_bytes(tmp_path: Path, resident: bool):
    tokens = np.random.default_rng(0).integers(2**32, size=4000)
    write_token_file(tmp_path / "a.ds", tokens.reshape(-1, 10), token_bytes=4)
    write_token_file(tmp_path / "b.ds", tokens.reshape(-1, 10), token_bytes=4, tokenizer=None)
    data = module(tmp_path, order="sequential", resident=resident)
    assert isinstance(data.train_dataloader().windows, ResidentWindows if resident else MappedWindows)
    found = torch.cat([batch[:, :-1].flatten() for batch in data.train_dataloader()])
    expected = np.concatenate([tokens[:3960], tokens[:3960]])[: len(found)]
    assert len(found) == 61 * CONTEXT * BATCH
    assert found.tolist() == expected.tolist()
    with pytest.raises(UserError, match=r"beyond model\.vocabulary = 128256"):
        attached(tmp_path, 128_256)


@pytest.mark.gpu
@pytest.mark.parametrize("token_bytes", [2, 4])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "mapped"])
def test_on_a_gpu_the_rows_are_the_same(tmp_path: Path, token_bytes: int, resident: bool):
    largest = 2 ** (8 * token_bytes)
    tokens = np.random.default_rng(0).integers(largest, size=4000)
    write_token_file(tmp_path / "a.ds", tokens.reshape(-1, 10), token_bytes)
    data = FineWeb(str(tmp_path), BATCH, CONTEXT, resident=resident)
    hparams = {"vocabulary": largest}
    data.trainer = trainer_stub("cuda", lightning_module=SimpleNamespace(hparams=hparams))  # type: ignore[assignment]
    data.setup("fit")
    for ours, expected in zip(data.train_dataloader(), module(tmp_path).train_dataloader(), strict=True):
        assert (ours.device.type, ours.dtype) == ("cuda", torch.int64)
        assert torch.equal(ours.cpu(), expected)


# ---- many files


def test_a_bounded_number_of_files_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_files, "MOST_MAPS", 3)
    folder = TokenFolder(write_numbered(tmp_path, files=200, documents=5))
    tokens, total = folder.tokens("train"), folder.count("train")
    expected = split_tokens(folder, "train")
    before = len(os.listdir("/proc/self/fd"))
    for start in np.random.default_rng(0).integers(total - 200, size=300).tolist():
        out = np.empty(200, np.int64)
        tokens.read(start, out)
        assert out.tolist() == expected[start : start + 200]
    assert len(tokens._maps) == 3
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_state_of_other_files_is_refused(tmp_path: Path):
    folder = write_numbered(tmp_path / "data", files=30, documents=20)
    state = module(folder).train_dataloader().state_dict()
    shutil.move(folder, tmp_path / "moved")
    module(tmp_path / "moved").train_dataloader().load_state_dict(json.loads(json.dumps(state)))
    for path in sorted((tmp_path / "moved" / "00").glob("0.ds*")):
        path.rename(path.with_name(f"last{path.name[1:]}"))  # as many tokens, in another order
    with pytest.raises(UserError, match="the checkpoint's data order has files="):
        module(tmp_path / "moved").train_dataloader().load_state_dict(state)


# ---- many tokens


@pytest.mark.parametrize("largest", [6, 2**32 - 1, 2**32, 10**12])
def test_random_starts_in_parts_are_those_of_one_draw(largest: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(windows, "DRAWN_AT_ONCE", 10)
    expected = torch.randint(largest + 1, (57,), generator=torch.Generator().manual_seed(3))
    edges = [(0, 4), (52, 57), (9, 11), (20, 30), (3, 48), (56, 57), (10, 10), (0, 57), (25, 26)]
    starts = RandomStarts(largest, 57, torch.Generator().manual_seed(3))
    for begin, end in edges:
        assert torch.equal(starts[begin:end], expected[begin:end])
        fresh = RandomStarts(largest, 57, torch.Generator().manual_seed(3))
        assert torch.equal(fresh[begin:end], expected[begin:end])


def own_memory() -> int:
    """Bytes of this process that are no pages of files."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_a_million_million_tokens_take_no_memory(tmp_path: Path, order: str):
    """A thousand files of a thousand million tokens, of which the disk has none."""
    file = tmp_path / "tokens.ds"
    with file.open("wb") as stream:
        stream.truncate(2 * 10**9)
    before = own_memory()
    tokens = MappedTokens([file] * 1000, [(0, 10**9)] * 1000, TOKEN)
    loader = WindowLoader(
        MappedWindows(tokens, 1025, CPU, ModelVocabulary("model.vocabulary", 10)), 64, order=order, drop_last=True
    )
    assert len(loader) == 10**12 // (64 * 1024)
    for position in (0, 1, len(loader) // 500):
        assert loader.batch_at(0, position).sum() == 0
    if order == "sequential":
        loader.go_to(3, len(loader) - 1)
        assert loader.batch_at(3, len(loader) - 1).shape == (64, 1025)
    assert own_memory() - before < 60e6
