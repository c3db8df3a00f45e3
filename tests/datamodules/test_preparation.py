"""Interruptions: killed, interrupted, cut off or started twice, a preparation ends with the same bytes, or says what is
wrong.
"""

from pathlib import Path
from typing import Any

import pytest
from corpus import ENTRIES, prepared, refused, write_article, write_text
from crashes import kill_and_repeat
from paths import contents
from programs import start_fork, wait_for_fork

from mupscale.__main__ import main
from mupscale.datamodules import documents, preparation
from mupscale.datamodules.documents import TextFiles


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BATCH", 5000)


@pytest.fixture
def article(tmp_path: Path) -> Path:
    return write_article(tmp_path / "article.txt")


@pytest.mark.slow
def test_killed_at_every_operation_the_result_is_the_same(tmp_path: Path, pytestconfig: pytest.Config):
    kills = 100 if pytestconfig.getoption("--all") else 15
    text = write_text(
        tmp_path / "text", [text for pair in zip(ENTRIES[:5], ENTRIES[-5:], strict=True) for text in pair]
    )

    def prepare(out: Path) -> None:
        documents.BATCH, preparation.COMMIT_SECONDS = 1000, 0.0
        preparation.prepare(TextFiles([text]), out, vocabulary=270, val_fraction=0.2, file_tokens=1500)

    assert kill_and_repeat(prepare, tmp_path, kills) > 100


def test_ctrl_c_loses_nothing_and_says_how_to_go_on(tmp_path: Path, article: Path, monkeypatch: pytest.MonkeyPatch):
    prepared(article, tmp_path / "straight", file_tokens=preparation.FILE_TOKENS)
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
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
    whole = len(list(TextFiles([article]).batches(None)))
    assert resumed == 2 * (whole - 4)


@pytest.mark.slow
def test_processes_that_start_together_make_one_folder(tmp_path: Path, article: Path):
    options = ["--vocab", "300", "--val-fraction", "0.2", "--out", tmp_path / "out"]
    command = ["prepare", "text", *map(str, (article, *options))]
    logs = [tmp_path / f"log-{index}" for index in range(3)]
    forks = [start_fork(lambda: main(command), log) for log in logs]
    statuses = [wait_for_fork(fork) for fork in forks]
    assert 0 in statuses
    for status, log in zip(statuses, logs, strict=True):
        assert status == 0 or "is being prepared by another process" in log.read_text()
    prepared(article, tmp_path / "alone", file_tokens=preparation.FILE_TOKENS)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_finished_folder_is_left_as_it_is(
    tmp_path: Path, article: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "out"
    prepared(article, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(preparation, "encode", None)
    (folder / "progress.json").write_text("of a process killed between its last two steps")
    assert prepared(article, folder)["train"]["documents"] > 0
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
