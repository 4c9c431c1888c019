"""Asking a language model: any OpenAI-compatible endpoint, with one policy for trying again.

`openai` and `tenacity` come with the extra `agents` and are imported when somebody asks.
"""

from __future__ import annotations

import math
from typing import Any

_LONGEST_PAUSE_S = 30.0


def open_client(base_url: str | None, api_key: str, timeout_s: float) -> Any:
    """An `openai.OpenAI` client that never tries again by itself (`complete` does).

    Args:
        base_url: None is the client's default.
        api_key: endpoints that need none take any text.
        timeout_s: seconds for one request.

    Raises:
        ImportError: the extra `agents` is not installed.
    """
    import openai
    import tenacity  # noqa: F401

    return openai.OpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=0)


def complete(
    client: Any, model: str, messages: list[dict[str, str]], *, attempts: int,
    longest_pause_s: float = _LONGEST_PAUSE_S, longest_asked_s: float = math.inf, **request: Any,
) -> Any:  # fmt: skip
    """One chat completion; waits and asks again while the endpoint is busy, failing or silent.

    Args:
        attempts: requests at most.
        longest_pause_s: longest pause of our own choice between two of them.
        longest_asked_s: an endpoint that asks for a longer pause (`Retry-After`) is not asked again.
        request: further fields of the request.

    Raises:
        openai.OpenAIError: the last failure.
    """
    import openai
    import tenacity

    passing = (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError)
    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=longest_pause_s)

    def pause(state: tenacity.RetryCallState) -> float:
        asked = _retry_after(state.outcome.exception() if state.outcome else None)
        return backoff(state) if asked is None else asked

    def worth_it(error: BaseException) -> bool:
        return isinstance(error, passing) and (_retry_after(error) or 0) <= longest_asked_s

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(worth_it), stop=tenacity.stop_after_attempt(attempts),
        wait=pause, reraise=True,
    )  # fmt: skip
    return retrying(client.chat.completions.create, model=model, messages=messages, **request)


def _retry_after(error: BaseException | None) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None)
    value = headers.get("retry-after") if headers is not None else None
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
