"""Layers in float8 grow like any others: emulated on the CPU, where sums are float64 and only the casts are real."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from nets import take_steps
from torch import Tensor, nn

import mupscale
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.models import fp8
from mupscale.models.fp8 import Float8Linear
from mupscale.models.gpt2 import GPT2
from mupscale.models.hf import HFCausalLM

VOCABULARY, CONTEXT = 37, 12
BATCHES = [
    torch.randint(VOCABULARY, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(seed)) for seed in range(26)
]


def gpt2(width: int, float8: bool = True, **arguments: object) -> GPT2:
    torch.manual_seed(width)
    shape = {"layers": 2, "head_dim": 16, "vocabulary": VOCABULARY, "context": CONTEXT, "fp8": float8} | arguments
    module = GPT2(width, base_width=16, **shape)  # type: ignore[arg-type]
    module.configure_model()
    return module


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        largest = torch.finfo(dtype).max
        scale = x.abs().amax() / largest
        return (x / scale).clamp(-largest, largest).to(dtype), scale

    def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *others: object) -> Tensor:
        bias = next((each for each in others if isinstance(each, Tensor)), 0)
        return (a.double() * a_scale) @ (b.double() * b_scale) + bias

    for name, value in {
        "NARROWEST": 16, "PRECISION": torch.float64, "is_in_float8": lambda x: True,
        "to_float8": quantise, "multiply": multiply,
    }.items():  # fmt: skip
        monkeypatch.setattr(fp8, name, value)


def losses(module: GPT2, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    return take_steps(module, optimizer, batches, lambda model, batch: model.loss(batch))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    "make", [partial(torch.optim.AdamW, lr=3e-3, eps=1e-6), partial(torch.optim.SGD, lr=0.1, momentum=0.9)]
)
def test_growth_trains_as_before(k: int, make: "partial[torch.optim.Optimizer]", emulated: None) -> None:
    """The bias of keys has a gradient of rounding alone, which a smaller eps would amplify, with and without float8."""
    narrow, wide = gpt2(32, optimizer=make).double(), gpt2(32 * k, optimizer=make).double()
    plain = gpt2(32, float8=False, optimizer=make).double()
    optimizer, of_plain = narrow.configure_optimizers(), plain.configure_optimizers()
    before = losses(narrow, optimizer, BATCHES[:6])
    rounded = max(abs(a - b) for a, b in zip(losses(plain, of_plain, BATCHES[:6]), before, strict=True))
    assert 1e-5 < rounded < 0.05  # float8 is in use
    report = mupscale.upscale(narrow.net, wide.net, optimizer, wide.configure_optimizers())
    after = losses(wide, report.optimizer, BATCHES[6:])
    assert after == pytest.approx(losses(narrow, optimizer, BATCHES[6:]), abs=1e-12)


def test_growth_by_a_fraction_is_refused(emulated: None) -> None:
    with pytest.raises(UserError, match=r"32 × 96 that grows to 48 × 144 would be rounded otherwise"):
        mupscale.plan(gpt2(32).net, gpt2(48).net)


def test_large_linear_layers_of_blocks_are_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "NARROWEST", 64)
    assert fp8.summary_of(gpt2(32).net or nn.Module()).startswith("float8: 0 of 9 linear layers")
    net = gpt2(64).net
    assert net is not None
    assert {name.split(".", 2)[2] for name, layer in net.named_modules() if isinstance(layer, Float8Linear)} == {
        "attention.qkv", "attention.project", "mlp.0", "mlp.2"
    }  # fmt: skip
    llama = HFCausalLM(
        config={"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 37}, fp8=True,
    )  # fmt: skip
    llama.configure_model()
    assert llama.net is not None
    # k and v have 32 outputs
    assert fp8.summary_of(llama.net).startswith("float8: 5 of 8 linear layers")


def test_other_precisions_are_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """So `verify` and the check, which compute in float64, see an ordinary network."""
    monkeypatch.setattr(fp8, "NARROWEST", 16)
    ours, plain = gpt2(32), gpt2(32, float8=False)
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(ours.to(dtype).loss(BATCHES[0]), plain.to(dtype).loss(BATCHES[0]))


def test_a_run_without_float8_matmuls_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=1, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"model\.fp8: float8 matmuls need a GPU, and this run is on cpu"):
        trainer.fit(gpt2_without_network(), torch.utils.data.DataLoader(BATCHES[0], 3))


def gpt2_without_network() -> GPT2:
    return GPT2(32, base_width=16, layers=1, head_dim=16, vocabulary=VOCABULARY, context=CONTEXT, fp8=True)


# --- on a GPU


@pytest.mark.gpu
def test_a_layer_is_right_to_the_rounding_of_its_operands() -> None:
    torch.manual_seed(0)
    layer, exact = (nn.Linear(1024, 2048, device="cuda") for _ in range(2))
    exact.load_state_dict(layer.state_dict())
    fp8.use_float8_(wrapped := nn.Sequential(layer))
    x = torch.randn(4, 64, 1024, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = wrapped(x)
    g = torch.randn_like(y)
    ours = [y, *torch.autograd.grad(y, [x, *layer.parameters()], g)]
    truth = exact(x)
    wanted = [truth, *torch.autograd.grad(truth, [x, *exact.parameters()], g.float())]
    assert type(layer) is Float8Linear
    # operands of y are off by 2⁻⁴ at most, and gradients of outputs by 2⁻³; a sum over many averages
    for mine, other, most in zip(ours, wanted, (0.04, 0.07, 0.07, 1e-2), strict=True):
        assert 1e-4 < float(((mine.float() - other).norm() / other.norm()).detach()) < most


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_a_run_grows_as_without(compile: bool, tmp_path: Path) -> None:
    """Both grow at step 8; no loss differs by more than float8 rounds, and no checkpoint has float8 in it."""
    ends = {}
    for float8 in (False, True):
        torch.manual_seed(0)
        module = GPT2(
            1024, base_width=64, layers=1, head_dim=64, vocabulary=512, context=128, compile=compile, fp8=float8,
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
        )  # fmt: skip
        watch = StepLosses()
        trainer = Trainer(
            max_steps=16, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[UpscaleCallback(8, width=2048, noise=None), watch], default_root_dir=tmp_path,
        )  # fmt: skip
        tokens = torch.randint(512, (32, 129), generator=torch.Generator().manual_seed(0))
        trainer.fit(module, torch.utils.data.DataLoader(tokens, 4))
        ends[float8] = watch.losses
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
        assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}
    assert ends[True] == pytest.approx(ends[False], rel=0.01)
    assert ends[True] != ends[False]


class StepLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        assert isinstance(pl_module, GPT2)
        assert pl_module.train_loss is not None
        self.losses.append(float(pl_module.train_loss))
