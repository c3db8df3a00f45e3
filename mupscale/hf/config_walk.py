"""A configuration and those inside it, field by field."""

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig


def parts(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """The configuration, then every nested one once, each with the path in front of its fields' names."""
    seen: set[int] = set()
    queue = [(path, config)]
    while queue:
        path, part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        queue += [
            (f"{path}{name}.", value) for name, value in vars(part).items() if isinstance(value, PretrainedConfig)
        ]


def fields_of(part: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The fields that may hold sizes: numbers, and lists of numbers."""
    for name, value in vars(part).items():
        if name in ("transformers_version", "id2label", "label2id", "torch_dtype", "dtype"):
            continue
        if isinstance(value, bool | str | dict | PretrainedConfig):
            continue
        yield name, value
