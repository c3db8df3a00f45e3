"""plan: print how a configured model will be widened, parameter by parameter. Nothing is trained."""

from mupscale.commands.configured import configured, growths


def main(command: str, arguments: list[str]) -> None:
    module, _, trainer = configured(command, arguments, __doc__)
    for before, after, method in growths(module, trainer):
        print(f"width {before} → {after}")
        print(method.plan(module.network(before, meta=True), module.network(after, meta=True), None, None))
