"""Recording what a reference does at full size without doing it.

The reference runs on meta tensors, which have shapes but no memory, under a dispatch mode that
notes every aten operation. Where its course depends on values (`.item()`, a boolean mask, sizes
read from a tensor), just those values are found (`contents`); weights and activations of gigabytes
never exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import islice
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..draws import fill_random, torch_dtype
from ..errors import BoundError
from ..inputs import InputMaker, load_generator
from ..problem import (
    CustomInput,
    Problem,
    RandomInput,
    SafetensorsInput,
    ScalarInput,
    TensorArg,
    Workload,
)
from .contents import CHEAP, Contents, TooExpensive
from .shapes import ELEMENTWISE, IN_PLACE, SHAPES, Elementwise
from .trace import Base, Control, Node, Trace, Value, map_values, values_in
from .views import make_step

_META = torch.device("meta")
_SEQUENCES = (list, tuple)
_REFERENCE = "<reference of "
_VIEWS_IN_PLACE = frozenset(("squeeze_", "unsqueeze_", "transpose_", "t_"))


def capture(problem: Problem, workload: Workload, *, seed: int) -> tuple[Trace, Contents]:
    """Record the reference on one workload.

    Args:
        problem: its reference is executed and must be trusted.
        workload: one of the problem's.
        seed: of the inputs, where their values matter.

    Returns:
        The run, and the source of real values for what is asked about it later.

    Raises:
        ValuesUnknown: the reference's course depends on values that cost too much to find.
        BoundError: the reference fails, or does not return what the definition says.
    """
    contents = Contents(seed)
    recorder = _Recorder(contents)
    sources = _input_sources(problem, workload, recorder, seed)
    recorder.begin()
    arguments: list[Any] = []
    inputs: dict[str, Value] = {}
    tensors = problem.tensors(workload)
    for name in problem.definition.inputs:
        if name in tensors:
            meta, inputs[name] = recorder.add_input(tensors[name], sources[name])
            arguments.append(meta)
        else:
            arguments.append(sources[name])
    outputs = recorder.run(load_run(problem), arguments)
    _check_outputs(problem, workload, outputs)
    return Trace(inputs, outputs, recorder.steps), contents


def _input_sources(
    problem: Problem, workload: Workload, recorder: _Recorder, seed: int
) -> dict[str, Any]:
    """Scalar inputs by value, tensor inputs as functions that make their real values."""
    sources: dict[str, Any] = {}
    tensors = problem.tensors(workload)
    for name, spec in workload.inputs.items():
        if isinstance(spec, ScalarInput):
            sources[name] = spec.value
        elif isinstance(spec, RandomInput):
            sources[name] = _drawing(tensors[name])
        elif isinstance(spec, SafetensorsInput):
            recorded = InputMaker(problem, workload, "cpu", seed=seed).recorded
            sources[name] = lambda tensor=recorded[name]: tensor
    custom = [n for n, s in workload.inputs.items() if isinstance(s, CustomInput)]
    if custom:
        scalars = {n: v for n, v in sources.items() if n not in tensors}
        axes = {**problem.definition.bind(workload.axes), **scalars}
        made = recorder.call(load_generator(problem), [axes, torch.device("cpu")])
        for name in custom:
            value = made.get(name)
            sources[name] = recorder.making(value) if isinstance(value, Tensor) else value
    return sources


def _drawing(arg: TensorArg) -> Callable[[], Tensor]:
    def draw() -> Tensor:
        batch = torch.empty((1, *arg.shape), dtype=torch_dtype(arg.dtype))
        fill_random(batch, arg.name, arg.dtype, torch.default_generator)
        return batch[0]

    return draw


def load_run(problem: Problem) -> Callable[..., Any]:
    """The reference's function, by executing its source.

    Raises:
        BoundError: the source fails, or has no function `run`.
    """
    namespace: dict[str, Any] = {"__name__": "reference"}
    try:
        exec(_compiled(problem.reference, f"{_REFERENCE}{problem.id}>"), namespace)
    except Exception as error:
        raise BoundError(
            f"{problem.id}: the reference cannot be executed: {type(error).__name__}: {error}"
        ) from error
    run = namespace.get("run")
    if not callable(run):
        raise BoundError(f"{problem.id}: the reference has no function 'run'")
    return run


@lru_cache(maxsize=64)
def _compiled(source: str, name: str) -> CodeType:
    return compile(source, name, "exec")


def _check_outputs(problem: Problem, workload: Workload, outputs: list[Value]) -> None:
    expected = list(problem.outputs(workload).values())
    if [o.shape for o in outputs] != [e.shape for e in expected]:
        raise BoundError(
            f"{problem.id}, workload {workload.uuid}: the reference returns shapes "
            f"{[list(o.shape) for o in outputs]}, the definition says "
            f"{[list(e.shape) for e in expected]}"
        )


class ValuesUnknown(BoundError):
    """The reference's course depends on values that cost too much to compute."""


class _Operation(NamedTuple):
    """What is looked up once for each operation."""

    name: str
    overload: str
    defaults: dict[str, Any]
    """Names of all arguments, in order, with their defaults."""
    written: tuple[str, ...]
    """Names of the arguments it changes."""
    pointwise: bool
    random: bool
    sized_by_values: bool
    """Whether the shape of the result depends on values."""


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    tags = func.tags
    return _Operation(
        name=schema.name.split("::")[1],
        overload=func._overloadname,
        defaults={a.name: a.default_value for a in schema.arguments},
        written=tuple(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ),
        pointwise=torch.Tag.pointwise in tags
        or schema.name.split("::")[1].rstrip("_") in ELEMENTWISE,
        random=torch.Tag.nondeterministic_seeded in tags,
        sized_by_values=torch.Tag.dynamic_output_shape in tags
        or torch.Tag.data_dependent_output in tags,
    )


class _Recorder(TorchDispatchMode):
    """Runs operations on meta tensors and notes what was done."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self.steps: list[Node | Control] = []
        self._contents = contents
        self._values: dict[tuple, Value] = {}
        self._bases: dict[int, Base] = {}
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}
        self._elementwise = Elementwise()
        self._making_inputs = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled; wrapping the mode for torch.compile would import all of
        # torch._dynamo at the first operation, which takes seconds.
        return False

    # ---- Setting up and running --------------------------------------------------------------

    def begin(self) -> None:
        """From here on it is the reference that runs, no longer the generator of inputs."""
        self.steps = []
        self._making_inputs = False

    def add_input(self, arg: TensorArg, draw: Callable[[], Tensor] | None) -> tuple[Tensor, Value]:
        """A meta tensor for an input, and its value."""
        meta = torch.empty(arg.shape, dtype=torch_dtype(arg.dtype), device=_META)
        value = self._add_base(meta, None)
        value.base.input_name, value.base.draw = arg.name, draw
        value.base.steering = "mask" in arg.name
        return meta, value

    def making(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that makes the real values of a tensor the generator returned."""
        value = self._value(self._on_meta(tensor))
        version = value.base.version
        return lambda: self._contents.of(value, version, budget=float("inf")).contiguous()

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Value]:
        """Call the reference and return the values of the tensors it returns, in order."""
        returned = self.call(function, arguments)
        items = returned.values() if isinstance(returned, dict) else returned
        items = [items] if isinstance(items, Tensor) else list(items)
        return [self._value(self._on_meta(item)) for item in items]

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call a function under the recorder."""
        try:
            with _Interceptor(self), self:
                return function(*arguments)
        except BoundError:
            raise
        except Exception as error:
            raise BoundError(
                f"recording the reference failed: {type(error).__name__}: {error}"
            ) from error

    def read(self, tensor: Tensor) -> Tensor:
        """Real values the reference asks for, noted as read.

        Raises:
            ValuesUnknown: finding them costs too much.
        """
        value = self._value(self._on_meta(tensor))
        self.steps.append(Control(value, value.base.version))
        found = self._contents.choosing(value, value.base.version)
        if found is None:
            raise ValuesUnknown(
                f"the reference's course depends on the values of a {list(value.shape)} "
                f"{value.dtype} tensor, which cost too much to compute here"
            )
        return found

    # ---- One operation -----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = _operation(func)
        if operation.name == "_local_scalar_dense":
            return self._number(self._on_meta(args[0]))
        if operation.name in _VIEWS_IN_PLACE:
            return self._view_in_place(func, operation, args)
        indexing = operation.name == "index" or operation.name.startswith("index_put")
        bound = dict(operation.defaults)
        bound.update(zip(operation.defaults, args, strict=False))
        kwargs = kwargs or {}
        bound.update(kwargs)
        arguments = bound.copy()
        inputs: list[Value] = []
        for name, arg in bound.items():
            if isinstance(arg, Tensor):
                bound[name] = meta = self._on_meta(arg)
                arguments[name] = value = self._value(meta)
                inputs.append(value)
            elif type(arg) in _SEQUENCES and any(isinstance(x, Tensor) for x in arg):
                items = [self._on_meta(x) if isinstance(x, Tensor) else x for x in arg]
                if indexing:
                    items = self._as_integer_indices(items)
                values = [self._value(x) if isinstance(x, Tensor) else x for x in items]
                bound[name], arguments[name] = items, values
                inputs += [v for v in values if isinstance(v, Value)]
        node = Node(
            name=operation.name,
            overload=operation.overload,
            call=func,
            args=arguments,
            inputs=inputs,
            versions=[len(v.base.makers) - 1 for v in inputs],
            written=[v for name in operation.written for v in values_in(arguments[name])],
            outs=[],
            pointwise=operation.pointwise,
            random=operation.random,
            position=len(self.steps),
            line=_line_of_reference(),
        )
        if "device" in arguments:
            arguments["device"] = "cpu"  # where its real values would be made
            bound["device"] = _META
            kwargs = {**kwargs, "device": _META}
        made_here = False
        if operation.sized_by_values and not indexing:
            results = self._sized_by_values(node)
            if not isinstance(results, (Tensor, *_SEQUENCES)):
                return results
        elif operation.written and (operation.pointwise or operation.name in IN_PLACE):
            results = bound[operation.written[0]]
        elif operation.pointwise:
            results, made_here = self._elementwise(func, bound), True
        elif operation.name in SHAPES and not operation.written:
            results, made_here = SHAPES[operation.name](bound), True
        elif operation.name == "arange":
            made = func(**arguments)  # cheaper to have than to find its length
            results = torch.empty_like(made, device=_META)
        else:
            positional = [bound[name] for name in islice(bound, len(args))]
            results = func(*positional, **{name: bound[name] for name in kwargs})
        if made_here and isinstance(results, Tensor):
            node.outs.append(self._add_base(results, node))
            self.steps.append(node)
            return results
        if self._register(node, results):
            self.steps.append(node)
        if operation.name == "arange":
            self._value(results).base.contents[0] = made
        return results

    def _view_in_place(self, func: Any, operation: _Operation, args: Sequence[Any]) -> Tensor:
        """A tensor becomes another view of its memory; the values do not change."""
        tensor = self._on_meta(args[0])
        source = self._value(tensor)
        name, rest = operation.name.removesuffix("_"), tuple(args[1:])
        call = getattr(getattr(torch.ops.aten, name), operation.overload)
        func(tensor, *rest)
        shape = tuple(tensor.shape)
        step = make_step(
            name, operation.overload, rest, source.shape, shape, 0, lambda t: call(t, *rest)
        )
        self._remember(tensor, Value(source.base, shape, tensor.dtype, source, step))
        return tensor

    def _sized_by_values(self, node: Node) -> Any:
        """An operation whose result's shape, or whose Python result, depends on values."""
        real = {}
        for name, arg in node.args.items():
            real[name] = map_values(self._read_value, arg)
        made = node.call(**real)
        if isinstance(made, Tensor):
            return torch.empty_like(made, device=_META)
        if isinstance(made, list | tuple):
            return [torch.empty_like(m, device=_META) for m in made]
        return made

    def _register(self, node: Node, results: Any) -> bool:
        """Values for the results; whether the operation is more than a view."""
        flat = results if isinstance(results, list | tuple) else [results]
        does_something = bool(node.written)
        for i, out in enumerate(flat):
            if not isinstance(out, Tensor):
                node.outs.append(None)
                continue
            value = self._find(out)
            if value is None:
                base = self._bases.get(out.untyped_storage()._cdata)
                value = (
                    self._add_base(out, node)
                    if base is None
                    else self._add_view(out, base, node, i)
                )
                does_something = does_something or base is None
            node.outs.append(value)
        for base in {id(v.base): v.base for v in node.written}.values():
            base.makers.append(node)
        return does_something

    # ---- Tensors and values ------------------------------------------------------------------

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """The meta tensor that stands for a tensor; real ones become constants."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._constants:
            meta = torch.empty_like(tensor, device=_META)
            value = self._add_base(meta, None)
            value.base.contents[0] = tensor.detach()
            self._constants[id(tensor)] = tensor, meta
        return self._constants[id(tensor)][1]

    def _find(self, meta: Tensor) -> Value | None:
        value = getattr(meta, "_solar_value", None)
        if value is None:
            value = self._values.get(_key(meta))
            if value is not None:
                meta._solar_value = value  # type: ignore[attr-defined]
        return value

    def _value(self, meta: Tensor) -> Value:
        value = self._find(meta)
        if value is None:
            raise BoundError(
                f"a {list(meta.shape)} {meta.dtype} tensor came from outside the recorded run"
            )
        return value

    def _add_base(self, meta: Tensor, maker: Node | None) -> Value:
        base = Base(tuple(meta.shape), meta.dtype, [maker], keep=meta)
        value = Value(base, base.shape, base.dtype)
        key = _key(meta)
        self._bases[key[0]] = base
        return self._remember(meta, value, key)

    def _add_view(self, out: Tensor, base: Base, node: Node, position: int) -> Value:
        source = next(v for v in node.inputs if v.base is base)
        # Without the node, which refers to the view: no cycle is left to be collected.
        call, args = node.call, node.args
        rest = tuple(a for a in args.values() if a is not source)

        def replay(tensor: Tensor) -> Tensor:
            made = call(**{k: tensor if a is source else a for k, a in args.items()})
            return made[position] if isinstance(made, list | tuple) else made

        step = make_step(
            node.name, node.overload, rest, source.shape, tuple(out.shape), position, replay
        )
        return self._remember(out, Value(base, tuple(out.shape), out.dtype, source, step))

    def _remember(self, meta: Tensor, value: Value, key: tuple | None = None) -> Value:
        key = key or _key(meta)
        self._values[key] = value
        value.geometry = key[1:]
        if value.source is None:
            value.base.geometry = value.geometry
        meta._solar_value = value  # type: ignore[attr-defined]
        return value

    def _read_value(self, value: Value) -> Tensor:
        assert value.base.keep is not None
        return self.read(value.of_base(value.base.keep))

    def _number(self, tensor: Tensor) -> Any:
        if not self._making_inputs:
            return self.read(tensor).item()
        value = self._value(tensor)
        try:
            return self._contents.of(value, value.base.version, budget=CHEAP / 8).item()
        except TooExpensive:
            return 1.0  # a number that a generator takes from large data is a scale

    def _as_integer_indices(self, given: Sequence[Any]) -> list[Any]:
        """The indices of an indexing operation with boolean masks as integer indices."""
        indices: list[Any] = []
        for index in given:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            else:
                mask = self.read(index)
                indices += [self._on_meta(i) for i in mask.nonzero(as_tuple=True)]
        return indices


class _Interceptor(TorchFunctionMode):
    """The few calls that would bypass the dispatcher or lose data on meta tensors."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}
        elif func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            values = self._recorder.read(args[0])
            with _disable_current_modes():
                return func(values, *args[1:], **kwargs)
        return func(*args, **kwargs)


def _line_of_reference() -> int | None:
    """The line of the reference that is being run."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_REFERENCE):
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _key(tensor: Tensor) -> tuple:
    """What identifies a view: its storage and geometry. Strides of axes of size 1 mean nothing."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if 1 in shape or 0 in shape:
        strides = tuple(s if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
    offset = tensor.storage_offset()
    return tensor.untyped_storage()._cdata, offset, shape, strides, tensor.dtype
