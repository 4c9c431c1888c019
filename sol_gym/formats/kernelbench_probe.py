"""Runs inside the sandbox: executes a KernelBench file and says what it consists of.

On meta tensors where the file allows it, which cost neither memory nor time; else for real. All
that is returned is JSON data.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

_REAL_BYTES = 2 << 30
"""Weights that are constructed for real, to see which are single-valued or differ."""


def probe(source: str) -> dict[str, Any]:
    """Arguments, weights and outputs of the file's module.

    Returns:
        `arguments` and `outputs`: name, shape (None: a number) and dtype. `weights`: key in the
        module, shape, dtype, whether it is a `buffer` and whether it has a `single_value`.
        `remarks`: texts for the user.

    Raises:
        Exception: whatever the file raises; ValueError for what cannot be a problem.
    """
    namespace: dict[str, Any] = {"__name__": "kernelbench_file"}
    exec(compile(source, "<KernelBench file>", "exec"), namespace)
    remarks: list[str] = []
    with torch.no_grad():
        try:
            model, inputs, returned = _run(namespace, "meta")
        except Exception as error:
            remarks.append(f"run for real, because meta tensors do not do: {_short(error)}")
            try:
                model, inputs, returned = _run(namespace, "cpu")
            except Exception as failure:
                if str(failure) == str(error):
                    raise
                # Which of the two is the file's own fault cannot be told.
                raise RuntimeError(
                    f"{_short(failure)} (and on meta tensors {_short(error)})"
                ) from None
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        size = sum(t.nbytes for t in [*parameters.values(), *buffers.values()])
        if size <= _REAL_BYTES:
            first, second = (_construct(namespace, "cpu", seed) for seed in (1, 2))
        else:
            first = second = model
            remarks.append(
                f"weights of {size >> 20} MiB were not looked into: single-valued ones keep their "
                "value, and random buffers are constants"
            )
        weights = [
            _tensor(p) | {"key": key, "buffer": False, "single_value": _single(first, key)}
            for key, p in parameters.items()
        ]
        weights += [
            _tensor(b) | {"key": key, "buffer": True, "single_value": False}
            for key, b in buffers.items()
            if not _same(_named(first, key), _named(second, key))
        ]
        remarks += _hidden_state(first, second)
    return {
        "arguments": [
            {"name": name} | _value(value)
            for name, value in zip(_names(model, len(inputs)), inputs, strict=True)
        ],
        "weights": weights,
        "outputs": [_tensor(t) for t in _flat(returned)],
        "remarks": remarks,
    }


def _construct(namespace: dict[str, Any], device: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        model = namespace["Model"](*namespace["get_init_inputs"]())
    if not isinstance(model, nn.Module):
        raise ValueError(f"Model is a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _run(namespace: dict[str, Any], device: str) -> tuple[nn.Module, list[Any], Any]:
    model = _construct(namespace, device, 0)
    with torch.device(device):
        inputs = namespace["get_inputs"]()
        if not isinstance(inputs, list | tuple):
            raise ValueError(f"get_inputs() gave {type(inputs).__name__}, expected a list")
        returned = model(*inputs)
    return model, list(inputs), returned


def _names(model: nn.Module, count: int) -> list[str]:
    """Names of forward's arguments, numbered where it takes any number."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [
        n for n, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds
    ]  # fmt: skip
    return (names + [f"input_{i}" for i in range(len(names), count)])[:count]


def _flat(returned: Any) -> list[Tensor]:
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, list | tuple) and returned:
        return [tensor for item in returned for tensor in _flat(item)]
    raise ValueError(
        f"forward returned {type(returned).__name__}, expected a tensor or a tuple of tensors"
    )


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return _tensor(value)
    for kind, dtype in ((bool, "bool"), (int, "int64"), (float, "float64")):
        if isinstance(value, kind):
            return {"shape": None, "dtype": dtype}
    raise ValueError(
        f"get_inputs() has a {type(value).__name__}, expected tensors and numbers alone"
    )


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _named(model: nn.Module, key: str) -> Tensor:
    owner, _, name = key.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _single(model: nn.Module, key: str) -> bool:
    """Whether a parameter has one value throughout (floats only; False for meta tensors)."""
    tensor = _named(model, key)
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return False
    return bool((tensor == tensor.reshape(-1)[0]).all())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num())


def _hidden_state(first: nn.Module, second: nn.Module) -> list[str]:
    """Random tensors that are neither parameters nor buffers: nobody outside can know them."""
    hidden = []
    for (path, a), (_, b) in zip(first.named_modules(), second.named_modules(), strict=True):
        for name, value in vars(a).items():
            other = vars(b).get(name)
            if isinstance(value, Tensor) and isinstance(other, Tensor) and not _same(value, other):
                hidden.append(f"{path}.{name}".lstrip("."))
    if not hidden:
        return []
    return [
        f"Model keeps random tensors that are neither parameters nor buffers ({', '.join(hidden)}): "
        "where an output depends on them no kernel can be right; make them buffers"
    ]


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 160 else text[:157] + "..."
