"""Wrappers for agents that are language models."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from .spaces import Utf8

__all__ = ["EpisodeBest", "TextOnly"]

_PARTS = ("prompt", "reference", "feedback")
_HEADINGS_LENGTH = 100
"""Room for what `TextOnly` puts between the parts, in characters."""


class TextOnly(gymnasium.ObservationWrapper[str, str, dict[str, Any]], RecordConstructorArgs):
    """The observation as one text: the task card, the reference, then the feedback.

    The feedback ends with the turn and the best score, so nothing of the Dict is lost.

    Example:
        >>> import gymnasium
        >>> from sol_gym.envs import TextOnly
        >>> env = TextOnly(gymnasium.make("SolGym-v0", problem="L1/069_rms_norm"))
        >>> text, info = env.reset()
        >>> text.startswith("# Task:")
        True
    """

    def __init__(self, env: gymnasium.Env[dict[str, Any], str]) -> None:
        """Wrap a `KernelEnv` or a wrapper around one."""
        RecordConstructorArgs.__init__(self)
        gymnasium.ObservationWrapper.__init__(self, env)
        parts = [env.observation_space[key] for key in _PARTS]  # type: ignore[index]
        self.observation_space = Utf8(sum(part.max_length for part in parts) + _HEADINGS_LENGTH)

    def observation(self, observation: dict[str, Any]) -> str:
        """The Dict observation as one text."""
        prompt, reference, feedback = (observation[key] for key in _PARTS)
        text = f"{prompt}\n## Reference\n```python\n{reference}\n```\n"
        if feedback:
            text += f"\n## Feedback on your last kernel\n{feedback}\n"
        return text


class EpisodeBest(gymnasium.Wrapper[Any, str, Any, str], RecordConstructorArgs):
    """Keeps the best kernel of the episode, the first one where several score the same.

    Every info has `best_source`, empty until a kernel scores; `best_evaluation_json` is there from
    then on. The text is what was handed in.

    Example:
        >>> import gymnasium
        >>> from sol_gym.envs import EpisodeBest
        >>> env = EpisodeBest(gymnasium.make("SolGym-v0", problem="L1/069_rms_norm"))
        >>> _, info = env.reset()
        >>> info["best_source"]
        ''
    """

    def __init__(self, env: gymnasium.Env[Any, str]) -> None:
        """Wrap a `KernelEnv` or a wrapper around one."""
        RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)
        self._best: dict[str, Any] = {"best_source": ""}
        self._score = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, with no best kernel."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._best, self._score = {"best_source": ""}, 0.0
        return observation, info | self._best

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Judge one kernel and keep it if it is better than those before."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        score = info.get("score", 0.0)
        if score > self._score:
            self._score = score
            self._best = {
                "best_source": str(action),
                "best_evaluation_json": info["evaluation_json"],
            }
        return observation, reward, terminated, truncated, info | self._best
