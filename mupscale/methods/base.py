"""The interface of growth methods.

Each width axis n → ñ has two ñ × n maps: `out`, what the new units produce, and `inn`, how they are read. A weight W
that reads axis x and writes axis y becomes W̃ = out_y · W · inn_xᵀ + N. The function is preserved if innᵀ · out = 1 on
every axis, `out` commutes with the nonlinearities and norms, and N · out_x = 0. The gradient is inn_y · G · out_xᵀ; the
rules for optimizer state and hyperparameters follow from it, and with them the training is preserved too. What a method
defines is in docs/which_growth.md, and below.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.methods.noise import Noise, SameNoise
from mupscale.widening.growth import Growth
from mupscale.widening.hints import Hints
from mupscale.widening.optimizers import Sized
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import table_rates
from mupscale.widening.stepping import StateRule, check_state_rule
from mupscale.widening.table import Scale
from mupscale.widening.write import is_inexact, widen_, widen_gradient_

Hyperparameters = Literal["table", "same"]

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch."""


class Claim(NamedTuple):
    """What a method preserves when it grows a certain model."""

    function: bool
    """The outputs just after growing."""
    dynamics: bool
    """The training after it: losses are those of the narrow network, step by step."""


class GrowthMethod(ABC):
    """A way to make a wide network from a narrow one.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> groups = {"hidden": {"0.weight": 0, "2.weight": 1}}  # the axes that hold the hidden units
        >>> x, method = torch.randn(5, 3), mupscale.methods.Net2Net(seed=1, groups=groups)
        >>> report = mupscale.upscale(narrow, wide, method=method, call=lambda model: model(x))
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
    """

    published_state: StateRule = "carry"
    """What the authors do with the optimizer state, and the default."""
    published_hyperparameters: Hyperparameters = "table"
    """Whether the authors rescale hyperparameters, and the default."""
    noise: Noise | None = None
    """A perturbation that belongs to the method."""
    equal_copies: bool = True
    """Whether all copies of a unit compute the same, so that centred noise cancels out."""
    state_to_copies: bool = True
    """Whether optimizer state is carried to all copies, or only to the first copy of each unit."""
    grows_weight_norms: bool = False
    """Whether all copies of a weight are equal, as `modules.py` requires."""
    needs_batches: bool = False
    """Whether `fit` must run before the weights can be written."""

    def __init__(
        self, state: StateRule | None = None, hyperparameters: Hyperparameters | None = None, rewarm_steps: int = 0
    ) -> None:
        """
        Args:
            state: `carry` moves the optimizer state, `reset` drops it. `reset_new_copies` moves it for the first copy
                of each unit; the other copies start with zero state and a step count of zero. By default as published.
            hyperparameters: Rescale learning rate, eps and weight decay by the rules (`table`), or not (`same`). By
                default as published.
            rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
        """
        self.state: StateRule = self.published_state if state is None else state
        self.hyperparameters = self.published_hyperparameters if hyperparameters is None else hyperparameters
        self.rewarm_steps = rewarm_steps
        check_state_rule(self.state, rewarm_steps)
        if self.hyperparameters not in get_args(Hyperparameters):
            raise UserError(f"hyperparameters must be table or same, got {hyperparameters!r}")

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        """Which axes grow and in which layout; raises a UserError if this method cannot grow the model."""
        return make_plan(narrow, wide, hints=hints)

    def fit(  # noqa: B027  most methods have nothing to learn
        self,
        narrow: nn.Module,
        wide: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        hints: Hints | None = None,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Learns from batches how to grow `narrow`, changing neither model; `average` averages over processes."""

    def forget(self) -> None:  # noqa: B027
        """Drops what `fit` learned, once the weights are written."""

    def check(self, plan: Plan) -> None:
        """Raises a UserError if the weights of this plan cannot be written, or not yet; runs before anything is."""
        normed = next((name for name, entry in plan.parameters.items() if entry.normed and entry.grows), None)
        if normed is not None and not self.grows_weight_norms:
            raise UserError(
                f"{type(self).__name__}: the layer of {normed!r} divides it by its norm (weight_norm), which is exact "
                "only if all copies are equal. Use Duplication(), or remove the norm"
            )

    def choose_noise(self, given: Noise | None, plan: Plan, narrow: nn.Module) -> Noise | None:
        """The noise to add: `given`, or the method's own. Raises a UserError if it cannot be added to this model."""
        own = type(self).__name__
        if not isinstance(given, Noise | None):
            raise UserError(f"noise must be AdditiveNoise(std), SignalNoise(t) or RecordedNoise(path), got {given!r}")
        if given is not None and self.noise is not None and not isinstance(given, SameNoise):
            raise UserError(f"{own} has noise of its own. Give none, or use another method")
        noise = self.noise if given is None else given
        if noise is None:
            return None
        noise.check(plan)
        for name, parameter in narrow.named_parameters():
            if not is_inexact(parameter) and noise.applies(plan.parameters[name]):
                raise UserError(
                    f"noise: {name!r} holds whole numbers ({parameter.dtype}), to which noise cannot be added. Leave "
                    f"it out, where={{{name!r}: False}}, or give both models floating-point weights"
                )
        if noise.centred and not self.equal_copies:
            raise UserError(
                "noise: centred noise keeps the function only if all copies of a unit compute the same, and those of "
                f"{own} do not. Use plain noise (centred=False), or Duplication"
            )
        return noise

    def widen_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        """Writes the widened weight into `target`."""
        widen_(target, source, entry)

    def widen_gradient_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        """Writes the gradient that the widened weight has where the narrow one has `source`."""
        widen_gradient_(target, source, entry)

    @property
    def widens_by_rows(self) -> bool:
        """Whether rows of a weight are widened as `weights.widen_` does it, which needs none of the others."""
        return type(self).widen_ is GrowthMethod.widen_

    def edit_(self, plan: Plan, wide: nn.Module) -> None:  # noqa: B027  most methods treat weights one by one
        """Changes the wide model across layers, after all weights are written."""

    def scale(self, growth: Growth) -> Scale:
        """What the weight and the gradient of a parameter are multiplied by."""
        return growth.scale

    def rates(self, growth: Growth) -> Sized:
        """What hyperparameters follow."""
        if self.hyperparameters == "same":
            return Sized(Scale(), growth.wide_shape, growth.wide_shape)
        return Sized(self.scale(growth), growth.narrow_shape, growth.wide_shape)

    def mup_rates(self, growth: Growth) -> Sized:
        """What the hyperparameters of a model under muP follow: its width, or nothing."""
        return self.rates(growth) if self.hyperparameters == "same" else table_rates(growth)

    @abstractmethod
    def claim(self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Claim:
        """What is preserved when this model grows and `optimizers` train it on; no more than is known of any data."""

    def claim_measured(
        self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer], gradients: Mapping[str, Tensor]
    ) -> Claim:
        """The claim where the gradients of the wide model, just after growing, are known by name."""
        return self.claim(plan, narrow, optimizers)

    def _follows_the_rules(self) -> bool:
        return self.state == "carry" and self.hyperparameters == "table"
