"""What the paper's published code gets wrong, and this library must not: one test for each mistake."""

import importlib.metadata
import math
import re
from collections.abc import Callable

import pytest
import torch
from architectures import ViT
from mup_optimizers import MuAdamW
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.models.resnet import ResNet18Net


def gpt2(width: int, tied: bool = True) -> nn.Module:
    return GPT2Net(width, layers=2, heads=2, vocabulary=30, context=11, tied=tied)


def mup_gpt2(width: int, base: int = 4) -> nn.Module:
    return mupscale.set_base_shapes(gpt2(width), gpt2(base), gpt2(2 * base), init="constant")


def step(model: nn.Module, optimizer: Optimizer, seed: int, clip: Callable[[nn.Module], Tensor] | None = None) -> float:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(30, (4, 9), generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    if clip is not None:
        assert clip(model) > 0.05  # it bites
    optimizer.step()
    return loss.item()


def std_error(tensor: Tensor, wanted: float) -> float:
    """In standard errors of a normal sample's standard deviation."""
    return abs(tensor.detach().double().std().item() - wanted) * math.sqrt(2 * tensor.numel()) / wanted


def test_1_noise_is_not_divided_together_with_the_signal():
    """They put the noise into the target first, and then divide signal and noise of hidden layers by k."""
    narrow, noisy, clean = (MLPNet(10, (w, w), 5, readout_zero_init=False) for w in (32, 128, 128))
    mupscale.upscale(narrow, noisy, noise=mupscale.AdditiveNoise(0.3))
    mupscale.upscale(narrow, clean)
    noise = {name: noisy.get_parameter(name) - p for name, p in clean.named_parameters()}
    assert std_error(noise["layers.0.weight"], 0.3) < 4
    assert std_error(noise["layers.1.weight"], 0.3 / math.sqrt(128)) < 4
    assert std_error(noise["readout.weight"], 0.3) < 4


def test_2_gpt2_init_and_noise_follow_mup():
    """Their GPT-2 draws everything with std 0.02 at every width; its embedding's noise grows as sqrt(width)."""
    torch.manual_seed(0)
    narrow = mup_gpt2(8)
    for width in (16, 64):
        wide = mup_gpt2(width)
        for name, wanted in (
            ("wte.weight", 0.02),
            ("wpe.weight", 0.02),
            ("blocks.0.attention.qkv.weight", 0.02 * (4 / width) ** 0.5),
            ("blocks.1.mlp.0.weight", 0.02 * (4 / width) ** 0.5),
            ("blocks.1.mlp.2.weight", 0.02 / 2 * (4 / width) ** 0.5),  # into the residual stream of two layers
        ):
            assert std_error(wide.get_parameter(name), wanted) < 4, name
        assert wide.head.readout.multiplier == 4 / width
        noisy = mup_gpt2(width)
        mupscale.upscale(narrow, wide)
        mupscale.upscale(narrow, noisy, noise=mupscale.AdditiveNoise(0.1))
        for name, wanted in (
            ("wte.weight", 0.1),
            ("wpe.weight", 0.1),
            ("blocks.0.attention.qkv.weight", 0.1 * width**-0.5),
            ("blocks.1.mlp.2.weight", 0.1 * (4 * width) ** -0.5),
        ):
            assert std_error(noisy.get_parameter(name) - wide.get_parameter(name), wanted) < 4, name


def test_3_eps_is_scaled_for_gpt2():
    """Their GPT-2 trains with one eps at every width, beside gradients that shrink as 1/width."""
    model = mup_gpt2(16)
    optimizer = MuAdamW(model, lr=0.01, eps=1e-6)
    eps = {id(p): group["eps"] for group in optimizer.param_groups for p in group["params"]}
    assert len(eps) == len(list(model.parameters()))
    # every parameter produces width: m_out = 4
    assert list(eps.values()) == pytest.approx([1e-6 / 4] * len(eps), rel=1e-12)
    narrow = mup_gpt2(8)
    continued = mupscale.upscale(narrow, model, MuAdamW(narrow, lr=0.01, eps=1e-6)).optimizer
    assert all(group["eps"] == pytest.approx(1e-6 / 4, rel=1e-12) for group in continued.param_groups)


@pytest.mark.slow
def test_4_clipping_does_not_break_equivalence():
    """They clip by the plain global norm, which another width feels differently."""

    def drift(clip: Callable[[nn.Module], Tensor]) -> float:
        torch.manual_seed(0)
        narrow, wide = gpt2(8, tied=False).double(), gpt2(16, tied=False).double()
        narrow_opt = torch.optim.AdamW(narrow.parameters(), lr=0.003, eps=1e-3)
        for index in range(5):
            step(narrow, narrow_opt, index, clip)
        wide_opt = mupscale.upscale(narrow, wide, narrow_opt).optimizer
        return max(
            abs(step(wide, wide_opt, index, clip) / step(narrow, narrow_opt, index, clip) - 1) for index in range(5, 35)
        )

    assert drift(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)) > 1e-4
    assert drift(lambda model: mupscale.clip_grad_norm_(model, 0.05)) <= 1e-10


def test_5_batchnorm_statistics_are_carried_over_and_its_gains_get_no_noise():
    """They lose the running statistics, and add a "noise" to the gains that is the same for all."""
    torch.manual_seed(0)
    narrow, wide = ResNet18Net(4, 5, readout_zero_init=False), ResNet18Net(8, 5, readout_zero_init=False)
    for _ in range(3):
        narrow(torch.randn(8, 3, 8, 8) * 2 + 1)
    for parameter in narrow.parameters():
        nn.init.normal_(parameter)
    report = mupscale.upscale(narrow, wide, noise=mupscale.AdditiveNoise(0.1))
    norms = [name for name, module in narrow.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 20
    for name in norms:
        before, after = narrow.get_submodule(name), wide.get_submodule(name)
        for attribute in ("weight", "bias", "running_mean", "running_var"):
            assert torch.equal(getattr(after, attribute), getattr(before, attribute).repeat_interleave(2)), name
        assert after.num_batches_tracked == 3
        assert report.noise[f"{name}.weight"] == report.noise[f"{name}.bias"] == 0
    mupscale.upscale(narrow, wide)
    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(wide.eval()(images), narrow.eval()(images), rtol=1e-4, atol=1e-4)


def test_6_step_counters_are_not_shared():
    """They hand the narrow optimizer's `step` tensors on: on the CPU both runs then advance one counter."""
    narrow, wide = mup_gpt2(8), mup_gpt2(16)
    narrow_opt = MuAdamW(narrow)
    step(narrow, narrow_opt, 0)
    wide_opt = mupscale.upscale(narrow, wide, narrow_opt).optimizer
    step(wide, wide_opt, 1)
    assert {float(state["step"]) for state in narrow_opt.state.values()} == {1.0}
    assert {float(state["step"]) for state in wide_opt.state.values()} == {2.0}
    tensors = [t for opt in (narrow_opt, wide_opt) for state in opt.state.values() for t in state.values()]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


def test_7_state_is_not_cast_to_the_parameter_dtype():
    """They cast all state to the dtype of its parameter; bfloat16 cannot count past 256."""
    narrow, wide = mup_gpt2(8).bfloat16(), mup_gpt2(16).bfloat16()
    narrow_opt = MuAdamW(narrow)
    step(narrow, narrow_opt, 0)
    for state in narrow_opt.state.values():
        state["step"].fill_(257)
        state["exp_avg_sq"] = state["exp_avg_sq"].float()  # kept in higher precision, as some trainers do
    wide_opt = mupscale.upscale(narrow, wide, narrow_opt).optimizer
    assert {state["exp_avg_sq"].dtype for state in wide_opt.state.values()} == {torch.float32}
    for state in wide_opt.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    for index in range(2):
        step(wide, wide_opt, index)
    assert {(float(state["step"]), state["step"].dtype) for state in wide_opt.state.values()} == {
        (259.0, torch.float32)
    }


def test_8_parameters_with_three_axes_are_widened():
    """They skip, in silence, what has more than two axes and its width in the last."""
    narrow, wide = ViT(8), ViT(24)
    with torch.no_grad():
        wide.cls_token.fill_(math.nan)
        wide.pos_embed.fill_(math.nan)
    plan = mupscale.upscale(narrow, wide).plan
    for name in ("cls_token", "pos_embed"):
        assert torch.equal(wide.get_parameter(name), narrow.get_parameter(name).repeat_interleave(3, -1))
        assert (plan.parameters[name].scale, plan.parameters[name].role) == ((1, 1 / 3, 3, 1), "vector")


def test_9_a_target_that_is_not_zero_is_not_added_to():
    """They `add_` the widened values: PReLU starts at 0.25 and LayerScale at its constant, so these double."""

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.prelu, self.shared_prelu = nn.PReLU(width), nn.PReLU()
            self.gamma, self.gamma_map = (
                nn.Parameter(torch.full((width,), 0.5)),
                nn.Parameter(torch.full((width, 1, 1), 0.5)),
            )

    narrow, wide = Net(4), Net(8)
    for parameter in narrow.parameters():
        nn.init.normal_(parameter)
    mupscale.upscale(narrow, wide)
    for name, parameter in narrow.named_parameters():
        k = wide.get_parameter(name).shape[0] // len(parameter)
        assert torch.equal(wide.get_parameter(name), parameter.repeat_interleave(k, 0))


def test_10_a_transformer_is_equivalent_and_resumes_from_a_checkpoint(tmp_path):
    """They never test a transformer, and cannot resume after an upscale."""
    torch.manual_seed(0)
    narrow, wide = mup_gpt2(8).double(), mup_gpt2(24).double()
    settings = {"lr": 0.003, "eps": 1e-3, "weight_decay": 0.1}
    narrow_opt, wide_opt = MuAdamW(narrow, **settings), MuAdamW(wide, **settings)

    def clip(model: nn.Module) -> Tensor:
        return mupscale.clip_grad_norm_(model, 0.05)

    for index in range(5):
        step(narrow, narrow_opt, index, clip)
    mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    for index in range(5, 15):
        assert step(wide, wide_opt, index, clip) == pytest.approx(step(narrow, narrow_opt, index, clip), rel=1e-10)

    torch.save({"model": wide.state_dict(), "optimizer": wide_opt.state_dict()}, tmp_path / "wide.ckpt")
    resumed = mup_gpt2(24).double()
    resumed_opt = MuAdamW(resumed, **settings)
    checkpoint = torch.load(tmp_path / "wide.ckpt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    resumed_opt.load_state_dict(checkpoint["optimizer"])
    for index in range(15, 25):
        assert step(resumed, resumed_opt, index, clip) == step(wide, wide_opt, index, clip)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), wide.parameters(), strict=True))


def test_10_a_plain_run_resumes_too(tmp_path):
    """The groups that an upscale splits are those that the next upscale of the same shapes splits."""
    torch.manual_seed(0)

    def pair() -> tuple[nn.Module, Optimizer]:
        narrow, wide = gpt2(8, tied=False), gpt2(16, tied=False)
        narrow_opt = torch.optim.AdamW(narrow.parameters(), lr=0.003)
        step(narrow, narrow_opt, 0)
        return wide, mupscale.upscale(narrow, wide, narrow_opt).optimizer

    wide, wide_opt = pair()
    step(wide, wide_opt, 1)
    torch.save({"model": wide.state_dict(), "optimizer": wide_opt.state_dict()}, tmp_path / "wide.ckpt")
    resumed, resumed_opt = pair()
    checkpoint = torch.load(tmp_path / "wide.ckpt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    resumed_opt.load_state_dict(checkpoint["optimizer"])
    for index in range(2, 6):
        losses = [
            step(*run, index, lambda model: mupscale.clip_grad_norm_(model, 0.1))
            for run in ((wide, wide_opt), (resumed, resumed_opt))
        ]
        assert losses[0] == losses[1]


def test_10_no_online_account_is_needed():
    """They cannot be installed, and log to an online service."""
    requirements = importlib.metadata.requires("mupscale") or []
    always = {re.match(r"[A-Za-z0-9_.-]+", line).group().lower() for line in requirements if "extra ==" not in line}
    ours = {"jsonargparse", "lightning", "mup", "tensorboard", "torch", "torchmetrics", "torchvision"}
    assert always == ours | {"numpy"}
    online = re.compile(r"wandb|mlflow|comet|neptune|clearml|swanlab", re.IGNORECASE)
    assert not [line for line in requirements if online.search(line)]
