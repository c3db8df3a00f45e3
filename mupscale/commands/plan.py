"""plan: print how a configured model will grow, parameter by parameter. Nothing is trained.

On a terminal, layers that grow alike share a row; `plan … | cat` prints a row for each parameter.
"""

from mupscale.commands.configured import configured, growths
from mupscale.commands.process import paint, show


def main(command: str, arguments: list[str]) -> None:
    module, data, trainer = configured(command, arguments, __doc__)
    for growth in growths(module, trainer, data):
        print(paint(growth.before.to(growth.after), "heading"))
        show(growth.plan)
