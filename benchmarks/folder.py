"""Time and peak memory of `upscale FOLDER --factor 2`, beside `cp` of as many bytes as it writes.

    python -m benchmarks folder [--quick] [--deep] [--layers 8] [--out folder.json]

The folder is a synthetic Llama of the shapes of Llama-2-7B in bfloat16 (hidden size 4096, intermediate size 11008, 32
heads, vocabulary 32,000) with fewer layers. The start-up is the time of the same command for a tiny model. The command
runs in a process of its own, whose peak resident memory is given; its check of the written files is included. `cp -r`
copies the wide folder on the same disk. Both times are given until the bytes are on disk, and CPU seconds beside them,
because a shared machine has other work to do. With `--deep` the number of layers is doubled instead of the width, by
layers that add nothing. TMPDIR names a folder on the disk to measure.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Options, Row
from mupscale.hf.folder import read_folder


def write_narrow(folder: Path, layers: int, *, quick: bool) -> None:
    """Writes a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 64 if quick else 4096
    heads = width // 128 or 1
    config = LlamaConfig(
        hidden_size=width, intermediate_size=11008 * width // 4096, num_attention_heads=heads,
        num_key_value_heads=heads, num_hidden_layers=layers, vocab_size=256 if quick else 32000,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM._from_config(config).save_pretrained(folder, max_shard_size="5GB")


def gb_of(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e9


def timed(*command: str) -> tuple[float, float]:
    """Seconds until a command has ended and all bytes are on disk, and its CPU seconds."""
    os.sync()
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    os.sync()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, used


def upscale(narrow: Path, wide: Path, layers: int | None) -> tuple[float, float]:
    """Widens a folder, or deepens it to so many layers."""
    options = ["--factor", "2"] if layers is None else ["--layers", str(layers)]
    return timed(sys.executable, "-m", "mupscale", "upscale", str(narrow), "--out", str(wide), *options)


def measure(where: Path, layers: int, *, quick: bool, deep: bool) -> Row:
    narrow, wide, copy = where / "narrow", where / "wide", where / "copy"
    new = 2 * layers if deep else None
    write_narrow(where / "tiny", layers if deep else 1, quick=True)
    start_up, _ = upscale(where / "tiny", where / "tiny-wide", new)
    write_narrow(narrow, layers, quick=quick)
    narrow_gb = gb_of(narrow)
    seconds, cpu = upscale(narrow, wide, new)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    shutil.rmtree(narrow)  # which leaves its room on the disk to the copy
    copy_seconds, copy_cpu = timed("cp", "-r", str(wide), str(copy))
    return {
        "layers": layers,
        "deep": deep,
        "narrow_gb": narrow_gb,
        "wide_gb": gb_of(wide),
        "start_up_seconds": start_up,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "cp_seconds": copy_seconds,
        "cp_cpu_seconds": copy_cpu,
        "ratio": seconds / copy_seconds,
        "peak_gb": peak / 1e9,
        "largest_wide_tensor_gb": max(tensor.size for tensor in read_folder(wide).tensors.values()) / 1e9,
    }


def rows(options: argparse.Namespace) -> Iterator[Row]:
    layers = options.layers or (2 if options.quick else 8)
    with tempfile.TemporaryDirectory() as where:
        yield measure(Path(where), layers, quick=options.quick, deep=options.deep)


OPTIONS: Options = {
    "--deep": {"action": "store_true", "help": "double the number of layers, not the width"},
    "--layers": {"type": int, "help": "layers of the narrow model (default 8, which needs 32 GB of disk)"},
}
