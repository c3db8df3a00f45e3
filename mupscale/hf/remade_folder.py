"""A folder with more experts or a larger vocabulary, out of another one, streamed as wider ones are."""

import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mupscale.errors import UserError
from mupscale.hf.continuing import FORMAT, factors_of
from mupscale.hf.experts import ROUTER_STD, find_growth
from mupscale.hf.family import on_meta
from mupscale.hf.folder import CONFIG_FILE, ModelFolder, read_folder
from mupscale.hf.forward_pass import largest_difference, load_in_float32
from mupscale.hf.names import made_tensors, stored_runs, with_aliases
from mupscale.hf.recipes import EntryRun, Recipes, Runs, copy_of, named_tensors, resolve
from mupscale.hf.vocabulary import NewRows, VocabularyGrowth, known_tokens, pieces_of
from mupscale.hf.widened_folder import FolderReport, FolderWriter, left_behind, read_run, too_large, written_folder
from mupscale.methods import Duplication
from mupscale.widening.optimizers import Sized

SAME = 1e-4
"""By how much outputs of a folder in float32 may differ; in half precision a new router's sum is rounded."""


def remake_folder(
    folder: str | Path,
    out: str | Path,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    split: int = 1,
    to: str | None = None,
    router_std: float = ROUTER_STD,
    noise: float = 0.0,
    tokens: int | None = None,
    tokenizer: str | Path | None = None,
    pad_to: int = 1,
    new_rows: NewRows = "rare",
    seed: int = 0,
    earlier: Mapping[str, Any] | None = None,
) -> FolderReport:
    """Writes a folder with more experts, a larger vocabulary, or both. `out` is there whole, or not at all.

    The arguments are those of `add_experts` and `extend_vocabulary`. `tokenizer` is a folder with the new tokenizer,
    whose files are written; `earlier` is the record of a growth that made `folder`, by which the new one multiplies.
    Memory holds a few MB at a time; with noise, the draws for the copies of one expert.

    `mupscale.hf.remake_folder("Qwen3-0.6B", "Qwen3-8x0.6B", experts=8, top_k=2)`
    """
    start, out = time.perf_counter(), Path(out)
    narrow = read_folder(Path(folder))
    model: Any = on_meta(narrow.model_class, narrow.config)
    runs, unused = stored_runs(narrow.tensors, model)
    recipes: Recipes = {name: copy_of(name, tensor) for name, tensor in named_tensors(model).items()}
    dtypes: dict[str, torch.dtype] = {}
    checks: list[str] = []
    larger = None
    if tokens is not None or tokenizer is not None:
        used, of_text = known_tokens(narrow.path), None
        if tokenizer is not None:
            used, found, of_text = pieces_of(narrow.path, Path(tokenizer))
            tokens = found if tokens is None else tokens
        assert tokens is not None
        larger = VocabularyGrowth(model, tokens, used, pad_to, new_rows, of_text)
        lengths = {name: tensor.numel() // larger.old_rows for name, tensor in named_tensors(model).items()}
        recipes = larger.recipes(partial(_read_rows, runs, lengths))
        model = on_meta(narrow.model_class, larger.config())
        runs = _made_of(recipes, runs, model)
        checks.append(f"{larger.tokens} tokens, {larger.rows} rows")
    if experts is not None:
        growth, check = find_growth(model.config, experts, top_k, split, to, router_std, noise, seed)
        checks.append(check)
        wide = on_meta(growth.model_class(narrow.model_class), growth.config(model.config))
        recipes = growth.recipes(model, wide)
        dtypes = {name: runs[recipe.origin][0].source.dtype for name, recipe in recipes.items()}
        model, runs = wide, _made_of(recipes, runs, wide)
    model.config.architectures = [type(model).__name__]
    writer = FolderWriter(dict(made_tensors(runs, dtypes, model)), Duplication())
    with written_folder(narrow, out, model.config, writer, _record(model, recipes, earlier)) as new:
        for path in sorted(Path(tokenizer).iterdir()) if tokenizer is not None else ():
            is_of_tokens = "token" in path.name or path.name in {"vocab.json", "merges.txt", "vocab.txt"}
            is_read = path.is_file() and path.suffix in (".json", ".txt", ".jinja")
            if is_read and (is_of_tokens or (new / path.name).exists()) and path.name != CONFIG_FILE:
                shutil.copyfile(path, new / path.name)
        reason = too_large(narrow, writer)
        compared = _compare(narrow, new, type(model), larger) if reason is None else f"were not compared: {reason}"
        checks.append(f"outputs of both folders {compared}")
    seconds, notes = time.perf_counter() - start, tuple(left_behind(narrow, unused))
    return FolderReport(out, narrow.size, writer.size, seconds, tuple(checks), notes)


def _read_rows(runs: Runs, lengths: Mapping[str, int], name: str, first: int, last: int) -> Tensor:
    """Rows of a stored table, of these lengths."""
    length = lengths[name]
    wanted = resolve([EntryRun(name, (last - first) * length, first * length)], runs)
    return torch.cat([run.entries(read_run) for run in wanted]).view(-1, length)


def _made_of(recipes: Recipes, older: Runs, wide: PreTrainedModel) -> dict[str, tuple[EntryRun, ...]]:
    """What the tensors of the next model are made of, in stored runs."""
    made = {name: tuple(resolve(each.runs, older)) for name, each in recipes.items() if each.origin in older}
    return with_aliases(made, wide)


def _compare(narrow: ModelFolder, new: Path, wide_class: type[PreTrainedModel], larger: VocabularyGrowth | None) -> str:
    """How outputs differ, in words. UserError where they should not."""
    if larger is not None:
        models = load_in_float32(narrow.model_class, narrow.path), load_in_float32(wide_class, new)
        return f"in float32: {larger.compare(*models)[1]}"
    found = largest_difference(narrow.path, new, narrow.model_class, None, {}, wide_class)
    if isinstance(found, str):
        return f"were not compared: {found}"
    precisions = {tensor.dtype for tensor in narrow.tensors.values() if tensor.dtype.is_floating_point}
    if not found <= max([SAME, *(16 * torch.finfo(each).eps for each in precisions - {torch.float32})]):
        raise UserError(f"outputs of the new folder differ by {found:.1e}; nothing was written")
    return f"differ by {found:.1e} in float32"


def _record(model: PreTrainedModel, recipes: Recipes, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `parameter_groups` reads; the factors of an earlier growth multiply."""
    rows = {}
    before = {} if earlier is None else earlier["parameters"]
    for name, parameter in model.named_parameters():
        recipe, shape = recipes[name], tuple(parameter.shape)
        factors = factors_of(Sized(recipe.scale, shape, shape))
        old = before.get(recipe.origin)
        if old is not None and not recipe.is_new:
            factors = {
                kind: {key: value * old["factors"][kind][key] for key, value in row.items()}
                for kind, row in factors.items()
            }
        role = "new" if recipe.is_new else "copied"
        rows[name] = {"role": role, "wide_shape": list(shape), "factors": factors}
    return {"format": FORMAT, "new_parameters": [name for name in rows if recipes[name].is_new], "parameters": rows}
