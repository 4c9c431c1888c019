"""The calls of one workload in one worker: memory for inputs and outputs, and what is asked for.

The judge lays out input sets in memory that it owns, fills them while the worker is stopped, and
reads outputs where they lie: in its own memory, or mapped from the worker's captured graph.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InfrastructureError
from ..inputs import InputMaker
from ..problem import CustomInput, Problem, Workload
from . import replies
from .backend import Backend
from .memory import Layout, MappedOutputs, Poison, slot_bytes
from .process import Worker
from .stages import Stages
from .verdict import NotCapturable, OutOfMemory, WorkedWhileStopped, accepted

_CUSTOM_FILL_BUDGET_S = 0.04
_IDLE_CHECK_SHARE, _TEARDOWN_S = 0.15, 5.0
"""How often, unforeseeably, the device is checked to be idle before a batch (6 ms each)."""
_random = secrets.SystemRandom()


class Calls:
    """One workload of one solution in one worker.

    Args:
        dps: whether the solution takes its outputs as arguments (destination passing).
        deadline: monotonic time at which the worker's time is up.
        watch: check that the device is idle before every batch, not before some.
    """

    def __init__(
        self, backend: Backend, arena: Any, worker: Worker, problem: Problem, workload: Workload,
        maker: InputMaker, deadline: float, dps: bool, stages: Stages, *, watch: bool = False,
    ):  # fmt: skip
        self.backend, self.arena, self.worker = backend, arena, worker
        self.problem, self.workload, self.maker = problem, workload, maker
        self.deadline, self.dps, self.stages, self.watch = deadline, dps, stages, watch
        self.poison = Poison()
        self.output_specs = problem.outputs(workload)
        self.varying = [
            name for name, spec in problem.definition.inputs.items()
            if spec.is_scalar and isinstance(workload.inputs[name], CustomInput)
        ]  # fmt: skip
        """Inputs that are numbers and come from a generator: other ones in every set."""
        self.layout: Layout
        self.scalars: list[dict[str, Any]] = []
        self.targets: torch.Tensor
        self.mapped: MappedOutputs | None = None
        self.mode = "eager"
        self.used = 1
        """The first so many sets of the layout take part."""
        self.fill_s = 0.0
        self._held: torch.Tensor | None = None

    # -- talking to the worker ----------------------------------------------------------------

    def left(self) -> float:
        """Seconds that the worker still has."""
        return max(0.05, self.deadline - time.monotonic())

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer; raises `Verdict` if it is not a good one."""
        return accepted(self.worker.ask(message, self.left()))

    # -- inputs and outputs -------------------------------------------------------------------

    def use(self, n: int) -> None:
        """Let `n` sets take part; the layout stays as it is if it has as many."""
        if n > self.layout.n:
            self.bind(n)
        self.used = n

    def bind(self, n: int, *, draw: int = 0, kinds: Sequence[str | None] = ()) -> None:
        """Lay out `n` sets and tell the worker; fill the first `draw`, with NaN between the slots.

        `kinds` are the strict variants of the first sets, None for compatible ones.
        """
        self.unmap()
        self.layout = layout = Layout.plan(self.problem, self.workload, n)
        wanted = layout.input_bytes + layout.output_bytes
        if wanted > self.arena.bytes.numel():
            self.ask({"cmd": "unmap"})
        remap = self.arena.ensure(wanted)
        if remap:
            self.ask(remap)
        self.used = draw or n
        if draw:
            self.arena.bytes[: layout.input_bytes].fill_(0xFF)
        if draw or self.varying:
            self.fill(kinds)
        else:
            self.scalars = [self.maker.given] * n
        definition = self.problem.definition
        self.ask(
            {
                "cmd": "bind",
                "n": n,
                "inputs": [
                    {"name": name, "scalar": True}
                    if spec.is_scalar
                    else layout.inputs[name].message()
                    for name, spec in definition.inputs.items()
                ],
                "outputs": [slot.message() for slot in layout.outputs.values()],
                "input_bytes": layout.input_bytes,
                "output_bytes": layout.output_bytes,
                "scalars": self.scalars,
                "axes": [self.workload.axes[name] for name in definition.var_axes],
            }
        )
        self.targets = self.arena.bytes[layout.input_bytes : wanted]

    def fill(self, kinds: Sequence[str | None] = ()) -> None:
        """Fresh inputs in every set that is in use."""
        start = time.perf_counter()
        views = {
            name: slot.view(self.arena.bytes, self.used)
            for name, slot in self.layout.inputs.items()
        }
        with self.stages.timed("inputs"):
            scalars = self.maker.fill(views, self.used, kinds)
            rest = [{**scalars[0], **self.maker.given}] * (self.layout.n - self.used)
            self.scalars = scalars + rest
            self.backend.synchronize()
        self.fill_s = max(0.0, time.perf_counter() - start - self.maker.hardening_s)

    def poison_outputs(self) -> None:
        """Outputs of all sets in use hold NaN (or a secret pattern) until they are written."""
        for position, slot in enumerate(self.layout.outputs.values()):
            byte = self.poison.byte(slot.dtype)
            if self.mapped:
                for index in range(self.mapped.count):
                    self.mapped.raw(index)[position].fill_(byte)
            else:
                self.targets[slot.offset : slot.offset + self.used * slot.stride].fill_(byte)

    def raw_outputs(self, index: int) -> list[torch.Tensor]:
        """Call `index`'s outputs as bytes, where they lie."""
        if self.mapped:
            return self.mapped.raw(index)
        return [slot.raw(self.targets, index) for slot in self.layout.outputs.values()]

    def outputs(self, index: int) -> list[torch.Tensor | None]:
        """Call `index`'s outputs where they lie; None for those without elements."""
        return [
            raw.view(getattr(torch, slot.dtype)).view(slot.shape) if slot.nbytes else None
            for slot, raw in zip(self.layout.outputs.values(), self.raw_outputs(index), strict=True)
        ]

    def most_sets(self) -> int:
        """How many sets fit: in the arena, in the worker beside it, and in the time to draw them."""
        outputs = self.output_specs
        tensors = {**self.problem.tensors(self.workload), **outputs}
        a_set = sum(map(slot_bytes, tensors.values())) + sum(map(slot_bytes, outputs.values()))
        most = min(self.backend.max_sets, max(1, self.backend.memory_cap() // max(a_set, 1)))
        if any(isinstance(spec, CustomInput) for spec in self.workload.inputs.values()):
            per_set = self.fill_s / self.used
            most = min(most, max(8, int(_CUSTOM_FILL_BUDGET_S / max(per_set, 1e-6))))
        return most

    def release_cached(self) -> None:
        """A float64 run leaves the judge with cached memory that the worker may need."""
        keep = self.backend.memory_cap() // 2
        if self.backend.cached_bytes() > keep:
            self.worker.stop()
            self.backend.release_cached(keep)
            self.worker.resume()

    def restore_numbers(self) -> None:
        """Later calls get the workload's numbers, where those of strict sets were others."""
        given = self.maker.given
        if all(row[name] == value for row in self.scalars for name, value in given.items()):
            return
        self.scalars = [{**row, **given} for row in self.scalars]
        positions = list(self.problem.definition.inputs)
        numbers = [[positions.index(name), value] for name, value in given.items()]
        self.ask({"cmd": "scalars", "scalars": [numbers] * self.layout.n})

    def mode_name(self) -> str:
        """How the calls are made, for the record."""
        if self.dps:
            return f"{self.mode}+dps"
        return self.mode if self.mapped else f"{self.mode}+copy"

    def prepare(self, command: str, mode: str, n: int) -> None:
        """Capture (or announce) `n` calls, and map their outputs where they lie."""
        self.unmap()
        if mode == "eager":
            self.ask({"cmd": command, "mode": "eager", "n": n})
            return
        reply = self.worker.ask({"cmd": command, "mode": "graph", "n": n}, self.left())
        if reply.get("ok") is True and reply.get("copy"):
            reply = self.worker.ask({"cmd": command, "mode": "graph+copy", "n": n}, self.left())
        if reply.get("ok") is not True:
            if reply.get("kind") in ("shape", "dtype"):
                accepted(reply)
            kind = OutOfMemory if reply.get("kind") == "memory" else NotCapturable
            raise kind(str(reply.get("message")).split("\n")[0][:200])
        if reply.get("outputs"):
            slots = list(self.layout.outputs.values())
            self.mapped = MappedOutputs(*replies.captured(reply, n, len(slots)), slots)

    def unmap(self) -> None:
        """Let go of all of the worker's memory."""
        if self.mapped:
            self.mapped.close()
            self.mapped = None

    def renew_scalars(self, prepare: Callable[[], None]) -> None:
        """New inputs whose generated scalars the worker must know before the batch.

        Such scalars are arguments, not memory, so a captured graph holds their old values. The
        graph is captured anew, over tensors that are hidden until the clock runs.
        """
        self.fill()
        positions = list(self.problem.definition.inputs)
        changed = [[[positions.index(k), row[k]] for k in self.varying] for row in self.scalars]
        inputs = self._input_block()
        self._held = inputs.clone()
        inputs.fill_(0xFF)
        self.backend.synchronize()
        self.ask({"cmd": "scalars", "scalars": changed})
        prepare()

    def _input_block(self) -> torch.Tensor:
        return self.arena.bytes[: self.layout.input_bytes]

    def set_stage(self) -> None:
        """Stop the worker, then write inputs and poison and push them out of the caches.

        Nothing of the worker runs until `resume`, so nothing can start early.
        """
        self.worker.stop()
        if self._held is not None:
            self._input_block().copy_(self._held)
            self._held = None
        else:
            self.fill()
        self.poison_outputs()
        if (self.watch or _random.random() < _IDLE_CHECK_SHARE) and self.backend.busy():
            self._accuse()

    def _accuse(self) -> None:
        """The device works although the worker is stopped: whose work is it?

        Its author's only if it ends with the worker, and if a fresh worker shows the same: others
        on the device may have paused, and a slow device may have recovered, at just that moment.
        """
        self.worker.kill()
        if not self.backend.idle_again(_TEARDOWN_S):
            raise InfrastructureError(
                "another process is working on the GPU, or the GPU has become much slower; "
                "measurements need it for themselves (SOL_GYM_IDLE_CHECK=0 measures all the same)"
            )
        raise WorkedWhileStopped("the solution's work ran on the GPU while its inputs were written")
