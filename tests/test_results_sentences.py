"""Every number in a sentence on the pages of results is computed here from the CSV files beside them, or was set."""

import re
from statistics import mean

import pytest
from result_rows import FOLDER, GROUPS, TITLES, by_seed, number, read_rows, show_factor, take

from mupscale.commands.reporting.compare import compare


def percent(ratio: float, digits: int = 0) -> str:
    return f"{abs(100 * (ratio - 1)):.{digits}f} %"


def by_arm(name: str, column: str, **where: str) -> dict[str, dict[str, float]]:
    """Losses of a mid-run experiment by arm and seed."""
    answer: dict[str, dict[str, float]] = {}
    for row in read_rows(f"{name}/midrun.csv"):
        if all(row[key] == value for key, value in where.items()):
            answer.setdefault(row["arm"], {})[row["seed"]] = float(row[column])
    return answer


def lowest(arms: dict[str, dict[str, float]], prefix: str) -> tuple[str, float]:
    """The arm with the lowest mean, of those whose name begins so."""
    means = {arm: mean(losses.values()) for arm, losses in arms.items() if arm.startswith(prefix)}
    best = min(means, key=means.__getitem__)
    return best, means[best]


def decay_sentences(experiment: str, digits: int) -> list[str]:
    """What a falling rate on both sides gives: differences with intervals, and the tuned values."""
    runs, facts = read_rows(f"{experiment}_decay/summary.csv"), []
    for column, label in (("final_loss", "training loss"), ("val/loss", "validation loss")):
        scratch, upscaled = (by_seed(runs, column, group) for group in GROUPS[1:])
        found = compare(scratch, upscaled)  # the sign is that of upscaled - from scratch
        ratio = mean(upscaled.values()) / mean(scratch.values())
        digits_here = digits + (experiment == "mlp_adamw" and column == "final_loss")
        interval = f"{found.low:.{digits_here}f} to {found.high:.{digits_here}f}".replace("-", "−")
        facts.append(f"{label} ends {percent(ratio)} {'lower' if ratio < 1 else 'higher'} ({interval})")
    tuned = []
    for sweep in ("sweep_1", "sweep_2"):
        trials = read_rows(f"{experiment}_decay/{sweep}.csv")
        best = min(trials, key=lambda row: number(row["last_epoch"]))
        tuned.append((len(trials), " and ".join(value for key, value in best.items() if key[:5] in ("model", "Upsca"))))
    (first, one), (second, two) = tuned
    return [*facts, f"Of {first} and {second} trials the best are: Sweep 1 {one}; Sweep 2 {two}."]


def paper_sentences() -> list[str]:
    facts = []
    summaries = {name: read_rows(f"{name}/summary.csv") for name in (*TITLES, "gpt2_decay")}
    means = {
        (name, column, group): mean(take(runs, column, group=group))
        for name, runs in summaries.items() for column in ("val/loss", "final_loss", "flops") for group in GROUPS
    }  # fmt: skip
    trials = []
    for name in ("mlp_sgd", "resnet", "gpt2"):
        (sweep,) = (r for r in read_rows("sweeps.csv") if (r["experiment"], r["sweep"]) == (name, "sweep_2"))
        cost = float(sweep["tflops"]) * 1e12 / int(sweep["trials"])
        trials.append(f"1/{means[name, 'flops', 'from scratch'] / cost:.0f}")
    facts.append(
        f"{trials[0]} of the target for the MLP, whose grids have 30 trials, {trials[1]} for ResNet and {trials[2]} for"
    )

    def ends(name: str) -> str:
        return percent(means[name, "val/loss", "upscaled"] / means[name, "val/loss", "from scratch"])

    facts.append(f"ends {ends('mlp_adamw')} above that from scratch. With SGD it ends {ends('mlp_sgd')} below.")
    facts.append(f"Validation loss ends {ends('resnet')} above that from scratch")
    facts += [
        each
        for name, digits in (("mlp_adamw", 3), ("mlp_sgd", 3), ("resnet", 3))
        for each in decay_sentences(name, digits)
    ]
    decays = {name: read_rows(f"{name}_decay/summary.csv") for name in ("mlp_adamw", "mlp_sgd")}
    reached = mean(take(decays["mlp_adamw"], "reach_step", group="upscaled")) / 18_560
    flops = [mean(take(decays["mlp_adamw"], column, group=group)) for column, group in (
        ("reach_flops", "upscaled"), ("flops", "base"), ("flops", "from scratch"))]  # fmt: skip
    facts.append(
        f"after {100 * reached:.0f} % of the steps, {show_factor(flops[2], flops[0] + flops[1])} if the base is"
    )
    base, scratch, upscaled = (mean(take(decays["mlp_sgd"], "flops", group=group)) for group in GROUPS)
    facts.append(f"for {percent((base + upscaled) / scratch)} more compute, that of the base")
    steps = {name: mean(take(summaries[name], "reach_step", group="upscaled")) for name in ("gpt2", "gpt2_decay")}
    cost = means["gpt2", "flops", "from scratch"]
    at = mean(take(summaries["gpt2"], "reach_flops", group="upscaled"))
    facts.append(
        f"after {steps['gpt2']:.0f} of 1,500 steps: {show_factor(cost, at)} cheaper if the base exists already, "
        f"{show_factor(cost, at + means['gpt2', 'flops', 'base'])} if"
    )
    facts.append(f"gets there only at step {steps['gpt2_decay']:,.0f}:")
    lower = [percent(means[n, "final_loss", "upscaled"] / means[n, "final_loss", "from scratch"], 1) for n in steps]
    both = means["gpt2", "flops", "base"] + means["gpt2", "flops", "upscaled"]
    facts.append(f"is {lower[0].removesuffix(' %')} and {lower[1]} below that from scratch, at {both / cost:.1f} times")
    return [*facts, *midrun_gpt2_sentences(), *midrun_mlp_sentences()]


def midrun_gpt2_sentences() -> list[str]:
    name = "midrun_gpt2"
    runs = read_rows(f"{name}/midrun.csv")
    settings = sorted({(row["schedule"], row["budget"]) for row in runs})
    arms = {each: by_arm(name, "validation_loss", schedule=each[0], budget=each[1]) for each in settings}
    late = {
        row["budget"]: float(row["grown_at_step"]) / float(row["steps"])
        for row in runs if row["schedule"] == "decay" and row["arm"].startswith("grown at 75")
    }  # fmt: skip
    facts = [
        f"after {100 * late['flops']:.0f} % (equal FLOPs) and {100 * late['seconds']:.0f} % (equal seconds) of its"
    ]
    below, above = [], []
    for found in arms.values():
        below += [
            mean(found["width 512"].values()) - mean(losses.values())
            for arm, losses in found.items() if arm.startswith("grown")
        ]  # fmt: skip
        best, loss = lowest(found, "grown")
        assert best.startswith("grown at 75")
        above.append(loss - mean(found["width 256"].values()))
        assert all(found[best][seed] > found["width 256"][seed] for seed in found[best])
    facts.append(
        f"below width 512 from scratch, by {min(below):.2f} to {max(below):.2f}, but the best of them, grown at 75 %, "
        f"ends above width 256, by {min(above):.2f} to {max(above):.2f} and in both seeds of all four"
    )
    return facts


def midrun_mlp_sentences() -> list[str]:
    name = "midrun_mlp"
    found = {
        (kind, budget): by_arm(name, f"{kind}_loss", schedule="constant", budget=budget)
        for kind in ("training", "validation") for budget in ("flops", "seconds")
    }  # fmt: skip
    kinds = ("training", "validation")
    gains = {key: lowest(arms, "grown")[1] / lowest(arms, "width")[1] for key, arms in found.items()}
    assert all(lowest(found[kind, "seconds"], "grown")[0].startswith("grown at 75") for kind in kinds)
    facts = [
        f"ends {percent(gains['training', 'seconds'])} below the best fixed width in training loss and "
        f"{percent(gains['validation', 'seconds'])} in validation loss; at equal FLOPs the best growth ends "
        f"{percent(gains['training', 'flops'])} and {percent(gains['validation', 'flops'])} below"
    ]
    decay = {kind: by_arm(name, f"{kind}_loss", schedule="decay") for kind in kinds}
    rows = [row for row in read_rows(f"{name}/midrun.csv") if row["schedule"] == "decay" and row["grown_at_step"]]
    shares = sorted({round(100 * float(row["grown_at_step"]) / float(row["steps"])) for row in rows})
    facts.append(f"after {shares[0]} and {shares[1]} % of the steps")
    losses = decay["validation"]
    best, loss = lowest(losses, "grown")
    assert best.startswith("grown at 25")
    arms = {arm: each for arm, each in losses.items() if arm.startswith("grown")}
    widths = {arm: each for arm, each in losses.items() if arm.startswith("width")}
    pairs = len(arms) * len(widths)
    difference = compare(widths["width 2000"], arms[best], pairs)
    facts.append(
        f"ends {percent(loss / mean(widths['width 2000'].values()))} above width 2000 from scratch "
        f"({difference.low:.3f} to {difference.high:.3f}, a {100 * (1 - 0.05 / pairs):.1f} % interval"
    )
    best, loss = lowest(decay["training"], "grown")
    assert best.startswith("grown at 50")
    (epochs,) = {
        row["epochs"] for row in read_rows(f"{name}/midrun.csv")
        if (row["schedule"], row["arm"]) == ("decay", "width 500")
    }  # fmt: skip
    over = loss / mean(decay["training"]["width 500"].values())
    return [*facts, f"but {percent(over)} above width 500, which uses the budget for {float(epochs):,.0f} epochs"]


def method_means(name: str, column: str) -> dict[str, float]:
    runs = read_rows(f"{name}/methods.csv")
    return {method: mean(take(runs, column, method=method)) for method in dict.fromkeys(row["method"] for row in runs)}


def best_of_tuning(name: str) -> dict[str, tuple[float, float]]:
    """The best losses at the small size without noise and with noise, by method."""
    best: dict[tuple[str, bool], float] = {}
    runs = read_rows(f"{name}/tuning.csv")
    (loss,) = (column for column in runs[0] if column.startswith("last"))
    for row in runs:
        if row["sweep"] != "sweep_1":
            key = row["sweep"].split("/")[-1], float(row["UpscaleCallback.noise.std"]) > 0
            value = number(row[loss])
            best[key] = min(best.get(key, float("inf")), value)
    return {method: (best[method, False], best[method, True]) for method, _ in best}


def method_sentences() -> list[str]:
    by_two, by_four = (method_means(name, "final_loss") for name in ("methods_mlp", "methods_mlp_4x"))
    gpt2, val = (method_means("methods_gpt2", column) for column in ("final_loss", "val/loss"))
    noise = sorted(without / best for without, best in best_of_tuning("methods_mlp").values())
    just_after = {method: f"{loss:.2f}" for method, loss in method_means("methods_mlp_4x", "loss_just_after").items()}
    facts = [
        f"ends lower, by {percent(by_two['lemon'] / by_two['duplication'], 1)}",
        f"ends {percent(by_two['fpi'] / by_two['net2net'])} higher (by four, below, "
        f"{percent(by_four['fpi'] / by_four['net2net'])})",
        f"ended {100 * noise[0] - 100:.0f} to {percent(noise[-1])} higher at 100 → 200",
        f"{percent(by_four['duplication'] / by_four['net2net'])} above Net2Net",
        f"its loss jumps to {just_after['duplication']}. Net2Net and HyperCloning got 0.8; their loss jumps to "
        f"{just_after['hypercloning']} to {just_after['net2net']}",
    ]
    best = ("aki", "hypercloning-diagonal")
    lower = [[losses["duplication"] - losses[method] for method in best] for losses in (gpt2, val)]
    runs = read_rows("methods_gpt2/methods.csv")
    spreads = []
    for column in ("final_loss", "val/loss"):
        both = [take(runs, column, method=method) for method in gpt2]
        spreads.append(max(max(each) - min(each) for each in both))
    facts.append(
        f"end {lower[0][0]:.3f} and {lower[0][1]:.3f} lower in training loss, and {lower[1][0]:.3f} and "
        f"{lower[1][1]:.3f} in validation loss, in both seeds, and the seeds of a method differ by at most "
        f"{spreads[0]:.3f} and {spreads[1]:.3f}."
    )
    facts.append(f"so its loss jumps to {method_means('methods_gpt2', 'loss_just_after')['aki']:.2f}.")
    ordered = sorted(gpt2, key=gpt2.__getitem__)[2:8]
    facts.append(f"end within {gpt2[ordered[-1]] - gpt2[ordered[0]]:.3f} of each other")
    after = method_means("methods_gpt2", "loss_after_100")
    ends = [take(runs, "final_loss", method=method) for method in ("net2net", "fpi")]
    differences = sorted(a - b for a, b in zip(*ends, strict=True))
    facts.append(
        f"is {after['fpi'] - after['net2net']:.2f} behind after 100 steps, and {differences[0]:.3f} and "
        f"{differences[1]:.3f} lower at the end"
    )
    tuned = best_of_tuning("methods_gpt2")
    higher = sorted(without - best for method, (without, best) in tuned.items() if method != "aki")
    facts.append(f"but AKI ends {higher[0]:.2f} to {higher[-1]:.2f} higher without it")
    return facts


def transfer_sentences() -> list[str]:
    def losses(name: str, sweep: str, before: str) -> dict[str, float]:
        rows = [
            row
            for row in read_rows(f"transfer_{name}/transfer.csv")
            if (row["sweep"], row["before"]) == (sweep, before)
        ]
        (loss,) = (column for column in rows[0] if column.startswith("last"))
        return {row["value"]: number(row[loss]) for row in rows}

    def price(name: str, sweep: str) -> str:
        narrow, wide = losses(name, sweep, "64"), losses(name, sweep, "512")
        return percent(wide[min(narrow, key=narrow.__getitem__)] / min(wide.values()))

    levels = [losses("gpt2", "noise", before).values() for before in ("64", "128", "256")]
    equal = losses("mlp_sgd", "lr", "64")
    widest = losses("mlp_adamw", "noise", "512")
    drifts = read_rows("transfer_mlp_adamw/drift.csv")
    falls = [5 ** float(next(row["exponent"] for row in drifts if row["sweep"] == sweep)) for sweep in ("lr", "noise")]
    return [
        f"with SGD ({price('mlp_sgd', 'lr')}) as with AdamW ({price('mlp_adamw', 'lr')})",
        f"within {max(percent(max(each) / min(each), 1) for each in levels)} of each other",
        f"equal within {percent(max(equal['0.2'], equal['0.4']) / min(equal['0.2'], equal['0.4']), 2)}",
        f"ends {price('mlp_adamw', 'lr').removesuffix(' %')} and {price('mlp_adamw', 'noise')} higher",
        f"falls to {falls[0]:.2f} and the best noise to {falls[1]:.2f}",
        f"which at 512 → 2048 is {percent(widest['1.6'] / min(widest.values()))} above",
    ]


SENTENCES = {"paper": paper_sentences, "methods": method_sentences, "transfer": transfer_sentences}
SETTINGS = {
    "paper": "2.11 3.7× 3.0× 18.9× 8.5× 2.0× 1.3× 5.8× 2.2× 1.4× 0.1 0.8 0.4 0.013 1.25 95 % 0.03 0.01 38.6 2.5 0.0078 "
    "0.24 0.0156 75 % 50 % 10 % 25 % 1.5 0.48 0.008 0.016 1.6 0.064",
    "methods": "0.8 1.6 0.24 0.001 15 %",
    "transfer": "0.2 0.4 1.6 0.032 0.8 0.0005 0.25",
}
"""Numbers in sentences that are no results: what was set or tuned, and what the paper says."""


@pytest.mark.parametrize("page", SETTINGS)
def test_every_number_in_a_sentence_is_computed_or_was_set(page: str) -> None:
    text = re.sub(r"```.*?```", "", (FOLDER / f"{page}.md").read_text(), flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "![")))
    text = " ".join(re.sub(r"\]\([^)]*\)", "]", text).replace("**", "").split())
    sentences = SENTENCES[page]()
    assert [sentence for sentence in sentences if sentence not in text] == []
    for sentence in sentences:
        text = text.replace(sentence, "")
    left = set(re.findall(r"\d+(?:[.,]\d+)*(?: %|×)|\d+\.\d+", text))
    assert left == set(re.findall(r"[\d.]+(?: %|×)?", SETTINGS[page]))
