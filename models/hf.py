"""Any causal language model of the transformers library as a growable module."""

import math
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mupscale.errors import UserError, needs_extra, prefix_errors
from mupscale.models._lightning import is_trial_run, run_folder
from mupscale.models.base import refuse_bad_width
from mupscale.models.checkpoint import SAVED, load_weights
from mupscale.models.tasks import LanguageModel
from mupscale.sharding import gathered
from mupscale.widening.growth import Role

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mupscale.discovery.found import Found


class TokenLoss(nn.Module):
    """The mean cross-entropy of logits. A module, so that it can be compiled."""

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(at_least_float32(logits_BTV).flatten(0, 1), targets_BT.flatten())


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class CausalLMNet(nn.Module):
    """A causal language model of transformers that declares how it grows to another width of its family."""

    def __init__(self, config: "PretrainedConfig") -> None:
        super().__init__()
        from mupscale.hf.causal_lm import build

        self.model = build(config)
        self.loss = TokenLoss()

    @property
    def config(self) -> "PretrainedConfig":
        return self.model.config

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits; given targets, their mean loss, with the loss of the routers where the configuration asks for it."""
        from mupscale.hf.forward_pass import whole_rows

        # inside of a compilation transformers does not look at values either way
        with nullcontext() if torch.compiler.is_compiling() else whole_rows():
            outputs: Any = self.model(input_ids=tokens_BT, use_cache=False)
        if targets_BT is None:
            return at_least_float32(outputs.logits)
        loss = self.loss(outputs.logits, targets_BT)
        of_routers = getattr(outputs, "aux_loss", None)
        return loss if of_routers is None else loss + self.config.router_aux_loss_coef * of_routers

    def layers(self) -> list[nn.Module]:
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=lambda entries: sum(p.numel() for p in entries.parameters()), default=[]))

    def width_roles(self, other: "CausalLMNet") -> dict[str, Role]:
        return {} if self._is_as_wide_as(other) else self._named(self._found(other).roles)

    def width_rescale(self, other: "CausalLMNet") -> dict[str, float | tuple[float, float]]:
        """The factors of weights; a growth by a fraction takes the power of the width that doubling it shows."""
        if self._is_as_wide_as(other):
            return {}
        found, ratio = self._found(other), self._ratio(other)
        if _is_whole(ratio):
            return self._named(found.rescale)
        answer: dict[str, float | tuple[float, float]] = {}
        for name, unit in found.rescale.items():
            scale, *offset = unit if isinstance(unit, tuple) else (unit,)
            here = float(ratio) ** math.log2(scale)
            answer[name] = (here, offset[0]) if offset else here
        return self._named(answer)

    def width_blocks(self, other: "CausalLMNet") -> dict[str, Any]:
        if self._is_as_wide_as(other):
            return {}
        ratio = self._ratio(other)
        if not _is_whole(ratio):
            raise UserError(
                f"the hidden size grows by {ratio}, from {self.width} to {other.width}; a model of transformers grows "
                "by a whole factor"
            )
        return self._named(self._found(other).blocks)

    @property
    def width(self) -> int:
        from mupscale.hf.config import hidden_size_of

        return hidden_size_of(self.config)

    def _ratio(self, other: "CausalLMNet") -> Fraction:
        return Fraction(other.width, self.width)

    @property
    def depth(self) -> int | None:
        from mupscale.hf.config import layers_of

        found = layers_of(self.config)
        return None if found is None else found[1]

    def _is_as_wide_as(self, other: "CausalLMNet") -> bool:
        return self.depth != other.depth and self.width == other.width

    def _found(self, other: "CausalLMNet") -> "Found":
        """How this model grows to the other one or, if that is not by a whole factor, to twice its width."""
        from mupscale.hf.config import config_at
        from mupscale.hf.family import Family

        if not _is_whole(self._ratio(other)):
            with torch.device("meta"):
                other = CausalLMNet(config_at(self.config, 2 * self.width))
        if self.depth == other.depth:
            return Family().found_between(self.model, other.model)
        return Family().found_between(self.model, other.model, config_at(self.config, other.width))

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in values.items()}


def _is_whole(ratio: Fraction) -> bool:
    return ratio.denominator == 1 and ratio > 1


class HFCausalLM(LanguageModel):
    """A causal language model of the transformers library, trained on batches of token rows.

    Its width is the hidden size. Feed-forward sizes and numbers of heads grow in proportion; head size and vocabulary
    stay fixed. How the parameters grow is found by comparing small models of the same family. It becomes deeper by
    `UpscaleCallback(layers=…)`; which parameters make new layers add nothing is found by running them.

    By default it trains as in transformers, without muP: the optimizer's hyperparameters are those of the initial
    width, and each growth rescales them. With `base_width`, they are those of the base width, and learning rates and
    initialisation follow muP.

    At the end of a fit, the model is saved in the folder `hf` of the run, for `AutoModelForCausalLM.from_pretrained`.
    `python -m mupscale export` does the same for any checkpoint. Checkpoints contain the configuration, and need no
    other file.
    """

    init = "constant"

    def __init__(
        self,
        folder: str | None = None,
        config: dict[str, Any] | str | None = None,
        width: int | None = None,
        base_width: int | None = None,
        layers: int | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            folder: A released checkpoint (config.json and safetensors) with the initial weights. Ignored when a run is
                resumed. No code in the folder is executed.
            config: Instead of a folder, for random weights: a mapping with `model_type` and fields of its transformers
                configuration, or a JSON file such as config.json.
            width: The initial hidden size; by default that of the configuration.
            base_width: The width for which the optimizer's hyperparameters are given; by default the
                initial width.
            layers: The initial number of layers; by default that of the configuration.
        """
        with needs_extra("hf"):
            import transformers  # noqa: F401

            from mupscale.hf.causal_lm import config_in, config_of
            from mupscale.hf.config import hidden_size_of, layers_of

        if folder is None and config is None:
            raise UserError(
                "model.folder or model.config: give a folder with config.json and safetensors, or a configuration such "
                "as {model_type: llama, hidden_size: 256}"
            )
        if folder is not None and config is not None:
            raise UserError(f"model.folder = {folder} has its own configuration; leave model.config out")
        key = "folder" if config is None else "config"
        with prefix_errors(f"model.{key}"):
            if isinstance(config, dict):
                made = config_of(config)
            else:
                made = config_in(Path(str(folder if config is None else config)).expanduser())
        # the arguments that a checkpoint keeps: all that it needs to be built again
        config = made.to_dict()
        own_width = hidden_size_of(made)
        width = own_width if width is None else width
        refuse_bad_width("model.width", width)
        base_width = width if base_width is None else base_width
        found = layers_of(made)
        own_layers = None if found is None else found[1]
        layers = own_layers if layers is None else layers
        if layers != own_layers and own_layers is None:
            raise UserError(
                f"model.layers = {layers}: a {made.model_type} has no single number of layers. Leave it out"
            )
        for name, value, own in (("width", width, own_width), ("layers", layers, own_layers)):
            if folder is not None and value != own:
                raise UserError(
                    f"model.{name} = {value}: it is {own} in {folder}. Leave it out, and grow by UpscaleCallback, "
                    "which may be at step 0"
                )
        super().__init__(width, base_width, layers=layers, **kwargs)

    def build(self, width: int, layers: int | None = None) -> nn.Module:
        from mupscale.hf.causal_lm import config_of
        from mupscale.hf.config import config_at, config_with_layers

        try:
            config = config_at(config_of(self.hparams["config"]), width)
            return CausalLMNet(config if layers is None else config_with_layers(config, layers))
        except UserError as error:
            problem = str(error).partition("; choose")[0]  # it goes on with arguments of wide_config
            raise UserError(f"model.width = {width}: {problem}; choose another width") from error

    def compile_network(self, net: nn.Module) -> None:
        # by parts: masks are made outside of them, so attention without a mask stays without one, and layers share a
        # compilation
        assert isinstance(net, CausalLMNet)
        for part in (*net.layers(), net.loss):
            part.compile()

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        assert isinstance(net, CausalLMNet)
        return net.layers()

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch[:, :-1], batch[:, 1:])

    def mappable_loss(self, batch: Tensor) -> Tensor:
        return self.loss(batch)

    # --- files

    def on_fit_start(self) -> None:
        if self.hparams["folder"] is not None and self.trainer.ckpt_path is None and self.hparams["init_from"] is None:
            from mupscale.hf.causal_lm import weights_in

            assert self.net is not None
            weights = weights_in(Path(self.hparams["folder"]).expanduser())
            load_weights(self.net, {"state_dict": {f"net.model.{name}": value for name, value in weights.items()}})
            self._renew_averages()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"]["folder"] = None  # it has weights of its own

    def on_train_end(self) -> None:
        folder = run_folder(self.trainer)
        if folder is not None and not is_trial_run(self.trainer) and self.trainer.checkpoint_callback is not None:
            self.save_pretrained(folder / SAVED)

    def save_pretrained(self, folder: Path | str) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` reads. Every rank must call it."""
        from mupscale.hf.causal_lm import save

        net = self.net
        assert isinstance(net, CausalLMNet), "call configure_model() first"
        weights = {name: gathered(value.detach()) for name, value in net.model.state_dict().items()}
        if self.global_rank == 0:
            save(net.model, Path(folder), weights)
