"""Mixtures of experts: every rule of the tables by its numbers, by library and by folder."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import load, save
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import mupscale.hf
from mupscale.__main__ import main
from mupscale.errors import UserError
from mupscale.hf.forward_pass import quiet

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = torch.randint(3, 61, (4, 16), generator=torch.Generator().manual_seed(1))
KINDS = {"AdamW": (torch.optim.AdamW, {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.1}),
         "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})}  # fmt: skip


class InDouble(TorchFunctionMode):
    """Casts to float32 in a forward pass, such as that of a router's softmax, become casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def model_of(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family]()
    for name, value in {**SIZES, **fields}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    model = AutoModelForCausalLM.from_config(config).double()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * (0.3 if tensor.ndim == 2 and len(tensor) in (4, 8) else 0.05))
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.05)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, **settings: Any) -> float:
    optimizer.zero_grad()
    with InDouble():
        loss = model(input_ids=TOKENS, labels=TOKENS, **settings).loss
        loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def difference(one: Any, other: Any) -> float:
    with InDouble():
        before, after = (model.eval()(input_ids=TOKENS).logits for model in (one, other))
    return float((after - before).abs().max() / before.abs().max())


SHARED = {"moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "moe_intermediate_size": 24,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1}  # fmt: skip
FOUR = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, tuple[str, dict[str, Any], int, int]] = {  # family, fields, experts afterwards, parts of one
    "softmax, top-k, normalised": ("mixtral", FOUR, 8, 1),
    "three copies": ("mixtral", FOUR, 12, 1),
    "softmax, not normalised, a shared expert": ("qwen2_moe", {**FOUR, **SHARED, "norm_topk_prob": False}, 8, 1),
    "softmax, not normalised": ("qwen3_moe", {**FOUR, **SHARED, "norm_topk_prob": False}, 8, 1),
    "top-k, then softmax": ("granitemoe", {**FOUR, "attention_multiplier": 0.35}, 8, 1),
    "a router with a bias": ("gpt_oss", FOUR, 8, 1),
    "sigmoid, normalised": ("deepseek_v3", {**LATENT, "norm_topk_prob": True}, 16, 1),
    "sigmoid, not normalised": (
        "deepseek_v3", {**LATENT, "norm_topk_prob": False, "routed_scaling_factor": 2.5}, 16, 1
    ),
    "groups": ("deepseek_v3", {**LATENT, "norm_topk_prob": True, "n_group": 4, "topk_group": 2}, 16, 1),
    "a bias on chances": ("ernie4_5_moe", ERNIE, 8, 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MORE)
def test_more_experts_compute_and_train_as_before(case: str, kind: str, tmp_path: Path) -> None:
    family, fields, experts, split = MORE[case]
    narrow = model_of(family, **fields)
    optimizer_class, settings = KINDS[kind]
    optimizer = optimizer_class(narrow.parameters(), **settings)
    for _ in range(5):
        step(narrow, optimizer)
    mixture = mupscale.hf.add_experts(narrow, experts, split=split, optimizer=optimizer)
    wide = mixture.model
    wide.set_experts_implementation("eager")
    assert difference(narrow, wide) <= 1e-12
    assert mixture.optimizer is not None
    for model in (narrow, wide):
        model.train()
    if kind == "SGD":
        loaded_of(narrow, wide, tmp_path, experts=experts, split=split)
    losses = [(step(narrow, optimizer), step(wide, mixture.optimizer)) for _ in range(20)]
    assert max(abs(after - before) / before for before, after in losses) <= 1e-12


@pytest.mark.slow
def test_the_load_balancing_loss_stays() -> None:
    """It sums the shares of all chosen experts, so its coefficient is divided."""
    narrow = model_of("mixtral", **FOUR, router_aux_loss_coef=0.5)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=2e-3, eps=1e-4)
    mixture = mupscale.hf.add_experts(narrow, 8, optimizer=optimizer)
    assert (narrow.config.router_aux_loss_coef, mixture.model.config.router_aux_loss_coef) == (0.5, 0.25)
    mixture.model.set_experts_implementation("eager")
    for _ in range(5):
        before = step(narrow, optimizer, output_router_logits=True)
        assert step(mixture.model, mixture.optimizer, output_router_logits=True) == pytest.approx(before, rel=1e-12)


def test_an_expert_is_split_into_parts_with_the_same_sum(tmp_path: Path) -> None:
    """Rows of the router train apart, so that training differs a little. Grouped kernels take no width of 10."""
    narrow = model_of("mixtral", **FOUR, intermediate_size=20)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=2e-3)
    step(narrow, optimizer)
    mixture = mupscale.hf.add_experts(narrow, 8, split=2, optimizer=optimizer)
    wide = mixture.model
    loaded_of(narrow, wide, tmp_path, experts=8, split=2)
    wide.set_experts_implementation("eager")
    assert (wide.config.num_local_experts, wide.config.num_experts_per_tok, wide.config.intermediate_size) == (8, 4, 10)
    assert difference(narrow, wide) <= 1e-12
    name = "model.layers.0.mlp.experts.down_proj"
    old, new = dict(narrow.named_parameters())[name], dict(wide.named_parameters())[name]
    group = next(group for group in mixture.optimizer.param_groups if any(each is new for each in group["params"]))
    assert (group["lr"], group["eps"]) == (2 * 2e-3, 1e-8 / 2)
    before, after = optimizer.state[old]["exp_avg_sq"], mixture.optimizer.state[new]["exp_avg_sq"]
    torch.testing.assert_close(after.sum(), before.sum() / 4)


DENSE: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama": ("llama", None, {}),
    "mistral": ("mistral", None, {}),
    "ministral": ("ministral", None, {}),
    "qwen2": ("qwen2", None, {}),
    "seed_oss": ("seed_oss", None, {"attention_bias": True}),
    "llama to qwen2_moe": ("llama", "qwen2_moe", {}),
    "qwen3": ("qwen3", None, {}),
    "qwen3 to dots1": ("qwen3", "dots1", {}),
    "qwen3 to hy_v3": ("qwen3", "hy_v3", {}),
    "olmo2": ("olmo2", None, {}),
    "granite": ("granite", None, {}),
    "granite to granitemoeshared": ("granite", "granitemoeshared", {}),
    "llama to granitemoe": ("llama", "granitemoe", {}),
    "cohere2": ("cohere2", None, {}),
    "ernie4_5": ("ernie4_5", None, {}),
    "llama to solar_open": ("llama", "solar_open", {}),
    "lfm2": ("lfm2", None, {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}),
    "qwen3_5": ("qwen3_5_text", None, {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }),
}  # fmt: skip
WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("gemma", "mixtral", {}),
    "granite": ("granite", "mixtral", {}),
    "helium": ("helium", "mixtral", {}),
    "layers without positions": ("smollm3", "mixtral", {"no_rope_layers": [1, 0]}),
    "other norms": ("olmo", "olmoe", {}),
    "biases": ("llama", "mixtral", {"attention_bias": True}),
    "fused": ("phi3", "mixtral", {}),
    "other names of fields": ("gpt2", "mixtral", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
    "a parallel block": ("cohere", "cohere2_moe", {}),
    "sliding windows": ("qwen3", "qwen3_moe", {
        "use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "sparsemixer": ("stablelm", "phimoe", {}),
    "no such family": ("llama", "lama", {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case if case == "llama" else pytest.param(case, marks=pytest.mark.slow) for case in DENSE]
)
def test_a_dense_model_becomes_a_mixture_that_computes_the_same(case: str, tmp_path: Path) -> None:
    """After loading, in float64 without casts; lfm2_moe adds 1e-6 to the sum of chances. A folder is the library's."""
    family, to, fields = DENSE[case]
    narrow = model_of(family, **fields)
    wide = mupscale.hf.add_experts(narrow, 4, top_k=2, to=to).model
    loaded = loaded_of(narrow, wide, tmp_path, experts=4, top_k=2, to=to)
    assert difference(narrow, loaded) <= (1e-6 if family == "lfm2" else 1e-12)


def loaded_of(narrow: Any, wide: Any, where: Path, **settings: Any) -> Any:
    """What a folder of the narrow model becomes, which must be what the library has made, to the bit."""
    for name, model in (("narrow", narrow), ("wide", wide)):
        save(model, where / name)
    mupscale.hf.remake_folder(where / "narrow", where / "out", **settings)
    expected, made = (load_file(where / name / "model.safetensors") for name in ("wide", "out"))
    assert expected.keys() == made.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(where / "out", dtype=torch.float64)
    loaded.set_experts_implementation("eager")
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_pairs_that_compute_something_else_are_refused(case: str) -> None:
    family, to, fields = WRONG[case]
    with pytest.raises(UserError):
        mupscale.hf.add_experts(model_of(family, **fields), 4, to=to)


def test_every_expert_gets_a_gradient_and_the_state_moves_by_the_table() -> None:
    narrow = model_of("llama")
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=1e-3)
    for _ in range(3):
        step(narrow, optimizer)
    mixture = mupscale.hf.add_experts(narrow, 8, top_k=2, optimizer=optimizer)
    wide, made = mixture.model, mixture.optimizer
    assert made is not None
    old, new = dict(narrow.named_parameters()), dict(wide.named_parameters())
    down, experts = (
        old["model.layers.0.mlp.down_proj.weight"],
        new["model.layers.0.mlp.experts.down_proj"],
    )
    before, after = optimizer.state[down], made.state[experts]
    torch.testing.assert_close(after["exp_avg"][3], before["exp_avg"] / 8)
    torch.testing.assert_close(after["exp_avg_sq"][3], before["exp_avg_sq"] / 16)
    group = next(group for group in made.param_groups if any(each is experts for each in group["params"]))
    assert (group["lr"], group["eps"]) == (1e-3, 1e-8 / 8)
    router = new["model.layers.0.mlp.gate.weight"]
    assert router not in made.state
    assert any(each is router for group in made.param_groups for each in group["params"])
    assert "model.layers.0.mlp.gate.weight" in mixture.new_parameters
    wide.set_experts_implementation("eager")
    step(wide, made)
    assert all(bool(experts.grad[number].any()) for number in range(8))


def test_noise_on_copies_keeps_the_function(tmp_path: Path) -> None:
    narrow = model_of("mixtral", **FOUR)
    before = copy.deepcopy(narrow.config.to_dict())
    wide = mupscale.hf.add_experts(narrow, 8, noise=0.3).model
    assert narrow.config.to_dict() == before
    loaded_of(narrow, wide, tmp_path, experts=8, noise=0.3)
    wide.set_experts_implementation("eager")
    assert difference(narrow, wide) <= 1e-12
    down = wide.model.layers[0].mlp.experts.down_proj
    assert not torch.allclose(down[0], down[1], atol=0.01)
    with pytest.raises(UserError, match="noise: only copies of experts need it"):
        mupscale.hf.add_experts(model_of("llama"), 4, noise=0.3)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "not a multiple": ("mixtral", FOUR, {"experts": 6}, "6 is no multiple of the 4 experts"),
    "k unchanged": ("mixtral", FOUR, {"experts": 8, "top_k": 2}, "each token must get 4, 2 times as many"),
    "split of other": ("mixtral", FOUR, {"experts": 8, "split": 4}, "each split into 4, are 16"),
    "another family": ("mixtral", FOUR, {"experts": 8, "to": "qwen2_moe"}, "is a mixture already"),
    "phimoe": ("phimoe", FOUR, {"experts": 8}, "always takes two experts"),
    "split of dense": ("llama", {}, {"experts": 8, "split": 2}, "no experts to split"),
    "split biases": ("gpt_oss", FOUR, {"experts": 8, "split": 2}, "is cut with its expert is not known"),
    "no mixture": ("gpt2", {}, {"experts": 8}, "no mixture is known that computes as a gpt2"),
    "more than there are": ("llama", {}, {"experts": 4, "top_k": 8}, "got 8 of 4 experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_exact_is_refused(case: str) -> None:
    family, fields, arguments, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        mupscale.hf.add_experts(model_of(family, **fields), **arguments)


@pytest.mark.slow
def test_a_folder_becomes_a_mixture_and_wider(tmp_path: Path, capsys: Any) -> None:
    """In bfloat16 a folder of copies computes bit for bit the same; with a factor in two passes."""
    narrow = save(model_of("llama").to(torch.bfloat16), tmp_path / "narrow")
    main(["upscale", str(narrow), "--experts", "8", "--top-k", "2", "--out", str(tmp_path / "mixture")])
    assert "outputs of both folders differ by" in capsys.readouterr().out
    before, after = (load(folder, dtype=torch.bfloat16) for folder in (narrow, tmp_path / "mixture"))
    assert type(after).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        assert torch.equal(before(TOKENS).logits, after(TOKENS).logits)
    main(["upscale", str(narrow), "--factor", "2", "--experts", "4", "--out", str(tmp_path / "both")])
    both = load(tmp_path / "both", dtype=torch.float32)
    assert (both.config.hidden_size, both.config.num_local_experts) == (64, 4)
    groups = mupscale.hf.parameter_groups(both, tmp_path / "both", lr=1.0, eps=1.0)
    record = json.loads((tmp_path / "both" / "mupscale.json").read_text())["parameters"]
    factors = record["model.layers.0.mlp.experts.down_proj"]["factors"]["AdamW"]
    assert (factors["lr"], factors["eps"]) == (1 / 2, 1 / 8), "of the factor, and of the experts"
    assert len(groups) > 1
    main(["upscale", str(tmp_path / "mixture"), "--experts", "16", "--out", str(tmp_path / "more")])
    assert load(tmp_path / "more").config.num_experts_per_tok == 4
