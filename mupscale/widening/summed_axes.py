"""Reads in the code of modules whether the width of a parameter may be summed over.

Only the code is read, nothing is run. It finds products that sum over an axis: `x @ self.query`, `F.linear`, `einsum`,
`(x * self.attention).sum(-1)`.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType

from torch import nn

_PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot", "linear", "conv1d", "conv2d", "conv3d")
_WEIGHT_FIRST = ("linear", "conv1d", "conv2d", "conv3d")
"""Products whose second operand is (out, in, …)."""

_LIBRARIES = ("torch", "F", "nn", "functional")


def may_be_summed(path: Sequence[tuple[str, nn.Module]], name: str, ndim: int, axis: int) -> bool:
    """Whether the code of the modules that contain a parameter sums over one of its axes, as far as can be read.

    Args:
        path: The modules that contain it, with their names, from the model to the one that holds it.
        name: The full name of the parameter.
        ndim: Its number of axes.
        axis: The axis, counted from the first.
    """
    for prefix, module in path:
        chain = ("self", *name.removeprefix(prefix).lstrip(".").split("."))
        kind: type = type(module)
        if any(_sums(product, chain, ndim, axis) for product in _products(kind)):
            return True
    return False


@cache
def _products(kind: type) -> tuple[tuple[str, tuple[ast.expr, ...]], ...]:
    """The products that sum over an axis, in the methods of a class: the name of each, and its operands."""
    nodes = (node for tree in _methods(kind) for node in ast.walk(tree))
    return tuple(product for node in nodes for product in _product(node))


def _methods(kind: type) -> Iterator[ast.AST]:
    """The methods of a class that are not torch's own, as far as their code can be read."""
    found: dict[str, FunctionType] = {}
    for base in kind.__mro__:
        if base is not object and base.__module__.partition(".")[0] != "torch":
            for name, method in vars(base).items():
                if inspect.isfunction(method):
                    found.setdefault(name, method)
    for method in found.values():
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, TypeError, SyntaxError):
            continue


def _product(node: ast.AST) -> Iterator[tuple[str, tuple[ast.expr, ...]]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield "matmul", (node.left, node.right)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    name, owner = node.func.attr, node.func.value
    is_function = isinstance(owner, ast.Name | ast.Attribute) and _chain(owner)[0] in _LIBRARIES
    operands = tuple(node.args) if is_function else (owner, *node.args)
    if name == "einsum" or (name in _PRODUCTS and len(operands) > 1):
        yield name, operands
    along = [*operands[1:], *(keyword.value for keyword in node.keywords if keyword.arg == "dim")]
    is_last = any(ast.unparse(argument) == "-1" for argument in along)
    if name == "sum" and is_last and isinstance(operands[0], ast.BinOp) and isinstance(operands[0].op, ast.Mult):
        yield "sum", (operands[0].left, operands[0].right)


def _sums(product: tuple[str, tuple[ast.expr, ...]], chain: tuple[str, ...], ndim: int, axis: int) -> bool:
    """Whether a product sums over the axis of the parameter that is `self.….name`."""
    name, operands = product
    places = [index for index, operand in enumerate(operands) if _chain(operand) == chain]
    if name == "einsum":
        return any(_sums_in_equation(operands[0], index - 1, axis) for index in places)
    if name in _WEIGHT_FIRST:
        return 1 in places and axis == min(1, ndim - 1)
    if name == "sum":
        return bool(places) and axis == ndim - 1
    return (0 in places and axis == ndim - 1) or (1 in places and axis == max(0, ndim - 2))


def _sums_in_equation(equation: ast.expr, operand: int, axis: int) -> bool:
    text = equation.value if isinstance(equation, ast.Constant) else None
    if not isinstance(text, str) or "->" not in text or "." in text:
        return False
    inputs, output = text.replace(" ", "").split("->")
    terms = inputs.split(",")
    return operand < len(terms) and axis < len(terms[operand]) and terms[operand][axis] not in output


def _chain(node: ast.expr) -> tuple[str, ...]:
    """`self.a.b` as ("self", "a", "b"), and `self.layers[0].b` as ("self", "layers", "0", "b"); else one empty text."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*_chain(node.value), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return (*_chain(node.value), str(node.slice.value))
    return ("",)
