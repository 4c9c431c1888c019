"""`sol-gym audit`: read a source, say what it does that a kernel should not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from . import render


@click.command("audit")
@click.argument("solution", type=click.Path(exists=True, path_type=Path))
@click.option("--llm", is_flag=True, help="Ask a language model too (SOL_GYM_JUDGE_MODEL, see docs/audit.md).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print findings and judgement as JSON.")
def audit(solution: Path, llm: bool, as_json: bool) -> None:
    """Read SOLUTION (a source file or solution.json) with the static audit. Nothing is run.

    The exit code is 0 without a veto, 1 with one, 2 on bad arguments, 3 if a model was to be asked
    and gave no usable answer.
    """
    from ..sandbox.audit import audit as read
    from ..sandbox.audit import vetoes
    from ..solution import load_solution

    source = load_solution(solution)
    findings = read(source)
    judgement = None
    if llm:
        from ..sandbox.audit import llm as model

        judgement = model.judge(source)
        findings = findings + judgement.findings
    refused = vetoes(findings)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "solution": source.name,
                    "veto": bool(refused),
                    "findings": [f.model_dump(mode="json") for f in findings],
                    "llm": judgement.to_json() if judgement else None,
                }
            )
        )
    else:
        render.findings(findings)
        if judgement:
            kept = ", kept from before" if judgement.cached else ""
            render.console.print(
                f"{judgement.model}: {judgement.verdict} (confidence {judgement.confidence:.2f}{kept})"
                if judgement.judged
                else f"{judgement.model}: not judged: {judgement.detail}",
                markup=False,
            )
        render.console.print(
            f"{len(refused)} vetoes: an evaluation would be REWARD_HACK"
            if refused
            else f"no veto, {len(findings)} findings"
        )
    if refused:
        sys.exit(1)
    sys.exit(3 if judgement and not judgement.judged else 0)
