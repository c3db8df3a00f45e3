"""Mixtures of experts: more experts out of a mixture, and a mixture out of a dense model, with the same function.

Copies of experts and of their router's rows are axes that are produced, as in Table 1; what a configuration has to
multiply or divide is in the tables here. Several pairs of families load without a warning and compute something else,
so small models of both, saved and loaded again, decide in float64.
"""

import copy
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mupscale.checks.recording import float64_copy
from mupscale.checks.weights import perturb_
from mupscale.errors import UserError, one_line, refuse_unless_whole
from mupscale.hf.config import BY_LAYER, fields_of, is_count, parts
from mupscale.hf.config_shrunken import shrunken
from mupscale.hf.family import RELOADED, Family, on_cpu, on_meta
from mupscale.hf.forward_pass import default_call, difference, quiet
from mupscale.hf.in_memory import wide_model
from mupscale.hf.inputs import field
from mupscale.hf.recipes import CopyNoise, EntryRun, Recipe, continued, copy_of, named_tensors, write
from mupscale.widening.table import NOTHING, Scale

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
WIDTHS = ("moe_intermediate_size", "intermediate_size")
GROUPS = ("n_group", "topk_group")
LOSS = "router_aux_loss_coef"
SCALING = "routed_scaling_factor"

ROUTER_STD = 1e-4
"""The std of a new router: bit-exact in bfloat16, where 0.02 is not. With 0 the same k experts would get all tokens."""

MIXTURES = {
    "llama": "mixtral", "mistral": "mixtral", "ministral": "mixtral", "qwen2": "qwen2_moe", "seed_oss": "qwen2_moe",
    "qwen3": "qwen3_moe", "olmo2": "flex_olmo", "granite": "granitemoe", "cohere2": "cohere2_moe",
    "ernie4_5": "ernie4_5_moe", "lfm2": "lfm2_moe", "qwen3_5_text": "qwen3_5_moe_text",
    "hunyuan_v1_dense": "hunyuan_v1_moe",
}  # fmt: skip
"""The mixture that a dense family becomes, unless another one is named."""

_REFUSED = {
    "phimoe": "its router always takes two experts, by a function of the number of experts",
    "jetmoe": "its attention has experts too",
}

_CONSTANTS: dict[str, Any] = {
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "router_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "num_shared_experts": 0, "shared_intermediate_size": 0,
    "first_k_dense_replace": 0, "num_dense_layers": 0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_layer_start_index": 0, "moe_layer_interval": 1, "moe_layer_freq": 1, "expert_selection_fn": "softmax",
}  # fmt: skip
"""Fields of a mixture of copies of one network, where its configuration has them."""


def number_of_experts(config: PretrainedConfig) -> int:
    """How many routed experts a layer has; 0 in a dense model."""
    found = field(config, *COUNTS)
    return found if isinstance(found, int) and found > 1 else 0


@dataclass(frozen=True)
class Mixture:
    """A model with other experts, and what continues its training."""

    model: PreTrainedModel
    optimizer: Optimizer | None
    new_parameters: tuple[str, ...]
    """Parameters that are no copies: routers, and experts that add nothing yet."""
    check: str


def add_experts(
    model: PreTrainedModel,
    experts: int,
    *,
    top_k: int | None = None,
    split: int = 1,
    to: str | None = None,
    router_std: float = ROUTER_STD,
    noise: float = 0.0,
    optimizer: Optimizer | None = None,
    seed: int = 0,
) -> Mixture:
    """Makes a mixture of so many experts that computes what the model computes.

    The experts of a mixture are copied, or split, and so many more are chosen for a token that the sum stays; this
    trains exactly as before. A dense model becomes a mixture of copies of its feed-forward networks with a new router:
    its outputs stay, and its experts part from the first step on.

        mixture = mupscale.hf.add_experts(model, 8, top_k=2, optimizer=optimizer)
        mixture.model.save_pretrained("mixture")
        optimizer = mixture.optimizer

    Args:
        model: A model of the transformers library.
        experts: How many experts each layer gets.
        top_k: How many are chosen for a token: for a mixture as many times more as there are experts, which is the
            default; for a dense model 2 by default.
        split: Into how many parts, each of a fraction of its width, an expert is split, in place of copies.
        to: The family (`model_type`) that a dense model becomes, where it is not that of the table.
        router_std: The standard deviation of a new router's weights.
        noise: What makes copies of an expert part, without which they stay equal: noise on their last projection, in
            units of its standard deviation, centred over the copies, so that the function stays.
        optimizer: The model's; `Mixture.optimizer` continues it.
        seed: The seed of a new router and of the noise.
    """
    growth, check = find_growth(model.config, experts, top_k, split, to, router_std, noise, seed)
    wide = wide_model(model, growth.config(model.config), growth.model_class(type(model)))
    recipes = growth.recipes(model, wide)
    write(model, wide, recipes)
    made = None if optimizer is None else continued(model, wide, recipes, optimizer)
    new = tuple(name for name, _ in wide.named_parameters() if recipes[name].is_new)
    return Mixture(wide, made, new, check)


def find_growth(
    config: PretrainedConfig,
    experts: int,
    top_k: int | None = None,
    split: int = 1,
    to: str | None = None,
    router_std: float = ROUTER_STD,
    noise: float = 0.0,
    seed: int = 0,
) -> "tuple[MixtureGrowth, str]":
    """How a model of `config` gets so many experts, and how that was checked on small models; else a UserError."""
    refuse_unless_whole("experts", experts, least=2)
    refuse_unless_whole("split", split, least=1)
    if config.model_type in _REFUSED:
        raise UserError(f"experts: {config.model_type} cannot get more: {_REFUSED[config.model_type]}")
    is_mixture = number_of_experts(config) > 0
    if split != 1 and not is_mixture:
        raise UserError("split: this model has no experts to split. Leave it out: experts are copies of its network")
    if noise and (split != 1 or not is_mixture):
        raise UserError("noise: only copies of experts need it; parts of experts, and copies of a network, part alone")
    if is_mixture and to is not None:
        raise UserError(f"to: this {config.model_type} is a mixture already, and keeps its family")
    candidates: list[MixtureGrowth]
    if is_mixture:
        times = _times(config, experts, top_k, split)
        scalings = (False, True) if isinstance(field(config, SCALING), int | float) else (False,)
        candidates = [_Copies(times, *each, split > 1, noise, seed) for each in product(scalings, (False, True))]
    else:
        family = _mixture_of(config, to)
        candidates = [_FromDense(experts, 2 if top_k is None else top_k, family, router_std, seed)]
    reasons = []
    for growth in candidates:
        try:
            with on_cpu():
                largest = growth.check(config)
        except UserError as error:
            reasons.append(error)
        else:
            words = f"logits of small models of both families, saved and loaded, differ by {largest:.0e} in float64"
            return growth, words
    raise reasons[0]


def _mixture_of(config: PretrainedConfig, to: str | None) -> str:
    family = MIXTURES.get(config.model_type) if to is None else to
    if family is None:
        raise UserError(
            f"experts: no mixture is known that computes as a {config.model_type}. Name one to try: --to FAMILY"
        )
    known = family in CONFIG_MAPPING and family not in _REFUSED
    if not known or not any(hasattr(CONFIG_MAPPING[family](), name) for name in COUNTS):
        raise UserError(f"to: {family!r} is no family of mixtures that experts can be copied to; such as mixtral")
    return family


def _times(config: PretrainedConfig, experts: int, top_k: int | None, split: int) -> int:
    """How many experts come from one."""
    old, chosen = number_of_experts(config), field(config, *CHOSEN)
    if experts % old or experts == old:
        raise UserError(f"experts: {experts} is no multiple of the {old} experts that there are")
    times = experts // old
    if split not in (1, times):
        raise UserError(f"split: {old} experts, each split into {split}, are {old * split}; got experts {experts}")
    if not is_count(chosen):
        raise UserError(f"experts: the configuration of {config.model_type} does not say how many a token gets")
    if top_k not in (None, times * chosen):
        raise UserError(
            f"top_k: of {times} times as many experts each token must get {times * chosen}, {times} times as many, or "
            f"its copies crowd out other experts; got {top_k}"
        )
    return times


class MixtureGrowth:
    """One way to get to another mixture."""

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        raise NotImplementedError

    def model_class(self, narrow: type[PreTrainedModel]) -> type[PreTrainedModel]:
        return narrow

    def recipes(self, narrow: Any, wide: Any) -> dict[str, Recipe]:
        """How each parameter and saved buffer is made, on any device."""
        raise NotImplementedError

    def check(self, config: PretrainedConfig) -> float:
        """Compares small models, saved and loaded again, in float64. Raises a UserError if they differ."""
        try:
            return self._largest_difference(config)
        except UserError:
            raise
        except Exception as error:  # whatever a model does with values of another family
            reason = one_line(error, 200)
            raise UserError(f"a small {config.model_type} with these experts cannot be run: {reason}") from error

    def _largest_difference(self, config: PretrainedConfig) -> float:
        small = shrunken(config)
        family = Family()
        narrow: Any = float64_copy(family.small_model(small)).eval()
        perturb_(narrow)
        target = self.config(small)
        # what does not fit is refused before it takes memory: fields of other names leave the defaults of a release
        self.recipes(narrow, on_meta(self.model_class(type(narrow)), target))
        wide: Any = float64_copy(family.small_model(target)).eval()
        _spread_chances_(narrow, wide)
        write(narrow, wide, self.recipes(narrow, wide))
        with tempfile.TemporaryDirectory() as folder, quiet():
            wide.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True)
        with torch.no_grad():
            found = difference(default_call(narrow), default_call(float64_copy(loaded).eval()))
        if isinstance(found, str) or not found <= RELOADED:
            by = found if isinstance(found, str) else f"logits differ by {100 * found:.2g} %"
            raise UserError(
                f"a {config.model_type} as a {target.model_type} with these experts computes something "
                f"else ({by} in a small model, after loading)"
            )
        return found


@torch.no_grad()
def _spread_chances_(narrow: PreTrainedModel, wide: PreTrainedModel) -> None:
    """Gives routers and their biases a say: where one decides alone, a wrong rule of the other does not show."""
    generator, after = torch.Generator().manual_seed(1), named_tensors(wide)
    for name, tensor in named_tensors(narrow).items():
        if tensor.ndim < 3 and name in after and after[name].shape != tensor.shape:
            std = 2 * tensor.shape[-1] ** -0.5 if min(tensor.shape) > 1 else 0.1
            tensor.copy_(std * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class _Copies(MixtureGrowth):
    """Every expert, and its row of the router, several times."""

    times: int
    scaling: bool
    """Whether the configuration's factor of the sum of experts is divided, because chances are not normalised."""
    bias: bool
    """Whether the bias is divided that is added to chances, which are divided."""
    split: bool
    """Whether experts are parts of the old ones, in place of copies."""
    noise: float
    seed: int

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        wide = copy.deepcopy(config)
        for _, part in parts(wide):
            if not number_of_experts(part):
                continue
            values = dict(fields_of(part))
            for name in (*COUNTS, *CHOSEN, *(GROUPS if _groups(part) > 1 else ())):
                if is_count(values.get(name)):
                    setattr(part, name, values[name] * self.times)
            if isinstance(values.get(LOSS), float):  # transformers sums shares of k experts
                setattr(part, LOSS, values[LOSS] / self.times)
            if self.scaling:
                setattr(part, SCALING, values[SCALING] / self.times)
            width = next(name for name in WIDTHS if is_count(values.get(name)))
            if self.split:
                if values[width] % self.times:
                    raise UserError(f"split: {width} = {values[width]} cannot be cut into {self.times}")
                setattr(part, width, values[width] // self.times)
        return wide

    def recipes(self, narrow: Any, wide: Any) -> dict[str, Recipe]:
        before = named_tensors(narrow)
        return {name: self._recipe(name, before[name], new, narrow.config) for name, new in named_tensors(wide).items()}

    def _recipe(self, name: str, old: Tensor, new: Tensor, config: PretrainedConfig) -> Recipe:
        if old.shape == new.shape:
            return copy_of(name, old)
        if self.split and ".experts." in name:
            return self._parts(name, old)
        return self._copies(name, old, new, config)

    def _copies(self, name: str, old: Tensor, new: Tensor, config: PretrainedConfig) -> Recipe:
        m, experts = self.times, number_of_experts(config)
        grown = [axis for axis, (n, w) in enumerate(zip(old.shape, new.shape, strict=True)) if n != w]
        axis = grown[0]
        if len(grown) > 1 or new.shape[axis] != m * old.shape[axis] or old.shape[axis] % experts:
            raise UserError(f"experts: how {name!r}, {tuple(old.shape)}, grows with their number is not known")
        length = math.prod(old.shape[axis:]) // experts
        # groups of experts are copied whole, or the best group would hold copies of the best experts alone
        tiles = [divmod(number, experts) for number in range(m * experts)]
        order = tiles if _groups(config) > 1 else [divmod(number, m)[::-1] for number in range(m * experts)]
        is_noisy = self.noise != 0 and name.endswith("experts.down_proj")
        runs = []
        for outer in range(math.prod(old.shape[:axis])):
            for number, expert in order:
                noise = CopyNoise(self.noise, f"{self.seed} {name} {expert}", m, number) if is_noisy else None
                factor = 1 / m if self.bias and "correction_bias" in name else 1.0
                start = (outer * experts + expert) * length
                runs.append(EntryRun(name, length, start, factor=factor, noise=noise))
        return Recipe(name, tuple(runs), Scale(1, 1 / m, m))

    def _parts(self, name: str, old: Tensor) -> Recipe:
        if old.ndim != 3 or not name.endswith(("up_proj", "down_proj")):
            raise UserError(f"split: how {name!r}, {tuple(old.shape)}, is cut with its expert is not known")
        m, (experts, rows, columns) = self.times, old.shape
        runs: list[EntryRun] = []
        for expert, part in product(range(experts), range(m)):
            start = expert * rows * columns
            if name.endswith("down_proj"):  # the parts of an expert have a share of its weight each
                length = columns // m
                runs.append(EntryRun(name, length, start + part * length, rows, columns, factor=m))
            else:
                halves = 2 if name.endswith("gate_up_proj") else 1
                length = rows // halves // m * columns
                starts = [start + (half * m + part) * length for half in range(halves)]
                runs += [EntryRun(name, length, each) for each in starts]
        return Recipe(name, tuple(runs), Scale(m, 1 / m, 1) if name.endswith("down_proj") else NOTHING)


def _groups(config: PretrainedConfig) -> int:
    found = field(config, "n_group")
    return found if is_count(found) else 1


_NETWORK = re.compile(r"(.*layers\.\d+\.)(mlp|feed_forward)\.(gate_proj|w1|up_proj|w3|down_proj|w2)\.weight")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


@dataclass(frozen=True)
class _FromDense(MixtureGrowth):
    """A mixture of copies of each feed-forward network, with a new router."""

    experts: int
    top_k: int
    family: str
    router_std: float
    seed: int

    def config(self, config: PretrainedConfig) -> PretrainedConfig:
        if not 1 <= self.top_k <= self.experts:
            raise UserError(f"top_k: got {self.top_k} of {self.experts} experts")
        target = CONFIG_MAPPING[self.family]()
        kept = ("model_type", "architectures", "transformers_version", "attribute_map", "id2label", "label2id")
        for name, value in vars(config).items():
            if name not in kept and not name.startswith("_") and hasattr(target, name):
                setattr(target, name, copy.deepcopy(value))
        layers, width = field(config, "num_hidden_layers"), field(config, "intermediate_size")
        fields = dict.fromkeys(COUNTS, self.experts) | dict.fromkeys(CHOSEN, self.top_k) | _CONSTANTS
        fields |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
        fields |= {"moe_layer_end_index": layers - 1, "mlp_layer_types": ["sparse"] * layers}
        if config.model_type == "llama":
            fields |= {"qkv_bias": False}
            if "granite" in self.family:
                ones = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
                fields |= {"attention_multiplier": config.head_dim**-0.5, **ones}
        for name, value in fields.items():
            if hasattr(target, name):
                setattr(target, name, copy.deepcopy(value))
        for name in BY_LAYER:
            kinds = getattr(target, name, None)
            if isinstance(kinds, list) and len(kinds) != layers:
                setattr(target, name, (kinds * layers)[:layers])
        target.architectures = None
        return target

    def model_class(self, narrow: type[PreTrainedModel]) -> type[PreTrainedModel]:
        if not narrow.__name__.endswith("ForCausalLM"):
            raise UserError(f"experts: a {narrow.__name__} cannot become a mixture; its causal language model can")
        found: Any = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[self.family]]
        return found

    def recipes(self, narrow: Any, wide: Any) -> dict[str, Recipe]:
        sources = {**dict(narrow.named_parameters(remove_duplicate=False)), **dict(narrow.named_buffers())}
        generator = torch.Generator().manual_seed(self.seed)
        recipes = {name: self._recipe(name, new, sources, generator) for name, new in named_tensors(wide).items()}
        used = {id(sources[run.source]) for recipe in recipes.values() for run in recipe.runs if run.source is not None}
        left = [name for name, parameter in narrow.named_parameters() if id(parameter) not in used]
        if left:
            raise UserError(f"a {wide.config.model_type} has no place for {left[0]!r} of a {narrow.config.model_type}")
        return recipes

    def _recipe(self, name: str, new: Tensor, sources: dict[str, Tensor], generator: torch.Generator) -> Recipe:
        if name in sources and sources[name].shape == new.shape:
            return copy_of(name, new)
        network = dict(_network(name, sources))
        if len(network) < 3:
            raise UserError(f"{name!r} has no source: the layer has no feed-forward network with gate, up and down")
        gate, up, down = (EntryRun(network[kinds], sources[network[kinds]].numel()) for kinds in (_GATE, _UP, _DOWN))
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            runs = (down,) if name.endswith("down_proj") else (gate, up)
            # each expert sees k/E of the tokens, whose gradients are mostly noise
            scale, squares = Scale(1, 1 / self.experts, self.experts), 1 / (self.experts * self.top_k)
            return Recipe(runs[0].source, runs * self.experts, scale, squares)
        if "shared" in name and name.endswith(("gate_proj.weight", "up_proj.weight")):
            run = gate if "gate_proj" in name else up
        elif re.search(r"(gate|router)", name) and new.ndim == 2:
            drawn = self.router_std * torch.randn(new.shape, generator=generator)
            run = EntryRun(None, new.numel(), values=drawn.reshape(-1))
        elif ("shared" in name and name.endswith("down_proj.weight")) or (new.ndim == 1 and "bias" in name):
            run = EntryRun(None, 1, count=new.numel(), values=torch.zeros(1))
        else:
            raise UserError(f"{name!r}, {tuple(new.shape)}, has no source in the dense model")
        return Recipe(gate.source, (run,), is_new=True)


def _network(name: str, sources: dict[str, Tensor]) -> Iterator[tuple[tuple[str, str], str]]:
    """The gate, up and down projections of the layer of a parameter."""
    layer = re.match(r".*layers\.\d+\.", name)
    for source in sources if layer else ():
        found = _NETWORK.fullmatch(source)
        if found and layer and found[1] == layer[0]:
            yield next(kinds for kinds in (_GATE, _UP, _DOWN) if found[3] in kinds), source
