"""What judge and worker say to each other: length-prefixed JSON, and words in a shared page.

Nothing a worker sends is ever unpickled or evaluated. A message that is too long, not JSON or not
an object is a violation of the protocol.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from typing import Any

MAX_MESSAGE = 4 << 20
"""Bytes; the longest honest message lists a few thousand output addresses."""

PAGE_BYTES = mmap.PAGESIZE
GO, DONE, ASK, ANSWER = range(4)
"""Indices of the 64-bit words in the shared page."""

ASK_STOP = 0xFFFFF
"""Set index that ends a series of single requests."""


class ProtocolError(Exception):
    """The peer said something that the protocol does not allow."""


class Closed(Exception):
    """The peer is gone."""


class Timeout(Exception):
    """The peer did not answer in time."""


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; `Closed` if the peer is gone, `Timeout` if it does not read."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(data)} bytes, expected at most {MAX_MESSAGE}")
    try:
        sock.sendall(struct.pack("<I", len(data)) + data)
    except TimeoutError:
        raise Timeout from None
    except OSError as error:
        raise Closed(str(error)) from None


def receive(sock: socket.socket, timeout_s: float | None = None) -> dict[str, Any]:
    """Next message within `timeout_s`; raises `Timeout`, `Closed` or `ProtocolError`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = struct.unpack("<I", _exactly(sock, 4, deadline))
    if length > MAX_MESSAGE:
        raise ProtocolError(f"message of {length} bytes announced, expected at most {MAX_MESSAGE}")
    data = _exactly(sock, length, deadline)
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not JSON: {data[:80]!r}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"expected an object, found {type(message).__name__}")
    return message


def _exactly(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if deadline is None:
            sock.settimeout(None)
        else:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Timeout
            sock.settimeout(left)
        try:
            chunk = sock.recv(min(count - len(parts), 1 << 20))
        except TimeoutError:
            raise Timeout from None
        except OSError as error:
            raise Closed(str(error)) from None
        if not chunk:
            raise Closed("end of stream")
        parts += chunk
    return bytes(parts)


class Page:
    """A page of 64-bit words shared by judge and worker (aligned 8-byte stores are atomic)."""

    def __init__(self, fd: int):
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> tuple[Page, int]:
        """A new page and the file descriptor to hand over (the caller closes it)."""
        fd = os.memfd_create("sol_gym_page")
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd), fd

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._map.close()
