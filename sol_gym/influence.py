"""Which inputs the outputs of a reference depend on, seen in one run.

`InputTracker` is a mode under which every operation passes on, from its operands to its result,
the names of the inputs they stem from. It errs on one side only: an input that it does not name
has no influence, while one that it names may still be multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InputTracker"]

_SHAPE_ALONE = frozenset((
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
))  # fmt: skip
"""Operations whose result takes the shape of an operand and nothing of its content."""
_READ_BY_PYTHON = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))
"""Ways out of torch that are no operations; what follows from the values cannot be seen."""


class InputTracker(TorchDispatchMode):
    """Follows named tensors through the operations run under it.

    Args:
        inputs: tensors by name; tensors that share memory share their influence.

    Example:
        >>> tracker = InputTracker({"x": x, "y": y})
        >>> with tracker:
        ...     result = run(x, y)
        >>> tracker.names(result)
        {'x'}
    """

    def __init__(self, inputs: dict[str, Tensor]):
        super().__init__()
        self.steering: set[str] = set()
        """Inputs whose values Python itself has read: they may decide anything that follows."""
        self._known: dict[int, frozenset[str]] = {}
        self._by_python = _ReadByPython(self)
        for name, tensor in inputs.items():
            self._known[_memory(tensor)] = self._of(tensor) | {name}

    def __enter__(self) -> InputTracker:
        super().__enter__()
        self._by_python.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._by_python.__exit__(*exc)
        super().__exit__(*exc)

    def names(self, result: Tensor) -> set[str]:
        """Inputs that may have influenced `result`, those that steered the run included."""
        return set(self._of(result)) | self.steering

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = list(_tensors((args, kwargs)))
        name = func._schema.name.removeprefix("aten::")
        influence = (
            frozenset() if name in _SHAPE_ALONE else frozenset().union(*map(self._of, operands))
        )
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            self.steering |= influence
        memories = {_memory(tensor) for tensor in operands}
        for tensor in _tensors(result):
            # A view or a tensor changed in place keeps what its memory had before.
            before = self._of(tensor) if _memory(tensor) in memories else frozenset()
            self._known[_memory(tensor)] = before | influence
        return result

    def _of(self, tensor: Tensor) -> frozenset[str]:
        return self._known.get(_memory(tensor), frozenset())


class _ReadByPython(TorchFunctionMode):
    def __init__(self, tracker: InputTracker):
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READ_BY_PYTHON:
            self._tracker.steering |= self._tracker._of(args[0])
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Identity of a tensor's memory, for as long as it is alive."""
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, str):
        return
    elif isinstance(value, Iterable):
        for item in value:
            yield from _tensors(item)
