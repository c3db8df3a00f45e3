"""export: write the model of an HFCausalLM checkpoint as a folder for AutoModelForCausalLM.from_pretrained.

For example: export runs/llama/version_0/checkpoints/last.ckpt --out wide. From a run with EMA it writes the average.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mupscale.commands.arguments import ArgumentParser
from mupscale.commands.outputs import refuse_output_folder
from mupscale.errors import UserError
from mupscale.models.checkpoint import CHECKPOINT_KEY, load_checkpoint, refuse_malformed
from mupscale.models.hf import CausalLMNet, HFCausalLM


def main(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="the checkpoint of an HFCausalLM, of any width")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise UserError(f"--out {options.out} exists; name a folder that does not")
    refuse_output_folder("--out", options.out)
    net = saved_network(load_checkpoint(options.checkpoint))

    from mupscale.hf.causal_lm import save

    save(net.model, options.out)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    print(f"wrote {options.out}: {net.config.model_type}, hidden size {net.width}, {parameters:,} parameters")


def saved_network(checkpoint: dict[str, Any]) -> CausalLMNet:
    """The network of a checkpoint, with its weights, on the CPU. Raises a UserError if it is not an HFCausalLM."""
    refuse_malformed(checkpoint)
    name = str(checkpoint[CHECKPOINT_KEY].get("class_path")).rpartition(".")[2]
    if name != HFCausalLM.__name__:
        raise UserError(
            f"the checkpoint is of {name}, not of a model of the transformers library; only those of "
            "HFCausalLM can be exported"
        )
    settings = {key: value for key, value in checkpoint["hyper_parameters"].items() if not str(key).startswith("_")}
    weights = {key.removeprefix("net."): value for key, value in checkpoint.get("state_dict", {}).items()}
    try:
        module = HFCausalLM(**settings)
    except TypeError as error:
        raise UserError(f"the checkpoint is damaged: its hyper_parameters make no HFCausalLM ({error})") from error
    try:
        with torch.device("meta"):
            net: nn.Module = module.build(module.hparams["width"])
        net.load_state_dict({key: weights[key] for key in net.state_dict()}, assign=True)
    except KeyError as error:
        raise UserError(f"the checkpoint is damaged: it has no weight {error}; use another checkpoint") from error
    except RuntimeError as error:  # torch's, for weights of other shapes
        message = " ".join(str(error).split())
        raise UserError(f"the checkpoint's weights are not those of its configuration: {message}") from error
    assert isinstance(net, CausalLMNet)
    return net
