"""The worker: loads one solution and calls it as the judge says. It decides nothing.

It reports shapes, errors and its own clock, all of which the judge treats as claims. Times count
only together with the judge's clock, outputs only as the bytes the judge reads itself.
"""

from __future__ import annotations

import gc
import mmap
import os
import socket
import time
import traceback
from typing import Any

from . import building, loading, wire
from .wire import ANSWER, ASK, ASK_STOP, DONE, GO

_TRACEBACK_CHARS = 6000
_CACHED_BYTES = 2 << 30


def serve(sock: socket.socket, shared: list[int], layers: dict[str, Any]) -> int:
    """Answer the judge's requests until it hangs up; returns the exit code."""
    page = wire.Page(shared[0])
    session = Session(sock, page, shared[1] if len(shared) > 1 else None)
    wire.send(sock, {"event": "hello", "layers": layers})
    while True:
        try:
            message = wire.receive(sock)
        except wire.Closed:
            return 0
        handler = getattr(session, "on_" + message["cmd"])
        try:
            reply = handler(message)
        except WrongOutput as error:
            reply = {"ok": False, "kind": error.kind, "message": str(error)}
        except loading.LoadError as error:
            reply = {"ok": False, "kind": "load", "message": str(error)}
        except building.BuildFailed as error:
            reply = {"ok": False, "kind": "compile", "message": str(error)}
        except BaseException as error:  # A candidate may raise anything, SystemExit included.
            reply = {
                "ok": False,
                "kind": "raised",
                "message": f"{type(error).__name__}: {error}"[:_TRACEBACK_CHARS],
                "traceback": _trace(error),
            }
        wire.send(sock, reply)


def _trace(error: BaseException) -> str:
    """The candidate's part of the traceback (frames of this package are of no use to its author)."""
    here = os.path.dirname(__file__)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) != here and not frame.filename.startswith("<frozen importlib")
    ]  # fmt: skip
    lines = traceback.format_list(frames) + traceback.format_exception_only(type(error), error)
    return "".join(lines)[-_TRACEBACK_CHARS:]


class WrongOutput(Exception):
    """What `run` returned does not have the declared number, shape or dtype."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class Session:
    """One solution in one process."""

    def __init__(self, sock: socket.socket, page: wire.Page, arena_fd: int | None):
        self.sock, self.page, self.arena_fd = sock, page, arena_fd
        self.run: Any = None
        self.dps = False
        self.on_gpu = False
        self.arena: Any = None
        self.sets: list[list[Any]] = []
        self.targets: list[list[Any]] = []
        self.specs: list[dict[str, Any]] = []
        self.graph: Any = None
        self.clock: Any = None
        self.graphs: list[Any] = []
        self.kept: list[Any] = []

    # -- loading and binding ------------------------------------------------------------------

    def on_start(self, message: dict[str, Any]) -> dict[str, Any]:
        """Get the device ready. Nothing of a candidate is in this process yet: failing is the machine's fault."""
        import torch

        self.on_gpu = message["device"] == "cuda"
        torch.set_grad_enabled(False)
        if self.on_gpu:
            torch.cuda.init()
            torch.cuda.set_device(0)
            # Calls run on the default stream, as in a user's program; only captures need another.
            self.capture_stream = torch.cuda.Stream()
        else:
            torch.set_num_threads(message["threads"])
        if message["arena"]:
            self.on_arena(message["arena"])
            self.arena[:1].tolist()  # It can be read, not only mapped.
        return {"ok": True}

    def on_load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run the candidate's module (or load its library)."""
        self.run, self.dps = loading.load(message)
        return {"ok": True, "dps": self.dps}

    def on_build(self, message: dict[str, Any]) -> dict[str, Any]:
        """Compile sources (in a worker that does nothing else)."""
        return {"ok": True, "library": building.build(message)}

    def on_attempt(self, message: dict[str, Any]) -> dict[str, Any]:
        """Try to break out (in a worker that does nothing else; see `sol_gym.sandbox.doctor`)."""
        from . import attempts

        broke, detail = attempts.run(message["name"], message["about"] | {"page": self.page})
        return {"ok": True, "broke": broke, "detail": detail}

    def on_unmap(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let go of the arena and of everything cached, so that the judge can lay it out anew."""
        self.on_release({})
        self.sets, self.targets = [], []
        if self.on_gpu and self.arena is not None:
            import torch

            from . import cuda

            torch.cuda.synchronize()
            pointer, self.arena = self.arena.data_ptr(), None
            cuda.close_handle(pointer)
        self.arena = None
        return {"ok": True}

    def on_arena(self, message: dict[str, Any]) -> dict[str, Any]:
        """Map the judge's arena (a CUDA IPC handle, or the memory file passed at the fork)."""
        import torch

        if self.on_gpu:
            from . import cuda

            self.arena = cuda.as_bytes(
                cuda.open_handle(bytes.fromhex(message["handle"])), message["bytes"]
            )
        else:
            assert self.arena_fd is not None
            self.arena = torch.frombuffer(
                mmap.mmap(self.arena_fd, message["bytes"]), dtype=torch.uint8
            )  # type: ignore[arg-type]
        return {"ok": True}

    def on_bind(self, message: dict[str, Any]) -> dict[str, Any]:
        """Make the argument tensors of every set: views of the arena, as the judge laid it out."""
        self.on_release({})
        self.specs = message["outputs"]
        n, start = message["n"], message["input_bytes"]
        block = self.arena[start : start + message["output_bytes"]]
        scalars = message["scalars"]
        columns = [
            [row[spec["name"]] for row in scalars]
            if spec["scalar"]
            else _views(self.arena, spec, n)
            for spec in message["inputs"]
        ]
        self.sets = [list(row) for row in zip(*columns, strict=True)] if columns else [[]] * n
        targets = [_views(block, spec, n) for spec in self.specs]
        self.targets = [list(row) for row in zip(*targets, strict=True)]
        if hasattr(self.run, "axes"):
            self.run.axes[:] = message["axes"]
        return {"ok": True}

    def on_scalars(self, message: dict[str, Any]) -> dict[str, Any]:
        """Replace scalar arguments that change with the inputs."""
        for i, values in enumerate(message["scalars"]):
            for position, value in values:
                self.sets[i][position] = value
        return {"ok": True}

    # -- calling ------------------------------------------------------------------------------

    def _call(self, index: int, copy: bool) -> list[Any] | None:
        """Call `run` on a set; outputs end in the targets (destination passing, copied) or are returned."""
        arguments = self.sets[index]
        if self.dps:
            self.run(*arguments, *self.targets[index])
            return None
        outputs = self._checked(self.run(*arguments))
        if not copy:
            return outputs
        for target, output in zip(self.targets[index], outputs, strict=True):
            _raw(target).copy_(_raw(output))
        return None

    def _checked(self, returned: Any) -> list[Any]:
        import torch

        if isinstance(returned, dict):
            names = [spec["name"] for spec in self.specs]
            if set(returned) != set(names):
                raise WrongOutput(
                    "shape",
                    f"run returned a dict with {sorted(map(str, returned))}, expected {names}",
                )
            returned = [returned[name] for name in names]
        outputs = list(returned) if isinstance(returned, tuple | list) else [returned]
        if len(outputs) != len(self.specs):
            raise WrongOutput(
                "shape", f"run returned {len(outputs)} outputs, expected {len(self.specs)}"
            )
        for spec, output in zip(self.specs, outputs, strict=True):
            name = spec["name"]
            if not isinstance(output, torch.Tensor):
                raise WrongOutput(
                    "shape", f"output {name!r} is {type(output).__name__}, expected a tensor"
                )
            if list(output.shape) != spec["shape"]:
                raise WrongOutput(
                    "shape",
                    f"output {name!r} has shape {list(output.shape)}, expected {spec['shape']}",
                )
            if output.dtype is not getattr(torch, spec["dtype"]):
                raise WrongOutput(
                    "dtype",
                    f"output {name!r} has dtype {output.dtype}, expected torch.{spec['dtype']}",
                )
            if output.device.type != self.arena.device.type:
                raise WrongOutput(
                    "shape", f"output {name!r} is on {output.device}, expected {self.arena.device}"
                )
        return outputs

    def _synchronize(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def on_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Eager calls, one after another; the figure returned is an estimate for planning."""
        seconds = []
        for index in message["sets"]:
            self._synchronize()
            start = time.perf_counter()
            self._call(index, copy=True)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return {"ok": True, "seconds": seconds}

    # -- timed series -------------------------------------------------------------------------

    def on_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """Get a batch of `n` calls ready: capture them in one CUDA graph, or leave them eager."""
        self.on_release({})
        n, mode = message["n"], message["mode"]
        self.count = n
        if mode == "eager":
            return {"ok": True, "outputs": []}
        outputs, self.graph = self._capture(
            range(n), copy=mode == "graph+copy", clock=self._graph_clock()
        )
        if self.dps or mode == "graph+copy":
            return {"ok": True, "outputs": []}
        return self._exported(outputs)

    def on_prepare_singles(self, message: dict[str, Any]) -> dict[str, Any]:
        """One graph a set (or eager calls), to be asked for one by one."""
        import torch

        self.on_release({})
        n, mode = message["n"], message["mode"]
        self.count = n
        if mode == "eager":
            return {"ok": True, "outputs": []}
        outputs = []
        try:
            for index in range(n):
                # Graphs do not share a memory pool: one's intermediates would overwrite another's output.
                made, graph = self._capture([index], copy=mode == "graph+copy")
                self.graphs.append(graph)
                outputs += made
        except torch.OutOfMemoryError as error:
            self.on_release({})
            torch.cuda.empty_cache()
            return {"ok": False, "kind": "memory", "message": str(error)[:300]}
        for graph in self.graphs:
            graph.replay()  # The first launch uploads it; that is not the kernel's time.
        torch.cuda.synchronize()
        if self.dps or mode == "graph+copy":
            return {"ok": True, "outputs": []}
        return self._exported(outputs)

    def _graph_clock(self) -> Any:
        """Events to record inside the graph, so that launching it is not the candidate's time."""
        import torch

        self.clock = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
        for event in self.clock:
            event.record()  # The first record creates the event, which is better not captured.
        return self.clock

    def _capture(self, indices: Any, copy: bool, clock: Any = None) -> tuple[list[Any], Any]:
        import torch

        graph = torch.cuda.CUDAGraph()
        outputs = []
        torch.cuda.synchronize()
        with torch.cuda.stream(self.capture_stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                if clock:
                    clock[0].record()
                for index in indices:
                    made = self._call(index, copy)
                    if made is not None:
                        outputs.append(made)
                if clock:
                    clock[1].record()
            finally:
                graph.capture_end()
        self.kept += outputs
        return outputs, graph

    def _exported(self, outputs: list[list[Any]]) -> dict[str, Any]:
        """Where the captured calls' outputs lie, as IPC handles; or that they must be copied."""
        from . import cuda

        segments: dict[int, str] = {}
        places, seen = [], set()
        for made in outputs:
            row = []
            for output in made:
                pointer = output.data_ptr()
                if (
                    type(output).__name__ not in ("Tensor", "Parameter")
                    or not output.is_contiguous()
                    or output.is_neg()
                    or output.is_conj()
                ):
                    return {"ok": True, "copy": "an output is not a plain contiguous tensor"}
                if pointer in seen:
                    return {"ok": True, "copy": "calls return the same buffer"}
                seen.add(pointer)
                try:
                    base, _ = cuda.address_range(pointer)
                    if base not in segments:
                        segments[base] = cuda.export(base).hex()
                except cuda.CudaError as error:
                    return {"ok": True, "copy": f"an output cannot be shared: {error}"}
                if base == self.arena.data_ptr():
                    return {"ok": True, "copy": "an output lies in the inputs' memory"}
                row.append([base, pointer - base])
            places.append(row)
        return {"ok": True, "outputs": places, "segments": {str(k): v for k, v in segments.items()}}

    def on_batch(self, message: dict[str, Any]) -> dict[str, Any]:
        """Wait for the judge's flag, run the batch, raise the answer flag, report the own clock."""
        words, ticket = self.page.words, message["ticket"]
        wire.send(self.sock, {"ok": True, "waiting": True})
        if self.on_gpu:
            import torch

            begin, end = self.clock or [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        gc.disable()
        while words[GO] != ticket:
            pass
        if self.on_gpu:
            if self.graph is not None:
                self.graph.replay()
            else:
                begin.record()
                for index in range(self.count):
                    self._call(index, copy=True)
                end.record()
            torch.cuda.synchronize()
            words[DONE] = ticket
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            for index in range(self.count):
                self._call(index, copy=True)
            seconds = time.perf_counter() - start
            words[DONE] = ticket
        gc.enable()
        return {"ok": True, "seconds": seconds}

    def on_singles(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer requests for single sets until told to stop."""
        words = self.page.words
        last = words[ASK]
        wire.send(self.sock, {"ok": True, "waiting": True})
        gc.disable()
        graphs, on_gpu = self.graphs, self.on_gpu
        if on_gpu:
            import torch

            synchronize = torch.cuda.synchronize
        while True:
            ask = words[ASK]
            if ask == last:
                continue
            last = ask
            index = ask & 0xFFFFF
            if index == ASK_STOP:
                gc.enable()
                return {"ok": True}
            if graphs:
                graphs[index].replay()
            else:
                self._call(index, copy=True)
            if on_gpu:
                synchronize()
            words[ANSWER] = ask

    def on_release(self, message: dict[str, Any]) -> dict[str, Any]:
        """Let go of graphs and outputs, and of memory cached for them."""
        self.graph, self.graphs, self.kept, self.clock = None, [], [], None
        if self.on_gpu:
            import torch

            if torch.cuda.memory_reserved() > _CACHED_BYTES:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        return {"ok": True}


def _views(memory: Any, spec: dict[str, Any], n: int) -> list[Any]:
    """An argument's `n` sets as dense tensors, as the judge laid them out in `memory`."""
    import torch

    start, stride, nbytes = spec["offset"], spec["stride"], spec["bytes"]
    dtype = getattr(torch, spec["dtype"])
    if not nbytes:
        return [memory[:0].view(dtype).view(spec["shape"]) for _ in range(n)]
    rows = memory[start : start + n * stride].view(n, stride)[:, :nbytes]
    return list(rows.view(dtype).view(n, *spec["shape"]).unbind(0))


def _raw(tensor: Any) -> Any:
    """A view that every build of torch can copy (fp4 has no copy on some)."""
    import torch

    if tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        return tensor.view(torch.uint8)
    return tensor
