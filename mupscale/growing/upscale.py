"""`upscale`: widens a trained model."""

from torch import nn

from mupscale.widening.buffers import Rebuild
from mupscale.widening.grow import Optimizers, UpscaleReport, grow
from mupscale.widening.methods import GrowthMethod
from mupscale.widening.new_copies import StateRule
from mupscale.widening.noise import Noise
from mupscale.widening.plan import Blocks, Plan
from mupscale.widening.roles import Roles
from mupscale.widening.units import Units


def upscale(
    narrow: nn.Module,
    wide: nn.Module,
    narrow_opt: Optimizers = None,
    wide_opt: Optimizers = None,
    *,
    noise: Noise | None = None,
    seed: int = 0,
    roles: Roles | None = None,
    blocks: Blocks | None = None,
    units: Units | None = None,
    plan: Plan | None = None,
    consume: bool = False,
    state: StateRule | None = None,
    rewarm_steps: int = 0,
    method: GrowthMethod | None = None,
    rebuild: Rebuild | None = None,
) -> UpscaleReport:
    """Widens a trained model: writes the weights, buffers and optimizer state of `narrow` into `wide`.

    Without noise, the wide model computes and trains exactly as the narrow one would have. What is frozen in `narrow`
    (`requires_grad`), or in evaluation mode (`eval()`), is so in `wide`. All checks run before anything is written:
    after a UserError both models are unchanged.

    Args:
        narrow: The trained model.
        wide: The same architecture at a larger width. Its values are overwritten. It may be on the meta device; its
            parameters are then allocated on the device of `narrow`.
        narrow_opt: The optimizer of `narrow`, or a list of them.
        wide_opt: The optimizer of `wide`, or a list in the same order. It receives the state and keeps its own
            hyperparameters (under muP, those of `apply_mup`). With None, `report.optimizer` is a new optimizer of the
            same class, its hyperparameters rescaled from those of `narrow_opt`.
        noise: Noise that makes the copies of a unit different.
        seed: The seed of the noise.
        roles: Roles of parameters by name pattern, where neither module types nor model classes define them.
        blocks: Layouts of axes by name pattern, likewise.
        units: Extra factors of parameters by name pattern, likewise.
        plan: The result of `mupscale.plan` for the same models.
        consume: Free `narrow` and its optimizer state tensor by tensor. Peak memory is then that of the wide model,
            its state and one tensor.
        state: `carry` moves the optimizer state, `reset` drops it. `reset_new_copies` moves it for the first copy of
            each unit; the other copies start with zero state and a step count of zero. The default depends on `method`.
        rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
        method: The growth method (`mupscale.widening.methods`); by default the paper's duplication.
        rebuild: Builds the wide model again, on the CPU. It provides the buffers that are not saved, if `wide` is on
            the meta device. `wide` keeps its own value of any other buffer that is not saved.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.01)
        >>> report = mupscale.upscale(narrow, wide, optimizer)
        >>> x = torch.randn(5, 3)
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
        >>> sorted({group["lr"] for group in report.optimizer.param_groups})  # the rates that continue the run
        [0.005, 0.01]
    """
    return grow(
        narrow,
        wide,
        narrow_opt,
        wide_opt,
        noise=noise,
        seed=seed,
        roles=roles,
        blocks=blocks,
        units=units,
        plan=plan,
        consume=consume,
        state=state,
        rewarm_steps=rewarm_steps,
        method=method,
        rebuild=rebuild,
    )
