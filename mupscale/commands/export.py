"""export: write the model of an HFCausalLM checkpoint as a folder for AutoModelForCausalLM.from_pretrained.

For example: export runs/llama/version_0/checkpoints/last.ckpt --out wide. From a run with EMA it writes the average.
"""

from pathlib import Path
from typing import Any

from mupscale.commands.process import ArgumentParser, refuse_new_folder
from mupscale.commands.saved_model import load_weights, module_of
from mupscale.errors import UserError
from mupscale.models.checkpoint import CHECKPOINT_KEY, load_checkpoint, refuse_malformed
from mupscale.models.hf import CausalLMNet, HFCausalLM


def main(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="the checkpoint of an HFCausalLM, of any width")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    options = parser.parse_args(arguments)
    refuse_new_folder("--out", options.out)
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
            f"the checkpoint is of {name}, not of a model of the transformers library; only those of HFCausalLM can be "
            "exported"
        )
    module = module_of(checkpoint)
    assert isinstance(module, HFCausalLM)
    net = module.network(module.width, meta=True)
    assert isinstance(net, CausalLMNet)
    load_weights(module, net, checkpoint.get("state_dict", {}), assign=True)
    return net
