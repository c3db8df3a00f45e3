"""Bad input of every command and of the library: one line with the remedy, and no file is touched."""

import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import small, upscale
from saved import Change, save_changed, save_gpt2, save_mlp
from torch import nn

import mupscale
from mupscale.__main__ import main
from mupscale.checks.coordinate_check import coord_check
from mupscale.datamodules.covertype import Covertype
from mupscale.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

FAST = {
    "nothing": ("fti", "Did you mean fit?"),
    "no arguments": ("upscale", "required: checkpoint, --out"),
    "a typo": ("upscale mlp.ckpt --width 16 --out o --noies 1", "Did you mean --noise"),
    "a width that is no number": ("upscale mlp.ckpt --width wide --out o", "invalid int value: 'wide'"),
    "width 0": ("upscale mlp.ckpt --width 0 --out o", "--width must be a whole number of at least 1"),
    "the same width": ("upscale mlp.ckpt --width 8 --out o", "give a larger one"),
    "no size": ("upscale mlp.ckpt --out o", "give --width, --layers, or both"),
    "layers of a model that has none": ("upscale mlp.ckpt --layers 9 --out o", "--layers: MLP "),
    "a way to become deeper, and no depth": (
        "upscale mlp.ckpt --width 16 --depth stack --out o",
        "--depth stack says how a model becomes deeper: give --layers too",
    ),
    "a huge width": (
        "upscale mlp.ckpt --width 99999999999 --out o",
        "does not fit into memory; choose a smaller width",
    ),
    "two widths for three layers": ("upscale mlp.ckpt --width 16 16 --out o", "Build both with the same depth"),
    "--out in a file": ("upscale mlp.ckpt --width 16 --out text.txt/o", "text.txt is not a folder"),
    "--out is a folder": ("upscale mlp.ckpt --width 16 --out folder --force", "folder is a folder; name a file in it"),
    "--out is read-only": ("upscale mlp.ckpt --width 16 --out /proc/o", "/proc cannot be written to"),
    "--out is the input": ("upscale mlp.ckpt --width 16 --out mlp.ckpt --force", "name another file"),
    "--out is a link to the input": ("upscale mlp.ckpt --width 16 --out link.ckpt --force", "name another file"),
    "--out exists": ("upscale mlp.ckpt --width 16 --out text.txt", "--force overwrites it"),
    "--centred without noise": ("upscale mlp.ckpt --width 16 --out o --centred", "--noise auto is centred already"),
    "--save-noise is --out": ("upscale mlp.ckpt --width 16 --out o --noise 1 --save-noise o", "is --out itself"),
    "--save-noise without noise": (
        "upscale mlp.ckpt --width 16 --out o --noise none --save-noise n.json",
        "leave --noise none",
    ),
    "noise nan": ("upscale mlp.ckpt --width 16 --out o --noise nan", "std must be a finite number of at least 0"),
    "no noise file": ("upscale mlp.ckpt --width 16 --out o --recorded-noise text.txt", "cannot be read as recorded"),
    "no whole factor": ("upscale gpt2.ckpt --width 12 --out o", "Grow this width by a whole factor, such as to 16"),
    "half a head": ("upscale gpt2.ckpt --width 8 10 32 --out o", "10 is not divisible by a head_dim of 4"),
    "a method that learns": (
        "upscale mlp.ckpt --width 16 --out o --method ligo",
        "Use it in a run, as UpscaleCallback",
    ),
    "no checkpoint": ("upscale no.ckpt --width 16 --out o", "name a file that exists"),
    "half a checkpoint": ("upscale half.ckpt --width 16 --out o", "half.ckpt is not a checkpoint, or is damaged"),
    "a checkpoint that is a folder": ("upscale folder --width 16 --out o", "name a checkpoint file"),
    "a run that is a file": ("resume text.txt", "is not the folder of a run"),
    "prepare without a kind": ("prepare", "--help lists the options"),
    "an experiment that is a folder": ("experiment folder", "name the YAML file of an experiment"),
}
"""Command lines, and what the message must contain."""

CSV_LOGGER = "--trainer.logger=CSVLogger --trainer.logger.save_dir=csv --trainer.logger"
FINEWEB = "{class_path: FineWeb, init_args: {batch_size: 4, context: 8}}"
SIZES = "hidden_size: 16, intermediate_size: 16, num_attention_heads: 2, num_hidden_layers: 1, vocab_size: 4096"
LLAMA = f"{{class_path: HFCausalLM, init_args: {{config: {{model_type: llama, {SIZES}, hidden_act: gelu_fsat}}}}}}"

COMMANDS = {
    # fit, validate, test, predict
    "fit without anything": ("fit", "give --config FILE, or --model and --data"),
    "fit: no configuration": ("fit --config no.yaml", "File does not exist"),
    "fit: a configuration of bytes": ("fit --config bytes.yaml", "config: bytes.yaml is not YAML that can be read"),
    "fit: an option that is none": ("fit --config c.yaml extra", "--help lists the options"),
    "fit: batch size 0": ("fit --config c.yaml --data.batch_size=0", "data.batch_size must be a whole number"),
    "fit: no layers": ("fit --config c.yaml --model.hidden_layers=null", "model.hidden_layers must be a whole number"),
    "fit: too few inputs": ("fit --config c.yaml --model.inputs=53", "set model.inputs: 54"),
    "fit: no widths": ("fit --config c.yaml --model.width=[]", "model.width must be a whole number of at least 1"),
    "fit: a seed below 0": ("fit --config c.yaml --seed_everything=-5", "from 0 to 4294967295, got -5"),
    "fit: no accumulation": ("fit --config c.yaml --trainer.accumulate_grad_batches=0", "must be at least 1, got 0"),
    "fit: checkpoints nowhere": (
        "fit --config c.yaml --checkpoint.dirpath=/proc/x",
        "checkpoint.dirpath: /proc cannot",
    ),
    "fit: a run nowhere": ("fit --config c.yaml --trainer.logger.save_dir=/proc/x", "trainer.logger.save_dir: /proc"),
    "fit: the last checkpoint": ("fit --config c.yaml --ckpt_path=last", "mupscale resume"),
    "fit: a folder of runs": ("fit --config c.yaml --ckpt_path=.", "mupscale resume ."),
    "fit: no base": ("fit --config c.yaml --model.init_from=no.ckpt", "name a file that exists"),
    "fit: lr null": ("fit --config c.yaml --model.optimizer.lr=null", "model.optimizer.lr: Expected a float; "),
    "fit: two upscales at one step": ("fit --config twice.yaml", "at_step = 5: two growths to width 16 and to width"),
    "plan: one upscale twice": (
        "plan --config twice.yaml --trainer.callbacks.init_args.width=16",
        "at_step = 5: two growths to width 16, twice",
    ),
    "validate without a checkpoint": ("validate --config c.yaml", "--ckpt_path runs/NAME"),
    "test without a checkpoint": ("test --config c.yaml", "test needs a checkpoint"),
    "predict from a base": ("predict --config c.yaml --model.init_from=base.ckpt", "--ckpt_path base.ckpt"),
    "validate: another architecture": (
        "validate --config c.yaml --ckpt_path mlp.ckpt --model.hidden_layers=5",
        "model.hidden_layers is 3 there and 5 here",
    ),
    "validate: a malformed checkpoint": ("validate --config c.yaml --ckpt_path weights.ckpt", "wanted a dense tensor"),
    "validate: not ours": ("validate --config c.yaml --ckpt_path foreign.ckpt", "use a checkpoint of a mupscale run"),
    # plan, verify
    "plan: never reached": ("plan --config grown.yaml --trainer.max_steps=3", "UpscaleCallback.at_step = 5 is never"),
    "plan: no such method": ("plan --config grown.yaml '--callback_args={UpscaleCallback: {method: Lmon}}'", "Lmon"),
    "plan: no next layer": (
        "plan --config grown.yaml --model.hidden_layers=2 '--callback_args={UpscaleCallback: {method: AKI}}'",
        "AKI: no layer of MLPNet has a next one of the same shape to take new units from. Use FPI",
    ),
    "plan: Adadelta": ("plan --config c.yaml --model.optimizer=Adadelta", "Train with one of Adagrad, Adam"),
    "verify: a list": ("verify --config list.yaml", "give a YAML file with keys (model:, data:, trainer:)"),
    "verify: no data": ("verify --config c.yaml --data.data_dir=/proc/x", "data_dir: /proc/x"),
    # coord-check
    "coord-check: no widths": ("coord-check --config c.yaml", "one of the arguments --widths --layers is required"),
    "coord-check: no steps": ("coord-check --config c.yaml --widths 8,16,32 --steps 0", "steps must be a whole number"),
    "coord-check: --out is a file": ("coord-check --config c.yaml --widths 8,16,32 --out text.txt", "name a folder"),
    # sweep
    "sweep: nan": ("sweep --config c.yaml --out s --sweep model.optimizer.lr=.nan,0.1", "values must be finite"),
    "sweep: a mapping": ("sweep --config c.yaml --out s --sweep 'model.width={a: 1}'", "give LOW:HIGH:N, or values"),
    "sweep: a stack": (
        "sweep --config c.yaml --out s --sweep model.width=8 --stack x",
        "--stack x: give auto, off, or",
    ),
    "sweep: a typo": ("sweep --config c.yaml --out s --sweep modle.width=8", "a key starts with one of"),
    # experiment
    "experiment: seeds": ("experiment seeds.yaml --plan", "is not from 0 to 4294967295"),
    "experiment: noise": ("experiment noise.yaml --plan", "noise: give class_path and init_args of a Noise"),
    # report, prepare, export, resume
    "report: a configuration that is a list": (
        "report listed",
        "is not the configuration of a run: its values are of another kind",
    ),
    "prepare: no threads": (
        "prepare text a.txt --vocab 300 --out p --workers 0",
        "--workers must be at least 1, got 0",
    ),
    "prepare: deep JSON": ("prepare text deep.jsonl --vocab 300 --out p", "is not a JSON object with a string `text`"),
    "export: another model": ("export mlp.ckpt --out o", "only those of HFCausalLM can be exported"),
    "export: a folder that exists": ("export mlp.ckpt --out folder", "name another folder, or delete it"),
    "resume: no checkpoint": ("resume listed", "has no checkpoint that can be read"),
    "resume: a typo": ("resume run --trainer.max_stps=4", "Did you mean trainer.max_steps"),
    # checkpoints that are damaged
    "validate: a folder": ("validate --config c.yaml --ckpt_path shards.ckpt", "shards.ckpt/.metadata is damaged"),
    "validate: whole numbers": (
        "validate --config c.yaml --ckpt_path whole.ckpt",
        "whole numbers in net.layers.0.weight, and the network fr",
    ),
    "validate: a step": ("validate --config c.yaml --ckpt_path step.ckpt", "global_step must be a whole number of"),
    "fit: optimizers": ("fit --config c.yaml --ckpt_path lists.ckpt", "its optimizer state: its values are of another"),
    "fit: loops": ("fit --config c.yaml --ckpt_path inside.ckpt", "the checkpoint cannot be restored"),
    "fit: a tensor for a value": ("fit --config c.yaml --ckpt_path tensor.ckpt", "configuration in the checkpoint is"),
    "fit: callbacks": ("fit --config c.yaml --ckpt_path callbacks.ckpt", "callbacks is [3], wanted dict"),
    "fit: a callback": ("fit --config c.yaml --ckpt_path exact.ckpt", "ExactResume in the checkpoint: its values are"),
    "fit: a sparse base": ("fit --config c.yaml --model.init_from=sparse.ckpt", "wanted a dense tensor; use another"),
    "upscale: complex numbers": ("upscale complex.ckpt --width 16 --out o", "has complex numbers in layers.0.weight"),
    "upscale: another shape": ("upscale shape.ckpt --width 16 --out o", "size mismatch for layers.0.weight"),
    "upscale: too much noise": ("upscale base.ckpt --width 16 --noise 1e308 --out o", "too large for torch.float32"),
    # what only a library can judge
    "fit: other data": (f"fit --config c.yaml '--data={FINEWEB}'", "model and data: m"),
    "fit: an activation": (f"fit --config c.yaml '--data={FINEWEB}' '--model={LLAMA}'", "there is no 'gelu_fsat'"),
    "coord-check: many steps": (
        f"coord-check --config c.yaml --widths 8,16,32 --steps 1{'0' * 400}",
        "argument --steps: invalid int value: '10000",
    ),
    "plan: no options": ("plan --config c.yaml --config value.yaml", "checkpoint: wanted options by name, got None"),
    "experiment: a list": ("experiment listed.yaml --plan", "listed.yaml: an experiment has the keys config, small"),
    "fit: no validation": (
        "fit --config c.yaml --trainer.check_val_every_n_epoch=0",
        "check_val_every_n_epoch must be at least 1, got 0",
    ),
    "fit: an optimizer for GPUs": (
        "fit --config c.yaml --model.optimizer.capturable=true",
        "model.optimizer: If capturable=True",
    ),
    "fit: gradients of gradients": (
        "fit --config c.yaml --model.optimizer.differentiable=true",
        "model.optimizer: a leaf Variable",
    ),
    "fit: sparse gradients": (
        "fit --config c.yaml --model.optimizer=SparseAdam",
        "model.optimizer: SparseAdam does not support dense gradients",
    ),
    "fit: a schedule of no steps": (
        "fit --config c.yaml '--model.lr_scheduler={class_path: CosineAnnealingLR, init_args: {T_max: 0}}'",
        "model.lr_scheduler: integer modulo by zero",
    ),
    "fit: a bucket": ("fit --config s3://bucket/c.yaml", "Install s3fs to access S3"),
    "fit: a loop of links": ("fit --config loop", "config: File does not exist"),
    "upscale: a loop of links": ("upscale loop --width 16 --out o", "loop"),
    "fit: checkpoints in a loop": ("fit --config c.yaml --checkpoint.dirpath=loop", "loop"),
    "fit: half a pattern": ("fit --config c.yaml '--checkpoint.filename={step'", "= {step: expected '}' before end"),
    "fit: a name elsewhere": ("fit --config c.yaml --checkpoint.filename=s3://b/x", "= s3://b/x: give a name"),
    "fit: no loggers": ("fit --config c.yaml --trainer.logger=[] --model.inputs=53", "set model.inputs: 54"),
    "fit: a folder without a logger": (
        "fit --config c.yaml --trainer.logger=false --model.inputs=53",
        "set model.inputs: 54",
    ),
    "fit: a table that is never written": (
        f"fit --config c.yaml {CSV_LOGGER}.flush_logs_every_n_steps=0",
        "trainer.logger.flush_logs_every_n_steps must be a whole number of at least 1, got 0",
    ),
    "fit: a profile nowhere": (
        "fit --config c.yaml --trainer.profiler=PyTorchProfiler --trainer.profiler.dirpath=/proc/x",
        "trainer: PyTorchProfiler.dirpath: /proc cannot be written to",
    ),
    "fit: no time": ("fit --config c.yaml --trainer.max_time=00:00:00:00", "trainer.max_time = 0:00:00: the run would"),
    "fit: less time": ("fit --config c.yaml '--trainer.max_time={minutes: -3}'", "trainer.max_time = -1 day, 23:57:00"),
    "predict: nowhere": (
        "predict --config c.yaml --ckpt_path base.ckpt --trainer.logger=false --trainer.default_root_dir=/proc/x",
        "the predictions: /proc cannot be written to",
    ),
    "plan: a checkpoint": ("plan --config c.yaml --ckpt_path base.ckpt", "this command reads no checkpoint; leave"),
    "fit: an optimizer's state": ("fit --config c.yaml --ckpt_path entry.ckpt", "the optimizer state is {'a': {}}"),
    "fit: a huge step": ("fit --config c.yaml --ckpt_path huge.ckpt", "damaged: global_step must be a whole number"),
    "fit: an epoch": ("fit --config c.yaml --ckpt_path epoch.ckpt", "damaged: epoch must be a whole number of at"),
    "upscale: a huge step": ("upscale huge.ckpt --width 16 --out o", "damaged: global_step must be a whole number"),
    "upscale: a folder to /": ("upscale . --factor 2 --out /", "error: "),
    "fit: a logger's number": ("fit --config c.yaml '--trainer.logger.flush_secs=[]'", "flush_secs must be a finite"),
}
"""More of them, which take longer."""

OPTIMIZER, NOISE = "--model.optimizer", "--trainer.callbacks.init_args.noise"
NUMBERS = {
    f"{OPTIMIZER}.lr=.nan": "model.optimizer: Invalid learning rate: nan",
    f"{OPTIMIZER}.lr=.inf": "model.optimizer: lr of AdamW must be a finite number of at least 0, got inf",
    f"{OPTIMIZER}.betas=[0.9,-0.1]": "model.optimizer: Invalid beta parameter at index 1: -0.1",
    "--model.lr_scheduler=ExponentialLR --model.lr_scheduler.gamma=.nan": "model.lr_scheduler.gamma must be a finite",
    "--trainer.gradient_clip_val=-1": "trainer.gradient_clip_val must be at least 0, got -1",
    "--trainer.max_steps=0": "trainer.max_steps = 0: the run would train nothing",
    "--trainer.limit_train_batches=0": "trainer.limit_train_batches = 0: the run would train nothing",
    "--trainer.callbacks.init_args.lr=.nan": "UpscaleCallback.lr must be positive and finite, got nan",
    "--trainer.callbacks.init_args.width=0": "UpscaleCallback.width must be a whole number",
    f"--trainer.callbacks.init_args.width=1{'0' * 400}": "UpscaleCallback.width must be a whole number",
    f"{NOISE}.init_args.std=.nan": "UpscaleCallback.noise: AdditiveNoise: std must be a finite number",
}
"""Options of `fit`, which are refused before data is loaded."""

SWEEP = {"UpscaleCallback.noise.std": [0.1, 0.2]}
EXPERIMENTS: dict[str, dict[str, Any]] = {"seeds": {"seeds": [-1]}, "noise": {"noise": 0.1}}
"""What is wrong with each file of an experiment."""


def in_optimizer(**values: Any) -> Change:
    return lambda checkpoint: checkpoint["optimizer_states"][0].update(values)


def in_group(**values: Any) -> Change:
    return lambda checkpoint: checkpoint["optimizer_states"][0]["param_groups"][0].update(values)


def in_arguments(**values: Any) -> Change:
    return lambda checkpoint: checkpoint["hyper_parameters"].update(values)


CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "foreign": (lambda checkpoint: checkpoint.pop("mupscale"), "use a checkpoint of a mupscale run"),
    "weights": (lambda checkpoint: checkpoint["state_dict"].update({"net.x": 3}), "wanted a dense tensor"),
    "no weights": (lambda checkpoint: checkpoint.pop("state_dict"), "it is empty, or quantised"),
    "no groups": (in_optimizer(param_groups=None), "its optimizer state: its values are of another kind"),
    "another state": (in_optimizer(state={"a": {}}), "the optimizer state is {'a': {}}, wanted a dict for each of"),
    "no state": (in_optimizer(state=[1]), "its optimizer state: its values are of another kind"),
    "numbers beyond": (in_group(params=[999]), "wanted each of 0 to 7 once"),
    "lr of text": (in_group(lr="fast"), "lr of param_groups must be a finite number of at least 0, got 'fast'"),
    "not muP": (in_group(source_group=[1]), "--no-optimizer leaves its state out"),
    "two optimizers": (lambda checkpoint: checkpoint["optimizer_states"].append({}), "of 2 optimizers"),
    "width of text": (in_arguments(width="8"), "width is '8', wanted int or list or tuple"),
    "a huge width": (in_arguments(width=10**12), "does not fit into memory"),
    "layers of text": (in_arguments(hidden_layers="many"), "model.hidden_layers must be a whole number"),
    "another argument": (in_arguments(nonsense=1), "hyper_parameters do not fit MLP: "),
    "a weight too few": (
        lambda checkpoint: checkpoint["state_dict"].pop("net.readout.weight"),
        "weights are not those of a MLP: ",
    ),
    "schedules": (lambda checkpoint: checkpoint.update(lr_schedulers=3), "lr_schedulers is 3, wanted list"),
}
"""How a checkpoint for `upscale` is malformed, and what the message must contain."""


def weight(change: Callable[[torch.Tensor], torch.Tensor], name: str = "net.layers.0.weight") -> Change:
    return lambda checkpoint: checkpoint["state_dict"].update({name: change(checkpoint["state_dict"][name])})


DAMAGED: dict[str, Change] = {
    "sparse": weight(lambda tensor: tensor.to_sparse()),
    "shape": weight(lambda tensor: tensor[:3]),
    "whole": weight(lambda tensor: tensor.int()),
    "complex": weight(lambda tensor: tensor * 1j),
    "lists": lambda checkpoint: checkpoint.update(optimizer_states=[[1, 2]]),
    "step": lambda checkpoint: checkpoint.update(global_step=[1]),
    "huge": lambda checkpoint: checkpoint.update(global_step=2**70),
    "epoch": lambda checkpoint: checkpoint.update(epoch="x"),
    "entry": in_optimizer(state={"a": {}}),
    "inside": lambda checkpoint: checkpoint["loops"].update(fit_loop=3),
    "tensor": lambda checkpoint: checkpoint["mupscale_run"]["config"].update(seed_everything=torch.ones(2)),
    "callbacks": lambda checkpoint: checkpoint.update(callbacks=[3]),
    "exact": lambda checkpoint: checkpoint["callbacks"].update(ExactResume=3),
}
"""How a checkpoint of a run of c.yaml is."""


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def with_rate(rate: float) -> mupscale.UpscaleReport:
    narrow = net()
    optimizer = adam(narrow)
    optimizer.param_groups[0]["lr"] = rate
    return mupscale.upscale(narrow, net(16), optimizer)


def verified(**arguments: Any) -> mupscale.Verdict:
    right: dict[str, Any] = {
        "narrow": net(),
        "wide": net(16),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batches": [torch.ones(2, 4)],
        "loss": lambda model, batch: model(batch).square().mean(),
        "steps": 1,
    }
    return mupscale.verify(**right | arguments)


def coordinates(**arguments: Any) -> Any:
    right: dict[str, Any] = {
        "network": net,
        "widths": [4, 8, 16],
        "optimizer": adam,
        "batches": [torch.ones(2, 4)],
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    return coord_check(**right | arguments)


class Packed(nn.Module):
    """As GPTQ packs weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.register_buffer("qweight", torch.zeros(width, 4, dtype=torch.int32))


class EightBits(nn.Module):
    """As bitsandbytes keeps weights."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 4, dtype=dtype), requires_grad=False)


class AffineQuantizedTensor(torch.Tensor):
    """As torchao names its tensors."""


def affine(width: int) -> nn.Module:
    module = nn.Linear(4, width)
    module.weight = nn.Parameter(torch.zeros(width, 4).as_subclass(AffineQuantizedTensor))
    return module


LIBRARY: dict[str, tuple[Callable[[], Any], str]] = {
    "plan of None": (lambda: mupscale.plan(None, net()), "Pass the network itself"),
    "plan of int8": (
        lambda: mupscale.plan(EightBits(8, torch.int8), EightBits(16, torch.int8)),
        "Take the model as it was before",
    ),
    "plan of packed weights": (lambda: mupscale.plan(Packed(8), Packed(16)), "Take the model as it was before"),
    "plan of quantised tensors": (lambda: mupscale.plan(affine(8), affine(16)), "Take the model as it was before"),
    "upscale with a class": (lambda: mupscale.upscale(net(), net(16), torch.optim.SGD), "or a list of them"),
    "upscale with lr nan": (lambda: with_rate(math.nan), "lr of AdamW must be a finite number"),
    "upscale with no hints": (lambda: mupscale.upscale(net(), net(16), hints=3), "hints must be mupscale.Hints"),
    "upscale with another plan": (
        lambda: mupscale.upscale(net(), net(32), plan=mupscale.plan(net(), net(16))),
        "Make a new one",
    ),
    "upscale with a plan and a depth": (
        lambda: mupscale.upscale(net(), net(16), plan=mupscale.plan(net(), net(16)), depth="stack"),
        "give hints and depth to mupscale.plan",
    ),
    "noise saved nowhere": (lambda: mupscale.upscale(net(), net(16)).save_noise("/proc/n"), "name another file"),
    "verify None": (lambda: verified(narrow=None), "verify: narrow must be a torch.nn.Module"),
    "verify on meta": (lambda: verified(narrow=net().to("meta")), "build it on the CPU"),
    "verify with a loss of many": (lambda: verified(loss=lambda model, batch: model(batch)), "one element"),
    "verify with a clip of text": (lambda: verified(clip="x"), "clip must be a finite number"),
    "coordinates of one network": (lambda: coordinates(network=lambda width: net()), "it must use its width"),
}
"""Library calls, and what the message must contain."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the tables name."""
    folder = tmp_path_factory.mktemp("workshop")
    save_mlp(folder / "mlp.ckpt")
    for name, (change, _) in CHECKPOINTS.items():
        save_changed(folder / "mlp.ckpt", folder / f"{name}.ckpt", change)
    save_gpt2(folder / "gpt2.ckpt")
    (folder / "link.ckpt").symlink_to("mlp.ckpt")
    whole = (folder / "mlp.ckpt").read_bytes()
    (folder / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    small(folder / "c.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", "--config", "c.yaml", "--trainer.max_steps=2", "--trainer.enable_progress_bar=false"])
    next((folder / "runs").rglob("resume/*.ckpt")).rename(folder / "base.ckpt")
    shutil.rmtree(folder / "runs")
    for name, change in DAMAGED.items():
        save_changed(folder / "base.ckpt", folder / f"{name}.ckpt", change)
    (folder / "shards.ckpt").mkdir()
    torch.save({"state_dict": {}}, folder / "shards.ckpt/meta.pt")
    (folder / "loop").symlink_to("loop")
    (folder / "value.yaml").write_text("checkpoint: null\n")
    (folder / "listed.yaml").write_text("- config: c.yaml\n")
    small(folder / "grown.yaml", upscale(5, 16))
    small(folder / "twice.yaml", upscale(5, 16), upscale(5, 32))
    noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
    right = {"config": "c.yaml", "small": [8, 16], "target": [16, 32], "seeds": [0]}
    for name, change in EXPERIMENTS.items():
        content = right | {"noise": noise, "sweep_2": SWEEP} | change
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    for name in ("folder", "listed", "run"):
        (folder / name).mkdir()
    (folder / "text.txt").write_text("plain")
    (folder / "folder" / "text.txt").write_text("plain")
    (folder / "bytes.yaml").write_bytes(bytes(range(256)))
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (folder / "listed" / "config.yaml").write_text("- 1\n")
    shutil.copy(folder / "c.yaml", folder / "run" / "config.yaml")
    shutil.copy(folder / "mlp.ckpt", folder / "run" / "step=1.ckpt")
    return folder


@pytest.fixture
def inside(workshop: Path, in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(workshop)
    before = contents(workshop)
    yield workshop
    assert contents(workshop) == before


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path in a folder, and the bytes of the files."""
    paths = sorted(folder.rglob("*"))
    return {str(path): None if path.is_symlink() or path.is_dir() else path.read_bytes() for path in paths}


def assert_refused(command: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(shlex.split(command))
    message = exit.value.code
    assert isinstance(message, str)  # which python prints, and exits with 1
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    assert remedy in message
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", FAST)
def test_a_mistake_is_refused(name: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(*FAST[name], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_more_mistakes_are_refused(name: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(*COMMANDS[name], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("options", NUMBERS)
def test_numbers_that_make_no_sense_are_refused_before_data_is_loaded(
    options: str, inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prepare_data", "setup"):
        monkeypatch.setattr(Covertype, name, lambda *_: pytest.fail("data was loaded"))
    assert_refused(f"fit --config grown.yaml {options}", NUMBERS[options], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_malformed_checkpoint_is_refused(name: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(f"upscale '{name}.ckpt' --width 16 --noise 0.1 --out o.ckpt", CHECKPOINTS[name][1], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
def test_a_library_call_is_refused(name: str, inside: Path) -> None:
    call, remedy = LIBRARY[name]
    with pytest.raises(UserError) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1
    assert remedy in str(caught.value)
