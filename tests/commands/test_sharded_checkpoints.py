"""Checkpoint folders of strangers: torch would unpickle parts of them, so they are checked first."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import refused, small
from stand_ins import Attack

from mupscale.commands.checkpoints import load_validated
from mupscale.errors import UserError
from mupscale.models.sharded import damage_at, damage_in_shards, undamaged

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sharded checkpoint of a tensor and a number in the newest place of a run's folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("run/checkpoints/step=2.ckpt")
    dcp.save(state(), checkpoint_id=path, no_dist=True)
    meta = {"global_step": 2, "hyper_parameters": {"width": 8}, "mupscale": {"class_path": "mupscale.models.mlp.MLP"}}
    torch.save(meta, path / "meta.pt")
    shutil.copy(small(tmp_path / "c.yaml"), "run/config.yaml")
    return path


def state() -> dict[str, Any]:
    return {"state_dict": {"net.weight": torch.arange(4.0)}, "optimizer_0": {"lr": 0.5, "betas": (0.9, 0.95)}}


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder: Path, content: Any, name: str = ".metadata") -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))


def place_of(content: Any, name: str) -> Any:
    """Where a value lies."""
    return next(info for index, info in content.storage_data.items() if index.fqn == name)


def assert_refused(folder: Path, *fragments: str) -> None:
    """By the check that every command makes first, in one line, and nothing runs."""
    with pytest.raises(UserError) as caught:
        load_validated(folder)
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments), message
    assert "\n" not in message
    assert not Path("marker").exists()


def test_a_checkpoint_of_torch_is_accepted(folder: Path):
    assert load_validated(folder)["hyper_parameters"] == {"width": 8}
    again = state()
    again["optimizer_0"]["lr"] = 0.0
    dcp.load(again, checkpoint_id=folder, no_dist=True)
    assert again["optimizer_0"]["lr"] == 0.5


def test_the_attack_works_on_torch_itself(folder: Path):
    """Otherwise the tests below would show nothing."""
    write(folder, Attack())
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state(), checkpoint_id=folder, no_dist=True)
    assert Path("marker").exists()


@pytest.mark.slow
def test_metadata_that_names_a_function(folder: Path):
    write(folder, Attack())
    fit = ["fit", "--config", "c.yaml"]
    for command in (
        [*fit, "--ckpt_path", str(folder)],
        [*fit, "--model.init_args.init_from", str(folder)],
        ["resume", "run"],
        ["upscale", str(folder), "--width", "16", "--out", "wide.ckpt"],
    ):
        assert "which no checkpoint needs; nothing of it was loaded" in refused(*command)
        assert not Path("marker").exists()


def test_a_chunk_that_the_metadata_lacks(folder: Path):
    """Its rows would be whatever is in memory."""
    content = metadata(folder)
    content.state_dict_metadata["state_dict.net.weight"].size = torch.Size([8])
    write(folder, content)
    message = refused("upscale", str(folder), "--width", "16", "--out", "wide.ckpt")
    assert "is damaged: .metadata does not have all of state_dict.net.weight" in message


def test_processes_share_the_check_of_the_shards(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """One that finds damage stops, so that it does not go on from another checkpoint than the others."""
    place = place_of(metadata(folder), "state_dict.net.weight")
    content = bytearray((folder / place.relative_path).read_bytes())
    start = content.index(torch.arange(4.0).numpy().tobytes())
    content[start + 8] ^= 1
    (folder / place.relative_path).write_bytes(content)
    assert "the checksum of" in str(damage_in_shards(folder))
    found = [damage_in_shards(folder, (rank, 4)) for rank in range(4)]
    assert sum(problem is not None for problem in found) == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, problem in enumerate(found):
        monkeypatch.setenv("RANK", str(rank))
        if problem is None:
            assert damage_at(folder) is None
        else:
            with pytest.raises(UserError, match=r"delete it to continue from the one before it"):
                damage_at(folder)
        undamaged.clear()


def test_metadata_with_a_foreign_object_inside(folder: Path):
    content = metadata(folder)
    content.planner_data = Attack()
    write(folder, content)
    assert_refused(folder, "which no checkpoint needs; nothing of it was loaded")


@pytest.mark.parametrize("name", ["torch.hub\nload", "builtins\neval", "os\nsystem", "torch\nload", "torch\nnn.Linear"])
def test_only_the_classes_of_metadata_are_known(name: str, folder: Path):
    write(folder, f"c{name}\n.".encode())
    assert_refused(folder, name.replace("\n", "."))


def test_metadata_that_changes_a_class_of_torch(folder: Path):
    """`BUILD` of the class itself sets its attributes."""
    before = dict(vars(dcp.Metadata))
    write(folder, b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00aI1\ns\x86b.")
    assert_refused(folder, "is damaged, or not the metadata of a checkpoint")
    assert dict(vars(dcp.Metadata)) == before


def test_metadata_that_changes_the_class_of_an_object(folder: Path):
    """It could pass for a tensor here and be unpickled by torch."""
    home = b"ctorch.distributed.checkpoint.metadata\n"
    change = b"N}X\x09\x00\x00\x00__class__" + home + b"BytesStorageMetadata\ns\x86b."
    write(folder, b"\x80\x04" + home + b"TensorStorageMetadata\n)\x81" + change)
    assert_refused(folder, ".metadata is damaged", "a pickle sets more than attributes of an object")


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"rubbish", pickle.dumps({}), pickle.dumps(None)])
def test_damaged_metadata(content: bytes, folder: Path):
    write(folder, content)
    assert_refused(folder, ".metadata is")


def test_a_value_that_is_not_a_tensor(folder: Path):
    """Torch unpickles it without restrictions."""
    torch.save(Attack(), folder / "__9_0.distcp")
    content = metadata(folder)
    place = place_of(content, "optimizer_0.lr")
    place.relative_path, place.offset = "__9_0.distcp", 0
    place.length = (folder / "__9_0.distcp").stat().st_size
    write(folder, content)
    assert_refused(folder, "__9_0.distcp has optimizer_0.lr with more than data in it")
    dcp.load(state(), checkpoint_id=folder, no_dist=True)
    assert Path("marker").exists(), "torch itself runs it"


def absolute(folder: Path) -> str:
    return str(shutil.move(folder / "__0_0.distcp", Path("elsewhere").resolve()))


def linked(folder: Path) -> str:
    shutil.move(folder / "__0_0.distcp", "elsewhere")
    (folder / "__0_0.distcp").symlink_to(Path("elsewhere").resolve())
    return "__0_0.distcp"


@pytest.mark.parametrize("name", [absolute, linked, lambda folder: "../../config.yaml", lambda folder: ".."])
@pytest.mark.parametrize("value", ["optimizer_0.lr", "state_dict.net.weight"])
def test_a_shard_outside_of_the_folder(name: Callable[[Path], str], value: str, folder: Path):
    content = metadata(folder)
    place_of(content, value).relative_path = name(folder)
    write(folder, content)
    assert_refused(folder, "something outside of it")


@pytest.mark.parametrize("place", [(-1, 5), (0, -5), ("0", 5)])
def test_a_value_at_no_place(place: tuple[Any, Any], folder: Path):
    content = metadata(folder)
    info = place_of(content, "optimizer_0.lr")
    info.offset, info.length = place
    write(folder, content)
    assert_refused(folder, "wanted whole numbers")


def test_the_rest_of_a_folder_is_data(folder: Path):
    torch.save(Attack(), folder / "meta.pt")
    message = refused("fit", "--config", "c.yaml", "--ckpt_path", str(folder))
    assert "meta.pt is not a checkpoint, or is damaged, or holds more than data" in message
    assert "has no checkpoint that can be read" in refused("resume", "run")
    assert not Path("marker").exists()
