"""How a family of the transformers library grows: found once, on the smallest models that show its structure."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from mupscale.checks.comparison import planned_layouts
from mupscale.checks.recording import float64_copy
from mupscale.discovery.discover import confirm, cuts_between, discover
from mupscale.discovery.found import Found
from mupscale.discovery.passes import PairedCut
from mupscale.errors import UserError, one_line, prefix_errors
from mupscale.hf.config import fields_of, parts, wide_config
from mupscale.hf.config_shrunken import shrunken
from mupscale.hf.forward_pass import Call, choose_experts, default_call, difference, quiet, whole_rows
from mupscale.methods.grow import grow
from mupscale.text_tables import Watch, unwatched
from mupscale.widening.plan import plan
from mupscale.widening.plan_text import Plan

OTHER_SIZE = 3
"""Times the size of the small models: there, what was found is confirmed to hold for other sizes too."""


FINDING = "finding how the model grows"
CHECKING = "checking it on a saved model and on a larger one"
"""What `watch` gets, one after the other."""


class CannotShrink(UserError):
    """A family has no small model, or it does not run."""


RELOADED = 1e-6
"""By how much the outputs of a model may differ after loading; its constants may be in float32."""

_known: dict[tuple[Any, ...], Found] = {}


@dataclass(frozen=True)
class Family:
    """The models of a class, and how they are run: small ones show how all of them grow."""

    model_class: Any = AutoModelForCausalLM
    call: Call | None = None
    """One forward pass; where it does not run a small model, `default_call` does."""
    watch: Watch = unwatched
    """Called with (words, done, total) while a finding is made."""

    def found_for(self, config: PretrainedConfig, wide: PretrainedConfig) -> Found:
        """How a model of `config` grows to one of `wide`, found with small models of the same factors.

        `found_between` has it for models of these configurations. A finding is made once in a process.
        """
        factors = field_factors(config, wide)
        small = shrunken(config)
        sizes = json.dumps([small.to_dict(), factors], sort_keys=True, default=str)
        key = type(small), self.model_class, self.call, sizes
        if key not in _known:
            try:
                _known[key] = self._discovered(small, wide_config(small, 1, fields=factors))
            except UserError as error:
                odd = [path for path, factor in factors.items() if factor.denominator != 1]
                if not odd:
                    raise
                grown = (f"{path} {attrgetter(path)(config)} → {attrgetter(path)(wide)}" for path in odd)
                raise UserError(f"{', '.join(grown)}: found in a small model of the family, {error}") from error
        return _known[key]

    def found_between(self, narrow: Any, wide: Any, config: PretrainedConfig | None = None) -> Found:
        """How a model grows to a wide one; `config` is the wide one's without new layers, if it has any."""
        config = wide.config if config is None else config
        return self.found_for(narrow.config, config).resolved(narrow, wide, lambda: self._cuts(narrow, config))

    def _cuts(self, narrow: Any, config: PretrainedConfig) -> list[PairedCut]:
        """Where two models cut their axes, from models of their sizes that have no memory."""
        before, after = (on_meta(type(narrow), each).double().eval() for each in (narrow.config, config))
        try:
            with torch.device("meta"), whole_rows():
                return _cuts_of(before, after, self.call or default_call)
        except Exception as error:  # many models look at values, which these do not have
            raise UserError(
                f"a {narrow.config.model_type} has axes with sections of unequal lengths, and where they are cut is "
                f"not found without its weights ({one_line(error, 100)}). Load it and use mupscale.discover(narrow, "
                "wide, call)"
            ) from error

    def _discovered(self, small: PretrainedConfig, large: PretrainedConfig) -> Found:
        with on_cpu():
            narrow, wide = self.small_model(small), self.small_model(large)
            call = self.working_call(narrow)
            _refuse_sizes(wide, call)
            found = discover(narrow, wide, call, lambda words, *count: self.watch(f"{FINDING}, {words}", *count))
            self.watch(CHECKING, 0, 2)
            check_reloaded(narrow, wide, plan(narrow, wide, hints=found), call)
            self.watch(CHECKING, 1, 2)
            larger = (wide_config(each, OTHER_SIZE, keep_heads=False) for each in (small, large))
            narrow, wide = map(self.small_model, larger)
            confirm(narrow, wide, call, found.resolved(narrow, wide, partial(_cuts_of, narrow, wide, call)))
            self.watch(CHECKING, 2, 2)
            return found

    def small_model(self, config: PretrainedConfig) -> Any:
        """A small model in float64, because units are read off constants that models keep in their own precision."""
        try:
            with local_torch_dtype(torch.float64):
                if hasattr(self.model_class, "from_config"):
                    return self.model_class.from_config(config, dtype=torch.float64, trust_remote_code=False)
                return self.model_class(config).double()
        except Exception as error:  # whatever it is, the small sizes have caused it
            reason = one_line(error, 200)
            raise CannotShrink(f"no small {config.model_type} can be built to find how it grows: {reason}") from error

    def working_call(self, model: Any) -> Call:
        """The given forward pass where it runs the small model, whose vocabulary is smaller; else the default one."""
        reasons = []
        for call in (self.call, default_call) if self.call is not None else (default_call,):
            try:
                with torch.no_grad():
                    call(float64_copy(model).eval())
            except Exception as error:  # only the caller knows which inputs a model takes
                reasons.append(f"{type(error).__name__}: {one_line(error, 200)}")
            else:
                return call
        raise CannotShrink(
            f"a small {model.config.model_type} cannot run ({reasons[0]}), so how it grows is not found. In Python, "
            "give mupscale.hf.upscale_folder a call that runs it, small or not"
        )


def _cuts_of(narrow: Any, wide: Any, call: Call) -> list[PairedCut]:
    """Where two models cut their axes; experts run without a look at which tokens they get."""
    for model in (narrow, wide):
        choose_experts(model, "batched_mm")
    return cuts_between(narrow, wide, call)


def field_factors(config: PretrainedConfig, wide: PretrainedConfig) -> dict[str, Fraction]:
    """The factor of each field, by its path, as `wide_config` takes it."""
    answer: dict[str, Fraction] = {}
    targets = dict(parts(wide))
    for path, part in parts(config):
        if path not in targets or type(targets[path]) is not type(part):
            raise UserError(f"the configurations differ in more than sizes: {path.rstrip('.') or type(part).__name__}")
        after = dict(fields_of(targets[path]))
        for name, value in fields_of(part):
            ratios = {Fraction(b, a) for a, b in _pairs(value, after.get(name)) if a != b}
            if len(ratios) > 1:
                raise UserError(f"entries of {path}{name} grow by different factors: {value} → {after.get(name)}")
            if ratios:
                answer[path + name] = ratios.pop()
    return answer


def _pairs(before: Any, after: Any) -> Iterator[tuple[int, int]]:
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        for a, b in zip(before, after, strict=False):
            yield from _pairs(a, b)
    elif isinstance(before, int) and isinstance(after, int) and before > 0:
        yield before, after


@contextmanager
def on_cpu() -> Iterator[None]:
    """Small models are built and run as if outside of the caller's device, autocast, or step without gradients."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def check_reloaded(narrow: Any, wide: Any, planned: Plan, call: Call) -> None:
    """Raises a UserError if the grown model, once it is saved and loaded again, computes something else."""
    before: Any = float64_copy(narrow).eval()
    after: Any = float64_copy(wide).eval()
    grow(before, after, plan=planned)
    with tempfile.TemporaryDirectory() as folder, quiet():
        after.save_pretrained(folder)
        loaded = type(wide).from_pretrained(folder, dtype=torch.float64, local_files_only=True)
    found_again = difference(
        call(before), call(float64_copy(loaded).eval()), planned_layouts(planned.parameters.values())
    )
    if isinstance(found_again, float) and not found_again <= RELOADED:
        raise UserError(
            f"a grown {narrow.config.model_type} computes something else once it is saved and loaded again: a part of "
            "it is computed from its sizes when it is loaded. It cannot be grown"
        )


def _refuse_sizes(wide: Any, call: Call) -> None:
    try:
        with torch.no_grad():
            call(float64_copy(wide).eval())
        getattr(wide.config, "validate", lambda: None)()  # which saving the model would do
    except Exception as error:  # whatever it is: the narrow model could do the same
        raise UserError(
            f"a {wide.config.model_type} whose fields grow by these factors cannot be used ({one_line(error, 200)}, in "
            "a small model). Choose others, such as the same for all numbers of heads and for the hidden size"
        ) from error


def on_meta(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model without memory for its weights. UserError where the configuration makes none."""
    # whatever it is, the configuration's values have caused it
    with prefix_errors(f"the configuration does not make a {model_class.__name__}", Exception):
        with torch.device("meta"), no_init_weights():
            model = model_class(config)
        model.tie_weights()  # which is a part of the initialisation
        return model
