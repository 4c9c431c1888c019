"""Rules for unknown operations, proposed by a language model and accepted only if they hold.

The model sees the operation's schema and an example call, and answers with an extended einsum. The
interpreter executes it on small random tensors and compares it with torch (`rulebook.verify`); what
differs goes back to the model, for a few rounds. Accepted rules are files in ``<cache>/rules``.
Without a model, or where none of its rules holds, the operation keeps the safe bound: nothing is
demanded through it, and the bound's notes name it.

Any OpenAI-compatible endpoint will do. `openai` and `tenacity` come with the extra `agents`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .. import chat
from ..errors import BoundError
from ..problem import Problem, Workload
from .capture import capture
from .dependence import RULES
from .rulebook import LearnedRule, Rulebook, rulebook, signature, verify
from .trace import Node, dtype_name
from .work import is_contraction

_INSTRUCTIONS = """\
You write down what a PyTorch operation computes as an extended einsum: statements that assign a
tensor element by element. Examples:
  out[m, n] = sum(k)(self[m, k] * mat2[k, n])
  top[i] = max(j)(self[i, j]); out[i, j] = exp(self[i, j] - top[i])
  out[i, j] = where(j <= i + diagonal, self[i, j], 0)
  out[b, o, t] = sum(c, k)(input[b, c, 2 * t + k - 1] * weight[o, c, k])
Rules: Python syntax. Reductions are sum, prod, max, min, any, all, written sum(k)(...). Functions:
exp log sqrt rsqrt abs sign floor ceil round sin cos tan tanh sigmoid erf maximum minimum pow where.
An index is an integer expression over axes, scalar arguments and integer tensors; reading outside
of a tensor gives 0. Tensors are named as the operation's arguments; the last statement assigns out.
size(x, d) is a size. An axis that no tensor has by itself gets its size in "sizes".
Touch no element that the result does not depend on.
Answer with JSON only: {"statements": "...; ...", "sizes": {"t": "size(input, 2) // 2"}}"""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint."""

    model: str
    base_url: str | None = None
    """Default: `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key: str | None = field(default=None, repr=False)
    """Default: `OPENAI_API_KEY`; endpoints that need none take any text."""
    timeout_s: float = 60.0
    attempts: int = 4
    """Tries of one request that fails for want of a connection, by a rate limit or at the server."""


class Outcome(BaseModel):
    """What became of one operation without a rule."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    signature: str
    accepted: bool
    rule: LearnedRule | None = None
    """The accepted rule, or the last that was refused."""
    rounds: int = 0
    reason: str = ""
    """Why it was refused."""
    file: Path | None = None


def unknown_operations(problem: Problem, workload: Workload, *, seed: int = 0) -> list[Node]:
    """Operations of a run that have no rule, built in or learned; one of each signature.

    Raises:
        BoundError: the reference cannot be recorded.
    """
    trace, _ = capture(problem, workload, seed=seed)
    found: dict[str, Node] = {}
    for node in trace.nodes():
        known = node.name in RULES or node.plain_name in RULES or node.pointwise
        if not known and not is_contraction(node) and node.inputs and rulebook().get(node) is None:
            found.setdefault(signature(node), node)
    return list(found.values())


def learn(
    problem: Problem, workload: Workload, endpoint: Endpoint, *, rounds: int = 4, seed: int = 0
) -> list[Outcome]:
    """Find rules for all operations of a workload that have none.

    Args:
        problem: its reference is recorded and must be trusted.
        workload: one of the problem's.
        endpoint: the model that proposes rules.
        rounds: proposals for each operation.
        seed: as in `analyze`.

    Raises:
        BoundError: the extra `agents` is not installed, the endpoint does not answer, or the
            reference cannot be recorded.
    """
    nodes = unknown_operations(problem, workload, seed=seed)
    if not nodes:
        return []
    ask = _client(endpoint)
    return [synthesize(node, ask, endpoint.model, rulebook(), rounds=rounds) for node in nodes]


def synthesize(node: Node, ask: Any, model: str, book: Rulebook, *, rounds: int = 4) -> Outcome:
    """Let a model propose rules for one operation until one holds.

    Args:
        node: a recorded call.
        ask: from a list of chat messages to the model's answer.
        model: its name, for the record.
        book: where an accepted rule is kept.
        rounds: proposals at most.
    """
    name = signature(node)
    messages = [
        {"role": "system", "content": _INSTRUCTIONS},
        {"role": "user", "content": _question(node)},
    ]
    rule, reason = None, "no proposal"
    for number in range(1, rounds + 1):
        answer = ask(messages)
        try:
            rule = _proposed(answer, name, model)
            problem = verify(rule, node)
        except (ValueError, ValidationError) as error:
            problem = f"not the JSON that was asked for: {error}"
        if problem is None and rule is not None:
            return Outcome(
                signature=name, accepted=True, rule=rule, rounds=number, file=book.add(rule)
            )
        reason = problem or reason
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"That does not hold: {reason}\nCorrect it. JSON only."},
        ]
    return Outcome(signature=name, accepted=False, rule=rule, rounds=rounds, reason=reason)


def _question(node: Node) -> str:
    lines = [f"Operation: {getattr(node.call, '_schema', node)}", "A call of it:"]
    for name, arg in node.args.items():
        shape = getattr(arg, "shape", None)
        text = f"{dtype_name(arg.dtype)} {list(shape)}" if shape is not None else repr(arg)
        lines.append(f"  {name}: {text}")
    out = node.outs[0]
    if out is not None:
        lines.append(f"  result: {dtype_name(out.dtype)} {list(out.shape)}")
    lines.append("Keep these options and ranks; the sizes vary.")
    return "\n".join(lines)


def _proposed(answer: str, name: str, model: str) -> LearnedRule:
    match = re.search(r"\{.*\}", answer, flags=re.DOTALL)
    if match is None:
        raise ValueError("no JSON object in the answer")
    data = json.loads(match.group())
    statements = data.get("statements")
    if isinstance(statements, list):
        statements = "; ".join(map(str, statements))
    if not isinstance(statements, str):
        raise ValueError("'statements' is missing")
    sizes = {str(k): str(v) for k, v in (data.get("sizes") or {}).items()}
    return LearnedRule(signature=name, statements=statements, sizes=sizes, model=model)


def _client(endpoint: Endpoint) -> Any:
    """A function from messages to an answer, with retries."""
    try:
        client = chat.open_client(
            endpoint.base_url or os.environ.get("OPENAI_BASE_URL"),
            endpoint.api_key or os.environ.get("OPENAI_API_KEY") or "none",
            endpoint.timeout_s,
        )
    except ImportError as error:
        raise BoundError(
            f"rule synthesis needs {error.name!r}; install the extra: pip install 'sol-gym[agents]'"
        ) from error
    import openai

    def ask(messages: list[dict[str, str]]) -> str:
        try:
            made = chat.complete(client, endpoint.model, messages, attempts=endpoint.attempts)
        except openai.OpenAIError as error:
            raise BoundError(
                f"the endpoint {client.base_url} did not answer for model {endpoint.model!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return made.choices[0].message.content or ""

    return ask
