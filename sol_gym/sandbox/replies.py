"""What a worker's replies must look like. They are an untrusted process's words: every figure in
them is looked at here, and whatever does not fit is a `wire.ProtocolError`, which is the worker's
fault. Any other exception in the judge is the judge's own and nobody's verdict.
"""

from __future__ import annotations

from typing import Any

from .worker import wire

_MOST_SECONDS = 1e4
_HANDLE_DIGITS = 128


def seconds(reply: dict[str, Any]) -> float:
    """`seconds` of a batch, by the worker's clock."""
    return _duration(reply.get("seconds"))


def seconds_list(reply: dict[str, Any], count: int) -> list[float]:
    """`seconds` of `count` eager calls."""
    values = reply.get("seconds")
    if not isinstance(values, list) or len(values) != count:
        raise wire.ProtocolError(f"times of {count} calls expected, found {_short(values)}")
    return [_duration(value) for value in values]


def destination_passing(reply: dict[str, Any]) -> bool:
    """`dps` of a loaded solution."""
    value = reply.get("dps")
    if not isinstance(value, bool):
        raise wire.ProtocolError(f"dps is {_short(value)}, expected true or false")
    return value


def library_name(reply: dict[str, Any], folder: str) -> str:
    """File name of a built library, which must lie in `folder`."""
    value = reply.get("library")
    if not isinstance(value, str):
        raise wire.ProtocolError(f"library is {_short(value)}, expected a path")
    start, _, name = value.rpartition("/")
    if start != folder or not name.endswith(".so") or len(name) > 100 or "\0" in name:
        raise wire.ProtocolError(f"library {_short(value)} does not lie in the build folder")
    return name


def captured(
    reply: dict[str, Any], calls: int, outputs: int
) -> tuple[dict[int, bytes], list[list[tuple[int, int]]]]:
    """Where captured calls' outputs lie.

    Returns:
        IPC handles by segment, and per call the (segment, offset in bytes) of each output.
    """
    segments, rows = reply.get("segments"), reply.get("outputs")
    if not isinstance(segments, dict) or not isinstance(rows, list):
        raise wire.ProtocolError("segments and outputs of captured calls expected")
    if len(rows) != calls:
        raise wire.ProtocolError(f"{len(rows)} calls captured, expected {calls}")
    handles = {}
    for base, handle in segments.items():
        if not isinstance(handle, str) or len(handle) != _HANDLE_DIGITS:
            raise wire.ProtocolError(f"{_short(handle)} is no IPC handle")
        try:
            handles[int(base)] = bytes.fromhex(handle)
        except ValueError:
            raise wire.ProtocolError(f"{_short(base)}: {_short(handle)} is no segment") from None
    places = []
    for row in rows:
        if not isinstance(row, list) or len(row) != outputs:
            raise wire.ProtocolError(f"places of {outputs} outputs expected, found {_short(row)}")
        places.append([_place(pair, handles) for pair in row])
    return handles, places


def _place(pair: Any, handles: dict[int, bytes]) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(v) is int for v in pair):
        raise wire.ProtocolError(f"a segment and an offset expected, found {_short(pair)}")
    base, offset = pair
    if base not in handles or offset < 0:
        raise wire.ProtocolError(f"an output at {_short(pair)} lies in no segment")
    return base, offset


def _duration(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wire.ProtocolError(f"a time in seconds expected, found {_short(value)}")
    if not 0 <= value < _MOST_SECONDS:  # NaN is neither.
        raise wire.ProtocolError(f"a time of {_short(value)} s was reported")
    return float(value)


def _short(value: Any) -> str:
    return repr(value)[:80]
