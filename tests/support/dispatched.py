"""What torch dispatches on the CPU, as it would launch it on a GPU: operations, and the bytes that are alive."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

NO_KERNEL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::promote_types",
    "aten::_unsafe_view",
}


class Operations(TorchDispatchMode):
    """Counts what is dispatched, step by step: `by_step[n]` is what happened between the ends of steps n and n + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, Counter[str]] = {0: Counter()}
        self.now = self.by_step[0]

    def begin(self, trainer: Any, module: Any) -> None:
        self.now = self.by_step[trainer.global_step] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::") and not func.is_view and name not in NO_KERNEL:
            self.now[name] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors made under it, and of `known` ones, that are alive, and their peak."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._see(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for part in tree_iter(answer):
            if isinstance(part, Tensor) and part.device.type == "cpu":
                self._see(part.untyped_storage())
        return answer

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size
