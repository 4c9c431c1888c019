"""The environment: a problem, kernel source as action, the SOL Score as reward.

An episode is a conversation about one problem. `reset` gives the task card and the reference; each
`step` hands in one kernel, which is built, run, compared and timed by the judge of
`sol_gym.evaluate` in other processes, and returns feedback the next attempt can build on. This
process needs neither torch nor a GPU, and may be a daemonic worker of a vector environment.

What a kernel does wrong is data: a status, a reward and feedback. What says nothing about the
kernel is never a reward: see `on_infra_error` of `KernelEnv`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from sol_gym.errors import InfrastructureError, SolGymError, SolutionError
from sol_gym.evaluation import Evaluation, Provenance, Status
from sol_gym.problem import Problem, ProfileName
from sol_gym.solution import Solution

from .feedback import write_feedback
from .prompt import task_card
from .rewards import Reward, get_reward
from .spaces import Utf8

if TYPE_CHECKING:
    from sol_gym.evaluate import Evaluator
    from sol_gym.evaluate.bounds import BoundSet

__all__ = ["KernelEnv"]

InputsProfile = Literal["compatible", "strict"]
OnInfraError = Literal["raise", "truncate"]

_SOURCE = Utf8(200_000)
_PROMPT = Utf8(32_000)
_REFERENCE = Utf8(64_000)
_FEEDBACK = Utf8(16_000)


class KernelEnv(gymnasium.Env[dict[str, Any], str]):
    """Write the fastest kernel for a problem.

    **Action**: `Utf8`, the kernel's source text (bare, or in one Markdown code fence).

    **Observation**: a Dict of `prompt` (the task card), `reference` (its Python source), `feedback`
    (on the last kernel, empty after `reset`), `turn` (int64[1], kernels judged so far) and
    `best_score` (float32[1], of this episode).

    **Reward**: `score`, `improvement` or `shaped` (see `sol_gym.envs.rewards`), or a `Reward`.

    **End**: `terminated` when a kernel scores `target_score`, `truncated` after `max_turns`.

    **Info**: flat and JSON-safe. Always `problem`, `profile`, `device`, `turn`, `best_score`. After
    a step also `status`, `message`, `passed`, `num_passed`, `num_workloads`, `solution_hash`,
    `evaluate_s` (wall seconds) and `evaluation_json` (the `Evaluation`, complete), and where they
    are known `score`, and as geometric means over the workloads `speedup` (T_b / T_k), `t_k_ms`,
    `t_b_ms` and `t_sol_ms`. An unknown figure is left out, so that every key keeps its type.

    **Seeds**: inputs are drawn from fresh secret seeds, other ones each turn. After
    ``reset(seed=...)`` they follow from that seed, and an episode's inputs can be had again.

    Example:
        >>> import gymnasium, sol_gym.envs
        >>> env = gymnasium.make("SolGym/L1-069_rms_norm-v0", device="auto", max_turns=8)
        >>> observation, info = env.reset(seed=0)
        >>> print(observation["prompt"])  # doctest: +SKIP
        >>> source = observation["reference"]  # slow but right: a start
        >>> observation, reward, terminated, truncated, info = env.step(source)  # doctest: +SKIP
        >>> env.close()
    """

    metadata = {"render_modes": ["ansi", "human"], "render_fps": 1}  # noqa: RUF012 (gymnasium's)

    def __init__(
        self,
        problem: str | Path | Problem,
        *,
        device: str = "auto",
        profile: ProfileName | None = None,
        inputs_profile: InputsProfile = "strict",
        bound_set: BoundSet = "solar",
        workloads: Sequence[int] | None = None,
        reward: str | Reward = "score",
        target_score: float | None = 0.95,
        max_turns: int = 8,
        timeout_s: float = 300.0,
        on_infra_error: OnInfraError = "raise",
        render_mode: str | None = None,
    ) -> None:
        """An environment for one problem; the judge is started or joined at the first step.

        Args:
            problem: id in the library (or a unique prefix of one), folder, or `Problem`.
            device: key of a device model, or `auto` for what is there.
            profile: workload profile, `full` or `smoke`; None is `smoke` on a CPU where the problem
                has one, else `full`.
            inputs_profile: what correctness is judged on. `strict` (the default: a reward must
                not be had by what published draws hide) adds sets on which every input matters and
                measures errors against float64; `compatible` is the published draws alone.
            bound_set: whose T_SOL the score is measured against: `solar` (ours), or `published`:
                the figures published for the full workloads of the library's problems on a B200.
            workloads: indices of the workloads to judge on; None is all.
            reward: name of a reward, or a `Reward`.
            target_score: score at which an episode terminates; None is never. The default, 0.95, is
                a kernel whose distance from the bound is a nineteenth of the baseline's. From there
                on the spread of a measurement decides more than the kernel.
            max_turns: kernels per episode, after which it is truncated.
            timeout_s: wall seconds one evaluation may take.
            on_infra_error: what a broken machine, an invalid reference or an unscorable problem
                does. `raise`: `InfrastructureError`, and the same turn may be tried again.
                `truncate`: the episode ends with reward NaN and `info["infra_error"]`.
            render_mode: None, `ansi` (render() returns the text) or `human` (printed as it goes).

        Raises:
            ProblemError: there is no such problem, profile or workload, or no published bound for
                it on this device.
            DeviceError: there is no such device.
            ValueError: another argument is out of range.
        """
        _check_choice("inputs_profile", inputs_profile, get_args(InputsProfile))
        _check_choice("on_infra_error", on_infra_error, get_args(OnInfraError))
        _check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, expected 1 or more")
        if target_score is not None and not 0 < target_score <= 1:
            raise ValueError(f"target_score is {target_score}, expected None or a score in (0, 1]")

        # Local, so that importing the environments stays light.
        from sol_gym.device import device_to_judge_on
        from sol_gym.evaluate.bounds import BoundSet, bound_times
        from sol_gym.evaluate.client import as_problem

        _check_choice("bound_set", bound_set, get_args(BoundSet))
        self._device_model = device_to_judge_on(device)
        self.device: str = self._device_model.key
        self.problem = as_problem(problem, profile, self._device_model)
        if workloads is not None:
            self.problem = self.problem.with_workloads(list(workloads))
        if bound_set == "published":
            bound_times(self.problem, self._device_model, bound_set)  # raises where there are none
        self.reward: Reward = get_reward(reward)
        self.inputs_profile = inputs_profile
        self.bound_set: BoundSet = bound_set
        self.target_score = target_score
        self.max_turns = max_turns
        self.timeout_s = timeout_s
        self.on_infra_error = on_infra_error
        self.render_mode = render_mode

        self.action_space = Utf8(_SOURCE.max_length)
        self.observation_space = spaces.Dict(
            {
                "prompt": Utf8(_PROMPT.max_length),
                "reference": Utf8(_REFERENCE.max_length),
                "feedback": Utf8(_FEEDBACK.max_length),
                "turn": spaces.Box(0, max_turns, shape=(1,), dtype=np.int64),
                "best_score": spaces.Box(0.0, 1.0, shape=(1,), dtype=np.float32),
            }
        )

        self._prompt = _PROMPT.fit(
            task_card(
                self.problem,
                device=f"{self._device_model.name} ({self.device})",
                inputs_profile=inputs_profile,
                max_turns=max_turns,
                target_score=target_score,
            )
        )
        self._reference = _REFERENCE.fit(self.problem.reference)
        self._evaluator: Evaluator | None = None
        self._seeded = False
        self._episode_seed = 0
        self._closed = False
        self._in_episode = False
        self._turn = 0
        self._best_score = 0.0
        self._feedback = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: makes the inputs of this and later episodes repeatable; never shown to a kernel.
            options: none are known.
        """
        self._require_open()
        super().reset(seed=seed, options=options)
        self._seeded = self._seeded or seed is not None
        self._episode_seed = int(self.np_random.integers(2**31))
        self._in_episode = True
        self._turn = 0
        self._best_score = 0.0
        self._feedback = ""
        self._show()
        return self._observation(), self._episode_info()

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Judge one kernel.

        Args:
            action: source text. One that is not in the action space (too long, not encodable) is
                judged a COMPILE_ERROR, because a policy can produce it.

        Raises:
            TypeError: `action` is not a text.
            ResetNeeded: there is no running episode.
            InfrastructureError: nothing can be said about the kernel, and `on_infra_error` is
                `raise`. The episode is as it was before, so the step may be repeated.
        """
        self._require_open()
        if not self._in_episode:
            raise gymnasium.error.ResetNeeded("there is no running episode; call reset() first")
        if not isinstance(action, str):
            raise TypeError(f"action is a {type(action).__name__}, expected source text (str)")
        began = time.perf_counter()
        try:
            evaluation = self._evaluate(str(action))
            _require_verdict(evaluation)
        except InfrastructureError as error:
            self._drop_evaluator()
            if self.on_infra_error == "raise":
                raise
            return self._break_off(error)

        reward = self.reward(
            evaluation, best_score=self._best_score, num_workloads=len(self.problem.workloads)
        )
        self._turn += 1
        self._best_score = max(self._best_score, evaluation.score or 0.0)
        terminated = self.target_score is not None and (evaluation.score or 0) >= self.target_score
        truncated = not terminated and self._turn >= self.max_turns
        self._in_episode = not (terminated or truncated)
        feedback = write_feedback(evaluation, uuids=[w.uuid for w in self.problem.workloads])
        self._feedback = _FEEDBACK.fit(f"{feedback}\n\n{self._standing()}")
        self._show()
        info = self._episode_info() | _evaluation_info(evaluation)
        info["num_workloads"] = len(self.problem.workloads)
        info["evaluate_s"] = time.perf_counter() - began
        return self._observation(), float(reward), terminated, truncated, info

    def render(self) -> str | None:  # type: ignore[override]
        """The episode as text in mode `ansi`; None otherwise (`human` prints as it goes)."""
        return self._frame() if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Let go of the judge. Closing twice is allowed; a closed environment cannot be used."""
        self._closed = True
        self._in_episode = False
        if self._evaluator is not None:
            evaluator, self._evaluator = self._evaluator, None
            evaluator.close()

    # ---- Judging

    def _evaluate(self, source: str) -> Evaluation:
        if source not in self.action_space:
            found = f"{len(source)} characters"
            if len(source) <= _SOURCE.max_length:
                found = "lone surrogates, which UTF-8 cannot encode"
            expected = f"UTF-8 text of at most {_SOURCE.max_length} characters"
            return self._refuse(source, f"expected {expected}, found {found}")
        try:
            solution = Solution.from_text(source)
        except SolutionError as error:
            return self._refuse(source, str(error))
        if self._evaluator is None:
            from sol_gym.evaluate import Evaluator

            self._evaluator = Evaluator(self._device_model)
        return self._evaluator.evaluate(
            self.problem,
            solution,
            profile=self.problem.profile,
            inputs_profile=self.inputs_profile,
            bound_set=self.bound_set,
            seed=self._turn_seed() if self._seeded else None,
            timeout_s=self.timeout_s,
        )

    def _turn_seed(self) -> int:
        """Seed of this turn's inputs: of the turn and not of what was tried, so that a step that is
        repeated after a fault, or a text that was refused, shifts nothing."""
        sequence = np.random.SeedSequence([self._episode_seed, self._turn])
        return int(sequence.generate_state(1)[0]) % 2**31

    def _refuse(self, source: str, message: str) -> Evaluation:
        """The evaluation of a text that is no solution, for which nothing needs to run."""
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return Evaluation(
            problem=self.problem.id,
            solution="solution",
            status=Status.COMPILE_ERROR,
            score=0.0,
            message=message,
            provenance=Provenance(
                device=self.device,
                device_name="",
                profile=self.problem.profile,
                inputs_profile=self.inputs_profile,
                bound_set=self.bound_set,
                problem_hash=self.problem.content_hash,
                solution_hash=digest,
                seeded=self._seeded,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )

    def _break_off(
        self, error: InfrastructureError
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """The end of an episode about whose last kernel nothing can be said."""
        self._in_episode = False
        self._feedback = ""
        self._show()
        return (
            self._observation(),
            math.nan,
            False,
            True,
            self._episode_info() | {"infra_error": str(error)},
        )

    def _drop_evaluator(self) -> None:
        """Forget a judge that failed, so that the next step starts or joins another."""
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            # It is broken already, and the caller is about to hear of that.
            with contextlib.suppress(SolGymError, OSError):
                evaluator.close()

    # ---- What the caller sees

    def _observation(self) -> dict[str, Any]:
        return {
            "prompt": self._prompt,
            "reference": self._reference,
            "feedback": self._feedback,
            "turn": np.array([self._turn], dtype=np.int64),
            "best_score": np.array([self._best_score], dtype=np.float32),
        }

    def _episode_info(self) -> dict[str, Any]:
        return {
            "problem": self.problem.id,
            "profile": self.problem.profile,
            "device": self.device,
            "turn": self._turn,
            "best_score": self._best_score,
        }

    def _standing(self) -> str:
        return f"Turn {self._turn} of {self.max_turns}. Best score so far: {self._best_score:.4f}."

    def _frame(self) -> str:
        lines = [f"{self.problem.id} on {self.device}", self._feedback or self._standing()]
        return "\n".join(lines) + "\n"

    def _show(self) -> None:
        if self.render_mode == "human":
            print(self._frame(), flush=True)

    def _require_open(self) -> None:
        if self._closed:
            raise gymnasium.error.ClosedEnvironmentError(
                "this environment was closed; make another one"
            )


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def _require_verdict(evaluation: Evaluation) -> None:
    """Raise where an evaluation says nothing that a reward could follow from."""
    if evaluation.status in (Status.INFRA_ERROR, Status.INVALID_REFERENCE):
        raise InfrastructureError(
            f"{evaluation.problem}: {evaluation.status}: {evaluation.message or 'no message'}; "
            "this says nothing about the kernel"
        )
    if evaluation.passed and evaluation.score is None:
        reasons = sorted({r.message for r in evaluation.results if r.score is None and r.message})
        raise InfrastructureError(
            f"{evaluation.problem}: the kernel passed but cannot be scored on device "
            f"{evaluation.provenance.device!r}: {'; '.join(reasons) or 'no workload has a score'}. "
            "Choose a device with a baseline, or workloads whose T_b is above T_SOL"
        )


def _evaluation_info(evaluation: Evaluation) -> dict[str, Any]:
    results = evaluation.results
    figures = {
        "score": evaluation.score,
        "speedup": evaluation.speedup,
        "t_k_ms": _geometric_mean(r.t_k_ms for r in results),
        "t_b_ms": _geometric_mean(r.t_b_ms for r in results),
        "t_sol_ms": _geometric_mean(r.t_sol_ms for r in results),
    }
    return {
        "status": str(evaluation.status),
        "message": evaluation.message,
        "passed": evaluation.passed,
        "num_passed": sum(r.status is Status.PASSED for r in results),
        "solution_hash": evaluation.provenance.solution_hash,
        "evaluation_json": json.dumps(evaluation.to_json()),
    } | {name: float(value) for name, value in figures.items() if value is not None}


def _geometric_mean(values: Iterable[float | None]) -> float | None:
    """None unless there are values and all are known."""
    every = list(values)
    known = [value for value in every if value]
    return statistics.geometric_mean(known) if known and len(known) == len(every) else None
