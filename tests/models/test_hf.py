"""Causal language models of the transformers library: grown in the middle of a fit, resumed, saved and loaded."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import refused
from tiers import slow_except
from tiny_modules import ADAMW, rows
from training_runs import Checkpoints, assert_identical, fit, gap, rates, state

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from mupscale.__main__ import main
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.checks.precision import Precision
from mupscale.errors import UserError
from mupscale.hf.causal_lm import config_of, save, weights_in
from mupscale.methods.noise import AdditiveNoise
from mupscale.models.checkpoint import Size, load_checkpoint
from mupscale.models.hf import CausalLMNet, HFCausalLM

SMALL = {"vocab_size": 11, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **SMALL,
}
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 4, "sliding_window": 4, "pad_token_id": 0}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 11,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "gemma2": GEMMA}


def module(config: dict[str, Any] = LLAMA, **arguments: Any) -> HFCausalLM:
    return HFCausalLM(**{"config": config, "optimizer": ADAMW} | arguments)


def logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Of the model in a folder, loaded as any user of transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad(), Precision() if dtype == torch.float64 else nullcontext():
        return model(input_ids=tokens).logits


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A folder as it is released, in bfloat16."""
    torch.manual_seed(3)
    save(AutoModelForCausalLM.from_config(config_of(LLAMA), dtype=torch.bfloat16), tmp_path / "released")
    return tmp_path / "released"


# --- growing


@pytest.mark.parametrize("family", slow_except(["llama", "gpt2", "gemma2"], kept=["llama"]))
def test_growth_leaves_the_losses_as_they_were(family: str, tmp_path: Path) -> None:
    """And what is saved at the end computes what the run computed."""
    settings: dict[str, Any] = {"steps": 8, "gradient_clip_val": 0.5}
    with Precision():
        narrow = fit(module(FAMILIES[family]), tmp_path / "narrow", **settings)
        swap, checkpoints = UpscaleCallback(4, 32, noise=None), Checkpoints(tmp_path / "wide" / "checkpoints")
        grown = fit(
            module(FAMILIES[family]), tmp_path / "wide", swap, checkpoints, **settings, enable_checkpointing=True
        )
    assert grown.module.width == 32
    assert gap(narrow, grown) < 1e-10
    tokens = rows(grown.module, 4, torch.float64)[0]
    with torch.no_grad(), Precision():
        ours = grown.module.eval()(tokens)
        assert torch.equal(logits(tmp_path / "wide" / "hf", tokens), ours)
        assert float((narrow.module.eval()(tokens) - ours).abs().max()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_except(FAMILIES, kept=["llama"]))
def test_new_layers_leave_the_loss_as_it_was(family: str, tmp_path: Path) -> None:
    """Alone and with twice the width, whose losses are those of new layers alone; what is saved computes the same."""
    settings: dict[str, Any] = {"steps": 8, "enable_checkpointing": True}
    with Precision():
        narrow = fit(module(FAMILIES[family]), tmp_path / "narrow", **settings)
        deep = fit(module(FAMILIES[family]), tmp_path / "deep", UpscaleCallback(4, layers=4, noise=None), **settings)
        both = fit(
            module(FAMILIES[family]), tmp_path / "both", UpscaleCallback(4, 32, layers=4, noise=None), **settings
        )
    assert (deep.module.size, both.module.size) == (Size(16, 4), Size(32, 4))
    assert float((deep.losses[:5] - narrow.losses[:5]).abs().max()) < 1e-12
    assert gap(deep, narrow) > 1e-6, "new layers learn"
    assert gap(deep, both) < 1e-10
    tokens = rows(both.module, 4, torch.float64)[0]
    with torch.no_grad(), Precision():
        assert torch.equal(logits(tmp_path / "both" / "hf", tokens), both.module.eval()(tokens))


def test_the_loss_of_routers_is_added() -> None:
    """hf/test_zoo.py widens a Mixtral."""
    torch.manual_seed(0)
    mixtral = module({**MIXTRAL, "router_aux_loss_coef": 0.5, "num_hidden_layers": 1, "num_local_experts": 2})
    mixtral.configure_model()
    batch = rows(mixtral, 4, torch.float32)[0]
    with torch.no_grad():
        plain = torch.nn.functional.cross_entropy(mixtral(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        assert float(mixtral.loss(batch)) > float(plain) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("step", slow_except([2, 4, 6], kept=[4, 6]))
def test_a_resumed_run_ends_as_an_uninterrupted_one(
    step: int, tmp_path: Path, finished: tuple[Any, dict[str, Any]], whole_run: Path
) -> None:
    """Before the swap, at it, and after it."""
    losses, end = finished
    resumed = fit(module(), tmp_path, swap(), ckpt=whole_run / f"step={step}.ckpt", steps=8)
    assert torch.equal(resumed.losses, losses[step:])
    assert_identical(state(resumed), end)


def swap() -> UpscaleCallback:
    return UpscaleCallback(4, 32, noise=AdditiveNoise(0.01))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def finished(whole_run: Path) -> tuple[Any, dict[str, Any]]:
    run = fit(module(), whole_run, swap(), Checkpoints(whole_run), steps=8, enable_checkpointing=True)
    return run.losses, state(run)


# --- hyperparameters


def test_rates_are_those_of_the_first_width(tmp_path: Path) -> None:
    """Plain by default: as configured before the growth, by Table 1 after it."""
    before, after = (
        fit(module(), tmp_path, steps=1),
        fit(module(), tmp_path, UpscaleCallback(1, 32, noise=None), steps=2),
    )
    assert set(rates(before).values()) == {0.01}
    grown = rates(after)
    assert grown["net.model.model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.005)
    assert grown["net.model.model.embed_tokens.weight"] == 0.01
    assert grown["net.model.lm_head.weight"] == pytest.approx(0.005)
    assert after.module.hparams["base_width"] == 16


@pytest.mark.slow
def test_with_a_base_width_it_trains_under_mup() -> None:
    plain, scaled = module(width=64), module(width=64, base_width=16)
    for each in (plain, scaled):
        torch.manual_seed(0)
        each.configure_model()
    weights = dict(plain.named_parameters())
    ratios = {name: (value.std() / weights[name].std()).item() for name, value in scaled.named_parameters()}
    assert ratios["net.model.model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.5)
    assert ratios["net.model.model.embed_tokens.weight"] == pytest.approx(1)
    assert ratios["net.model.lm_head.weight"] == pytest.approx(0.25)
    groups = scaled.configure_optimizers().param_groups
    assert {group["lr"] for group in groups} == {0.01, 0.0025}


# --- files


@pytest.mark.slow
def test_a_released_folder(released: Path, tmp_path: Path) -> None:
    """A fit starts from its weights, and its checkpoint needs the folder no more."""
    run = tmp_path / "run"
    fit(
        module(config=None, folder=str(released), optimizer=torch.optim.SGD),
        run,
        Checkpoints(run),
        steps=1,
        enable_checkpointing=True,
        precision="32-true",
        limit_train_batches=1,
    )
    first = load_checkpoint(run / "step=1.ckpt")
    assert first["hyper_parameters"]["folder"] is None
    weights = AutoModelForCausalLM.from_pretrained(released, dtype=torch.float32).state_dict()
    moved = {
        name: float((first["state_dict"][f"net.model.{name}"] - value).abs().max()) for name, value in weights.items()
    }
    assert 0 < max(moved.values()) < 0.1
    shutil.rmtree(released)
    loaded = HFCausalLM.load_from_checkpoint(run / "step=1.ckpt", map_location="cpu")
    tokens = rows(loaded, 4, torch.float64)[0]
    assert_identical(
        {name: value for name, value in loaded.state_dict().items() if name.startswith("net.")},
        {name: value for name, value in first["state_dict"].items() if name.startswith("net.")},
    )
    main(["export", str(run / "step=1.ckpt"), "--out", str(tmp_path / "out")])
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out", tokens, torch.float32), loaded.eval()(tokens))


def test_the_command_grows_a_checkpoint_and_exports_it(whole_run: Path, finished: Any, tmp_path: Path) -> None:
    wide = tmp_path / "wide.ckpt"
    main(["upscale", str(whole_run / "step=2.ckpt"), "--width", "32", "--noise", "none", "--out", str(wide)])
    for name, file in (("narrow", whole_run / "step=2.ckpt"), ("wide", wide)):
        main(["export", str(file), "--out", str(tmp_path / name)])
    tokens = rows(module(), 4, torch.float64)[0]
    narrow, grown = (logits(tmp_path / name, tokens) for name in ("narrow", "wide"))
    assert float((narrow - grown).abs().max()) < 1e-10
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["num_attention_heads"] == 8
    assert "exists" in refused("export", str(wide), "--out", str(tmp_path / "wide"))


# --- mistakes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"config": None}, "model.folder or model.config: give a folder"),
    "both": ({"folder": "."}, "model.folder = . has its own configuration"),
    "no folder": ({"config": None, "folder": "nowhere"}, "model.folder: nowhere does not exist"),
    "no type": ({"config": without("model_type")}, "model.config: model_type = None is no model of the transformers"),
    "another type": ({"config": {"model_type": "lama"}}, "model_type = 'lama' is no model of the transformers library"),
    "no language model": ({"config": {"model_type": "vit"}}, "'vit' has no causal language model"),
    "a typo": ({"config": {**LLAMA, "hiden_size": 8}}, "a llama has no field 'hiden_size'"),
    "a text": ({"config": {**LLAMA, "hidden_size": "x"}}, "model.config: these fields do not make a llama"),
    "a width of 0": ({"width": 0}, "model.width must be a whole number of at least 1"),
    "no layers": ({"layers": 0}, "model.layers must be a whole number of at least 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    arguments, message = MISTAKES[name]
    with pytest.raises(UserError) as error:
        module(**{"config": LLAMA} | arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_another_architecture_is_named(whole_run: Path, finished: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"architecture: model.config.num_key_value_heads is 2 there and 4 here$"):
        fit(module({**LLAMA, "num_key_value_heads": 4}), tmp_path, ckpt=whole_run / "step=2.ckpt", steps=8)


def test_a_width_that_is_no_number_of_heads() -> None:
    with pytest.raises(UserError, match=r"model.width = 18: .*intermediate_size = 24 times 9/8|num_attention_heads"):
        module(width=18).configure_model()


BAD_FOLDERS: dict[str, str] = {
    "code": "needs code of its own",
    "other weights": "its weights are not those of its configuration",
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_folders(name: str, released: Path, tmp_path: Path) -> None:
    content = json.loads((released / "config.json").read_text())
    if name == "other weights":
        content["num_hidden_layers"] = 3
    else:
        (released / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
        content["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (released / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=BAD_FOLDERS[name]) as error:
        weights_in(released)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_names_of_code_in_a_configuration_have_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    names = {
        "attn_implementation": "somebody/kernel",
        "_experts_implementation": {"": "somebody/kernel"},
        "auto_map": {"AutoConfig": "evil.Evil"},
    }
    file.write_text(json.dumps({**LLAMA, "transformers_version": "5.0.0", **names}))
    each = module(config=str(file))
    each.configure_model()
    assert isinstance(each.net, CausalLMNet)
    assert each.net.config._attn_implementation == "sdpa"
    assert not hasattr(each.net.config, "auto_map")
    names = {"attribute_map": {"x": "_attn_implementation"}, "x": "somebody/kernel"}
    file.write_text(json.dumps({**LLAMA, "transformers_version": "5.0.0", **names}))
    with pytest.raises(UserError, match="names code from elsewhere"):
        module(config=str(file)).configure_model()


# --- commands


@pytest.fixture
def configuration(in_an_empty_folder: None) -> str:
    config = {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 4,
            "limit_val_batches": 1,
            "val_check_interval": 2,
            "enable_progress_bar": False,
            "callbacks": [{"class_path": "UpscaleCallback", "init_args": {"at_step": 2, "width": 32}}],
        },
        "model": {
            "class_path": "HFCausalLM",
            "init_args": {
                "config": {**LLAMA, "vocab_size": 4096},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
            },
        },
        "data": {"class_path": "FineWeb", "init_args": {"batch_size": 2, "context": 8}},
        "checkpoint": {"every_n_train_steps": 1},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return "config.yaml"


def test_a_vocabulary_that_is_too_small(configuration: str) -> None:
    line = refused("fit", "--config", configuration, "--model.config.vocab_size=100")
    assert "model.config.vocab_size = 100" in line
    assert "the token 4095" in line
    line = refused("fit", "--config", configuration, "--data.context=32")
    assert "data.context = 32: the model has model.config.max_position_embeddings = 16" in line


@pytest.mark.slow
def test_a_run_from_a_folder_goes_on_without_it(configuration: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    save(AutoModelForCausalLM.from_config(config_of({**LLAMA, "vocab_size": 4096})), Path("released"))
    options = ["--config", configuration, "--model.config=null", "--model.folder=released"]
    main(["plan", *options])
    assert "width 16 → 32" in capsys.readouterr().out
    main(["fit", *options])
    run = Path("runs/default/version_0")
    ends = {name: (run / "hf" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    shutil.rmtree("released")
    shutil.rmtree(run / "hf")
    for path in (run / "checkpoints").rglob("*.ckpt"):
        if not path.name.startswith("pre-upscale"):
            path.unlink()
    main(["resume", str(run)])
    assert {name: (run / "hf" / name).read_bytes() for name in ends} == ends
