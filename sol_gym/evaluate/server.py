"""The judge's process: one a device, shared by clients over a local socket.

The main thread judges, one evaluation at a time; a thread per client reads requests and notices
when the client hangs up, which cancels its evaluation. The process ends by itself a moment after
its last client is gone, and takes the zygote and every worker with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from ..device import Device
from ..errors import DeviceError, InfrastructureError, ProblemError, SolGymError, SolutionError
from ..paths import cache_dir, runtime_dir
from ..problem import Problem
from ..sandbox.request import Cancelled
from ..sandbox.worker import wire
from ..solution import Solution
from .bench import Bench

LINGER_S = float(os.environ.get("SOL_GYM_LINGER_S", "2"))
"""Seconds the process stays after its last client is gone."""
_FIRST_CLIENT_S = 60.0


class Client:
    """One connection: a reading thread that queues requests."""

    def __init__(self, sock: socket.socket, requests: queue.Queue[tuple[Client, dict[str, Any]]]):
        self.sock = sock
        self.gone = threading.Event()
        self._requests = requests
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        reader = self.sock.dup()
        try:
            while True:
                message = wire.receive(reader)
                if message.get("cmd") == "hello":
                    self.send({"event": "hello"})
                else:
                    self._requests.put((self, message))
        except (wire.Closed, wire.ProtocolError, OSError):
            self.gone.set()
        finally:
            reader.close()
            self.sock.close()

    def send(self, message: dict[str, Any]) -> None:
        """Answer; a client that is gone is not an error."""
        try:
            wire.send(self.sock, message)
        except (wire.Closed, wire.Timeout, OSError):
            self.gone.set()


class Server:
    """Accepts clients and works off their requests."""

    def __init__(self, path: Path, bench: Bench):
        self._path, self._bench = path, bench
        self._requests: queue.Queue[tuple[Client, dict[str, Any]]] = queue.Queue()
        self._clients: list[Client] = []
        self._clients_lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            client = Client(sock, self._requests)
            with self._clients_lock:
                self._clients.append(client)

    def _connected(self) -> bool:
        with self._clients_lock:
            self._clients = [c for c in self._clients if not c.gone.is_set()]
            return bool(self._clients)

    def serve(self) -> None:
        """Work until nobody is connected any more."""
        leave_at = time.monotonic() + _FIRST_CLIENT_S
        while True:
            if self._connected():
                leave_at = time.monotonic() + LINGER_S
            elif time.monotonic() > leave_at:
                return
            try:
                client, message = self._requests.get(timeout=0.25)
            except queue.Empty:
                continue
            if not client.gone.is_set():
                client.send(self._answer(client, message))

    def _answer(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        def progress(stage: str, done: int, total: int) -> None:
            client.send({"event": "progress", "stage": stage, "done": done, "total": total})

        try:
            if message.get("cmd") == "describe":
                return {
                    "event": "result",
                    "value": self._bench.describe(examine=bool(message.get("examine"))),
                }
            problem = Problem.model_validate(message["problem"]).model_copy(
                update={"root": message.get("root"), "blob_root": message.get("blob_root")}
            )
            solution = Solution.model_validate(message["solution"])
            evaluation = self._bench.evaluate(
                problem,
                solution,
                inputs_profile=message["inputs_profile"],
                seed=message["seed"],
                timing=message["timing"],
                scoring=message["scoring"],
                bound_set=message["bound_set"],
                timeout_s=float(message["timeout_s"]),
                strict_isolation=bool(message.get("strict_isolation")),
                on_progress=progress,
                cancelled=client.gone.is_set,
            )
            return {"event": "result", "value": evaluation.to_json()}
        except Cancelled:
            return {"event": "error", "kind": "infrastructure", "message": "cancelled"}
        except SolGymError as error:
            kinds = {ProblemError: "problem", SolutionError: "solution", DeviceError: "device"}
            return {
                "event": "error",
                "kind": kinds.get(type(error), "infrastructure"),
                "message": str(error),
            }
        except Exception as error:
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            text = f"the judge failed: {type(error).__name__}: {error} ({where})"
            return {"event": "error", "kind": "infrastructure", "message": text}

    def close(self) -> None:
        """Stop listening and hang up."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener.close()
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.sock.shutdown(socket.SHUT_RDWR)


def _clock_to_lock() -> int | None:
    """`SOL_GYM_LOCK_CLOCK_MHZ`: where to hold the GPU's SM clock; nothing is locked without it."""
    text = os.environ.get("SOL_GYM_LOCK_CLOCK_MHZ")
    if not text:
        return None
    if not text.isdigit() or int(text) == 0:
        raise InfrastructureError(f"SOL_GYM_LOCK_CLOCK_MHZ is {text!r}, expected MHz, e.g. 1500")
    return int(text)


def main() -> None:
    """Entry point of the process: device model on standard input, readiness on a descriptor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()
    device = Device.model_validate_json(sys.stdin.buffer.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    bench = None
    server = None
    try:
        bench = Bench(
            device, cache_dir(), hidden=[str(runtime_dir())], lock_clock_mhz=_clock_to_lock()
        )
        server = Server(arguments.socket, bench)
        os.write(arguments.ready_fd, b"ready")
        os.close(arguments.ready_fd)
        server.serve()
    except InfrastructureError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    finally:
        if server:
            server.close()
        if bench:
            bench.close()
