"""How many fits one stack has room for."""

import torch
from lightning.pytorch import Trainer

from mupscale.callbacks.stacked_fits import Apart, Awaited, loss_of
from mupscale.callbacks.upscale import size_after_all, swaps_of
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError
from mupscale.models._lightning_loop import training_loader
from mupscale.models.base import Growable, init_contexts
from mupscale.models.checkpoint import Size
from mupscale.stacking.memory import bytes_per_model
from mupscale.widening.stepping import step_records

SHARE = 0.9
"""The share of the free memory that a stack may use."""


def room_in_stack(first: Awaited, size: int | str) -> int:
    """How many fits like this one to stack: `size`, or for `auto` as many as fit into memory.

    Raises a UserError if `size` of them do not fit. Raises Apart if two do not fit, if a stack cannot compute their
    loss or, for `auto`, if a stack would be slower than one fit after another.
    """
    slow = why_slow(first.module, first.trainer.strategy.root_device) if isinstance(size, str) else None
    if slow is not None:
        raise Apart(slow)
    free = SHARE * free_bytes(first.trainer.strategy.root_device)
    final = largest(first.trainer, first.module)
    try:
        each = bytes_of(first, final)
    except UserError as error:
        raise Apart(str(error)) from error
    most = int(free // each)
    if isinstance(size, str) and most < 2:
        raise Apart(
            f"{free / 1e9:.1f} GB of free memory do not hold two networks of {final} ({each / 1e9:.1f} GB each)"
        )
    if isinstance(size, str):
        return most
    if size > most:
        raise UserError(
            f"--stack {size}: networks of {final} take about {each / 1e9:.2g} GB each, and {free / 1e9:.2g} GB "
            f"are free. Give at most {most}"
        )
    return size


def why_slow(module: Growable, device: torch.device) -> str | None:
    """Why a stack of such models is not faster than training them one after another; None if it is faster."""
    if device.type != "cuda" or module.stacked_losses() is not None:
        return None
    return f"torch.vmap of {type(module).__name__} is slower on a GPU; to use it anyway, give --stack N"


def largest(trainer: Trainer, module: Growable) -> Size:
    """The size at the end of a fit."""
    return size_after_all(module.size, swaps_of(trainer))


def bytes_of(first: Awaited, size: Size) -> int:
    """The memory that a fit takes in a stack, at this size."""
    module, loader = first.module, training_loader(first.trainer)
    batch = first.batch if loader is None else loader.batch_at(0, 0)
    net = module.net
    with torch.random.fork_rng(devices=[]), init_contexts(first.trainer):  # in the precision of the fit
        module.net = module.network(*size, meta=True)
        try:
            optimizer = first.trainer.optimizers[0]
            return bytes_per_model(
                module,
                type(optimizer),
                loss_of,
                first.trainer.precision_plugin.convert_input(batch),
                shared=False,
                losses=module.stacked_losses(),
                amsgrad=any(group.get("amsgrad", False) for group in optimizer.param_groups),
                grown=any(record.changes_steps for record in step_records(optimizer).values())
                or bool(swaps_of(first.trainer)),
            )
        finally:
            module.net = net
