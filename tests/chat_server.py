"""A real HTTP server that speaks the chat-completions protocol as a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Step = Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes]]
"""From a request's body to status, headers and data."""


class ChatServer:
    """Answers every request with `answer(body)`; keeps what it was asked."""

    def __init__(self, answer: Step):
        self.requests: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append(
                    {"path": self.path, "key": self.headers["authorization"], **body}
                )
                status, headers, data = answer(body)
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # The client has given up waiting.
                    pass

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def completion(content: str | None, *, refusal: str | None = None, finish: str = "stop") -> bytes:
    """The data of a successful answer."""
    message = {"role": "assistant", "content": content, "refusal": refusal}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
         "choices": [{"index": 0, "finish_reason": finish, "message": message}]}
    ).encode()  # fmt: skip
