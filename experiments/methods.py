"""Which growth method ends lowest, if each is tuned by itself?

    python -m experiments.methods experiments/methods/mlp_adamw.yaml --data.data_dir data/covertype

The paper's procedure (docs/experiments.md), with a sweep of the growth and runs at the target size for each of the
`methods` of the YAML file, from the same bases. Writes methods.csv, with a row for each run, and prints where the
methods end. docs/results/methods.md has the results.
"""

from typing import Any

import pandas as pd

from experiments.study import run
from mupscale.commands.checkpoints import read_result
from mupscale.commands.experiment import OPTIONAL, REQUIRED, Study, begin, grow
from mupscale.commands.reporting import load_curves, load_runs
from mupscale.commands.sweep_folder import SweepFolder

AFTER, WINDOW = 100, 20
"""Steps after the growth at which losses are compared, and how many of them are averaged."""


def compare_methods(study: Study, content: dict[str, Any]) -> None:
    begun = begin(study, content)
    grown = {name: grow(study, content, begun, name, method=method) for name, method in content["methods"].items()}
    if study.only_checks:
        return
    table = pd.concat([table_of(name, swept) for name, swept in grown.items() if swept is not None and swept.best])
    table.to_csv(study.out / "methods.csv", index=False)
    columns = [name for name in table if name.startswith(("loss_", "final_", "last "))]
    print(table.groupby("method")[columns].mean().sort_values("final_loss").to_string(float_format="%.4g"))
    for name, swept in grown.items():
        if swept is None or not swept.best:
            print(f"{name}: all trials diverged")
    print(f"wrote {study.out / 'methods.csv'}")


def table_of(name: str, swept: SweepFolder) -> pd.DataFrame:
    """A row for each seed: losses of the next batch just before and after the growth, a little later, at the end."""
    runs, curves = load_runs(swept.folder), load_curves(swept.folder)
    rows = []
    for run_ in runs.to_dict("records"):
        growth = read_result(swept.folder / "trials" / run_["folder"].rpartition("/")[2])["growths"][-1]
        later = curves[(curves.seed == run_["seed"]) & curves.step.between(AFTER - WINDOW + 1, AFTER)]
        rows.append({
            "method": name, "seed": run_["seed"], "loss_before": growth["loss_before"],
            "loss_just_after": growth["loss_after"], f"loss_after_{AFTER}": later.loss.mean(),
            "final_loss": run_["final_loss"], **{key: run_[key] for key in run_ if key.startswith("last ")},
            "flops": run_["flops"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def main(arguments: list[str] | None = None) -> None:
    run("methods", __doc__, compare_methods, (*REQUIRED, "methods"), OPTIONAL, arguments)


if __name__ == "__main__":
    main()
