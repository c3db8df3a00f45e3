"""A model of the transformers library widened in memory."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mupscale.checks.agreement import Agreement, check_agreement
from mupscale.checks.random_numbers import generators_kept
from mupscale.checks.recording import state_kept
from mupscale.discovery.discover import discover
from mupscale.discovery.found import Found
from mupscale.errors import UserError, needs_extra
from mupscale.hf.family import CannotShrink, found_between
from mupscale.hf.folder import read_folder
from mupscale.hf.growth import ConfigGrowth
from mupscale.hf.inputs import Call, default_call
from mupscale.hf.outputs import quiet
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import Optimizers, UpscaleReport, grow
from mupscale.methods.noise import Noise
from mupscale.watching import Watch, unwatched
from mupscale.widening.plan import plan

MOST_PARAMETERS = 100_000_000
"""Of a wide model that is itself run to find how it grows."""

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def upscale(
    model_or_folder: "PreTrainedModel | str | Path",
    factor: float,
    *,
    call: Call | None = None,
    optimizer: Optimizers = None,
    noise: Noise | None = None,
    seed: int = 0,
    method: GrowthMethod | None = None,
    keep_heads: bool | None = None,
    only: Literal["feed_forward"] | None = None,
    fields: dict[str, float] | None = None,
    watch: Watch = unwatched,
) -> "tuple[PreTrainedModel, UpscaleReport]":
    """A wide model that computes, and trains, as the narrow one, and the report of its making.

        model = AutoModelForCausalLM.from_pretrained("narrow")
        wide, report = mupscale.hf.upscale(model, 2, optimizer=optimizer)
        wide.save_pretrained("wide")
        optimizer = report.optimizer

    Args:
        model_or_folder: A model of the transformers library, or a folder with one.
        factor: By how much its widths grow.
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
    growth = ConfigGrowth(factor, keep_heads, only, fields)
    wide = _wide_model(narrow, growth.wide(narrow.config))
    found = _found(narrow, wide, call, watch)
    check = _checked(narrow, wide, found, call or default_call)
    report = grow(narrow, wide, optimizer, noise=noise, seed=seed, method=method, hints=found)
    wide.train(narrow.training)
    return wide, replace(report, exact=check.exact, check=str(check))


def _checked(narrow: "PreTrainedModel", wide: "PreTrainedModel", found: Found, call: Call) -> Agreement:
    """Compares the two models themselves, where memory allows. Raises a UserError if they differ."""

    def compared(model: Any) -> Any:
        output = call(model)
        logits = getattr(output, "logits", None)
        return output if logits is None else logits

    try:
        with torch.no_grad(), state_kept(narrow.modules()), generators_kept():
            compared(narrow)
    except Exception as error:  # only the caller knows which inputs a model takes
        return Agreement(None, reason=f"no input is known ({' '.join(str(error).split())[:200]}). Give call")
    answer = check_agreement(narrow, wide, plan(narrow, wide, hints=found), compared)
    if answer.exact is False:
        raise UserError(f"this {narrow.config.model_type} model is not widened exactly: {answer.reason}")
    return answer


def _found(narrow: "PreTrainedModel", wide: "PreTrainedModel", call: Call | None, watch: Watch) -> Found:
    """How the model grows, found with small ones of its family; where there are none, with the models themselves."""
    try:
        return found_between(narrow, wide, model_class=type(narrow), call=call, watch=watch)
    except CannotShrink:
        if sum(parameter.numel() for parameter in wide.parameters()) > MOST_PARAMETERS:
            raise
        return discover(narrow, wide, call or default_call, watch)


def _refuse_unless_pretrained(model: object) -> None:
    with needs_extra("hf"):
        from transformers import PreTrainedModel
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"wanted a model of the transformers library, or a folder of one; got {type(model).__name__}")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise UserError("the model is quantised: its scales cannot be widened. Load it in floating point")


def _wide_model(narrow: "PreTrainedModel", config: "PretrainedConfig") -> "PreTrainedModel":
    """A fresh wide model: its buffers are what a newly loaded one computes, its weights are not set."""
    from transformers.initialization import no_init_weights

    parameter = next(narrow.parameters())
    config._attn_implementation = narrow.config._attn_implementation
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(parameter.dtype if parameter.is_floating_point() else default)
        with parameter.device, no_init_weights():
            wide = type(narrow)(config)
        wide.tie_weights()  # which is a part of the initialisation
    finally:
        torch.set_default_dtype(default)
    narrow_parameters = dict(narrow.named_parameters())
    for name, target in wide.named_parameters():
        if name in narrow_parameters:
            source = narrow_parameters[name]
            target.data = target.data.to(source.dtype)
            target.requires_grad_(source.requires_grad)
    if getattr(narrow, "generation_config", None) is not None:
        wide.generation_config = copy.deepcopy(narrow.generation_config)
    return wide
