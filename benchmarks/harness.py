"""What every benchmark shares: options, the clock and memory of a device, a table that grows with its rows, JSON."""

import argparse
import gc
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mupscale.errors import UncheckedWarning

Row = dict[str, Any]
"""One measurement, by the titles of its columns. What is no text or number is in the JSON file only."""

Options = dict[str, dict[str, Any]]
"""Options of a command by their names, with argparse's settings."""

SHARED: Options = {
    "--device": {"type": torch.device, "default": "cuda" if torch.cuda.is_available() else "cpu"},
    "--quick": {"action": "store_true", "help": "tiny sizes, to test the benchmark itself"},
    "--out": {"type": Path, "help": "write the rows as JSON"},
}
ONLY: Options = {"--only": {"default": "", "help": "the cases whose names contain this"}}
"""Options of benchmarks with several cases."""


def run(name: str, benchmark: Any, arguments: list[str]) -> None:
    """Prints each of the `rows` of a module as soon as it is measured; its OPTIONS are its own ones."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=benchmark.__doc__, formatter_class=layout
    )
    for option, settings in (SHARED | benchmark.OPTIONS).items():
        parser.add_argument(option, **settings)
    given = parser.parse_args(arguments, argparse.Namespace(name=name))
    quieten()
    table = {
        "machine": torch.cuda.get_device_name() if given.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "rows": [],
    }
    titles: list[str] = []
    for row in benchmark.rows(given):
        table["rows"].append(row)
        shown = {title: as_text(value) for title, value in row.items() if isinstance(value, str | int | float)}
        if titles != list(shown):
            titles = list(shown)
            print("  ".join(f"{title:{width(title)}}" for title in titles))
        print("  ".join(f"{text:{width(title)}}" for title, text in shown.items()), flush=True)
        if given.out:
            given.out.write_text(json.dumps(table, indent=1) + "\n")


def width(title: str) -> int:
    return 26 if title in ("case", "way") else max(len(title), 9)


def as_text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.simplefilter("ignore", UncheckedWarning)


def now() -> float:
    """Seconds, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clear_memory() -> None:
    """Frees what is left, and begins to measure the peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def rate(step: Callable[[], Any], seconds: float, at_once: int = 1) -> float:
    """Calls a second. The device is waited for after so many calls at once; after single calls at the end only."""
    start, count = now(), 0
    while time.perf_counter() < start + seconds:
        for _ in range(at_once):
            step()
        count += at_once
        if at_once > 1:
            now()
    return count / (now() - start)
