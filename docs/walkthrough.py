"""The library in one sitting: train narrow, look at the plan, verify it, widen, and train on.

python docs/walkthrough.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet


def spirals(count: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Points on interleaved spiral arms, in four dimensions: easy to draw, hard for a narrow network."""
    label = torch.randint(classes, (count,))
    radius = torch.rand(count) * 3 + 0.2
    angle = 5 * radius + label * (2 * torch.pi / classes) + 0.15 * torch.randn(count)
    flat = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return torch.cat([flat, flat.square()], 1), label


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Trains and answers with the mean loss of the last tenth."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, spirals(256))
        optimizer.zero_grad()
        loss.backward()
        mupscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def build(width: int) -> nn.Module:
    return MLPNet(4, (width, width, width), 5, readout_zero_init=False)


def mup(width: int) -> nn.Module:
    return mupscale.set_base_shapes(build(width), build(8), build(16))


def main() -> None:
    torch.manual_seed(0)
    print("1. A narrow network, trained for 600 steps of AdamW under muP")
    narrow, wide = mup(16), mup(64)
    narrow_opt = mupscale.apply_mup(torch.optim.AdamW(narrow.parameters(), lr=3e-3), narrow)
    before = train(narrow, narrow_opt, 600)
    print(f"   loss {before:.4f}\n")

    print("2. The plan for widening it fourfold (nothing is touched)")
    print(str(mupscale.plan(narrow, wide)) + "\n")

    print("3. Is it exact? Copies of both are trained side by side in float64")
    batches = [spirals(64) for _ in range(4)]
    verdict = mupscale.verify(
        narrow,
        wide,
        optimizer=lambda params: mupscale.apply_mup(torch.optim.AdamW(params, lr=3e-3)),
        batches=batches,
        loss=loss_of,
        steps=50,
        clip=1.0,
    )
    print(f"   {verdict}\n")
    assert verdict.passed

    print("4. And where it is not: an attention scaled by 1/sqrt(head_dim) cannot grow its head_dim")
    verdict = broken_attention()
    print(f"   {verdict}\n")
    assert verdict.first_divergent == "blocks.0.attention"

    print("5. Widened without noise, the loss goes on as if nothing had happened: 200 more steps")
    runs = {"narrow": (narrow, narrow_opt)}
    batch = spirals(32)
    for name, noise in (("wide, no noise", None), ("wide, noise 0.3", mupscale.AdditiveNoise(0.3))):
        target = mup(64)
        report = mupscale.upscale(narrow, target, narrow_opt, call=lambda model: loss_of(model, batch), noise=noise)
        runs[name] = target, report.optimizer
    after = {name: train(model, optimizer, 200) for name, (model, optimizer) in runs.items()}
    for name, loss in after.items():
        print(f"   {name:<16} {loss:.6f}")
    assert abs(after["wide, no noise"] - after["narrow"]) < 0.02 * after["narrow"]  # float32

    print("\n6. With noise it has twelve times the parameters to use: 1000 more steps of each")
    for name, (model, optimizer) in runs.items():
        after[name] = train(model, optimizer, 1000)
        print(f"   {name:<16} {after[name]:.6f}")
    assert after["wide, noise 0.3"] < after["narrow"]


def broken_attention() -> mupscale.Verdict:
    def gpt2(width: int) -> nn.Module:
        return GPT2Net(width, layers=1, heads=2, vocabulary=20, context=8, tied=False)

    def usual_scale(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        return attention(q, k, v, is_causal=is_causal)  # torch's default: 1 / sqrt(head_dim)

    tokens = torch.randint(20, (4, 9))
    attention = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = usual_scale
    try:
        return mupscale.verify(
            gpt2(8), gpt2(16), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), batches=[tokens], steps=3,
            loss=lambda m, x: F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()),
        )  # fmt: skip
    finally:
        F.scaled_dot_product_attention = attention


if __name__ == "__main__":
    main()
