"""What is frozen, or evaluates, in the narrow model does so in the wide one: `requires_grad` and `training`."""

from torch import nn


def carry_frozen_(narrow: nn.Module, wide: nn.Module) -> list[str]:
    """Freezes in the wide model what is frozen in the narrow one, and nothing else.

    Returns a note for each parameter that was frozen in the wide model alone.
    """
    notes = []
    targets = dict(wide.named_parameters())
    for name, source in narrow.named_parameters():
        target = targets.get(name)
        if target is None or target.requires_grad == source.requires_grad:
            continue
        if source.requires_grad:
            if not (target.is_floating_point() or target.is_complex()):
                continue
            notes.append(
                f"{name}: frozen in the wide model, but not in the narrow one, which decides: it will be trained. "
                "To freeze it, call requires_grad_(False) after the upscale"
            )
        else:
            target.grad = None  # an optimizer would still apply it
        target.requires_grad_(source.requires_grad)
    return notes


def carry_modes_(narrow: nn.Module, wide: nn.Module) -> None:
    """Sets modules of the wide model to train or to evaluate as those of the same name in the narrow one."""
    modules = dict(narrow.named_modules())
    for name, module in wide.named_modules():
        if name in modules:
            module.training = modules[name].training
