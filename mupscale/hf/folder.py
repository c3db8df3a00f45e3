"""A model folder of the transformers library, read as data: its configuration and where its tensors lie.

Nothing in the folder is executed. Weights are read from safetensors files alone, classes are those of the installed
transformers library, and every file lies in the folder itself (or among the blobs of its snapshot in a hub cache).
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mupscale.data_files import json_of, read_bytes, refuse_endless_file
from mupscale.errors import UserError, needs_extra, one_line, prefix_errors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The formats that a tensor may have; eight-bit floating point, which needs scales beside it, is none of them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk."""

    name: str
    path: Path
    offset: int
    """The position of its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_size(self) -> int:
        """The bytes of one entry of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a file, in the order of their bytes. UserError if the file is none, or a damaged one."""
    with needs_extra("hf"):
        from safetensors import SafetensorError, safe_open
    refuse_endless_file(path)
    try:
        with safe_open(path, framework="pt") as file:  # it compares all offsets with the length of the file
            file.keys()
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            header = json_of(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged ({one_line(error)}). Get it again") from error
    header.pop("__metadata__", None)
    found = []
    for name, row in header.items():
        if row["dtype"] not in DTYPES:
            raise UserError(
                f"{path}: {name!r} has the format {row['dtype']}, which cannot grow. "
                "Take the model in floating point of at least 16 bits"
            )
        start = LENGTH_BYTES + length + row["data_offsets"][0]
        found.append(StoredTensor(name, path, start, DTYPES[row["dtype"]], tuple(row["shape"])))
    return sorted(found, key=lambda tensor: tensor.offset)


@dataclass(frozen=True)
class NewFile:
    """A file that is to be written: its tensors know their places already."""

    path: Path
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor in self.tensors)


def new_file(path: Path, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> NewFile:
    """The file that holds tensors of these names, formats and shapes, the widest formats first for alignment."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed: list[StoredTensor] = []
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda row: -row[1].itemsize):
        tensor = StoredTensor(name, path, at, dtype, shape)
        rows[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + tensor.size]}
        placed.append(tensor)
        at += tensor.size
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return NewFile(path, header, tuple(replace(tensor, offset=len(header) + tensor.offset) for tensor in placed))


def split_into_files(
    folder: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], most_bytes: int
) -> list[NewFile]:
    """Files of at most `most_bytes` of tensors each (a larger tensor has its own), named as transformers names them."""
    parts: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    filled = 0
    for row in tensors:
        size = math.prod(row[2]) * row[1].itemsize
        if parts[-1] and filled + size > most_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += size
    if len(parts) == 1:
        return [new_file(folder / SINGLE_FILE, parts[0])]
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return [new_file(folder / name, part) for name, part in zip(names, parts, strict=True)]


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def index_text(files: Sequence[NewFile]) -> str:
    """The content of the index of several files."""
    weight_map = {tensor.name: file.path.name for file in files for tensor in file.tensors}
    total = sum(tensor.size for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


CONFIG_FILE = "config.json"

OTHER_WEIGHTS = {
    ".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pickle", ".pkl", ".pt", ".pth",
    ".safetensors", ".tar", ".tflite",
}  # fmt: skip
"""Endings of files that hold weights of the narrow model, or may hold pickles."""

CODE = {".bat", ".dll", ".dylib", ".exe", ".ipynb", ".js", ".ps1", ".py", ".pyc", ".pyd", ".sh", ".so", ".whl"}
IMPLEMENTATIONS = (
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", "grouped_mm",
    "batched_mm",
)  # fmt: skip
"""Names of attention and experts that are part of transformers. By others it fetches kernels from elsewhere."""

SMALL = 256 * 2**20
"""Bytes. A larger file beside the weights is no tokenizer, and stays behind."""


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds, checked: `read_folder` makes it."""

    path: Path
    config: "PretrainedConfig"
    settings: dict[str, Any]
    model_class: "type[PreTrainedModel]"
    tensors: dict[str, StoredTensor]
    """The tensors by name, in the order of the files."""

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    def companions(self) -> list[Path]:
        """The files that travel with the weights as they are: tokenizer, generation configuration, licence."""
        return [path for path in sorted(self.path.iterdir()) if path.is_file() and self._travels(path)]

    def _travels(self, path: Path) -> bool:
        is_ours = path.name in (CONFIG_FILE, GROWTH_FILE) or path.name.endswith(".index.json")
        if path.name.startswith(".") or (is_ours and path.parent == self.path):
            return False
        if path.is_dir():
            return not path.is_symlink()
        is_plain = path.suffix.lower() not in OTHER_WEIGHTS | CODE and is_inside(self.path, path)
        return is_plain and path.is_file() and path.stat().st_size <= SMALL

    def subfolders(self) -> tuple[list[Path], list[Path]]:
        """The subfolders that are copied, and those that are not, because they hold weights, code or links."""
        found = [path for path in sorted(self.path.iterdir()) if path.is_dir() and not path.name.startswith(".")]
        travels = {path: not path.is_symlink() and all(map(self._travels, path.rglob("*"))) for path in found}
        return [path for path in found if travels[path]], [path for path in found if not travels[path]]


GENERATION_FILE = "generation_config.json"

GROWTH_FILE = "mupscale.json"
"""What a growth leaves beside the weights: roles, layouts, and factors of the hyperparameters."""


def read_folder(path: Path) -> ModelFolder:
    """A model folder, with all of its headers read and compared. UserError if it cannot be widened."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        is_name = not path.exists() and len(path.parts) == 2 and not path.is_absolute()
        how = f". For a model of the hub: hf download {path} --local-dir {path.name}" if is_name else ""
        raise UserError(f"{path} {problem}; name a model folder, with {CONFIG_FILE} and safetensors files{how}")
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"{path} holds an adapter (adapter_config.json), not a model. Merge it into its base model first "
            "(merge_and_unload of peft), and save that"
        )
    if not (path / CONFIG_FILE).is_file():
        raise UserError(f"{path} is not a model folder: it has no {CONFIG_FILE}")
    if (path / GENERATION_FILE).is_file():
        read_json(path / GENERATION_FILE)  # transformers would name no file
    settings = _settings(path)
    config = _config(path, settings)
    tensors = _tensors(path)
    return ModelFolder(path, config, settings, _model_class(path, settings, config, tensors), tensors)


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a file lies in a folder, or among the blobs that a snapshot of a hub cache links to."""
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    return any(path.resolve().is_relative_to(each) for each in roots)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; raises a UserError if it is damaged, or something else."""
    try:
        content = json_of(read_bytes(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({one_line(error)}); get it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not the configuration of a model: it holds no names with values")
    return content


def _refuse_outside(folder: Path, file: Path) -> None:
    if not is_inside(folder, file):
        raise UserError(f"{file} is a link out of its folder; it is not read")


def _settings(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    _refuse_outside(path, file)
    settings = read_json(file)
    _refuse_code(file, settings)
    if settings.get("quantization_config") is not None or settings.get("compression_config") is not None:
        raise UserError(
            f"{path} is quantised (quantization_config in {CONFIG_FILE}): its scales cannot grow. "
            "Take the model in floating point, and quantise the wide one"
        )
    return settings


def _refuse_code(file: Path, settings: Any) -> None:
    if isinstance(settings, list):
        for value in settings:
            _refuse_code(file, value)
    if not isinstance(settings, dict):
        return
    for key, value in settings.items():
        if key in ("auto_map", "custom_pipelines"):
            raise UserError(
                f"{file} needs code of its own ({key}), which is never run. If transformers itself has this model, "
                f"delete {key} from a copy of the folder"
            )
        if key == "configuration_files":
            raise UserError(
                f"{file} names other configurations ({key}), which would be read in its place. Copy the one that you "
                f"want to {CONFIG_FILE} of a copy of the folder"
            )
        if "_implementation" in str(key):
            _refuse_kernels(file, key, value)
        _refuse_code(file, value)


def _refuse_kernels(where: object, key: str, value: Any) -> None:
    """Raises a UserError if an implementation of attention or experts, or one of several, is not of transformers."""
    several = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for each in several:
        if isinstance(each, dict | list):
            _refuse_kernels(where, key, each)
        elif each is not None and each not in IMPLEMENTATIONS:
            raise UserError(
                f"{where} names code from elsewhere ({key}: {value!r}), which is never run; delete it there"
            )


def without_implementations(where: object, config: "PretrainedConfig") -> "PretrainedConfig":
    """A configuration without implementations, which transformers then chooses; a UserError for one from elsewhere."""
    from mupscale.hf.config import parts

    for path, part in parts(config):
        for key in ("_attn_implementation", "_experts_implementation"):
            _refuse_kernels(where, path + key, getattr(part, key, None))
            setattr(part, key, None)
    return config


def _config(path: Path, settings: dict[str, Any]) -> "PretrainedConfig":
    with needs_extra("hf"):
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"{path / CONFIG_FILE} has model_type {kind!r}, which the installed transformers does not have; "
            "a newer version may"
        )
    # whatever it is, the file's values have caused it
    with prefix_errors(f"{path / CONFIG_FILE} is not a configuration of a {kind} model", Exception):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return without_implementations(path / CONFIG_FILE, config)


def _model_class(
    path: Path, settings: dict[str, Any], config: "PretrainedConfig", tensors: Collection[str]
) -> "type[PreTrainedModel]":
    """The class that the configuration names, or that the tensors fit, of transformers and nowhere else."""
    import transformers
    from transformers import PreTrainedModel

    names = settings.get("architectures") or [_class_with(tensors, config)]
    name = names[0] if isinstance(names, list) and names else names
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise UserError(f"{path / CONFIG_FILE} has architectures {names!r}, which transformers does not have")
    if not isinstance(config, found.config_class or ()):
        raise UserError(f"{path / CONFIG_FILE}: {name} is no architecture of a {config.model_type} model")
    return found


def _class_with(tensors: Collection[str], config: "PretrainedConfig") -> str | None:
    """The name of the class that transformers saves, or saved, as tensors of these names; a head before its base."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto import modeling_auto

    from mupscale.hf.family import on_meta
    from mupscale.hf.recipes import named_tensors

    heads = "MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "PRETRAINING"
    found: dict[str, tuple[int, int]] = {}
    for kind in (*(f"MODEL_FOR_{head}" for head in heads), "MODEL"):
        mapping = getattr(modeling_auto, f"{kind}_MAPPING_NAMES")
        name = mapping.get(config.model_type)
        if isinstance(name, str) and hasattr(transformers, name) and name not in found:
            model = on_meta(getattr(transformers, name), config)
            saved = revert_weight_conversion(model, named_tensors(model)).keys()
            known = (saved | model.state_dict().keys()) & set(tensors)
            found[name] = len(known), -len(saved - known)
    return max(found, key=lambda name: found[name], default=None)


def _tensors(path: Path) -> dict[str, StoredTensor]:
    index = path / INDEX_FILE
    if index.exists():
        weight_map = _weight_map(path, index)
        files = list(dict.fromkeys(weight_map.values()))
    elif (path / SINGLE_FILE).exists():
        weight_map = None
        files = [SINGLE_FILE]
    else:
        found = sorted(file.name for file in path.iterdir() if file.suffix.lower() in OTHER_WEIGHTS)
        if any(name.lower().endswith(".safetensors") for name in found):
            raise UserError(f"{path} has {found[0]} but no {SINGLE_FILE} and no {INDEX_FILE}; get the missing file")
        if found and found[0].lower().endswith((".gguf", ".ggml")):
            raise UserError(
                f"{path} has its weights in {found[0]}, a format for inference, mostly quantised. Take the release of "
                "this model that has safetensors"
            )
        if found:
            raise UserError(
                f"{path} has its weights in {found[0]}, which may hold code; only safetensors are read. "
                "Convert it on a machine you can lose: from_pretrained, then save_pretrained"
            )
        raise UserError(f"{path} has no weights: wanted {SINGLE_FILE}, or {INDEX_FILE} and its files")
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        file = path / name
        if not file.is_file():
            raise UserError(f"{path} lacks {name}, which {INDEX_FILE} names; get it again")
        _refuse_outside(path, file)
        for tensor in stored_tensors(file):
            if weight_map is not None and weight_map.get(tensor.name) != name:
                raise UserError(f"{file} holds {tensor.name!r}, but {INDEX_FILE} does not say so; get both again")
            tensors[tensor.name] = tensor
    missing = [name for name in weight_map or () if name not in tensors]
    if weight_map is not None and missing:
        raise UserError(f"{path / weight_map[missing[0]]} lacks {missing[0]!r}, which {INDEX_FILE} names there")
    if not tensors:
        raise UserError(f"{path} has no tensors in its safetensors files")
    return tensors


def _weight_map(path: Path, index: Path) -> dict[str, str]:
    _refuse_outside(path, index)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map with the file of each tensor; get it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{index} names {file!r} for {name!r}, wanted a safetensors file in the folder")
    return weight_map
