"""A model of the transformers library grown in memory."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mupscale.checks.recording import generators_kept, state_kept
from mupscale.discovery.discover import discover
from mupscale.discovery.found import Found
from mupscale.errors import UserError, needs_extra, one_line
from mupscale.growing.upscale import upscale as grow_checked
from mupscale.hf.depth import MOST_PARAMETERS, Counts, How, deepened, grown_config, hints_at_depth
from mupscale.hf.family import CannotShrink, Family, on_meta
from mupscale.hf.folder import read_folder
from mupscale.hf.forward_pass import Call, default_call, logits_of, quiet
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import Optimizers, UpscaleReport, grow
from mupscale.methods.noise import NoiseOrAuto
from mupscale.text_tables import Watch, unwatched
from mupscale.widening.hints import some_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def upscale(
    model_or_folder: "PreTrainedModel | str | Path",
    factor: float = 1,
    *,
    layers: Counts | None = None,
    depth: How = "identity",
    call: Call | None = None,
    optimizer: Optimizers = None,
    noise: NoiseOrAuto = None,
    seed: int = 0,
    method: GrowthMethod | None = None,
    keep_heads: bool | None = None,
    only: Literal["feed_forward"] | None = None,
    fields: dict[str, float] | None = None,
    watch: Watch = unwatched,
) -> "tuple[PreTrainedModel, UpscaleReport]":
    """A wider or deeper model that computes as the one it is made of, and the report of its making.

    A wide model also trains as the narrow one; new layers learn from the first step on.

        model = AutoModelForCausalLM.from_pretrained("narrow")
        wide, report = mupscale.hf.upscale(model, 2, optimizer=optimizer)
        wide.save_pretrained("wide")
        optimizer = report.optimizer

    Args:
        model_or_folder: A model of the transformers library, or a folder with one.
        factor: By how much its widths grow.
        layers: How many layers it gets. Where it has several numbers of layers, by the field of the configuration:
            `{"decoder_layers": 12}`.
        depth: How it gets them. "identity": new layers add nothing at first, so it computes as before; with
            "interleave", each layer k times in place, and "stack", the whole stack again, it does not.
        call: One forward pass of a model, where its own dummy inputs do not do. With it, or with those, both models are
            compared before anything is written, if there is memory for copies; `report.exact` is the result.
        optimizer: The narrow model's; `report.optimizer` continues it.
        noise: What makes the copies part.
        seed: The seed of the noise.
        method: Another way to grow; by default the paper's duplication.
        keep_heads: Whether the number of heads stays; by default as the family needs.
        only: `feed_forward` grows the intermediate sizes alone.
        fields: Other factors, by the name of a field of the configuration.
        watch: Called with (words, done, total) while the growth of the family is found.
    """
    if isinstance(model_or_folder, str | Path):
        folder = read_folder(Path(model_or_folder))
        with quiet():
            narrow = folder.model_class.from_pretrained(
                folder.path, config=folder.config, dtype="auto", local_files_only=True, use_safetensors=True
            )
    else:
        narrow = model_or_folder
        _refuse_unless_pretrained(narrow)
    family = Family(type(narrow), call, watch)
    sizes: dict[str, Any] = {"keep_heads": keep_heads, "only": only, "fields": fields}
    config, deepenings, is_wider = grown_config(family, narrow.config, factor, layers, depth, **sizes)
    found = _found(family, narrow, config) if is_wider else None
    wide = wide_model(narrow, deepened(config, deepenings))
    hints = hints_at_depth(narrow, wide, deepenings, found)
    settings: dict[str, Any] = {"hints": hints, "noise": noise, "seed": seed, "method": method}
    run: Call = call or default_call
    try:
        with torch.no_grad(), state_kept(narrow.modules()), generators_kept():
            run(narrow)
    except Exception as error:  # only the caller knows which inputs a model takes
        unchecked = f"not checked: no input is known ({one_line(error, 200)}). Give call"
        return wide, replace(grow(narrow, wide, optimizer, **settings), check=unchecked)
    report = grow_checked(narrow, wide, optimizer, call=lambda model: logits_of(run(model)), **settings)
    if report.exact and found is not None and found.untested:
        unchecked = f"not checked: the forward pass does not depend on {some_names(found.untested)}. Give call"
        report = replace(report, exact=None, check=unchecked)
    return wide, report


def _found(family: Family, narrow: "PreTrainedModel", config: "PretrainedConfig") -> Found:
    """How the model grows, found with small ones of its family; where there are none, with the models themselves."""
    wide = on_meta(type(narrow), config)
    try:
        return family.found_between(narrow, wide)
    except CannotShrink:
        if sum(parameter.numel() for parameter in wide.parameters()) > MOST_PARAMETERS:
            raise
        return discover(narrow, wide_model(narrow, config), family.call or default_call, family.watch)


def _refuse_unless_pretrained(model: object) -> None:
    with needs_extra("hf"):
        from transformers import PreTrainedModel
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"wanted a model of the transformers library, or a folder of one; got {type(model).__name__}")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise UserError("the model is quantised: its scales cannot grow. Load it in floating point")


def wide_model(
    narrow: "PreTrainedModel", config: "PretrainedConfig", model_class: "type[PreTrainedModel] | None" = None
) -> "PreTrainedModel":
    """A fresh wide model: its buffers are what a newly loaded one computes, its weights are not set."""
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import local_torch_dtype

    parameter = next(narrow.parameters())
    config._attn_implementation = narrow.config._attn_implementation
    dtype = parameter.dtype if parameter.is_floating_point() else torch.get_default_dtype()
    with local_torch_dtype(dtype):
        with parameter.device, no_init_weights():
            wide = (model_class or type(narrow))(config)
        wide.tie_weights()  # which is a part of the initialisation
    narrow_parameters = dict(narrow.named_parameters())
    for name, target in wide.named_parameters():
        if name in narrow_parameters:
            source = narrow_parameters[name]
            target.data = target.data.to(source.dtype)
            target.requires_grad_(source.requires_grad)
    if getattr(narrow, "generation_config", None) is not None:
        wide.generation_config = copy.deepcopy(narrow.generation_config)
    return wide
