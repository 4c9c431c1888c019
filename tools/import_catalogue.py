"""Write problem packs' data files, and the published B200 figures, from a folder of facts.

The facts are one JSON file a problem, ``<SUBSET>/<name>.json``: axes, inputs, outputs, and per
workload the axis values, the kind of each input, the tolerance and the published times. From them
this tool writes, for each problem, the two files that are data alone::

    problems/<SUBSET>/<name>/definition.json
    problems/<SUBSET>/<name>/workload.jsonl

and, for the whole library, ``baselines/b200/published.json``. The hand-written half of a pack
(``reference.py``, ``pack.json``) is never written; pack.json is read for its title and family, and
for the inputs its generator makes although they are published as random (``custom_inputs``). The
output depends on the facts and on pack.json alone, so running the tool again changes nothing.

    python tools/import_catalogue.py FACTS --ids L1/069_rms_norm L1/070_swiglu
    python tools/import_catalogue.py FACTS --check        # validate everything, write nothing
    python tools/import_catalogue.py FACTS --published    # only baselines/b200/published.json
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sol_gym.errors import ProblemError
from sol_gym.problem import Definition, Pack, Problem, Workload, parse, read_json

REPOSITORY = Path(__file__).resolve().parent.parent
UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "sol_gym.problems")
"""Namespace of the workload ids: uuid5(UUID_NAMESPACE, "<problem id>/<workload index>")."""
GENERATOR = "generate_inputs"
"""Name every reference of the library gives its generator of custom inputs."""
PROVENANCE = {
    "data_set": "nvidia/SOL-ExecBench",
    "revision": "63699402",
    "device": "b200",
    "hardware": "one NVIDIA B200",
    "sm_clock_mhz": 1500,
    "clock_locked": True,
    "columns": ["t_sol_ms", "t_b_ms"],
    "t_sol": "bound of the published analyzer, rounded to 0.0001 ms (0.1 us)",
    "t_b": "published scoring baseline",
    "order": "rows follow the lines of the problem's workload.jsonl",
}


def problem_ids(catalogue: Path) -> list[str]:
    """Ids of all facts files, sorted."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in catalogue.glob("*/*.json"))


def read_facts(catalogue: Path, problem_id: str) -> dict[str, Any]:
    """The facts of one problem.

    Raises:
        ProblemError: there is no such file, or it is about another problem.
    """
    file = catalogue / f"{problem_id}.json"
    facts = read_json(file)
    if facts["id"] != problem_id:
        raise ProblemError(f"{file}: field id is {facts['id']!r}, expected {problem_id!r}")
    return facts


def definition_record(facts: dict[str, Any], pack: Pack | None) -> dict[str, Any]:
    """definition.json of a problem, in the public layout but without the reference's text."""
    record: dict[str, Any] = {"name": facts["id"].split("/")[1]}
    if pack is not None:
        if pack.family:
            record["op_type"] = pack.family
        record["description"] = pack.title
    axes = {name: _axis(value) for name, value in facts["axes"].items()}
    # A flag that workloads bind like an axis although no shape depends on it (it is a custom
    # scalar made from the binding) is an axis all the same; one problem leaves it undeclared.
    for workload in facts["workloads"]:
        for name in workload["axes"]:
            axes.setdefault(name, {"type": "var"})
    record["axes"] = axes
    for kind in ("inputs", "outputs"):
        record[kind] = {
            name: {
                "shape": None if spec["shape"] is None else [str(dim) for dim in spec["shape"]],
                "dtype": spec["dtype"],
            }
            for name, spec in facts[kind].items()
        }
    specs = [spec for w in facts["workloads"] for spec in _input_specs(facts, w, pack).values()]
    if any(spec["type"] == "custom" for spec in specs):
        record["custom_inputs_entrypoint"] = GENERATOR
    return record


def workload_records(facts: dict[str, Any], pack: Pack | None) -> Iterator[dict[str, Any]]:
    """The lines of workload.jsonl, in published order.

    Raises:
        ProblemError: an input's kind is unknown, or pack.json's custom_inputs does not fit.
    """
    for index, workload in enumerate(facts["workloads"]):
        record = {
            "uuid": str(uuid.uuid5(UUID_NAMESPACE, f"{facts['id']}/{index}")),
            "axes": workload["axes"],
            "inputs": _input_specs(facts, workload, pack),
        }
        if workload["tolerance"] is not None:
            # Keys stay as published, the misspelt one included, which the loader understands.
            record["tolerance"] = workload["tolerance"]
        yield record


def _axis(value: str | int) -> dict[str, Any]:
    if value == "var":
        return {"type": "var"}
    if isinstance(value, int):
        return {"type": "const", "value": value}
    return {"type": "expr", "expression": value}


def _input_specs(
    facts: dict[str, Any], workload: dict[str, Any], pack: Pack | None
) -> dict[str, dict[str, Any]]:
    """Input records in call order, without names that are no arguments (one problem lists such)."""
    specs = {name: _input_spec(workload["inputs"][name]) for name in facts["inputs"]}
    for name in pack.custom_inputs if pack is not None else ():
        if name not in specs:
            raise ProblemError(
                f"{facts['id']}: pack.json field custom_inputs names {name!r}, which is no input; "
                f"expected some of {sorted(specs)}"
            )
        specs[name] = {"type": "custom"}
    return specs


def _input_spec(kind: str | bool | int | float) -> dict[str, Any]:
    if kind == "random":
        return {"type": "random"}
    # Recorded tensors are not part of the library; the reference's generator makes their like.
    if kind in ("custom", "safetensors"):
        return {"type": "custom"}
    if isinstance(kind, str):
        raise ProblemError(f"input kind {kind!r}; expected random, custom, safetensors or a number")
    return {"type": "scalar", "value": kind}


def check(
    facts: dict[str, Any], definition: dict[str, Any], workloads: list[dict[str, Any]]
) -> int:
    """Build the Problem and resolve every shape; returns the number of workloads.

    Raises:
        ProblemError: naming the problem, the field, what was expected and what was found.
    """
    where = facts["id"]
    dummy = {**definition, "reference": "def run(*inputs): ..."}
    problem = Problem(
        id=where,
        definition=parse(Definition, dummy, f"{where} definition"),
        workloads=tuple(
            parse(Workload, record, f"{where} workload {i}") for i, record in enumerate(workloads)
        ),
    )
    for workload in problem.workloads:
        problem.tensors(workload)
        problem.outputs(workload)
    return len(workloads)


def write_published(catalogue: Path, file: Path) -> int:
    """Write the published times of all problems, one line a problem; returns the row count."""
    lines, count = [], 0
    for problem_id in problem_ids(catalogue):
        rows = [
            [w["b200_sol_ms"], w["b200_baseline_ms"]]
            for w in read_facts(catalogue, problem_id)["workloads"]
        ]
        count += len(rows)
        lines.append(f"{json.dumps(problem_id)}:{json.dumps(rows, separators=(',', ':'))}")
    file.parent.mkdir(parents=True, exist_ok=True)
    provenance = json.dumps(PROVENANCE, separators=(",", ":"))
    body = ",\n".join(lines)
    file.write_text(f'{{"provenance":{provenance},\n"problems":{{\n{body}\n}}}}\n')
    return count


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description="Write problem definitions and workloads from a folder of facts."
    )
    parser.add_argument("catalogue", type=Path, help="folder with <SUBSET>/<name>.json")
    parser.add_argument("--ids", nargs="+", help="problems to import (default: all)")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="where to write")
    parser.add_argument("--check", action="store_true", help="validate only, write nothing")
    parser.add_argument("--published", action="store_true", help="write only the published times")
    arguments = parser.parse_args(argv)

    known = problem_ids(arguments.catalogue)
    ids = arguments.ids or known
    if unknown := sorted(set(ids) - set(known)):
        parser.error(f"{arguments.catalogue} has no facts for {unknown}")

    if not arguments.published:
        count = 0
        for problem_id in ids:
            facts = read_facts(arguments.catalogue, problem_id)
            folder = arguments.repository / "problems" / problem_id
            pack_file = folder / "pack.json"
            pack = parse(Pack, read_json(pack_file), pack_file) if pack_file.is_file() else None
            definition = definition_record(facts, pack)
            workloads = list(workload_records(facts, pack))
            count += check(facts, definition, workloads)
            if not arguments.check:
                folder.mkdir(parents=True, exist_ok=True)
                text = json.dumps(definition, indent=2) + "\n"
                (folder / "definition.json").write_text(text)
                lines = [json.dumps(record) + "\n" for record in workloads]
                (folder / "workload.jsonl").write_text("".join(lines))
        verb = "valid" if arguments.check else "written"
        print(f"{len(ids)} problems, {count} workloads {verb}")
    if not arguments.check:
        file = arguments.repository / "baselines" / "b200" / "published.json"
        rows = write_published(arguments.catalogue, file)
        print(f"{file}: {rows} published rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
