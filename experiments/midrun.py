"""Does it pay to grow in the middle of a run, if all runs cost as many FLOPs?

    python -m experiments.midrun experiments/midrun/gpt2_reduced.yaml --data.data_dir data/fineweb

The budget is the cost of the configured number of steps at the wide width. A run that grows spends a share of it at the
narrow width; it is compared with three fixed widths, each of which trains for as many steps as the budget allows.
Hyperparameters come from the same comparison at the small size: `sweep_1` for each fixed width, `sweep_2` for each
noise and each share of `tuned_at`. In `schedules`, `100%` is all steps of a run, and `20% of the budget` the share of
steps in which it spends the last fifth of its budget. Writes midrun.csv, with a row for each run. docs/results/paper.md
has the results.
"""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from experiments.study import run
from mupscale.commands.cli import load_configuration
from mupscale.commands.configured import first_batches
from mupscale.commands.experiment import Study, growing, growths_of, of_size, refuse_diverged
from mupscale.commands.reporting import load_runs
from mupscale.commands.widths import Size, folder_name, model_size
from mupscale.errors import UserError

SHARE = re.compile(r"(\d+(?:\.\d+)?)%( of the budget)?")
FIXED = "narrow", "middle", "wide"
KEYS = (
    "config", "small", "target", "middle", "small_middle", "seeds", "shares", "noises", "sweep_1", "sweep_2"
)  # fmt: skip


class Costs(NamedTuple):
    """What steps cost, by the names of sizes, and the length of the wide run."""

    flops: dict[str, float]
    steps: int
    batches_per_step: int
    batches_per_epoch: int

    def length(self, schedule: Any, steps: int, grows: tuple[int, float] | None = None) -> dict[str, Any]:
        """The configuration of a run of so many steps, with one validation, after the last one, and its schedule."""
        per_epoch = math.ceil(self.batches_per_epoch / self.batches_per_step)
        epochs, more = divmod(steps, per_epoch)  # the last step of an epoch takes the batches that are left
        batches = epochs * self.batches_per_epoch + more * self.batches_per_step
        length = {"max_steps": steps, "max_epochs": -1, "check_val_every_n_epoch": None, "val_check_interval": batches}
        return {"trainer": length, **stretch(schedule, steps, grows)}

    def steps_of(self, size: Size, wide: Size) -> int:
        """The steps of a size that cost as much as `steps` steps of the wide one."""
        return max(1, round(self.steps * self.flops[folder_name(wide)] / self.flops[folder_name(size)]))

    def steps_of_growth(self, narrow: Size, wide: Size, share: float) -> tuple[int, int]:
        """The step at which a run grows that has then spent a share of the budget, and the steps of the whole run."""
        ratio = self.flops[folder_name(narrow)] / self.flops[folder_name(wide)]
        before = max(1, round(share * self.steps / ratio))
        return before, before + max(1, round((1 - share) * self.steps))


def stretch(schedule: Any, steps: int, grows: tuple[int, float] | None) -> Any:
    """A schedule for a run of so many steps, which grows at a step with a share of the budget spent."""
    if isinstance(schedule, dict):
        return {key: stretch(item, steps, grows) for key, item in schedule.items()}
    found = SHARE.fullmatch(schedule) if isinstance(schedule, str) else None
    if found is None:
        return schedule
    share = float(found[1]) / 100
    if not found[2]:
        return max(1, round(share * steps))
    if grows is None:
        return share
    at_step, spent = grows
    wide = min(share, 1 - spent) / (1 - spent) * (steps - at_step)
    return (wide + max(0.0, share - (1 - spent)) / spent * at_step) / steps


def count_costs(study: Study, sizes: list[Size]) -> Costs:
    """Counts the FLOPs of a step at every size, and the steps of the configured run."""
    config, cli = load_configuration(study.of_fit, "experiment")
    trainer, (batch,) = config["trainer"], first_batches(cli.model, cli.datamodule, 1)
    batches, limit = len(cli.datamodule.train_dataloader()), trainer["limit_train_batches"]
    if limit is not None:
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    accumulated = trainer["accumulate_grad_batches"]
    per_epoch = math.ceil(batches / accumulated)
    flops = {}
    for size in sizes:
        cli.model.hparams.update(model_size(size))
        flops[folder_name(size)] = batches / per_epoch * cli.model.training_flops(batch)
    lengths = [(trainer["max_steps"], 1), (trainer["max_epochs"], per_epoch)]
    known = [length * each for length, each in lengths if length not in (None, -1)]
    if not known:
        raise UserError("config: trainer.max_steps, trainer.max_epochs: give the length of a run of the wide width")
    return Costs(flops, min(known), accumulated, batches)


def compare_midrun(study: Study, content: dict[str, Any]) -> None:
    small, target = growths_of(content)
    sizes = {
        name: dict(zip(FIXED, (growth.before, content[key], growth.after), strict=True))
        for name, growth, key in (("small", small, "small_middle"), ("target", target, "middle"))
    }
    costs = count_costs(study, [size for each in sizes.values() for size in each.values()])
    seeds, rows = content["seeds"], []
    for schedule, overlay in content.get("schedules", {"constant": {}}).items():
        length = partial(costs.length, overlay or {})
        at_fixed: dict[str, Any] = {}
        for name in FIXED:
            at_small, at_target = (
                (of_size(each[name]), length(costs.steps_of(each[name], each["wide"]))) for each in sizes.values()
            )
            found = study.sweep(f"{schedule}/sweep_1/{name}", content["sweep_1"], seeds[:1], *at_small)
            refuse_diverged(found)
            at_fixed[name] = found.best
            study.sweep(f"{schedule}/{name}", {}, seeds, *at_target, found.best)
            rows.append((f"{schedule}/{name}", {"schedule": schedule, "arm": name}))
        for noise_name, noise in content["noises"].items():
            tuned = {}
            for share in content.get("tuned_at", content["shares"]):
                at_step, steps = costs.steps_of_growth(small.before, small.after, share)
                layers = growing(small, None, at_step, noise=noise), length(steps, (at_step, share)), at_fixed["narrow"]
                name = f"{schedule}/sweep_2/{noise_name}-{share:g}"
                found = study.sweep(name, content["sweep_2"], seeds[:1], *layers)
                refuse_diverged(found)
                tuned[share] = found.best
            for share in content["shares"]:
                nearest = tuned[min(tuned, key=lambda each: abs(each - share))]
                at_step, steps = costs.steps_of_growth(target.before, target.after, share)
                grown = growing(target, None, at_step, noise=noise)
                name = f"{schedule}/{noise_name}-{share:g}"
                study.sweep(name, {}, seeds, grown, length(steps, (at_step, share)), at_fixed["narrow"], nearest)
                arm = f"grown at {100 * share:g} % ({noise_name})"
                rows.append((name, {"schedule": schedule, "arm": arm, "noise": noise_name, "share": share}))
    if not study.only_checks:
        write(study, rows)


def write(study: Study, rows: list[tuple[str, dict[str, Any]]]) -> None:
    """Writes midrun.csv, and prints the means over seeds."""
    parts = []
    for folder, details in rows:
        runs = load_runs(study.out / folder).rename(
            columns={"final_loss": "training_loss", "last val/loss": "validation_loss"}
        )
        kept = [name for name in ("seed", "steps", "flops", "training_loss", "validation_loss") if name in runs]
        parts.append(runs[kept].assign(**details))
    table = pd.concat(parts, ignore_index=True)
    table.to_csv(study.out / "midrun.csv", index=False)
    columns = [name for name in ("flops", "training_loss", "validation_loss") if name in table]
    print(table.groupby(["schedule", "arm"], sort=False)[columns].mean().to_string(float_format="%.4g"))
    print(f"wrote {study.out / 'midrun.csv'}")


def main(arguments: list[str] | None = None) -> None:
    run("midrun", __doc__, compare_midrun, KEYS, ("metric", "schedules", "tuned_at"), arguments)


if __name__ == "__main__":
    main()
