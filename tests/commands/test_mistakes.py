"""What is about the user's input ends with one line; the user's own code, training and bugs keep their traceback."""

import errno
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, small
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.commands.mistakes import IN_TRAINING, TRACEBACK, line_about


def raised(call: Callable[[], object]) -> Exception:
    """What a call raises, with the traceback that it has in a command."""
    namespace: dict[str, Any] = {"__name__": "mupscale.commands.somewhere", "call": call}
    code = compile(
        "def run():\n    try:\n        call()\n    except Exception as error:\n        return error", "x", "exec"
    )
    exec(code, namespace)
    return namespace["run"]()


def of_library(source: str, module: str = "torch.optim.adam") -> Exception:
    """What code of a library raises."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(f"def call():\n    {source}", "x", "exec"), namespace)
    return raised(namespace["call"])


# --- the rule


def test_what_a_library_raises_is_one_line_with_its_section() -> None:
    line = line_about(of_library("raise RuntimeError('fused and\\n  foreach.')"))
    assert line == f"model.optimizer: fused and foreach (RuntimeError in torch.optim.adam; {TRACEBACK}=1 shows where)"
    line = line_about(of_library("{}['gelu_fsat']", "transformers.activations"))
    assert line is not None
    assert line.startswith("model: there is no 'gelu_fsat' (KeyError in transformers.activations; ")
    assert len(line_about(of_library("raise ValueError('x' * 10_000)")) or "") < 800


def test_what_mupscale_or_the_users_code_raises_keeps_its_traceback() -> None:
    assert line_about(of_library("raise KeyError('bug')", "mupscale.widening.plan")) is None
    assert line_about(of_library("raise RuntimeError('mine')", "my_model")) is None
    assert line_about(raised(lambda: torch.ones(2) @ torch.ones(3))) is None  # of this file, which is no library


def test_what_is_raised_in_training_keeps_its_traceback() -> None:
    for module, expected in (("torch.optim.adam", False), ("torch.optim.lr_scheduler", True)):
        error = of_library("1 / 0", module)
        error.add_note(IN_TRAINING)
        assert (line_about(error) is not None) is expected


def test_memory_and_the_system() -> None:
    assert "does not fit into memory" in (line_about(raised(lambda: bytearray(10**17))) or "")
    huge = raised(lambda: torch.empty(10**16))
    assert "does not fit into memory; choose smaller sizes" in (line_about(huge) or "")
    assert line_about(raised(lambda: open("/nowhere/x"))) == "/nowhere/x: no such file or directory"  # noqa: SIM115
    assert line_about(OSError(errno.ELOOP, "Too many links", "loop")) == "loop: too many links"


def test_the_traceback_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small(Path("c.yaml"))
    both = ["fit", "--config", "c.yaml", "--model.optimizer.fused=true", "--model.optimizer.foreach=true"]
    assert "`fused` and `foreach` cannot be `True` together" in refused(*both)
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(ValueError, match="cannot be `True` together") as caught:
        main(both)
    assert isinstance(caught.value.__cause__, RuntimeError)


# --- mistakes that ended with a traceback


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, a checkpoint of it, and checkpoints that are damaged in various ways."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small(Path("c.yaml"), max_steps=2, enable_progress_bar=False)
        main(["fit", "--config", "c.yaml"])
        whole = next(Path("runs").rglob("resume/*.ckpt"))
        weight = "net.layers.0.weight"
        for name, change in CHECKPOINTS.items():
            content = torch.load(whole, weights_only=True)
            change(content, weight)
            torch.save(content, f"{name}.ckpt")
        whole.rename("base.ckpt")
        Path("shards.ckpt").mkdir()
        torch.save({"state_dict": {}}, "shards.ckpt/meta.pt")
        Path("loop").symlink_to("loop")
        Path("value.yaml").write_text("checkpoint: null\n")
        Path("listed.yaml").write_text("protocol: [upscale]\nconfig: c.yaml\n")
    return folder


CHECKPOINTS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "plain": lambda c, w: [c.pop(key) for key in [*c] if key != "state_dict"],
    "sparse": lambda c, w: c["state_dict"].update({w: c["state_dict"][w].to_sparse()}),
    "shape": lambda c, w: c["state_dict"].update({w: c["state_dict"][w][:3]}),
    "whole": lambda c, w: c["state_dict"].update({w: c["state_dict"][w].int()}),
    "complex": lambda c, w: c["state_dict"].update({w: c["state_dict"][w] * 1j}),
    "lists": lambda c, w: c.update(optimizer_states=[[1, 2]]),
    "state": lambda c, w: c["optimizer_states"][0].update(state=3),
    "step": lambda c, w: c.update(global_step=[1]),
    "loops": lambda c, w: c.update(loops=3),
    "inside": lambda c, w: c["loops"].update(fit_loop=3),
    "callbacks": lambda c, w: c.update(callbacks=[3]),
    "exact": lambda c, w: c["callbacks"].update(ExactResume=3),
}

DENSE = "wanted a dense tensor; use another checkpoint"
OPTIMIZERS = "this checkpoint is damaged: its optimizer state: its values are of another kind"

MISTAKES = {
    "validate --config c.yaml --ckpt_path plain.ckpt": "was not saved by a growable module",
    "validate --config c.yaml --ckpt_path shards.ckpt": "shards.ckpt/.metadata is damaged",
    "validate --config c.yaml --ckpt_path sparse.ckpt": DENSE,
    "validate --config c.yaml --ckpt_path whole.ckpt": "whole numbers in net.layers.0.weight, and the network fr",
    "upscale complex.ckpt --width 16 --out o": "has complex numbers in layers.0.weight",
    "validate --config c.yaml --ckpt_path step.ckpt": "global_step is [1], wanted int",
    "fit --config c.yaml --ckpt_path lists.ckpt": OPTIMIZERS,
    "fit --config c.yaml --ckpt_path state.ckpt": OPTIMIZERS,
    "fit --config c.yaml --ckpt_path loops.ckpt": "loops is 3, wanted dict",
    "fit --config c.yaml --ckpt_path inside.ckpt": "the checkpoint cannot be restored",
    "fit --config c.yaml --ckpt_path callbacks.ckpt": "callbacks is [3], wanted dict",
    "fit --config c.yaml --ckpt_path exact.ckpt": "ExactResume in the checkpoint: its values are of another kind",
    "fit --config c.yaml --model.init_from=sparse.ckpt": DENSE,
    "upscale sparse.ckpt --width 16 --out o": DENSE,
    "upscale shape.ckpt --width 16 --out o": "size mismatch for layers.0.weight",
    "fit --config c.yaml '--data={class_path: FineWeb, init_args: {batch_size: 4, context: 8}}'": "model and data: m",
    f"coord-check --config c.yaml --widths 8,16,32 --steps 1{'0' * 400}": "argument --steps: invalid int value: '10000",
    "plan --config c.yaml --config value.yaml": "checkpoint: wanted options by name, got None",
    "experiment listed.yaml --plan": "listed.yaml: its values are of another kind",
    "fit --config c.yaml --trainer.check_val_every_n_epoch=0": "check_val_every_n_epoch must be at least 1, got 0",
    "fit --config c.yaml --trainer.devices=99": "trainer.devices = 99: on a CPU each device is a process",
    "fit --config c.yaml --model.optimizer.capturable=true": "model.optimizer: If capturable=True",
    "upscale base.ckpt --width 16 --noise 1e308 --out o": "too large for torch.float32, whose largest number",
    "fit --config c.yaml --model.optimizer.differentiable=true": "model.optimizer: a leaf Variable",
    "fit --config c.yaml --model.optimizer=SparseAdam": "model.optimizer: SparseAdam does not support dense gradients",
    "fit --config c.yaml '--model.lr_scheduler={class_path: CosineAnnealingLR, init_args: {T_max: 0}}'": (
        "model.lr_scheduler: integer modulo by zero"
    ),
    "fit --config s3://bucket/c.yaml": "Install s3fs to access S3",
    "fit --config loop": "config: File does not exist",
    "upscale loop --width 16 --out o": "loop",
    "fit --config c.yaml --checkpoint.dirpath=loop": "loop",
    "fit --config c.yaml '--checkpoint.filename={step'": "checkpoint.filename = {step: expected '}' before end",
    "fit --config c.yaml --checkpoint.filename=s3://b/x": "checkpoint.filename = s3://b/x: give a name",
    "fit --config c.yaml '--trainer.logger.flush_secs=[]'": "unsupported operand type",
}
"""Command lines, and what the message must contain."""


@pytest.mark.parametrize("line", slow_except(MISTAKES, *list(MISTAKES)[::4]))
def test_a_mistake_is_one_line(
    line: str, workshop: Path, monkeypatch: pytest.MonkeyPatch, in_an_empty_folder: None
) -> None:
    monkeypatch.chdir(workshop)
    assert MISTAKES[line] in refused(*shlex.split(line))


def test_an_unknown_activation_of_transformers(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    sizes = "hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 4096"
    config = f"{{model_type: llama, {sizes}, num_hidden_layers: 1, hidden_act: gelu_fsat}}"
    model = f"--model={{class_path: HFCausalLM, init_args: {{config: {config}}}}}"
    data = "--data={class_path: FineWeb, init_args: {batch_size: 4, context: 8}}"
    assert "model: there is no 'gelu_fsat'" in refused("fit", "--config", "c.yaml", model, data)


@pytest.mark.slow
def test_the_users_own_code_keeps_its_traceback(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("failing.py").write_text(
        "import torch\n"
        "from mupscale.models.mlp import MLP\n"
        "class Mine(MLP):\n"
        "    def loss(self, batch):\n"
        "        return torch.ones(2) @ torch.ones(3)\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    with pytest.raises(RuntimeError) as caught:
        main(["fit", "--config", small(Path("c.yaml")), "--model=failing.Mine"])
    assert caught.traceback[-1].path.name == "failing.py"
