"""One workload in one worker: correctness rounds, timed batches, single requests.

This is the timing protocol of docs/design.md as code. Both backends run it; a CPU has shared
memory and eager calls where a GPU has IPC and captured graphs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import InfrastructureError
from ..evaluation import Status
from ..inputs import InputMaker
from ..problem import CustomInput, Problem, Workload
from . import replies
from .backend import Backend
from .correctness import HARD_CAP, Comparison
from .memory import Layout, MappedOutputs, Poison, slot_bytes
from .oracle import OracleUnsupported
from .precision import Yardstick
from .process import Worker, WorkerGone
from .reference import InvalidReference, Reference
from .schedule import TIMED, Turn
from .stages import Stages
from .timing import Calibration, Measured, Plan, SingleRound, sets_for, singles_would_count
from .worker import wire

_SNAPSHOT_BYTES = 2048
_FIRST_SETS = 16
_SLOW_CALL_S = 0.5
"""Calls this long (interpreted Triton on a CPU) are repeated twice only."""
_SLOW_REFERENCE_S = 0.02
_CUSTOM_FILL_BUDGET_S = 0.04
_IDLE_CHECK_SHARE, _TEARDOWN_S = 0.15, 5.0
"""How often, unforeseeably, the device is checked to be idle before a batch (6 ms each)."""
_random = secrets.SystemRandom()

Snapshots = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""For each of some calls its outputs' bytes, and random positions in them."""


class Verdict(Exception):
    """The workload is decided: it failed with a status and a message for the author."""

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status, self.message = status, message


class NotCapturable(Exception):
    """The solution cannot run inside a CUDA graph; the worker may be unusable now."""


class OutOfMemory(NotCapturable):
    """The captured calls do not fit into device memory together; fewer may."""


class WorkedWhileStopped(Exception):
    """The device was busy while the worker was stopped, and came to rest when the worker was killed."""


def accepted(reply: dict[str, Any]) -> dict[str, Any]:
    """A worker's reply if it reports success; raises the `Verdict` it amounts to otherwise."""
    if reply.get("ok") is True:
        return reply
    status = {
        "shape": Status.INCORRECT_SHAPE,
        "dtype": Status.INCORRECT_DTYPE,
        "load": Status.COMPILE_ERROR,
        "compile": Status.COMPILE_ERROR,
    }.get(str(reply.get("kind")), Status.RUNTIME_ERROR)
    text = reply.get("traceback") or reply.get("message") or "the worker sent an empty reply"
    raise Verdict(status, str(text))


@dataclass
class Private:
    """The judge's own copy of one input set."""

    arguments: list[Any]
    tensors: dict[str, torch.Tensor]


class Series:
    """Runs one workload of one solution in one worker.

    With `watch` the device is checked to be idle before every batch, not before some.
    """

    def __init__(
        self, backend: Backend, arena: Any, worker: Worker, problem: Problem, workload: Workload,
        reference: Reference, maker: InputMaker, plan: Plan, deadline: float, dps: bool,
        stages: Stages, *, strict: Turn | None = None, watch: bool = False,
    ):  # fmt: skip
        self.backend, self.arena, self.worker = backend, arena, worker
        self.problem, self.workload, self.reference = problem, workload, reference
        self.maker, self.plan, self.deadline, self.dps = maker, plan, deadline, dps
        self.stages, self.strict, self.watch = stages, strict, watch
        self.poison = Poison()
        # Where a selection decides, an element may honestly be anything.
        capped = strict is not None and not (problem.pack and problem.pack.selects)
        self.comparison = Comparison(workload.tolerance, HARD_CAP if capped else None)
        self.outputs = problem.outputs(workload)
        self.varying = [
            name for name, spec in problem.definition.inputs.items()
            if spec.is_scalar and isinstance(workload.inputs[name], CustomInput)
        ]  # fmt: skip
        self.layout: Layout
        self.scalars: list[dict[str, Any]] = []
        self.targets: torch.Tensor
        self.mapped: MappedOutputs | None = None
        self._held: torch.Tensor | None = None
        self._mode = "eager"
        self.used = 1
        """The first so many sets of the layout take part."""
        self.call_s = self.reference_s = self.fill_s = 0.0
        self._ticket = secrets.randbits(32)

    # -- talking to the worker ----------------------------------------------------------------

    def _left(self) -> float:
        return max(0.05, self.deadline - time.monotonic())

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return accepted(self.worker.ask(message, self._left()))

    # -- inputs and outputs -------------------------------------------------------------------

    def _use(self, n: int) -> None:
        """Let `n` sets take part; the layout stays as it is if it has as many."""
        if n > self.layout.n:
            self._bind(n)
        self.used = n

    def _bind(self, n: int, *, draw: int = 0, kinds: Sequence[str | None] = ()) -> None:
        """Lay out `n` sets and tell the worker; fill the first `draw`, with NaN between the slots.

        `kinds` are the strict variants of the first sets, None for compatible ones.
        """
        self.unmap()
        self.layout = layout = Layout.plan(self.problem, self.workload, n)
        wanted = layout.input_bytes + layout.output_bytes
        if wanted > self.arena.bytes.numel():
            self._ask({"cmd": "unmap"})
        remap = self.arena.ensure(wanted)
        if remap:
            self._ask(remap)
        self.used = draw or n
        if draw:
            self.arena.bytes[: layout.input_bytes].fill_(0xFF)
        if draw or self.varying:
            self._fill(kinds)
        else:
            self.scalars = [self.maker.given] * n
        definition = self.problem.definition
        self._ask(
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

    def _fill(self, kinds: Sequence[str | None] = ()) -> None:
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

    def _poison_outputs(self) -> None:
        for position, slot in enumerate(self.layout.outputs.values()):
            byte = self.poison.byte(slot.dtype)
            if self.mapped:
                for index in range(self.mapped.count):
                    self.mapped.raw(index)[position].fill_(byte)
            else:
                self.targets[slot.offset : slot.offset + self.used * slot.stride].fill_(byte)

    def _raw_outputs(self, index: int) -> list[torch.Tensor]:
        if self.mapped:
            return self.mapped.raw(index)
        return [slot.raw(self.targets, index) for slot in self.layout.outputs.values()]

    def _private(self, index: int) -> Private:
        tensors = {
            name: slot.one(self.arena.bytes, index).clone()
            for name, slot in self.layout.inputs.items()
        }
        arguments = [
            self.scalars[index][name] if spec.is_scalar else tensors[name]
            for name, spec in self.problem.definition.inputs.items()
        ]
        return Private(arguments, tensors)

    def _verify(self, index: int, private: Private, variant: str | None = None) -> None:
        """Compare call `index`'s outputs, read in place, with the reference on the judge's copy."""
        for name, slot in self.layout.inputs.items():
            ours = private.tensors[name].view(-1).view(torch.uint8) if slot.nbytes else None
            if ours is not None and not torch.equal(slot.raw(self.arena.bytes, index), ours):
                raise Verdict(
                    Status.INCORRECT_NUMERICAL,
                    f"run() changed its input {name!r}; inputs must be left as they are",
                )
        self.backend.synchronize()
        with self.stages.timed("verify"):
            self.comparison.rounds += 1
            if variant is None:
                start = time.perf_counter()
                expected = self.reference(private.arguments, self.outputs)
                self.backend.synchronize()
                self.reference_s = time.perf_counter() - start
                slots = self.layout.outputs.values()
                for slot, got, right in zip(slots, self._outputs(index), expected, strict=True):
                    self.comparison.add(slot.name, right if got is None else got, right)
            else:
                self._verify_strict(index, private, variant)
        if self.comparison.failed:
            text = "; ".join(self.comparison.reasons)
            if self.comparison.mismatch:
                text += f"; first: {self.comparison.mismatch}"
            raise Verdict(Status.INCORRECT_NUMERICAL, text)

    def _outputs(self, index: int) -> list[torch.Tensor | None]:
        """Call `index`'s outputs where they lie; None for those without elements."""
        return [
            raw.view(getattr(torch, slot.dtype)).view(slot.shape) if slot.nbytes else None
            for slot, raw in zip(
                self.layout.outputs.values(), self._raw_outputs(index), strict=True
            )
        ]

    def _verify_strict(self, index: int, private: Private, variant: str) -> None:
        """Compare by the error that the declared precision itself makes on this set."""
        assert self.strict is not None
        try:
            yardstick = Yardstick(self.problem, self.reference, private.arguments, self.outputs)
            got = [
                right if output is None else output
                for output, right in zip(self._outputs(index), yardstick.expected, strict=True)
            ]
            self.comparison.add_strict(variant, yardstick, got)
            return
        except (InvalidReference, OracleUnsupported) as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = "no memory for float64 on this device"
            self.strict.forgo(why)
        self.comparison.skipped.append(f"{variant}: {why}")

    def _most_sets(self) -> int:
        """How many sets fit: in the arena, in the worker beside it, and in the time to draw them."""
        tensors = {**self.problem.tensors(self.workload), **self.outputs}
        a_set = sum(map(slot_bytes, tensors.values())) + sum(map(slot_bytes, self.outputs.values()))
        most = min(self.backend.max_sets, max(1, self.backend.memory_cap() // max(a_set, 1)))
        if any(isinstance(spec, CustomInput) for spec in self.workload.inputs.values()):
            per_set = self.fill_s / self.used
            most = min(most, max(8, int(_CUSTOM_FILL_BUDGET_S / max(per_set, 1e-6))))
        return most

    # -- correctness --------------------------------------------------------------------------

    def check(self) -> None:
        """Correctness rounds on fresh inputs; raises `Verdict` at the first failure.

        Strict sets, where the profile has them, take the place of one compatible round and come in
        a secret order among them.
        """
        with self.stages.timed("correctness"):
            self.layout = Layout.plan(self.problem, self.workload, 1)
            most = self._most_sets()
            kinds = self._kinds(most)
            sets = min(most, max(len(kinds), _FIRST_SETS))
            while kinds:
                chunk, kinds = kinds[:most], kinds[most:]
                self._check_some(chunk, sets)
                kinds = [kind for kind in kinds if kind is None or self._admitted(kind)]
            if self.strict is not None:
                self._restore_numbers()
                self._release_cached()

    def _kinds(self, most: int) -> list[str | None]:
        """Strict variants (None for compatible sets) of the rounds, in order."""
        rounds = self.plan.rounds
        if self.strict is None or not self.strict.variants:
            return [None] * max(1, min(rounds, most))
        return self.strict.rounds(max(1, rounds - 1))

    def _admitted(self, variant: str) -> bool:
        """Whether a variant is to be compared; the record says so if it is not."""
        assert self.strict is not None
        admitted = self.strict.admits(variant)
        if not admitted:
            self.comparison.skipped.append(f"{variant}: {self.strict.why_not}")
        return admitted

    def _check_some(self, kinds: Sequence[str | None], sets: int) -> None:
        """One call of the worker for each kind of set, all in a layout of `sets` sets."""
        self._bind(sets, draw=len(kinds), kinds=kinds)
        self._poison_outputs()
        privates = [self._private(i) for i in range(len(kinds))]
        self.backend.synchronize()
        reply = self._ask({"cmd": "call", "sets": list(range(len(kinds)))})
        self.call_s = min(replies.seconds_list(reply, len(kinds)))
        for index, kind in enumerate(kinds):
            if kind is None:
                self._verify(index, privates[index])
        if self.strict is None:
            return
        self.strict.spend(self.maker.hardening_s)
        for index, variant in enumerate(kinds):
            if variant is None or not self._admitted(variant):
                continue
            self._compare_strictly(variant, index, privates[index])

    def _compare_strictly(self, variant: str, index: int, private: Private) -> None:
        assert self.strict is not None
        with self.stages.timed("strict"):
            start, before = time.perf_counter(), self.comparison.strict_rounds
            self._verify(index, private, variant)
            compared = self.comparison.strict_rounds > before
            self.strict.record(variant, time.perf_counter() - start, compared)

    def _release_cached(self) -> None:
        """A float64 run leaves the judge with cached memory that the worker may need."""
        keep = self.backend.memory_cap() // 2
        if self.backend.cached_bytes() > keep:
            self.worker.stop()
            self.backend.release_cached(keep)
            self.worker.resume()

    def _restore_numbers(self) -> None:
        """Later calls get the workload's numbers, where those of strict sets were others."""
        given = self.maker.given
        if all(row[name] == value for row in self.scalars for name, value in given.items()):
            return
        self.scalars = [{**row, **given} for row in self.scalars]
        positions = list(self.problem.definition.inputs)
        numbers = [[positions.index(name), value] for name, value in given.items()]
        self._ask({"cmd": "scalars", "scalars": [numbers] * self.layout.n})

    # -- timing -------------------------------------------------------------------------------

    def measure(self, *, graph: bool, calibration: Calibration) -> Measured:
        """Timed batches and single requests.

        Raises:
            Verdict: an output of a batch is wrong, or the protocol was broken.
            NotCapturable: a graph was wanted and the solution cannot be captured.
            WorkedWhileStopped: the worker is dead; was it to blame?
        """
        self._mode = "graph" if graph else "eager"
        most = self._most_sets()
        with self.stages.timed("capture"):
            per_call = self._settle_sets(most, calibration)
        measured = Measured(n_sets=self.used, mode=self._mode_name())
        with self.stages.timed("batches"):
            slow = per_call >= _SLOW_CALL_S
            self._repeat(measured, min(2, self.plan.repeats) if slow else self.plan.repeats)
        with self.stages.timed("singles"):
            if per_call < self.plan.single_below_s and most > 1:
                self._singles(measured, per_call, most, calibration)
            self.unmap()
            self._ask({"cmd": "release"})
        return measured

    def _settle_sets(self, most: int, calibration: Calibration) -> float:
        """Prepare a batch that is long enough, of at most `most` sets; returns seconds per call.

        A first batch is small and tells how long a call takes, which eager calls do not. Its last
        batch is not counted: it warms up, and is verified like the others.
        """
        batch_s = calibration.batch_s(self.backend.batch_s)
        n = min(_FIRST_SETS, sets_for(self.call_s, batch_s, most))
        while True:
            self._use(n)
            self._prepare("prepare", self._mode, n)
            judge, own = self._batch()
            per_call = max(judge - calibration.overhead_of(judge), own) / n
            wanted = sets_for(per_call, batch_s, most)
            if wanted <= 1.3 * n or n > _FIRST_SETS:
                return per_call
            n = wanted

    def _repeat(self, measured: Measured, repeats: int) -> None:
        """Counted batches; those during which clocks throttled are done again, a few times."""
        retries = 0
        strict = _random.randrange(repeats)
        while len(measured.judge_s) < repeats:
            judge, own = self._batch(strict=len(measured.judge_s) == strict)
            state = self.backend.state()
            if state["throttled"] and retries < self.plan.max_retries:
                retries += 1
                continue
            measured.judge_s.append(judge)
            measured.reported_s.append(own)
            measured.sm_clock_mhz, measured.clock_locked = state["sm_clock_mhz"], state["locked"]
        if retries:
            measured.marks.append(f"{retries} repeats done again: clocks throttled")

    def _mode_name(self) -> str:
        if self.dps:
            return f"{self._mode}+dps"
        return self._mode if self.mapped else f"{self._mode}+copy"

    def _prepare(self, command: str, mode: str, n: int) -> None:
        """Capture (or announce) `n` calls, and map their outputs where they lie."""
        self.unmap()
        if mode == "eager":
            self._ask({"cmd": command, "mode": "eager", "n": n})
            return
        reply = self.worker.ask({"cmd": command, "mode": "graph", "n": n}, self._left())
        if reply.get("ok") is True and reply.get("copy"):
            reply = self.worker.ask({"cmd": command, "mode": "graph+copy", "n": n}, self._left())
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

    def _renew_scalars(self, prepare: Callable[[], None]) -> None:
        """New inputs whose generated scalars the worker must know before the batch.

        Such scalars are arguments, not memory, so a captured graph holds their old values. The
        graph is captured anew, over tensors that are hidden until the clock runs.
        """
        self._fill()
        positions = list(self.problem.definition.inputs)
        changed = [[[positions.index(k), row[k]] for k in self.varying] for row in self.scalars]
        inputs = self._input_block()
        self._held = inputs.clone()
        inputs.fill_(0xFF)
        self.backend.synchronize()
        self._ask({"cmd": "scalars", "scalars": changed})
        prepare()

    def _input_block(self) -> torch.Tensor:
        return self.arena.bytes[: self.layout.input_bytes]

    def _set_stage(self) -> None:
        """Stop the worker, then write inputs and poison and push them out of the caches.

        Nothing of the worker runs until `resume`, so nothing can start early.
        """
        self.worker.stop()
        if self._held is not None:
            self._input_block().copy_(self._held)
            self._held = None
        else:
            self._fill()
        self._poison_outputs()
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

    def _batch(self, *, strict: bool = False) -> tuple[float, float]:
        """One timed batch: seconds by the judge's clock and by the worker's.

        With `strict`, and if the profile is, a call is also held to the strict yardstick.
        """
        n = self.used
        if self.varying:
            self._renew_scalars(partial(self._prepare, "prepare", self._mode, n))
        self._ticket += 1
        ticket, words = self._ticket, self.worker.page.words
        words[wire.DONE] = 0
        self._ask({"cmd": "batch", "ticket": ticket})
        self._set_stage()
        chosen = self._choose(n)
        privates = {index: self._private(index) for index in chosen}
        snapshots = self._snapshot_plan(chosen)
        self.backend.flush()
        self.backend.synchronize()

        # The flag is up before the worker may run and the clock starts before it is resumed: the
        # cost of waking it is part of the calibrated overhead.
        words[wire.GO] = ticket
        begin = time.perf_counter_ns()
        self.worker.resume()
        self.worker.wait_word(wire.DONE, ticket, self._left(), sleep_s=self.backend.poll_sleep_s)
        # The end stamp is when a sample of the outputs has reached the judge: work still running
        # after the answer either delays it or is missing from it.
        taken = _taken(snapshots)
        self.backend.synchronize()
        judge_s = (time.perf_counter_ns() - begin) / 1e9

        own_s = replies.seconds(accepted(self.worker.receive(self._left())))
        for index in chosen:
            self._verify(index, privates[index])
        if strict and self.strict is not None and self.strict.timed:
            self._compare_strictly(TIMED, chosen[0], privates[chosen[0]])
            self._release_cached()
        _insist_unchanged(
            snapshots, taken, "outputs changed after the answer: work was left running"
        )
        return judge_s, own_s

    def _choose(self, n: int) -> list[int]:
        """Calls to verify: the last one and a random one (only one of them if the reference is slow)."""
        last, other = n - 1, _random.randrange(n)
        if self.reference_s > _SLOW_REFERENCE_S:
            return [_random.choice((last, other))]
        return sorted({last, other})

    def _snapshot_plan(self, chosen: list[int]) -> Snapshots:
        """For each chosen call, its outputs' bytes with random positions to look at first."""
        plan = []
        for index in chosen:
            row = []
            for raw in self._raw_outputs(index):
                if raw.numel():
                    where = torch.randint(
                        raw.numel(), (min(_SNAPSHOT_BYTES, raw.numel()),), device=raw.device
                    )
                    row.append((raw, where))
            plan.append(row)
        return plan

    def _prepare_singles(self, pool: int) -> int:
        """One graph a set, for `pool` sets or fewer; returns for how many.

        Graphs of their own share no memory for intermediates. Where even two do not fit, the calls
        are eager: slower, but a candidate cannot get out of the single requests by asking for memory.
        """
        for sets, mode in ((pool, self._mode), (2, self._mode), (2, "eager")):
            self._use(sets)
            prepare = partial(self._prepare, "prepare_singles", mode, sets)
            try:
                if self.varying:
                    self._renew_scalars(prepare)
                else:
                    prepare()
                break
            except OutOfMemory:
                continue
        return sets

    def _singles(
        self, measured: Measured, per_call: float, most: int, calibration: Calibration
    ) -> None:
        """Ask for sets one by one; if that would count against the batch, ask again to be sure."""
        pool, asks = self.plan.singles(per_call, most)
        pool = self._prepare_singles(pool)
        while True:
            # How many are asked for is not to be foreseen, so nobody knows which one is the last.
            fewer = min(asks, pool // 2)
            fewer -= _random.randrange(1 + fewer // 4)
            measured.rounds.append(self._single_round(pool, fewer))
            enough = len(measured.rounds) >= self.plan.single_rounds
            if enough or not singles_would_count(measured, calibration, self.plan):
                return
            if self.varying:
                pool = self._prepare_singles(pool)

    def _single_round(self, pool: int, asks: int) -> SingleRound:
        """Ask for `asks` sets in a secret order; sets never asked for must stay poisoned."""
        words, worker = self.worker.page.words, self.worker
        words[wire.ASK] = words[wire.ANSWER] = 0
        self._ask({"cmd": "singles"})
        self._set_stage()
        order = _random.sample(range(pool), asks)
        asked = set(order)
        idle = [index for index in range(pool) if index not in asked]
        chosen = (
            [order[-1], _random.choice(order)]
            if self.reference_s <= _SLOW_REFERENCE_S
            else [_random.choice(order)]
        )
        privates = {index: self._private(index) for index in chosen}
        snapshots = self._snapshot_plan(order[-1:])
        self.backend.flush()
        self.backend.synchronize()
        worker.resume()

        clock, sleep_s = time.perf_counter_ns, self.backend.poll_sleep_s
        answers_s, end = [], 0
        for number, index in enumerate(order, 1):
            request = number << 20 | index
            begin = clock()
            words[wire.ASK] = request
            end = worker.wait_word(wire.ANSWER, request, self._left(), sleep_s=sleep_s)
            answers_s.append((end - begin) / 1e9)
        # Whatever was put off until after its answer is done, or missing, when the sample arrives.
        taken = _taken(snapshots)
        self.backend.synchronize()
        tail_s = (clock() - end) / 1e9
        words[wire.ASK] = (asks + 1) << 20 | wire.ASK_STOP
        accepted(worker.receive(self._left()))
        for index, private in privates.items():
            self._verify(index, private)
        _insist_unchanged(
            snapshots,
            taken,
            "outputs changed after the answer to a single request: it came before the work",
        )
        for index in _random.sample(idle, min(3, len(idle))):
            for slot, raw in zip(
                self.layout.outputs.values(), self._raw_outputs(index), strict=True
            ):
                if raw.numel() and not bool((raw == self.poison.byte(slot.dtype)).all()):
                    raise Verdict(
                        Status.REWARD_HACK,
                        "an output was written that nobody had asked for: calls are worked off ahead of time",
                    )
        return SingleRound(answers_s, tail_s)


def _taken(snapshots: Snapshots) -> list[list[torch.Tensor]]:
    """The bytes that are at the snapshots' places now (on a GPU once the judge's stream is there)."""
    return [[raw[where] for raw, where in row] for row in snapshots]


def _insist_unchanged(snapshots: Snapshots, taken: list[list[torch.Tensor]], message: str) -> None:
    """Raises `Verdict` if outputs are not what they were when the answer had come."""
    for row, sample in zip(snapshots, taken, strict=True):
        for (raw, where), bytes_then in zip(row, sample, strict=True):
            if not torch.equal(raw[where], bytes_then):
                raise Verdict(Status.REWARD_HACK, message)


def decide(error: Exception) -> tuple[Status, str]:
    """Status and message that an exception while measuring amounts to.

    Raises:
        the error itself, if it is the judge's own and says nothing about the solution.
    """
    if isinstance(error, Verdict):
        return error.status, error.message
    if isinstance(error, WorkerGone):
        timeout = error.exit.reason.startswith("wall time")
        return Status.TIMEOUT if timeout else Status.RUNTIME_ERROR, str(error)
    if isinstance(error, wire.Timeout):
        return Status.TIMEOUT, "no answer within the time limit"
    if isinstance(error, wire.ProtocolError):
        return Status.REWARD_HACK, f"the worker broke the protocol: {error}"
    raise error
