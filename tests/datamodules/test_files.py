"""Files of data sets: whole or refused by name, fetched whole or not at all, and nothing left lying about."""

import hashlib
import os
import socket
from http.client import IncompleteRead
from pathlib import Path

import numpy as np
import pytest

from mupscale.datamodules.files import TIMEOUT, check_digest, fetched, read_npz, temporary_folder
from mupscale.errors import UserError


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_arrays_come_in_the_order_of_their_names(tmp_path: Path):
    np.savez(tmp_path / "some.npz", a=np.arange(3), b=np.arange(4), c=np.arange(5))
    assert [len(array) for array in read_npz(tmp_path / "some.npz", ("c", "a"))] == [5, 3]


def test_an_npz_file_cut_anywhere_is_refused(tmp_path: Path):
    whole, cut = tmp_path / "whole.npz", tmp_path / "cut.npz"
    np.savez_compressed(whole, a=np.arange(1000), b=np.arange(10))
    content = whole.read_bytes()
    for length in range(0, len(content), 97):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"data_dir: .*cut\.npz is not a whole npz file with arrays a, b \("):
            read_npz(cut, ("a", "b"))


def test_a_digest_is_compared(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"published")
    check_digest(file, "md5", hashlib.md5(b"published").hexdigest())
    other = hashlib.sha256(b"published, but longer").hexdigest()
    with pytest.raises(
        ValueError, match=rf"^cut short.*its sha256 is {hashlib.sha256(b'published').hexdigest()}.*{other}"
    ):
        check_digest(file, "sha256", other)


def test_only_what_was_moved_out_stays(tmp_path: Path):
    with temporary_folder(tmp_path / "deep" / "data") as temporary:
        (temporary / "finished").write_text("")
        (temporary / "rest").write_text("")
        os.replace(temporary / "finished", temporary.parent / "finished")
    assert everything(tmp_path) == ["deep", "deep/data", "deep/data/finished"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("there", ["", "deep", "deep/data"])
def test_a_failure_leaves_the_folders_as_they_were(tmp_path: Path, error: type[BaseException], there: str):
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = everything(tmp_path)

    def fail() -> None:
        with temporary_folder(tmp_path / "deep" / "data") as temporary:
            (temporary / "half").write_text("")
            raise error

    with pytest.raises(error):
        fail()
    assert everything(tmp_path) == before


def test_a_failure_leaves_what_another_process_put_there(tmp_path: Path):
    def fail() -> None:
        with temporary_folder(tmp_path / "data") as temporary:
            (temporary.parent / "theirs").write_text("")
            raise ValueError("oh")

    with pytest.raises(ValueError, match="oh"):
        fail()
    assert everything(tmp_path) == ["data", "data/theirs"]


def test_two_processes_have_folders_of_their_own(tmp_path: Path):
    with temporary_folder(tmp_path) as one, temporary_folder(tmp_path) as other:
        assert one != other


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "covertype.npz").write_text("")
    with (
        pytest.raises(UserError, match=r"data_dir: .*covertype\.npz lacks the data set, and cannot be written to"),
        temporary_folder(tmp_path / "covertype.npz"),
    ):
        pass


def test_a_download_has_a_timeout_and_its_error_tells_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(url: str, file: str) -> None:
        assert socket.getdefaulttimeout() == TIMEOUT
        raise IncompleteRead(b"")

    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    told = rf"data_dir: {tmp_path} lacks .* fetching http://there failed \(Incomplete.*\)\. .* put it there as a\.gz$"
    with pytest.raises(UserError, match=told), fetched(tmp_path / "a.gz", "http://there", "md5", ""):
        pass
    assert socket.getdefaulttimeout() is None


def test_a_wrong_file_is_told_from_a_wrong_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def download(url: str, file: str) -> None:
        Path(file).write_bytes(b"other")

    monkeypatch.setattr("torch.hub.download_url_to_file", download)
    failed = rf"^data_dir: {tmp_path} lacks .* failed \(cut short, [^/]*\)\. Download it by hand and put it there as a"
    with pytest.raises(UserError, match=failed), fetched(tmp_path / "a.gz", "http://there", "md5", "0"):
        pass
    (tmp_path / "a.gz").write_bytes(b"other")
    refused = rf"^data_dir: {tmp_path}/a.gz is cut short, .*\. Delete it, and mupscale downloads it"
    with pytest.raises(UserError, match=refused), fetched(tmp_path / "a.gz", "http://there", "md5", "0"):
        pass
