"""Making the inputs of a workload: fresh, different sets on demand, in memory the caller owns.

An `InputMaker` belongs to one problem, one workload and one device. Each input comes from where
the workload says: drawn by rule (`draws`), made by the reference's own generator, given as a
number, or read from a recorded file. Sets differ from each other in everything that is drawn or
generated; recorded tensors and given numbers are the same in all.

With a seed the sequence of sets is repeatable for the same sequence of calls; without one it is
seeded from the operating system, which is what a judge wants: a candidate must not be able to
know its inputs. How `random` inputs are drawn is a *profile*: `compatible` is the published one,
and `register_profile` adds others. `strict` draws the same, and offers `variants` besides: kinds of
sets that are changed so that every input matters (`strict`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from .draws import fill_random, torch_dtype
from .errors import ProblemError
from .problem import (
    CustomInput,
    Problem,
    RandomInput,
    SafetensorsInput,
    ScalarInput,
    TensorArg,
    Workload,
)
from .recorded import read_recorded
from .strict import harden, variants_for

__all__ = [
    "InputMaker",
    "RandomFill",
    "Scalar",
    "fill_random",
    "load_generator",
    "register_profile",
    "torch_dtype",
]

Scalar = bool | int | float
RandomFill = Callable[[Tensor, str, str, Generator], None]
"""Fills a tensor [n, *shape] with n sets of an input: (out, input name, dtype name, generator)."""

_PROFILES: dict[str, Callable[[Problem, Workload], RandomFill]] = {
    "compatible": lambda problem, workload: fill_random,
    "strict": lambda problem, workload: fill_random,
}


def register_profile(name: str, maker: Callable[[Problem, Workload], RandomFill]) -> None:
    """Add an input profile, or replace one of the same name.

    Args:
        name: what `InputMaker(profile=...)` is given.
        maker: called once per `InputMaker`; what it returns fills that workload's random inputs
            and has the signature of `fill_random`.
    """
    _PROFILES[name] = maker


class InputMaker:
    """Makes input sets for one workload.

    Args:
        problem: the problem; its reference is executed if the workload has custom inputs.
        workload: one of the problem's workloads.
        device: where the tensors are to be.
        seed: makes the sequence of sets repeatable; None draws a secret seed.
        profile: how `random` inputs are drawn.
        blob_root: folder that recorded tensors are looked up in, before those the problem names.

    Raises:
        ProblemError: unknown profile, unusable reference or generator, missing or unfit file.

    Example:
        >>> problem = load("L1/069_rms_norm", profile="smoke")
        >>> maker = InputMaker(problem, problem.workloads[0], "cpu", seed=0)
        >>> inputs = maker.draw()  # {"hidden_states": tensor, ..., "eps": 1e-05}
    """

    def __init__(
        self,
        problem: Problem,
        workload: Workload,
        device: str | torch.device,
        *,
        seed: int | None = None,
        profile: str = "compatible",
        blob_root: str | Path | None = None,
    ) -> None:
        if profile not in _PROFILES:
            raise ProblemError(_unknown_profile(profile))
        self.problem = problem
        self.workload = workload
        self.device = torch.device(device)
        self.tensors = problem.tensors(workload)
        """Tensor inputs in call order, with resolved shapes."""
        self._fill_random = _PROFILES[profile](problem, workload)
        self.variants: tuple[str, ...] = variants_for(problem) if profile == "strict" else ()
        """Kinds of strict sets there are; none in other profiles."""
        self.hardening_s = 0.0
        """Wall seconds that the last `fill` spent on making sets strict."""
        self._draws = Generator(device=self.device).manual_seed(_new_seed(seed))
        # Seeds for custom generators come from a generator of their own, on the CPU: reading a
        # number from the device's would make the host wait for the device.
        self._seeds = Generator().manual_seed(_new_seed(seed))
        kinds = workload.inputs
        self._random = [n for n in self.tensors if isinstance(kinds[n], RandomInput)]
        self._custom = [n for n, kind in kinds.items() if isinstance(kind, CustomInput)]
        self._given = {
            name: _as_scalar(kind.value, problem, name)
            for name, kind in kinds.items()
            if isinstance(kind, ScalarInput)
        }
        self._generate = load_generator(problem) if self._custom else None
        self._recorded = {
            name: read_recorded(
                self.tensors[name],
                kind,
                (blob_root, problem.blob_root, problem.root),
                self.device,
                self._where,
            )
            for name, kind in kinds.items()
            if isinstance(kind, SafetensorsInput)
        }

    @property
    def given(self) -> dict[str, Scalar]:
        """The numbers that the workload gives, in call order; those of strict sets may differ."""
        return {k: self._given[k] for k in self.problem.definition.inputs if k in self._given}

    @property
    def recorded(self) -> dict[str, Tensor]:
        """The recorded inputs, which are the same in all sets."""
        return self._recorded

    def draw(self, variant: str | None = None) -> dict[str, Tensor | Scalar]:
        """One fresh set in call order: dense tensors on the device, and Python numbers.

        Args:
            variant: a kind of strict set (`strict.VARIANTS`); None is a plain one.

        Raises:
            ProblemError: the reference's generator failed or made something unfit.
        """
        values: dict[str, Tensor | Scalar] = {**self._given, **self._make_custom()}
        for name in self._random:
            arg = self.tensors[name]
            batch = torch.empty((1, *arg.shape), dtype=torch_dtype(arg.dtype), device=self.device)
            self._fill_random(batch, name, arg.dtype, self._draws)
            values[name] = batch[0]
        for name, recorded in self._recorded.items():
            values[name] = recorded.clone()
        drawn = {name: values[name] for name in self.problem.definition.inputs}
        return drawn if variant is None else self._harden(drawn, variant)

    def fill(
        self, views: dict[str, Tensor], n: int, variants: Sequence[str | None] = ()
    ) -> list[dict[str, Scalar]]:
        """Write n fresh, different sets into the caller's memory.

        Args:
            views: input name -> tensor of shape [at least n, *shape] and of the input's dtype
                (`float4_e2m1fn_x2` also as uint8), possibly a strided view; all tensor inputs.
            n: how many sets to write, into the first n places.
            variants: for each of the first sets the kind of strict set it is, None for a plain one;
                sets beyond are plain.

        Returns:
            Each set's scalar inputs, in call order.

        Raises:
            ProblemError: a view is missing or does not fit, or the reference's generator failed.
        """
        self.hardening_s = 0.0
        targets = {name: _bytes(self._checked(views, name, n)) for name in self.tensors}
        for name in self._random:
            self._fill_random(targets[name], name, self.tensors[name].dtype, self._draws)
        for name, recorded in self._recorded.items():
            targets[name].copy_(_bytes(recorded).expand_as(targets[name]))
        return [
            self._finish(targets, i, variants[i] if i < len(variants) else None) for i in range(n)
        ]

    def _finish(self, targets: dict[str, Tensor], i: int, variant: str | None) -> dict[str, Scalar]:
        """Custom inputs and hardening of set i, whose other inputs are drawn; returns its scalars."""
        numbers = dict(self._given)
        for name, value in self._make_custom().items():
            if isinstance(value, Tensor):
                targets[name][i].copy_(_bytes(value))
            else:
                numbers[name] = value
        names = self.problem.definition.inputs
        if variant is None:  # Often some hundred sets: nothing is done to their tensors.
            return {name: numbers[name] for name in names if name not in targets}
        drawn: dict[str, Tensor | Scalar] = {
            name: targets[name][i] if name in targets else numbers[name] for name in names
        }
        hardened = self._harden(drawn, variant)
        return {k: v for k, v in hardened.items() if not isinstance(v, Tensor)}

    def _harden(
        self, drawn: dict[str, Tensor | Scalar], variant: str
    ) -> dict[str, Tensor | Scalar]:
        begin = time.perf_counter()
        hard = harden(drawn, self.problem, self.workload, variant, self._draws)
        self.hardening_s += time.perf_counter() - begin
        return hard

    def _checked(self, views: dict[str, Tensor], name: str, n: int) -> Tensor:
        """The first n places of a view, if it fits the input."""
        arg = self.tensors[name]
        view = views.get(name)
        if view is None:
            raise ProblemError(f"{self._where}: no view for input {name!r}; got {sorted(views)}")
        if tuple(view.shape[1:]) != arg.shape or view.dim() == 0 or view.shape[0] < n:
            raise ProblemError(
                f"{self._where}: the view for input {name!r} has shape {list(view.shape)}, "
                f"expected [at least {n}, *{list(arg.shape)}]"
            )
        _check_dtype(view, arg, f"{self._where}: the view for input {name!r}")
        return view[:n]

    def _make_custom(self) -> dict[str, Tensor | Scalar]:
        """One set of custom inputs from the reference's generator, checked."""
        if self._generate is None:
            return {}
        d = self.problem.definition
        source = f"{self._where}: {d.custom_inputs_entrypoint}"
        seed = int(torch.randint(2**62, (), generator=self._seeds))
        arguments = {**d.bind(self.workload.axes), **self._given}
        # References draw with plain torch.randn: seed the global state, and put it back after.
        devices = [self.device] if self.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.manual_seed(seed)
            try:
                made = self._generate(arguments, self.device)
            except torch.OutOfMemoryError:
                raise  # The machine is too small; the problem is not malformed.
            except Exception as error:
                raise ProblemError(f"{source} raised {type(error).__name__}: {error}") from error
        if not isinstance(made, dict):
            raise ProblemError(f"{source} returned {type(made).__name__}, expected a dict by name")
        missing = [n for n in self._custom if n not in made]
        unknown = [n for n in made if n not in d.inputs]
        if missing or unknown:
            raise ProblemError(
                f"{source} returned the wrong names: missing {missing}, unknown {unknown}; "
                f"custom inputs are {self._custom}"
            )
        return {name: self._check_custom(name, made[name], source) for name in self._custom}

    def _check_custom(self, name: str, value: Any, source: str) -> Tensor | Scalar:
        source = f"{source}: input {name!r}"
        if name not in self.tensors:
            if isinstance(value, Tensor) or not isinstance(value, bool | int | float):
                raise ProblemError(
                    f"{source} is {type(value).__name__}, expected a Python number "
                    "(shape null); for a 0-d tensor use .item()"
                )
            return _as_scalar(value, self.problem, name)
        arg = self.tensors[name]
        if not isinstance(value, Tensor):
            raise ProblemError(f"{source} is {type(value).__name__}, expected a tensor")
        if tuple(value.shape) != arg.shape:
            raise ProblemError(
                f"{source} has shape {list(value.shape)}, expected {list(arg.shape)}"
            )
        _check_dtype(value, arg, source)
        value = value.detach().to(self.device).contiguous()
        return (
            value if value.dtype == torch_dtype(arg.dtype) else value.view(torch_dtype(arg.dtype))
        )

    @property
    def _where(self) -> str:
        return f"{self.problem.id}, workload {self.workload.uuid}"


def load_generator(problem: Problem) -> Callable[[dict[str, Any], torch.device], Any]:
    """The reference's generator of custom inputs, f(axes_and_scalars, device) -> {name: value}.

    Executes the reference's source, which must be trusted.

    Raises:
        ProblemError: the reference cannot be executed or has no such function.
    """
    entry = problem.definition.custom_inputs_entrypoint
    if entry is None:
        raise ProblemError(f"{problem.id}: custom_inputs_entrypoint is not set")
    namespace: dict[str, Any] = {"__name__": "reference"}
    try:
        exec(compile(problem.reference, f"<reference of {problem.id}>", "exec"), namespace)
    except Exception as error:
        raise ProblemError(
            f"{problem.id}: the reference cannot be executed: {type(error).__name__}: {error}"
        ) from error
    function = namespace.get(entry)
    if not callable(function):
        raise ProblemError(
            f"{problem.id}: the reference has no function {entry!r} (custom_inputs_entrypoint)"
        )
    return function


def _bytes(tensor: Tensor) -> Tensor:
    """fp4 tensors as their bytes, since torch lacks most operations on them; others as they are."""
    return tensor.view(torch.uint8) if str(tensor.dtype) == "torch.float4_e2m1fn_x2" else tensor


def _check_dtype(tensor: Tensor, arg: TensorArg, what: str) -> None:
    expected = torch_dtype(arg.dtype)
    packed = arg.dtype == "float4_e2m1fn_x2" and tensor.dtype == torch.uint8
    if tensor.dtype != expected and not packed:
        raise ProblemError(f"{what} has dtype {tensor.dtype}, expected {expected}")


def _as_scalar(value: Scalar, problem: Problem, name: str) -> Scalar:
    """The number as the Python type of its declared dtype: 1 for a float32 input is 1.0."""
    dtype = problem.definition.inputs[name].dtype
    kind: type = bool if dtype == "bool" else float if "float" in dtype else int
    if kind is float:
        return float(value)  # nan and infinities are floats like others
    if not math.isfinite(value) or kind(value) != value:
        raise ProblemError(f"{problem.id}: input {name!r} is {value!r}, expected {dtype}")
    return kind(value)


def _new_seed(seed: int | None) -> int:
    """A seed torch takes: 63 bits, from the operating system unless given."""
    return (int.from_bytes(os.urandom(8)) if seed is None else seed) & (2**63 - 1)


def _unknown_profile(profile: str) -> str:
    known = ", ".join(sorted(_PROFILES))
    return f"there is no input profile {profile!r}; there is: {known}"
