"""Modelled workers: what the router sees of prefill and decode workers, over engines whose steps only take time.

    router ─start─▶ decode: reserve ─reserved─▶ router ─run─▶ prefill: compute ─first token─▶ router
                                                                      └─ KV: transfer_s ─▶ decode: commit ─tokens─▶

Each arrow takes `hop_s`, and longer while engines compute, which have the cores of those that send and receive: the
call of the prefill worker what all messages up to there take longer, and the first token what its own does.
Choices are single: a trace has no requests with several.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import ClassVar

from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from mesh.domain.errors import InvalidRequest, MeshError, SequencePreempted, WorkerBusy, WorkerDraining, WorkerLost
from mesh.domain.kv import KVLayout
from mesh.domain.prefill import PrefillEvent, PrefillStarted, TransferFinished
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import SampledToken, SequenceKey, SequenceOutput
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole
from router.served_model import ServedModel
from router.workers.decode_link import SequenceListener
from tandem_cli.simulation.engine import ModelledEngine
from tandem_cli.simulation.profile import MeshProfile, WorkerProfile

_NUM_HOPS = 5
"""Messages, one after the other, from a client's request to its first token: the request, start, reserved, the call to
the prefill worker, the token."""
_TOLD_CHANGE = 1 / 16  # of the share of engines that compute: hundreds of engines are not told of each other's steps
_MAX_STEP_STRETCH = 2.0  # the default of decode workers (DecodeSettings); a test compares them


def hop_s(profile: MeshProfile) -> float:
    """Seconds of one message."""
    return profile.overhead_s / _NUM_HOPS


class Neighbours:
    """The engines of both roles that there are, and those that compute now."""

    def __init__(self) -> None:
        self._engines: dict[WorkerRole, list[ModelledEngine]] = {role: [] for role in WorkerRole}
        self._num_busy: Counter[WorkerRole] = Counter()
        self._told_share: dict[WorkerRole, float] = dict.fromkeys(WorkerRole, 0.0)

    def join(self, role: WorkerRole, engine: ModelledEngine) -> None:
        """An engine of this role has come."""
        self._engines[role].append(engine)

    def leave(self, role: WorkerRole, engine: ModelledEngine) -> None:
        """An engine of this role, which rests, has left."""
        self._engines[role].remove(engine)

    def on_busy(self, role: WorkerRole, is_busy: bool) -> None:
        """An engine of this role begins to compute, or rests. Those of the other one then go on at another pace."""
        self._num_busy[role] += 1 if is_busy else -1
        share = self.busy_share(role)
        if abs(share - self._told_share[role]) >= _TOLD_CHANGE:
            self._told_share[role] = share
            for other in WorkerRole:
                if other is not role:
                    for engine in self._engines[other]:
                        engine.keep_pace()

    def busy_share(self, role: WorkerRole) -> float:
        """The share of this role's engines that compute."""
        return self._num_busy[role] / max(1, len(self._engines[role]))


class ModelledWorker:
    """The common part of both roles. Call `lose` when it ends."""

    other_role: ClassVar[WorkerRole]
    max_step_stretch: ClassVar[float] = 0.0

    def __init__(self, info: WorkerInfo, profile: MeshProfile, token: SampledToken, neighbours: Neighbours) -> None:
        self.info = info
        self.is_draining = False
        self.engine = ModelledEngine(
            _of_role(profile, info.role),
            token,
            self._on_step,
            max_step_stretch=self.max_step_stretch,
            prompt_stretch=profile.prefill.stretch,  # a decode worker's prompts lose the lent cores as others do
            neighbours=partial(neighbours.busy_share, self.other_role),
            on_busy=partial(neighbours.on_busy, info.role),
        )
        self._neighbours = neighbours
        neighbours.join(info.role, self.engine)
        self._hop_s = hop_s(profile)
        self._loop = asyncio.get_running_loop()

    @property
    def load(self) -> WorkerLoad:
        """The load that its heartbeat would tell."""
        return self.engine.scheduler.load()

    @property
    def is_idle(self) -> bool:
        """True if no sequence is here, in any state."""
        raise NotImplementedError

    def lose(self) -> None:
        """End everything that is here, with WorkerLost."""
        self.engine.stop()
        self._neighbours.leave(self.info.role, self.engine)

    def _on_step(self, outputs: list[SequenceOutput], preempted: list[SequenceState]) -> None:
        raise NotImplementedError


class ModelledPrefill(ModelledWorker):
    other_role = WorkerRole.DECODE

    def __init__(self, info: WorkerInfo, profile: MeshProfile, token: SampledToken, neighbours: Neighbours) -> None:
        super().__init__(info, profile, token, neighbours)
        self._profile = profile
        self._prompts: dict[SequenceKey, asyncio.Future[SequenceOutput]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._prompts

    async def run(self, spec: SequenceSpec, decode: "ModelledDecode") -> AsyncGenerator[PrefillEvent, None]:
        """Compute one prompt, then hand it over. Raises WorkerDraining or WorkerLost."""
        await asyncio.sleep(self._hop_s + self._longer_s(_NUM_HOPS - 1))
        if self.is_draining:
            raise WorkerDraining("the worker is draining")
        sequence = SequenceState(spec, hand_over=True)
        first_token: asyncio.Future[SequenceOutput] = self._loop.create_future()
        self._prompts[sequence.key] = first_token
        added_s = self._loop.time()
        self.engine.post(lambda scheduler: scheduler.add(sequence))
        try:
            output = await first_token
            yield PrefillStarted(self._loop.time() - added_s)
            computed_s = self._loop.time()
            await asyncio.sleep(self._hop_s + self._longer_s(1))
            yield output
            if output.finish_reason is None:
                await asyncio.sleep(max(0.0, computed_s + self._transfer_s(sequence) - self._loop.time()))
                decode.commit(sequence.key, output.tokens[-1].id)
                yield TransferFinished(0, self._transfer_s(sequence))
        finally:
            del self._prompts[sequence.key]
            self.engine.post(lambda scheduler: scheduler.remove(sequence))

    def lose(self) -> None:
        super().lose()
        for first_token in self._prompts.values():
            if not first_token.done():
                first_token.set_exception(WorkerLost("the prefill worker is lost"))

    def _longer_s(self, num_hops: int) -> float:
        """Seconds that so many messages take longer now than in an idle mesh. The profile says it for decode workers
        that compute; prefill workers take the same cores."""
        busy_share = max(self._neighbours.busy_share(role) for role in WorkerRole)
        return num_hops * self._hop_s * (self._profile.overhead_stretch - 1) * busy_share

    def _transfer_s(self, sequence: SequenceState) -> float:
        """Seconds from the first token until all KV is there: that of earlier passes has gone before."""
        last_chunk = min(sequence.num_prompt_tokens, self._profile.prefill.max_batch_tokens)
        return self._profile.transfer_s + self._profile.transfer_token_s * last_chunk

    def _on_step(self, outputs: list[SequenceOutput], preempted: list[SequenceState]) -> None:
        for output in outputs:
            first_token = self._prompts.get(output.key)
            if first_token is not None and not first_token.done():
                first_token.set_result(output)


class ModelledDecode(ModelledWorker):
    """Takes prompts over, or computes them, and generates. It is the router's link to itself."""

    other_role = WorkerRole.PREFILL
    max_step_stretch = _MAX_STEP_STRETCH

    def __init__(self, info: WorkerInfo, profile: MeshProfile, token: SampledToken, neighbours: Neighbours) -> None:
        super().__init__(info, profile, token, neighbours)
        self._listeners: dict[SequenceKey, SequenceListener] = {}
        self._sequences: dict[SequenceKey, SequenceState] = {}

    @property
    def is_idle(self) -> bool:
        return not self._sequences

    def start(
        self,
        spec: SequenceSpec,
        transfer_id: str,
        listener: SequenceListener,
        fork_listeners: Sequence[SequenceListener] = (),
    ) -> None:
        """Start an attempt, as DecodeLink.start. There are no forks."""
        self._listeners[spec.key] = listener
        self._loop.call_later(self._hop_s, self._begin, spec, transfer_id)

    def abort(self, key: SequenceKey) -> None:
        """Abort an attempt, as DecodeLink.abort."""
        if self._listeners.pop(key, None) is not None:
            self._loop.call_later(self._hop_s, self._remove, key)

    def commit(self, key: SequenceKey, first_token_id: int) -> None:
        """All KV is there: the sequence runs from the next step on."""
        if key in self._sequences:
            self.engine.post(lambda scheduler: scheduler.commit(key, first_token_id))

    def lose(self) -> None:
        super().lose()
        listeners, self._listeners = self._listeners, {}
        self._sequences.clear()
        for listener in listeners.values():
            listener.on_failed(WorkerLost("the decode worker is lost"))

    def _begin(self, spec: SequenceSpec, transfer_id: str) -> None:
        sequence = SequenceState(spec)
        if sequence.key not in self._listeners:
            return
        if self.is_draining:
            self._fail(sequence.key, WorkerDraining("the worker is draining"))
            return
        self._sequences[sequence.key] = sequence
        if transfer_id:
            self.engine.post(lambda scheduler: self._reserve(scheduler, sequence))
        else:
            self.engine.post(lambda scheduler: scheduler.add(sequence))

    def _reserve(self, scheduler: Scheduler, sequence: SequenceState) -> None:
        try:
            ready_tokens = scheduler.reserve(sequence)
        except (WorkerBusy, InvalidRequest) as error:
            self._fail(sequence.key, error)
            return
        self._loop.call_later(self._hop_s, self._report_reserved, sequence.key, ready_tokens)

    def _report_reserved(self, key: SequenceKey, ready_tokens: int) -> None:
        listener = self._listeners.get(key)
        if listener is not None:
            listener.on_reserved(ready_tokens)

    def _remove(self, key: SequenceKey) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self.engine.post(lambda scheduler: scheduler.remove(sequence))

    def _on_step(self, outputs: list[SequenceOutput], preempted: list[SequenceState]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._sequences.pop(output.key, None)
        for sequence in preempted:
            self._sequences.pop(sequence.key, None)
            self._fail(sequence.key, SequencePreempted("its blocks went to older sequences"))
        if outputs:
            self._loop.call_later(self._hop_s, self._deliver, outputs)

    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            listener = self._listeners.get(output.key)
            if listener is None:
                continue
            if output.finish_reason is not None:
                del self._listeners[output.key]
            listener.on_output(output)

    def _fail(self, key: SequenceKey, error: MeshError) -> None:
        self._sequences.pop(key, None)
        listener = self._listeners.pop(key, None)
        if listener is not None:
            self._loop.call_later(self._hop_s, listener.on_failed, error)


def worker_info(
    profile: MeshProfile, role: WorkerRole, *, worker_id: str, incarnation: str, model: ServedModel
) -> WorkerInfo:
    """The identity of a modelled worker."""
    of_role = _of_role(profile, role)
    layout = KVLayout(
        "modelled",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=of_role.block_size,
        dtype="float32",
        state_blocks=of_role.state_blocks,
        windows=of_role.windows,
        windows_are_chunks=of_role.windows_are_chunks,
    )
    return WorkerInfo(
        worker_id,
        incarnation=incarnation,
        role=role,
        address=worker_id,
        model=model.name,
        tokenizer_fingerprint=model.facts.tokenizer_fingerprint,
        layout=layout,
        max_batch_tokens=of_role.max_batch_tokens,
        max_num_seqs=of_role.max_num_seqs,
        num_blocks=of_role.num_blocks,
        max_model_len=of_role.max_model_len,
        switchable=True,
    )


def _of_role(profile: MeshProfile, role: WorkerRole) -> WorkerProfile:
    return profile.prefill if role is WorkerRole.PREFILL else profile.decode
