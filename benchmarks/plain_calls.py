"""Calls of hand-written kernels in this process, without the judge, for programs that profile them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sol_gym.problem import Problem, Workload
from sol_gym.sandbox.worker.loading import told_from_signature

KERNELS = Path(__file__).parent / "kernels"


def load_run(file: str) -> Callable[..., Any]:
    """`run` of a Python file in benchmarks/kernels."""
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, KERNELS / file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.run


def destinations(
    run: Callable[..., Any], problem: Problem, workload: Workload, device: torch.device
) -> list[torch.Tensor]:
    """Tensors for `run` to write into, after its inputs; none if it returns its outputs."""
    outputs = problem.outputs(workload)
    if not told_from_signature(run, len(problem.definition.inputs), len(outputs)):
        return []
    return [
        torch.empty(o.shape, dtype=getattr(torch, o.dtype), device=device) for o in outputs.values()
    ]
