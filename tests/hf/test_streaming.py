"""Tensors widened by rows are the tensors widened at once; files are those of the safetensors library."""

from pathlib import Path

import pytest
import torch
from model_folders import llama, save
from peak_memory import peak_bytes
from safetensors.torch import load_file
from torch import Tensor

from mupscale.errors import UserError
from mupscale.hf import widened_folder
from mupscale.hf.folder import as_bytes, new_file, split_into_files, stored_tensors
from mupscale.hf.names import GrowingTensor
from mupscale.hf.widened_folder import FolderWriter, row_chunks
from mupscale.methods import Duplication, HyperCloning
from mupscale.methods.noise import AdditiveNoise, add_noise_
from mupscale.widening.growth import Axis, Growth, Layout, Piece, evenly, narrow_length, source_index, wide_length
from mupscale.widening.write import widen_

LAYOUTS: dict[str, Layout] = {
    "fixed": (Piece(24, 24, 1),),
    "tiled": (Piece(24, 24, 3),),
    "interleaved": (Piece(24, 1, 2),),
    "heads": (Piece(24, 4, 2),),
    "pieces": (Piece(8, 8, 2), Piece(4, 2, 2), Piece(12, 12, 1)),
    "fractional": evenly(24, 40),
}


def planned(rows: Layout, columns: Layout, sides: tuple[str, str] = ("out", "in")) -> Growth:
    layouts = (rows, columns)
    shapes = [tuple(length(layout) for layout in layouts) for length in (narrow_length, wide_length)]
    summed = tuple(axis for axis, side in enumerate(sides) if side == "in")
    axes = (sides.index("out"), sides.index("in"))
    return Growth(("w",), *shapes, "weight", tuple(map(Axis, layouts, sides)), axes, summed_axes=summed)


def saved(folder, content: Tensor, entry: Growth) -> GrowingTensor:
    file = new_file(folder / "narrow.safetensors", [("w", content.dtype, tuple(content.shape))])
    file.path.write_bytes(file.header + as_bytes(content))
    return GrowingTensor("w", stored_tensors(file.path)[0], entry, "w")


@pytest.mark.parametrize("most", [1, 2, 5, 7, 16, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_cover_every_wide_row_in_order(name: str, most: int) -> None:
    index = source_index(LAYOUTS[name])
    end = 0
    for rows in row_chunks(LAYOUTS[name], most):
        assert rows.start == end < rows.stop <= rows.start + most
        read = index[rows].tolist()
        assert set(read) == set(range(min(read), max(read) + 1)), "no more than a chunk is read"
        end = rows.stop
    assert end == len(index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sides", [("out", "in"), ("in", "out")])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_streamed_tensor_is_the_tensor_widened_at_once(name, sides, dtype, tmp_path, monkeypatch) -> None:
    """Chunks of a few rows, on either side of a matrix: the same bytes, as the safetensors library reads them."""
    monkeypatch.setattr(widened_folder, "CHUNK_BYTES", 300)
    entry = planned(LAYOUTS[name], LAYOUTS["tiled"], sides)
    narrow = torch.randn(24, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.empty(entry.wide_shape, dtype=dtype)
    widen_(expected, narrow, entry)
    files = split_into_files(tmp_path, [("w", dtype, entry.wide_shape)], 10**9)
    counted: list[int] = []
    FolderWriter({"w": saved(tmp_path, narrow, entry)}, Duplication()).write(files, counted.append)
    assert torch.equal(load_file(files[0].path)["w"], expected)
    assert sum(counted) == 2 * expected.nbytes, "written, then checked"


def test_noise_and_methods_are_those_of_the_library(tmp_path) -> None:
    entry = planned(LAYOUTS["heads"], LAYOUTS["tiled"])
    narrow = torch.randn(24, 24, generator=torch.Generator().manual_seed(0))
    noisy, diagonal = torch.empty(entry.wide_shape), torch.empty(entry.wide_shape)
    noise, method = AdditiveNoise(0.5, centred=True), HyperCloning("diagonal")
    widen_(noisy, narrow, entry)
    add_noise_(noisy, entry, noise, narrow, 3)
    method.widen_(diagonal, narrow, entry)
    tensors = {"w": saved(tmp_path, narrow, entry)}
    cases = {"noise": ((Duplication(), noise, 3), noisy), "diagonal": ((method,), diagonal)}
    for name, (settings, expected) in cases.items():
        (tmp_path / name).mkdir()
        files = split_into_files(tmp_path / name, [("w", torch.float32, entry.wide_shape)], 10**9)
        FolderWriter(tensors, *settings).write(files, lambda count: None)
        assert torch.equal(load_file(files[0].path)["w"], expected)


@pytest.mark.parametrize("noise", [None, AdditiveNoise(0.1)])
def test_a_file_that_changed_on_disk_is_found(noise, tmp_path) -> None:
    """One bit of one entry, far from the start."""
    entry = planned(LAYOUTS["heads"], LAYOUTS["tiled"])
    tensors = {"w": saved(tmp_path, torch.ones(24, 24), entry)}
    files = split_into_files(tmp_path, [("w", torch.float32, entry.wide_shape)], 10**9)
    writer = FolderWriter(tensors, Duplication(), noise)
    writer.write(files, lambda count: None)
    writer.check(files[0], lambda count: None)
    content = bytearray(files[0].path.read_bytes())
    content[-1001] ^= 1
    files[0].path.write_bytes(content)
    with pytest.raises(UserError, match="'w' is not what was written"):
        writer.check(files[0], lambda count: None)


def test_weights_that_are_not_finite_are_named(tmp_path) -> None:
    for value in (float("nan"), float("inf")):
        folder = tmp_path / str(value)
        folder.mkdir()
        narrow = torch.ones(24, 24)
        narrow[17, 3] = value
        entry = planned(LAYOUTS["tiled"], LAYOUTS["tiled"])
        files = split_into_files(folder, [("w", torch.float32, entry.wide_shape)], 10**9)
        with pytest.raises(UserError, match="'w' has NaN or infinite entries"):
            FolderWriter({"w": saved(folder, narrow, entry)}, Duplication()).write(files, lambda count: None)


def test_files_are_split_by_size_and_aligned(tmp_path) -> None:
    rows = [("a", torch.bfloat16, (3,)), ("b", torch.float32, (5,)), ("c", torch.int64, ()), ("d", torch.bool, (7,))]
    one, two = split_into_files(tmp_path, rows, 30)
    assert [file.path.name for file in (one, two)] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert [tensor.name for tensor in one.tensors] == ["b", "a"], "the widest format first"
    assert all(tensor.offset % tensor.dtype.itemsize == 0 for file in (one, two) for tensor in file.tensors)
    for file in (one, two):
        file.path.write_bytes(file.header + bytes(file.size - len(file.header)))
        assert tuple(stored_tensors(file.path)) == file.tensors
        assert {name: tuple(value.shape) for name, value in load_file(file.path).items()} == {
            tensor.name: tensor.shape for tensor in file.tensors
        }


LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 16_000}
OPTIONS = {
    "wider": ("--factor", "2", "--noise", "none"),
    "deeper": ("--layers", "12"),
    "experts": ("--experts", "4"),
    "a larger vocabulary": ("--vocab", "16100", "--new-rows", "mean"),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize("case", OPTIONS)
def test_memory_is_a_part_of_a_tensor(case: str, tmp_path: Path) -> None:
    """Of a model with the proportions of one of 7 billion parameters, whose largest tensor has 33 MB."""
    for name, sizes in (("tiny", {}), ("large", LARGE)):
        save(llama(**sizes), tmp_path / name)
    tiny, large = (
        ["upscale", str(tmp_path / name), *options, "--out", str(tmp_path / f"{name}-out")]
        for name, options in (
            ("tiny", [each.replace("16100", "70") for each in OPTIONS[case]]),
            ("large", OPTIONS[case]),
        )
    )
    peak = peak_bytes(tiny, large, as_if_full=True)
    whole = sum(path.stat().st_size for path in (tmp_path / "large-out").iterdir())
    assert whole > 130e6
    assert peak < 40e6, f"{peak / 1e6:.0f} MB of {whole / 1e6:.0f} MB"
