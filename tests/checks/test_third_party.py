"""Models of transformers, torchvision and torch.nn, widened with hints, without a change to their code.

hf/test_zoo.py widens some two hundred without a hint.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
import transformers as hf
from tiers import slow_except
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models.regnet import BlockParams, RegNet

import mupscale

VOCABULARY = 32
CLASSES = 5
STEPS = 15


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def tokens() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (2, 8)) for _ in range(4)]


def images(size: int) -> Callable[[], list[Any]]:
    return lambda: [(torch.randn(4, 3, size, size), torch.randint(0, CLASSES, (4,))) for _ in range(4)]


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(input_ids=batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def same_token(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def classification(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return cross_entropy(getattr(logits, "logits", logits), batch[1])


def mixtral(k: int) -> nn.Module:
    """4k query heads over 2k key-value heads of 4 dimensions."""
    sizes = {"hidden_size": 16 * k, "intermediate_size": 24 * k, "num_attention_heads": 4 * k}
    fixed = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_hidden_layers": 2, "num_local_experts": 4}
    net = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **fixed, num_key_value_heads=2 * k, pad_token_id=0))
    net.set_experts_implementation("eager")  # the others have no float64
    return net


def gpt2(k: int) -> nn.Module:
    config = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8 * k, "n_head": 2 * k, "n_layer": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**config, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def regnet(k: int) -> nn.Module:
    stages = BlockParams(
        [1, 2], [16 * k, 32 * k], group_widths=[4, 4], bottleneck_multipliers=[1.0, 1.0], strides=[2, 2], se_ratio=0.25
    )
    return RegNet(stages, num_classes=CLASSES, stem_width=8 * k)


def shufflenet(k: int) -> nn.Module:
    return torchvision.models.ShuffleNetV2([1, 2, 1], [8 * k, 16 * k, 32 * k, 64 * k, 64 * k], num_classes=CLASSES)


class TorchTransformer(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16 * k)
        self.transformer = nn.Transformer(16 * k, 2 * k, 1, 1, 24 * k, dropout=0.0, batch_first=True)
        self.readout = nn.Linear(16 * k, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.readout(
            self.transformer(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))
        )


class Case(NamedTuple):
    build: Callable[[int], nn.Module]
    batches: Callable[[], list[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: dict[str, Any] | None = None
    roles: dict[str, Any] | None = None


GQA = {"*.q_proj.weight": {0: 8}, "*.[kv]_proj.weight": {0: 4}, "*.o_proj.weight": {1: 8}}
REGNET_GROUPS = {"*.f.a.0.weight": {0: 4}, "*.f.[ab].1.weight": {0: 4}, "*.f.c.0.weight": {1: 4}}
EXPERTS = {"*.experts.*": "matrix", "*.mlp.gate.weight": "readout"}

SHUFFLES: dict[str, Any] = {  # two interleaved halves of block b become channels of block 2b
    **{f"stage3.0.branch1.{i}.weight": {0: 2} for i in (0, 1)},
    **{f"stage3.0.branch{i}.weight": {1: 2} for i in ("1.2", "2.0")},
    "stage3.1.branch2.0.weight": {1: 2},
    **{f"stage3.1.branch2.{i}.weight": {0: 2} for i in (5, 6)},
    **{f"stage4.0.branch1.{i}.weight": {0: 4} for i in (0, 1)},
    **{f"stage4.0.branch{i}.weight": {1: 4} for i in ("1.2", "2.0")},
    "conv5.0.weight": {1: 2},
}

CASES = {
    "gpt2": Case(
        gpt2,
        tokens,
        next_token,
        {"*.c_attn.weight": {1: 4}, "*.attn.c_proj.weight": {0: 4}},
        {"transformer.ln_f.*": "readout"},
    ),
    "mixtral": Case(mixtral, tokens, next_token, GQA, EXPERTS),
    "regnet": Case(
        regnet, images(32), classification, REGNET_GROUPS | {"*.f.se.fc1.weight": {1: 4}, "*.f.se.fc2.weight": {0: 4}}
    ),
    "shufflenet": Case(shufflenet, images(64), classification, SHUFFLES),
    "nn.Transformer": Case(TorchTransformer, tokens, same_token),
}


def verdict(
    case: Case, *, k: int = 2, optimizer: Any = adamw, steps: int = STEPS, clip: float | None = None
) -> mupscale.Verdict:
    torch.manual_seed(0)
    narrow, wide = case.build(1), case.build(k)
    settings = {"optimizer": optimizer, "batches": case.batches(), "loss": case.loss, "steps": steps, "clip": clip}
    return mupscale.verify(narrow, wide, hints=mupscale.Hints(roles=case.roles, blocks=case.blocks), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(CASES, "gpt2", kept=["mixtral", "regnet", "shufflenet", "nn.Transformer"]))
def test_exact_under_adamw(name):
    answer = verdict(CASES[name])
    assert answer.passed, str(answer)
    assert answer.loss_drift <= 1e-10
    assert answer.activation_drift <= 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "module", "drifts"),
    [
        ("gpt2", {"blocks": None}, "transformer.h.0.attn", "before 'transformer.h.0.attn.c_proj'"),
        ("gpt2", {"blocks": {"*.c_attn.weight": {1: 4}}}, "transformer.h.0.attn.c_proj", "returns differs"),
        ("mixtral", {"roles": {"*.experts.*": "matrix"}}, "model.layers.0.mlp.gate", "returns differs"),
        ("regnet", {"blocks": REGNET_GROUPS}, "trunk_output.block1.block1-0.f.se.fc1", "returns differs"),
    ],
)
def test_first_divergent_module_is_the_one_at_fault(name, change, module, drifts):
    answer = verdict(CASES[name]._replace(**change), steps=1)
    assert not answer.passed
    assert answer.first_divergent == module
    assert drifts in answer.reason


def test_fused_expert_weights_ask_for_a_role():
    with pytest.raises(ValueError, match=r"experts.gate_up_proj.*does not determine which is summed over"):
        verdict(CASES["mixtral"]._replace(roles=None))
