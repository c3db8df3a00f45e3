"""plan: print how a configured model will be widened, parameter by parameter. Nothing is trained."""

from mupscale.commands.configured import configured, growths
from mupscale.widening.plan import plan


def main(command: str, arguments: list[str]) -> None:
    module, _, trainer = configured(command, arguments, __doc__)
    for before, after in growths(module, trainer):
        print(f"width {before} → {after}")
        print(plan(module.network(before, meta=True), module.network(after, meta=True)))
