"""plan: print how a configured model will be widened, parameter by parameter. Nothing is trained."""

from mupscale.commands.configured import configured, growths


def main(command: str, arguments: list[str]) -> None:
    module, _, trainer = configured(command, arguments, __doc__)
    for growth in growths(module, trainer):
        print(f"width {growth.before} → {growth.after}")
        print(growth.plan)
