"""Interruptions: killed, interrupted, cut off or started twice, a preparation ends with the same bytes, or says what is
wrong.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corpus import ENTRIES, contents, prepared, refused, write_article, write_hub, write_text
from paths import SUPPORT
from programs import run_program

from mupscale.__main__ import main
from mupscale.datamodules import documents, preparation
from mupscale.datamodules.documents import TextFiles
from mupscale.datamodules.preparation import lock_folder

CRASHES = SUPPORT / "prepare_crashes.py"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BATCH", 5000)


@pytest.fixture
def article(tmp_path: Path) -> Path:
    return write_article(tmp_path / "article.txt")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub(tmp_path / "hub", monkeypatch)


@pytest.mark.slow
def test_killed_at_every_operation_the_result_is_the_same(tmp_path: Path, pytestconfig: pytest.Config):
    every = 1 if pytestconfig.getoption("--all") else 2
    text = write_text(
        tmp_path / "text", [text for pair in zip(ENTRIES[:5], ENTRIES[-5:], strict=True) for text in pair]
    )
    done = run_program("-W", "error", SUPPORT / "prepare_crashes.py", text, tmp_path, every)
    assert int(done.stdout) > 25, done.stdout


def test_ctrl_c_loses_nothing_and_says_how_to_go_on(tmp_path: Path, article: Path, monkeypatch: pytest.MonkeyPatch):
    straight = prepared(article, tmp_path / "straight", file_tokens=preparation.FILE_TOKENS)
    append, calls = preparation.TokenWriter.append, []

    def interrupting(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 9:  # between the splits of the fifth batch
            raise KeyboardInterrupt
        append(*arguments)

    command = ["text", article, "--vocab", "300", "--val-fraction", "0.2", "--out", tmp_path / "out"]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(preparation.TokenWriter, "append", interrupting)
        calls.clear()
        assert refused(*command) == f"interrupted; run the same command again to continue in {tmp_path / 'out'}"
        interrupted.setattr(
            preparation.TokenWriter, "append", lambda *arguments: (calls.append(None), append(*arguments))
        )
        calls.clear()
        main(["prepare", *map(str, command)])
        resumed = len(calls)
    assert contents(tmp_path / "out") == contents(straight.folder)
    whole = len(list(TextFiles([article]).batches(None)))
    assert resumed == 2 * (whole - 4)


def test_one_process_at_a_time(tmp_path: Path, article: Path):
    out = tmp_path / "out"
    command = ["text", article, "--vocab", "300", "--out", out]
    with lock_folder(out):
        assert refused(*command) == f"error: --out {out} is being prepared by another process"
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert not out.exists()


@pytest.mark.slow
def test_processes_that_start_together_make_one_folder(tmp_path: Path, article: Path):
    options = ["--vocab", "300", "--val-fraction", "0.2", "--out", tmp_path / "out"]
    command = ["-m", "mupscale", "prepare", "text", article, *options]
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda _: run_program(*command, status=None), range(3)))
    assert 0 in [program.returncode for program in ended]
    assert all("is being prepared by another process" in program.stderr for program in ended if program.returncode)
    assert contents(tmp_path / "out") == contents(
        prepared(article, tmp_path / "alone", file_tokens=preparation.FILE_TOKENS).folder
    )


def test_a_finished_folder_is_left_as_it_is(
    tmp_path: Path, article: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = prepared(article, tmp_path / "out").folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(preparation, "encode", None)
    (folder / "progress.json").write_text("of a process killed between its last two steps")
    assert prepared(article, folder).content["train"]["documents"] > 0
    assert "is finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"vocabulary": 301}, "vocab = 300, this command has vocab = 301"),
        ({"vocabulary": None}, "vocab = 300, this command has vocab = gpt2"),
        ({"tokens": 500}, "tokens = None, this command has tokens = 500"),
        ({"val_fraction": 0.3}, "val-fraction = 0.2, this command has val-fraction = 0.3"),
        ({}, "files = "),
    ],
)
def test_other_arguments_are_refused(
    tmp_path: Path, article: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, other: dict, told: str
):
    with monkeypatch.context() as interrupted:
        if not finished:
            interrupted.setattr(preparation, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        try:
            prepared(article, tmp_path / "out")
        except KeyboardInterrupt:
            assert not finished
    before = contents(tmp_path / "out")
    if not other:
        article.write_text(article.read_text() + "more")
    with pytest.raises(
        ValueError, match=f"--out .*out was prepared with {told}.*: name another folder, or delete that one"
    ):
        prepared(article, tmp_path / "out", **other)
    assert contents(tmp_path / "out") == before


@pytest.mark.slow
def test_a_stream_that_breaks_off_goes_on(tmp_path: Path, hub: None, monkeypatch: pytest.MonkeyPatch):
    import datasets  # which takes its time

    rows = datasets.IterableDataset.__iter__
    left = [100]

    def breaking(self: datasets.IterableDataset) -> Iterator[Any]:
        for row in rows(self):
            if left[0] == 0:
                raise OSError("connection reset")
            left[0] -= 1
            yield row

    command = [
        "fineweb",
        "--subset",
        "CC-MAIN-2013-20",
        "--tokens",
        "1M",
        "--vocab",
        "300",
        "--val-fraction",
        "0.2",
        "--out",
    ]
    main(["prepare", *command, str(tmp_path / "straight")])
    with monkeypatch.context() as broken:
        broken.setattr(datasets.IterableDataset, "__iter__", breaking)
        told = refused(*command, tmp_path / "out")
        assert "connection reset" in told
        assert not (tmp_path / "out").exists()  # it broke off when the vocabulary was trained
        left[0] = 120 + 70
        assert "run the same command again to continue" in refused(*command, tmp_path / "out")
        progress = json.loads((tmp_path / "out/progress.json").read_bytes())
        done = sum(documents for files in progress["files"].values() for _, documents in files)
        assert 60 < done < 70
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha="fedcba9876543210"))
    done_before = contents(tmp_path / "out")
    with (
        monkeypatch.context() as broken
    ):  # as `datasets` says it without a network, if it knows the repository from before
        broken.setattr(
            datasets,
            "load_dataset",
            lambda *_, **__: (_ for _ in ()).throw(ValueError("Couldn't find cache for fineweb-edu")),
        )
        assert "streaming" in refused(*command, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == done_before.keys()
    load, revisions = datasets.load_dataset, []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **options: (revisions.append(options["revision"]), load(*args, **options))[1],
    )
    main(["prepare", *command, str(tmp_path / "out")])
    assert revisions == ["0123456789abcdef"]  # with which it began, whatever has been published since
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
