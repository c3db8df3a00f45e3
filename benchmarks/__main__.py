"""`python -m benchmarks NAME [--quick] [options]`: measures, prints a table, writes JSON."""

import sys
from importlib import import_module

from benchmarks.harness import run

NAMES = {
    "gpt2": "GPT-2 inside Trainer.fit, beside a bare loop and the authors' code",
    "mlp": "the MLP on Covertype, beside a bare loop",
    "resnet": "ResNet-18 on CIFAR-100, likewise",
    "upscale": "`upscale` at up to 2.3 B parameters",
    "pause": "the pause of a fit that grows, and its speed before and after",
    "swap_memory": "memory of each rank while a sharded run grows",
    "data": "the data modules, beside a plain DataLoader",
    "fp8": "GPT-2 in float8, beside bfloat16, torchao and the authors' code",
    "stack": "many trials as one program, beside one after another",
}


def main(arguments: list[str]) -> None:
    usage = "usage: python -m benchmarks NAME [--quick] [options]\n\n" + "\n".join(
        f"  {name:<9} {text}" for name, text in NAMES.items()
    )
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
    elif arguments[0] not in NAMES:
        sys.exit(f"there is no benchmark {arguments[0]!r}\n\n{usage}")
    else:
        name, *others = arguments
        module = import_module("benchmarks.cases" if name in ("gpt2", "fp8", "mlp", "resnet") else f"benchmarks.{name}")
        if hasattr(module, "main"):
            module.main(others)
        else:
            run(name, module, others)


if __name__ == "__main__":
    main(sys.argv[1:])
