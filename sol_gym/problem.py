"""Problems as data: definition, reference and workloads, in the public SOL-ExecBench layout.

A problem is a folder::

    L1/069_rms_norm/
        definition.json   axes, inputs, outputs (and, in the public data set, the reference text)
        workload.jsonl    one workload a line
        reference.py      run(*inputs) -> outputs; optionally a generator of custom inputs
        pack.json         ours, optional: title, family, smoke profile, strict-input hints

The first three are exactly what the public data set and its tools use, so folders interchange in
both directions. `Problem` is frozen and complete: it travels to the judge as JSON, and nothing on
the other side needs the folder.

Adding a problem to the library is adding such a folder under ``problems/<SUBSET>/``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .axes import check_constraint, concerns_values, evaluate_axis, names_in
from .errors import ProblemError

DType = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float4_e2m1", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "float4_e2m1": 1, "float4_e2m1fn_x2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes an element occupies in memory (two packed fp4 values count as one element)."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _Open(BaseModel):
    """Public records may carry fields we do not know; they are kept, so that export loses nothing."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


class AxisConst(_Open):
    """An axis with one value for all workloads."""

    type: Literal["const"] = "const"
    value: int = Field(ge=0)
    description: str | None = None


class AxisVar(_Open):
    """An axis bound by each workload."""

    type: Literal["var"] = "var"
    description: str | None = None


class AxisExpr(_Open):
    """An axis computed from others."""

    type: Literal["expr"] = "expr"
    expression: str
    description: str | None = None


Axis = Annotated[AxisConst | AxisVar | AxisExpr, Field(discriminator="type")]


class TensorSpec(_Open):
    """Shape and dtype of one input or output."""

    shape: list[str] | None
    """Axis names, integers as text, or expressions; `None` is a Python scalar, `[]` a 0-d tensor."""
    dtype: DType
    description: str | None = None

    @field_validator("shape", mode="before")
    @classmethod
    def _integers_as_text(cls, shape: Any) -> Any:
        return (
            [str(s) if isinstance(s, int) else s for s in shape]
            if isinstance(shape, list)
            else shape
        )

    @property
    def is_scalar(self) -> bool:
        """Whether the argument is a Python number rather than a tensor."""
        return self.shape is None


class RandomInput(_Model):
    """Drawn by the rules of `sol_gym.inputs`, from the input's name and dtype."""

    type: Literal["random"] = "random"


class CustomInput(_Model):
    """Made by the reference's own generator (`Definition.custom_inputs_entrypoint`)."""

    type: Literal["custom"] = "custom"


class ScalarInput(_Model):
    """A Python number given by the workload."""

    type: Literal["scalar"] = "scalar"
    value: bool | int | float


class SafetensorsInput(_Model):
    """A tensor read from a recorded file, relative to the problem's folder or the blob root."""

    type: Literal["safetensors"] = "safetensors"
    path: str
    tensor_key: str


InputSpec = Annotated[
    RandomInput | CustomInput | ScalarInput | SafetensorsInput, Field(discriminator="type")
]


class Tolerance(_Model):
    """When an output counts as right: |out - ref| <= max_atol + max_rtol * |ref|, for enough elements."""

    max_atol: float = Field(default=1e-2, ge=0)
    max_rtol: float = Field(default=1e-2, ge=0)
    required_matched_ratio: float = Field(default=0.99, ge=0, le=1)
    """Share of the elements that must pass."""
    max_error_cap: float | None = Field(default=None, ge=0)
    """No element may be further off than this, whatever the ratio."""
    allow_negative_inf: bool = False
    """Whether -inf on both sides is a match."""
    misspelt_ratio_key: bool = Field(default=False, exclude=True)
    """True where the file said `required_match_ratio`, a misspelling in the public data set.

    The public harness ignores that key and applies 0.99; here it is understood as
    `required_matched_ratio`."""

    @model_validator(mode="before")
    @classmethod
    def _understand_the_misspelling(cls, data: Any) -> Any:
        if isinstance(data, dict) and "required_match_ratio" in data:
            data = dict(data)
            ratio = data.pop("required_match_ratio")
            data.setdefault("required_matched_ratio", ratio)
            data["misspelt_ratio_key"] = True
        return data


class Workload(_Open):
    """One binding of the variable axes, with where the inputs come from and the tolerance."""

    uuid: str = Field(min_length=1)
    axes: dict[str, int]
    inputs: dict[str, InputSpec]
    tolerance: Tolerance = Tolerance()

    @field_validator("tolerance", mode="before")
    @classmethod
    def _default_tolerance(cls, value: Any) -> Any:
        return Tolerance() if value is None else value

    @field_validator("axes")
    @classmethod
    def _no_negative_axis(cls, axes: dict[str, int]) -> dict[str, int]:
        for name, value in axes.items():
            if value < 0:
                raise ValueError(f"axis {name!r} is {value}, expected 0 or more")
        return axes

    @property
    def scalars(self) -> dict[str, bool | int | float]:
        """Values of the scalar inputs."""
        return {k: v.value for k, v in self.inputs.items() if isinstance(v, ScalarInput)}


class Definition(_Open):
    """What a problem computes on: axes, inputs and outputs in call order."""

    name: str = Field(min_length=1)
    op_type: str | None = None
    description: str | None = None
    axes: dict[str, Axis]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    constraints: list[str] | None = None
    custom_inputs_entrypoint: str | None = None
    """Name of a function in the reference: f(axes_and_scalars, device) -> {input name: tensor}."""
    reference: str = Field(min_length=1)
    """Python source that defines `run(*inputs)`."""

    @model_validator(mode="after")
    def _consistent(self) -> Definition:
        if not self.inputs or not self.outputs:
            raise ValueError("expected at least one input and one output")
        both = set(self.inputs) & set(self.outputs)
        if both:
            raise ValueError(f"names {sorted(both)} are both inputs and outputs")
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for name, spec in specs.items():
                if kind == "output" and spec.shape is None:
                    raise ValueError(f"output {name!r} has shape null; outputs are tensors")
                for dim in spec.shape or ():
                    unknown = names_in(dim) - set(self.axes)
                    if unknown:
                        raise ValueError(
                            f"{kind} {name!r} uses unknown axis {sorted(unknown)}; "
                            f"known axes: {sorted(self.axes)}"
                        )
        for name, axis in self.axes.items():
            if isinstance(axis, AxisExpr) and (
                missing := names_in(axis.expression) - set(self.axes)
            ):
                raise ValueError(
                    f"axis {name!r} = {axis.expression!r} uses unknown {sorted(missing)}"
                )
        return self

    @property
    def var_axes(self) -> list[str]:
        """Names of the axes a workload must bind, in definition order."""
        return [n for n, a in self.axes.items() if isinstance(a, AxisVar)]

    def bind(self, axes: dict[str, int]) -> dict[str, int]:
        """All axis values, given those of the variable axes.

        Raises:
            ProblemError: a variable axis is missing, an unknown one given, an expression is
                circular, or a constraint over axes does not hold.
        """
        missing = [n for n in self.var_axes if n not in axes]
        unknown = [n for n in axes if n not in self.axes]
        if missing or unknown:
            raise ProblemError(
                f"{self.name}: workload axes do not fit: missing {missing}, unknown {unknown}; "
                f"expected {self.var_axes}"
            )
        values = {n: a.value for n, a in self.axes.items() if isinstance(a, AxisConst)} | axes
        pending = {
            n: a.expression
            for n, a in self.axes.items()
            if isinstance(a, AxisExpr) and n not in values
        }
        while pending:
            ready = [n for n, e in pending.items() if names_in(e) <= set(values)]
            if not ready:
                raise ProblemError(f"{self.name}: axis expressions are circular: {pending}")
            for name in ready:
                values[name] = evaluate_axis(pending.pop(name), values)
        for constraint in self.constraints or ():
            if concerns_values(constraint, self.inputs):
                continue
            if not check_constraint(constraint, values):
                raise ProblemError(
                    f"{self.name}: constraint {constraint!r} does not hold for {values}"
                )
        return values


class SmokeProfile(_Model):
    """A small stand-in for the published workloads: same structure, shrunk axes."""

    axes: dict[str, int] = {}
    """Constant axes to override."""
    workloads: list[Workload]


class _Rule(_Model):
    """How the strict profile draws one input, instead of by what the input looks like."""

    variants: list[str] | None = None
    """Strict variants it is for; None is all. In the others the generic rules apply."""

    def applies(self, variant: str) -> bool:
        """Whether the rule is for this variant."""
        return self.variants is None or variant in self.variants


class KeepRule(_Rule):
    """As the compatible profile draws it."""

    kind: Literal["keep"] = "keep"


class ActivationRule(_Rule):
    """As an activation, whatever the name says: scales, means and outliers of the variant."""

    kind: Literal["activation"] = "activation"


class ScaleRule(_Rule):
    """Times a power of two with an exponent from `low` to `high`, another one for each row (all
    axes but the last), or for each index of `axis`; a Python number once."""

    kind: Literal["scale"] = "scale"
    low: int = -3
    high: int = 3
    axis: int | None = None


class NormalRule(_Rule):
    """Independent normal values."""

    kind: Literal["normal"] = "normal"
    mean: float = 0.0
    std: float = Field(default=1.0, gt=0)
    fan_in: bool = False
    """Whether `std` is divided by the square root of the last axis."""


class UniformRule(_Rule):
    """Independent uniform values."""

    kind: Literal["uniform"] = "uniform"
    low: float
    high: float


class ChoiceRule(_Rule):
    """One of `values`: for each element, or for a Python number once."""

    kind: Literal["choice"] = "choice"
    values: list[bool | int | float] = Field(min_length=1)


class IntegersRule(_Rule):
    """Uniform integers from `low` to below `high`; a bound may name an axis."""

    kind: Literal["integers"] = "integers"
    low: int | str = 0
    high: int | str


class DistinctRule(_Rule):
    """Distinct integers below `size` in every row, in random order; with `skew` (0 to 2) the low
    ones are likelier and the highest ones rarely chosen."""

    kind: Literal["distinct"] = "distinct"
    size: int | str
    skew: float = Field(default=0.0, ge=0)


class SkewedRule(_Rule):
    """Integers below `size`, low ones far likelier, repeated freely."""

    kind: Literal["skewed"] = "skewed"
    size: int | str
    power: float = Field(default=2.0, gt=0)


class ShuffleRule(_Rule):
    """The drawn values in a random order along an axis."""

    kind: Literal["shuffle"] = "shuffle"
    axis: int = 0


class LengthsRule(_Rule):
    """Boundaries of pieces of very unequal lengths, down to `least`, with the same total."""

    kind: Literal["lengths"] = "lengths"
    leading_zero: bool = True
    least: int = Field(default=0, ge=0)
    total: int | str | None = None


class MaskRule(_Rule):
    """An additive mask: one visible key in five blocked, the others shaded if `graded`; or with
    `graded_only` finite shades everywhere."""

    kind: Literal["mask"] = "mask"
    graded: bool = True
    graded_only: bool = False


StrictRule = Annotated[
    KeepRule | ActivationRule | ScaleRule | NormalRule | UniformRule | ChoiceRule | IntegersRule
    | DistinctRule | SkewedRule | ShuffleRule | LengthsRule | MaskRule,
    Field(discriminator="kind"),
]  # fmt: skip

Precision = Literal["float32", "tf32", "bfloat16", "float16"]


class PrecisionPolicy(_Model):
    """The lowest precision that operands of contractions may be rounded to, besides quantising
    steps of the problem itself. Accumulation is in float32 throughout."""

    contraction: Precision = "float32"
    """Of matrix products (attention included)."""
    convolution: Precision = "float32"
    """Of convolutions; PyTorch lets cuDNN use TF32 for float32 ones by default."""
    why: str = ""


class Recipe(_Model):
    """Another way to draw a problem's inputs than its workloads say."""

    description: str
    """What it draws, and why one might want it."""
    random: list[str]
    """Inputs that are drawn by the rules of `sol_gym.draws` instead."""


class Pack(_Open):
    """What we add to a public problem (`pack.json`)."""

    id: str
    title: str
    source_model: str | None = None
    family: str = ""
    """E.g. `norm`, `attention`, `moe`, `gemm`, `ssm`, `conv`."""
    direction: Literal["forward", "backward"] = "forward"
    precision: str = ""
    """Precision class of the contraction work, e.g. `bf16`, `fp32`, `fp8`, `nvfp4`, `none`."""
    notes: list[str] = []
    """Facts a kernel author should know: unread inputs, discarded work, data-dependent work."""
    unread_inputs: list[str] = []
    """Inputs no output depends on."""
    custom_inputs: list[str] = []
    """Inputs the reference's generator makes although the published workloads say `random`."""
    recipes: dict[str, Recipe] = {}
    """Named alternatives to how the workloads draw their inputs (`Problem.with_recipe`)."""
    published_aliases: dict[str, str] = {}
    """Output -> input that the published reference overwrites and returns as that output.

    References here leave their inputs alone and return tensors of their own, and the judge rejects
    a candidate that changes an input."""
    zero_outputs: list[str] = []
    """Outputs that are zero whatever the inputs, in the published reference too."""
    rounding_sensitive: str = ""
    """Why results turn on the last bit of an intermediate, so that float64 is no oracle."""
    strict: dict[str, Any] = {}
    """What must vary for a wrong kernel to be caught, in words: input name -> hint."""
    strict_rules: dict[str, StrictRule | list[StrictRule]] = {}
    """Strict draws of inputs that the generic rules of `sol_gym.strict` do not fit; several rules
    apply one after the other."""
    strict_variants: list[str] | None = None
    """Names of the strict variants used; None leaves the choice to the family."""
    free_axes: list[str] = []
    """Variable axes of which the strict profile also tries sizes that no workload has. Only axes
    whose published sizes have no common divisor: a kernel must serve any size of those."""
    precision_policy: PrecisionPolicy = PrecisionPolicy()
    selects: float = Field(default=0.0, ge=0, le=1)
    """Share of an output's elements that a selection (top-k, routing) or a quantising step may
    decide otherwise where two candidates are equal up to rounding; 0 where nothing is selected."""
    smoke: SmokeProfile | None = None
    imported_from: dict[str, str] | None = None
    """Of an imported problem: `format`, `source` (file or folder name) and the source's `sha256`."""


class TensorArg(_Model):
    """A tensor argument with everything resolved: its shape in elements and its size."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


M = TypeVar("M", bound=BaseModel)

ProfileName = Literal["full", "smoke"]


class Problem(_Model):
    """A problem, complete and immutable.

    Example:
        >>> from sol_gym.problems import load
        >>> problem = load("L1/069_rms_norm")
        >>> problem.tensors(problem.workloads[0])["hidden_states"].shape
        (1, 8192, 8192)
    """

    id: str
    """`SUBSET/name` for the library's own, else the definition's name."""
    definition: Definition
    workloads: tuple[Workload, ...]
    profile: ProfileName = "full"
    """Which workload list this is; every result repeats it."""
    pack: Pack | None = None
    root: str | None = Field(default=None, exclude=True)
    """Folder it came from; safetensors paths are relative to it."""
    blob_root: str | None = Field(default=None, exclude=True)
    """Folder the user named for recorded tensors; looked in before `root`."""

    @model_validator(mode="after")
    def _workloads_fit(self) -> Problem:
        if not self.workloads:
            raise ValueError(f"{self.id}: no workloads")
        for i, workload in enumerate(self.workloads):
            try:
                self._check_workload(workload)
            except ProblemError as error:
                raise ValueError(f"workload {i} ({workload.uuid}): {error}") from None
        return self

    def _check_workload(self, workload: Workload) -> None:
        d = self.definition
        missing, unknown = (
            set(d.inputs) - set(workload.inputs),
            set(workload.inputs) - set(d.inputs),
        )
        if missing or unknown:
            raise ProblemError(
                f"inputs do not fit: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name, spec in workload.inputs.items():
            if isinstance(spec, CustomInput):
                if not d.custom_inputs_entrypoint:
                    raise ProblemError(
                        f"input {name!r} is custom but custom_inputs_entrypoint is not set"
                    )
            elif isinstance(spec, ScalarInput) != d.inputs[name].is_scalar:
                expected = "a scalar" if d.inputs[name].is_scalar else "a tensor"
                raise ProblemError(f"input {name!r} is declared as {expected}, found {spec.type!r}")
        d.bind(workload.axes)

    @property
    def reference(self) -> str:
        """Python source of the reference."""
        return self.definition.reference

    def tensors(self, workload: Workload) -> dict[str, TensorArg]:
        """Tensor inputs of a workload with their resolved shapes, in call order."""
        return self._resolve(self.definition.inputs, workload)

    def outputs(self, workload: Workload) -> dict[str, TensorArg]:
        """Outputs of a workload with their resolved shapes, in call order."""
        return self._resolve(self.definition.outputs, workload)

    def declared_bytes(self, workload: Workload) -> int:
        """Bytes of a workload's inputs and outputs together."""
        arguments = [*self.tensors(workload).values(), *self.outputs(workload).values()]
        return sum(argument.nbytes for argument in arguments)

    def _resolve(self, specs: dict[str, TensorSpec], workload: Workload) -> dict[str, TensorArg]:
        values = self.definition.bind(workload.axes)
        return {
            name: TensorArg(
                name=name,
                shape=tuple(evaluate_axis(dim, values) for dim in spec.shape),
                dtype=spec.dtype,
            )
            for name, spec in specs.items()
            if spec.shape is not None
        }

    def with_profile(self, profile: ProfileName) -> Problem:
        """This problem with its full or its smoke workloads.

        Raises:
            ProblemError: the pack has no smoke profile.
        """
        if profile == self.profile:
            return self
        if profile == "full":
            raise ProblemError(
                f"{self.id}: the full workloads cannot be had from a smoke problem; load it again"
            )
        if self.pack is None or self.pack.smoke is None:
            raise ProblemError(
                f"{self.id} has no smoke profile (pack.json: 'smoke'); use profile 'full'"
            )
        smoke = self.pack.smoke
        axes = dict(self.definition.axes)
        for name, value in smoke.axes.items():
            if not isinstance(axes.get(name), AxisConst):
                raise ProblemError(
                    f"{self.id}: smoke overrides {name!r}, which is not a constant axis"
                )
            axes[name] = axes[name].model_copy(update={"value": value})
        return Problem(
            id=self.id,
            definition=self.definition.model_copy(update={"axes": axes}),
            workloads=tuple(smoke.workloads),
            profile="smoke",
            pack=self.pack,
            root=self.root,
            blob_root=self.blob_root,
        )

    def with_recipe(self, name: str) -> Problem:
        """This problem with its inputs drawn by a named recipe of its pack.

        Raises:
            ProblemError: the pack has no such recipe.
        """
        recipes = {} if self.pack is None else self.pack.recipes
        if name not in recipes:
            known = f"it has {', '.join(recipes)}" if recipes else "it has none"
            raise ProblemError(f"{self.id} has no input recipe {name!r}; {known}")
        drawn = {input_name: RandomInput() for input_name in recipes[name].random}
        return self.model_copy(
            update={
                "workloads": tuple(
                    w.model_copy(update={"inputs": {**w.inputs, **drawn}}) for w in self.workloads
                )
            }
        )

    def with_workloads(self, indices: list[int]) -> Problem:
        """This problem with some of its workloads, in the order given."""
        count = len(self.workloads)
        for i in indices:
            if not -count <= i < count:
                raise ProblemError(f"{self.id} has {count} workloads; there is no workload {i}")
        return self.model_copy(update={"workloads": tuple(self.workloads[i] for i in indices)})

    @cached_property
    def content_hash(self) -> str:
        """Identity of what is computed on what: 16 hex digits over definition and workloads."""
        data = {
            "definition": self.definition.model_dump(mode="json", exclude={"description"}),
            "workloads": [w.model_dump(mode="json") for w in self.workloads],
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def workload_hash(self, workload: Workload) -> str:
        """Identity of what one workload computes: 16 hex digits over the definition, the reference
        and the workload's axes and inputs (not its tolerance, which no time depends on)."""
        data = {
            "definition": self.definition.model_dump(
                mode="json",
                include={"axes", "inputs", "outputs", "custom_inputs_entrypoint", "reference"},
            ),
            "workload": workload.model_dump(mode="json", include={"axes", "inputs"}),
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def load_problem(path: str | Path, *, problem_id: str | None = None) -> Problem:
    """Read a problem from a folder (or its definition.json) in the public layout.

    Raises:
        ProblemError: naming the file, the field, what was expected and what was found.
    """
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    definition_file = folder / "definition.json"
    if not definition_file.is_file():
        raise ProblemError(f"{folder}: expected a folder with definition.json and workload.jsonl")
    data = read_json(definition_file)
    if not isinstance(data, dict):
        raise ProblemError(f"{definition_file}: expected an object, found {type(data).__name__}")
    reference_file = folder / "reference.py"
    if not data.get("reference"):
        if not reference_file.is_file():
            raise ProblemError(
                f"{definition_file}: no field 'reference' and no reference.py beside it; one is needed"
            )
        data["reference"] = reference_file.read_text()
    definition = parse(Definition, data, definition_file)

    workload_file = folder / "workload.jsonl"
    if not workload_file.is_file():
        raise ProblemError(f"{workload_file}: missing; expected one workload a line")
    workloads = []
    for where, record in read_json_lines(workload_file):
        # Recorded traces wrap the workload: {"definition": ..., "workload": {...}}.
        if isinstance(record, dict) and "workload" in record and "axes" not in record:
            record = record["workload"]
        workloads.append(parse(Workload, record, where))

    pack_file = folder / "pack.json"
    pack = parse(Pack, read_json(pack_file), pack_file) if pack_file.is_file() else None
    try:
        return Problem(
            id=problem_id or (pack.id if pack else definition.name),
            definition=definition,
            workloads=tuple(workloads),
            pack=pack,
            root=str(folder),
        )
    except ValidationError as error:
        raise ProblemError(f"{folder}: {explain(error)}") from None


def export_problem(problem: Problem, folder: str | Path) -> Path:
    """Write a problem in the public layout, so that `load_problem` gives it back; returns the folder.

    The reference is embedded in definition.json and stands beside it too. pack.json, which other
    tools pass over, is written with the full workloads only: it holds the smoke ones.

    Raises:
        ProblemError: the folder cannot be written.
    """
    folder = Path(folder)
    texts = {
        "definition.json": json.dumps(_as_record(problem.definition), indent=2),
        "workload.jsonl": "\n".join(json.dumps(_as_record(w)) for w in problem.workloads),
    }
    if problem.pack is not None and problem.profile == "full":
        texts["pack.json"] = json.dumps(_as_record(problem.pack), indent=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reference.py").write_text(problem.reference)
        for name, text in texts.items():
            (folder / name).write_text(text + "\n")
    except OSError as error:
        raise ProblemError(f"{folder}: cannot be written: {error.strerror}") from None
    return folder


_SAYS_NOTHING = {
    "description", "op_type", "constraints", "custom_inputs_entrypoint", "max_error_cap",
    "source_model", "smoke", "imported_from",
}  # fmt: skip
"""Fields of ours that mean the same whether they are null or missing."""


def _as_record(model: BaseModel) -> Any:
    """JSON data of a model, without the nulls that say nothing (a shape of null is a scalar)."""

    def compact(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: v for k, v in value.items() if v is not None or k not in _SAYS_NOTHING}
            return {k: compact(v) for k, v in kept.items()}
        return [compact(v) for v in value] if isinstance(value, list) else value

    return compact(model.model_dump(mode="json"))


def iter_problem_folders(root: str | Path) -> Iterator[Path]:
    """Folders below `root` that hold a problem, in name order."""
    for file in sorted(Path(root).rglob("definition.json")):
        yield file.parent


def read_json(file: Path) -> Any:
    """Parsed content of a JSON file; `ProblemError` with file and position otherwise."""
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise ProblemError(f"{file}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ProblemError(f"{file}: not valid JSON: {error}") from None


def read_json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Records of a JSONL file with where they stand (`file:line`); blank lines are passed over.

    Raises:
        ProblemError: a line that is not JSON, naming file and line.
    """
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise ProblemError(f"{where}: not valid JSON: {error}") from None


def parse(model: type[M], data: Any, where: object) -> M:
    """`model` validated from `data`; `ProblemError` naming `where`, the field and what was found."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ProblemError(f"{where}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """A pydantic error in one line an author can act on: field, expectation, value found."""
    parts = []
    for item in error.errors()[:3]:
        field = ".".join(str(p) for p in item["loc"]) or "(top level)"
        found = repr(item["input"])
        found = found if len(found) <= 80 else found[:77] + "..."
        message = item["msg"].removeprefix("Value error, ")
        parts.append(
            f"field {field}: {message}"
            + ("" if isinstance(item["input"], BaseModel | dict) else f" (found {found})")
        )
    more = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
