"""Configurations whose runs are killed and resumed: one with everything at once, and variants of a smaller one."""

from typing import Any

NOISE = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
SCHEDULES = "torch.optim.lr_scheduler"
CALLBACKS = "lightning.pytorch.callbacks"
EMA = {"class_path": f"{CALLBACKS}.EMAWeightAveraging", "init_args": {"decay": 0.9}}


def swap(at_step: int = 5, width: Any = 8, **arguments: Any) -> dict[str, Any]:
    return {
        "class_path": "UpscaleCallback",
        "init_args": {"at_step": at_step, "width": width, "noise": NOISE, **arguments},
    }


def deeper(at_step: int, layers: int, **arguments: Any) -> dict[str, Any]:
    return made("UpscaleCallback", at_step=at_step, layers=layers, **arguments)


def made(class_path: str, /, **arguments: Any) -> dict[str, Any]:
    """An object of a configuration."""
    return {"class_path": class_path, "init_args": arguments}


def checkpoints(**arguments: Any) -> dict[str, Any]:
    """Settings of the run's own checkpoints."""
    return {f"checkpoint.{name}": value for name, value in arguments.items()}


TENSORBOARD = made("mupscale.callbacks.tensorboard.LossFirstLogger", save_dir="WORK", name="run", version=0)
CSV = made("CSVLogger", save_dir="WORK", name="run", version=0, flush_logs_every_n_steps=2)

BASE: dict[str, Any] = {
    "seed_everything": 3,
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 10,
    "trainer.log_every_n_steps": 2,
    "trainer.val_check_interval": 3,
    "trainer.check_val_every_n_epoch": None,
    "trainer.num_sanity_val_steps": 0,
    "trainer.enable_progress_bar": False,
    "trainer.default_root_dir": "WORK/root",
    "trainer.logger": TENSORBOARD,
    "trainer.callbacks": [swap()],
    "model.class_path": "interrupted.DropoutMLP",
    "model.init_args": {"width": 4, "base_width": 4, "inputs": 6, "outputs": 3},
    "model.init_args.optimizer": made("torch.optim.AdamW", lr=0.01),
    "data": made("attack_classes.Rows"),
    "checkpoint.every_n_train_steps": 2,
}
"""Every run is of ten steps, four of them an epoch, with one swap in the middle of an epoch and no other option; WORK
is the folder of a case. Keys of a lower level come later, and override."""

BACKGROUND = "in the background"
"""Ends the names of variants whose checkpoints a thread writes, slowly, while the run trains."""

ALL_AT_ONCE: dict[str, Any] = {
    "trainer.max_steps": 12,
    "trainer.log_every_n_steps": 3,
    "trainer.val_check_interval": 4,
    "trainer.gradient_clip_val": 0.5,
    "trainer.callbacks": [swap(4), swap(7, 16), EMA],
    "model.init_args.lr_scheduler": made(f"{SCHEDULES}.CosineAnnealingLR", T_max=12),
    "checkpoint.every_n_train_steps": 3,
}

EVERYTHING: dict[str, dict[str, Any]] = {"everything": ALL_AT_ONCE, f"everything, {BACKGROUND}": ALL_AT_ONCE}
"""Two noisy swaps, EMA, dropout, schedule and clipping; killed at its every file operation."""

SGD = made("torch.optim.SGD", lr=0.1, momentum=0.9)
LISTS = {"width": [4, 8], "base_width": [4, 4], "inputs": 6, "outputs": 3}
GPT2 = {"width": 8, "base_width": 4, "layers": 1, "heads": 2, "vocabulary": 11, "context": 8}
DEEP = GPT2 | {"layers": 2, "base_layers": 2}
PLATEAU = made("lightning.pytorch.cli.ReduceLROnPlateau", monitor="val/loss", factor=0.5, patience=0, threshold=10.0)
STOPPING = made(f"{CALLBACKS}.EarlyStopping", monitor="val/loss", patience=3, min_delta=10.0)
OTHER_CHECKPOINTS = made(
    f"{CALLBACKS}.ModelCheckpoint",
    monitor="val/loss",
    filename="best-{step}",
    save_top_k=2,
    auto_insert_metric_name=False,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "widths as lists": {"model.init_args": LISTS, "trainer.callbacks": [swap(5, [8, 16])]},
    "ResNet, SGD with momentum": {
        "model.class_path": "ResNet18",
        "model.init_args": {"width": 2, "base_width": 2, "outputs": 3},
        "model.init_args.optimizer": SGD,
        "data": made("attack_classes.Rows", model="resnet"),
        "trainer.callbacks": [swap(5, 4)],
    },
    "GPT-2, warm-up": {
        "model.class_path": "GPT2",
        "model.init_args": GPT2,
        "model.init_args.lr_scheduler": made("attack_classes.WarmUp", steps=4, total=10),
        "data": made("attack_classes.Rows", model="gpt2"),
        "trainer.callbacks": [swap(5, 16)],
    },
    "deeper, then deeper and wider": {
        "model.class_path": "GPT2",
        "model.init_args": DEEP,
        "model.init_args.lr_scheduler": made("attack_classes.WarmUp", steps=4, total=10),
        "data": made("attack_classes.Rows", model="gpt2"),
        "trainer.callbacks": [EMA, deeper(4, 4), deeper(6, 8, depth="interleave", width=16, noise=NOISE)],
    },
    "random layers": {
        "model.class_path": "GPT2",
        "model.init_args": DEEP,
        "data": made("attack_classes.Rows", model="gpt2"),
        "trainer.callbacks": [deeper(5, 4, depth="random")],
    },
    "SGD": {"model.init_args.optimizer": made("torch.optim.SGD", lr=0.1)},
    "Adam, plateau": {
        "model.init_args.optimizer": made("torch.optim.Adam", lr=0.01),
        "model.init_args.lr_scheduler": PLATEAU,
    },
    "accumulation": {"trainer.accumulate_grad_batches": 2, "trainer.val_check_interval": 4},
    "EMA, cosine": {
        "trainer.callbacks": [EMA, swap()],
        "model.init_args.lr_scheduler": made(f"{SCHEDULES}.CosineAnnealingLR", T_max=10),
    },
    "validation every second epoch": {"trainer.check_val_every_n_epoch": 2, "trainer.val_check_interval": 1.0},
    "epochs, early stopping": {
        "trainer.max_steps": -1,
        "trainer.max_epochs": 5,
        "trainer.check_val_every_n_epoch": 1,
        "trainer.val_check_interval": 0.5,
        "trainer.callbacks": [swap(), STOPPING],
    },
    "checkpoints by epochs": checkpoints(every_n_train_steps=None, every_n_epochs=1),
    "checkpoints by time": checkpoints(every_n_train_steps=None, train_time_interval="0:00:00"),
    "monitor, best": checkpoints(monitor="val/loss"),
    "monitor, best two, maximised": checkpoints(monitor="val/accuracy", mode="max", save_top_k=2),
    "fixed filename": checkpoints(filename="newest"),
    "save_top_k -1": checkpoints(save_top_k=-1),
    "save_top_k 0": checkpoints(save_top_k=0),
    "save_last false": checkpoints(save_last=False),
    "save_last true": checkpoints(save_last=True, save_top_k=-1),
    "weights only": checkpoints(save_weights_only=True),
    "dirpath elsewhere": checkpoints(dirpath="WORK/elsewhere"),
    "no logger": {"trainer.logger": False},
    "CSV": {"trainer.logger": CSV},
    "two loggers": {"trainer.logger": [TENSORBOARD, CSV]},
    "two ModelCheckpoints": {"trainer.callbacks": [swap(), OTHER_CHECKPOINTS]},
    "swap at step 0": {"trainer.callbacks": [swap(0)]},
    "swap after an epoch": {"trainer.callbacks": [swap(4)]},
    "swaps in neighbouring steps": {"trainer.callbacks": [swap(5), swap(6, 16)]},
    "swap restarts the schedule": {
        "trainer.callbacks": [swap(restart_schedule=True)],
        "model.init_args.lr_scheduler": made(f"{SCHEDULES}.CosineAnnealingLR", T_max=10),
    },
    "swap with another rate": {"trainer.callbacks": [swap(lr=0.003)]},
    "swap without state": {"trainer.callbacks": [swap(transfer_state="reset")]},
    "swap with noise by signal": {"trainer.callbacks": [swap(noise=made("mupscale.SignalNoise", t=0.1))]},
    "workers": {"data": made("attack_classes.Rows", workers=2)},
    "frozen layers": {"model.class_path": "attack_classes.FrozenMLP"},
    "loop options": {"loop.tf32": True, "loop.cuda_graph": True},
    "numbered by the logger": {"trainer.logger": made("TensorBoardLogger", save_dir="WORK", name="run")},
    "TMPDIR on another file system": {},
    **{
        f"{name}, {BACKGROUND}": changes
        for name, changes in {
            "monitor, best": checkpoints(monitor="val/loss"),
            "save_top_k -1": checkpoints(save_top_k=-1),
            "dirpath elsewhere": checkpoints(dirpath="WORK/elsewhere"),
            "every step": checkpoints(every_n_train_steps=1),
            "two ModelCheckpoints": {"trainer.callbacks": [swap(), OTHER_CHECKPOINTS]},
        }.items()
    },
}
"""What differs from BASE."""


def configuration(variant: str, work: str) -> dict[str, Any]:
    """The configuration of a variant, or of `everything`, with its files in `work`."""
    answer: dict[str, Any] = {}
    for key, value in {**BASE, **(EVERYTHING | VARIANTS)[variant]}.items():
        *outer, last = key.split(".")
        section = answer
        for name in outer:
            section = section.setdefault(name, {})
        section[last] = placed(value, work)
    return answer


def placed(value: Any, work: str) -> Any:
    """A value of a configuration with WORK replaced in all its texts."""
    if isinstance(value, dict):
        return {key: placed(entry, work) for key, entry in value.items()}
    if isinstance(value, list):
        return [placed(entry, work) for entry in value]
    return value.replace("WORK", work) if isinstance(value, str) else value
