"""The reference, run by the judge in its own context. Candidates never see its results."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

import torch

from ..problem import Problem, TensorArg


class InvalidReference(Exception):
    """The problem's own reference fails or returns something else than it declares."""


class Reference:
    """Callable reference of a problem."""

    def __init__(self, problem: Problem):
        file = f"<reference of {problem.id}>"
        namespace: dict[str, Any] = {"__name__": "sol_gym_reference"}
        linecache.cache[file] = (
            len(problem.reference),
            None,
            problem.reference.splitlines(True),
            file,
        )
        try:
            exec(compile(problem.reference, file, "exec"), namespace)
        except Exception as error:
            raise InvalidReference(
                f"the reference of {problem.id} does not load: {_last(error)}"
            ) from None
        self.run: Any = namespace.get("run")
        """The reference's function itself, whose results nobody checks."""
        if not callable(self.run):
            raise InvalidReference(f"the reference of {problem.id} defines no function 'run'")

    def returned(self, arguments: list[Any], outputs: dict[str, TensorArg]) -> list[Any]:
        """What `run` returns, as a list of one value an output; they are not looked at yet.

        Raises:
            InvalidReference: it raises, or returns another number of values.
        """
        try:
            with torch.no_grad():
                returned = self.run(*arguments)
        except torch.OutOfMemoryError:
            raise  # The machine is too small; the problem is not at fault.
        except Exception as error:
            raise InvalidReference(f"the reference failed: {_last(error)}") from None
        if isinstance(returned, dict):
            returned = [returned.get(name) for name in outputs]
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        if len(results) != len(outputs):
            raise InvalidReference(
                f"the reference returned {len(results)} outputs, declared are {len(outputs)}"
            )
        return results

    def __call__(self, arguments: list[Any], outputs: dict[str, TensorArg]) -> list[torch.Tensor]:
        """Expected outputs for `arguments` (in call order).

        Raises:
            InvalidReference: it raises, or returns another number, shape or dtype than declared.
        """
        results = self.returned(arguments, outputs)
        for spec, result in zip(outputs.values(), results, strict=True):
            if not isinstance(result, torch.Tensor):
                raise InvalidReference(
                    f"the reference's {spec.name!r} is {type(result).__name__}, expected a tensor"
                )
            if tuple(result.shape) != spec.shape:
                raise InvalidReference(
                    f"the reference's {spec.name!r} has shape {tuple(result.shape)}, declared {spec.shape}"
                )
            if str(result.dtype).removeprefix("torch.") != spec.dtype:
                raise InvalidReference(
                    f"the reference's {spec.name!r} has dtype {result.dtype}, declared {spec.dtype}"
                )
        return results


def _last(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
