"""Measures the profile of a running mesh through its router, while nobody else uses it.

Prompts go one by one, in several lengths, each after a rest, as requests come to a mesh that is not full: a process
that has slept answers later than one in full swing. Their `prefill` phase is the step's time, the rest of the time to
the first token is overhead. Then answers are read in batches of several sizes: the gap between tokens is the time of a
decode step. At last, prompts are computed while answers run, in turn with both alone: workers of both roles may share
cores, and a prompt may be lent those of a decode worker that rests. The profile therefore includes costs of the router,
of clients, and of neighbours on the machine.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise

import tandem
from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.simulation.profile import MeshProfile, StepTimes, Table, WorkerProfile

_FIRST_ID = 3
_REST_S = 0.2
_REPEATS = 7
_PROMPT_SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)  # of the tokens of a prefill step
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_TOKENS = 64  # of each answer whose gaps are measured; it is at least twice as long, so that all run together
_NUM_ROUNDS = 3  # of prompts beside answers, and of both alone
_PROMPTS_A_ROUND = 4
_ANSWERS_BESIDE = 4  # at each decode worker
_MAX_ANSWER = 1024
_MIN_ALONE_S = 0.5


def ratio(seconds: dict[str, list[float]]) -> float:
    """How many times as long it takes beside others; at least 1."""
    if not seconds["alone"] or not seconds["beside"]:
        raise RunFailed("no token came while prompts were computed, or beside them: the mesh is not idle")
    return max(1.0, statistics.fmean(seconds["beside"]) / statistics.fmean(seconds["alone"]))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, or medians of several of one length: seconds of prefill, until the first token, and from there until
    the KV had arrived.
    """

    prefill_s: float
    first_token_s: float
    transfer_s: float

    @property
    def overhead_s(self) -> float:
        return max(1e-6, self.first_token_s - self.prefill_s)


@dataclass(frozen=True, slots=True)
class _Step:
    """A decode step, and the mean context of its sequences in tokens."""

    seconds: float
    context: float


@dataclass(frozen=True, slots=True)
class _Stretches:
    """How many times as long steps of prefill and of decode workers take while those of the other role compute, and
    the rest of the time to a first token while decode workers do.
    """

    prefill: float
    decode: float
    overhead: float


class MeshMeter:
    """Measures one mesh, in which every worker of a role must be like the others. It needs a prefill worker."""

    def __init__(self, client: tandem.AsyncClient, model: tandem.Model) -> None:
        self._client = client
        self._model = model
        self._rng = random.Random(0)

    async def profile(self) -> MeshProfile:
        """Measure for about a minute. Raises ConfigurationError without workers to measure, RunFailed if what was
        measured is no profile.
        """
        workers = [worker for worker in await self._client.workers() if worker.model == self._model.name]
        prefills = [worker for worker in workers if worker.role == "prefill" and worker.serving]
        decodes = [worker for worker in workers if worker.role == "decode" and worker.serving]
        if not prefills or not decodes:
            raise ConfigurationError("a profile needs a mesh with a prefill and a decode worker that serve")
        if not prefills[0].block_size:
            raise RunFailed("this router tells no sizes of blocks: it is older than this command")
        max_tokens = self._model.max_total_tokens
        pass_tokens = min(prefills[0].max_batch_tokens, max_tokens - 2)
        lengths = sorted({max(1, int(share * pass_tokens)) for share in _PROMPT_SHARES})
        await self._prompt(lengths[0])  # compiles kernels, opens connections
        prompts = {length: await self._prompt(length) for length in lengths}
        long_tokens = min(2 * pass_tokens, max_tokens - 2)
        long_prompt = await self._prompt(long_tokens)
        whole = prompts[pass_tokens]
        pairs = (long_tokens - pass_tokens) * pass_tokens
        context_s = (long_prompt.prefill_s - whole.prefill_s * long_tokens / pass_tokens) / max(1, pairs)
        decode_s, decode_context_s = await self._decode_steps(len(decodes), decodes[0].max_num_seqs, pass_tokens)
        times = StepTimes(
            prompt_s=tuple((length, prompt.prefill_s) for length, prompt in prompts.items()),
            decode_s=decode_s,
            prompt_context_s=max(0.0, context_s),
            decode_context_s=decode_context_s,
        )
        num_answers = len(decodes) * min(_ANSWERS_BESIDE, decodes[0].max_num_seqs)
        stretches = await self._stretches(pass_tokens, len(prefills), num_answers)
        of_all = list(prompts.values())
        return MeshProfile(
            f"measured: {self._model.name}, {len(prefills)} + {len(decodes)} workers on {decodes[0].device}",
            self._worker(times, prefills[0], stretches.prefill),
            self._worker(times, decodes[0], stretches.decode),
            overhead_s=statistics.median(prompt.overhead_s for prompt in of_all),
            transfer_s=statistics.median(prompt.transfer_s for prompt in of_all),
            overhead_stretch=round(stretches.overhead, 3),
        )

    def _worker(self, times: StepTimes, worker: tandem.Worker, stretch: float) -> WorkerProfile:
        return WorkerProfile(
            times,
            worker.num_blocks,
            worker.max_batch_tokens,
            worker.max_num_seqs,
            self._model.max_total_tokens,
            worker.block_size,
            round(stretch, 3),
            worker.state_blocks,
            worker.windows,
            worker.windows_are_chunks,
        )

    async def _stretches(self, num_tokens: int, num_prefills: int, num_answers: int) -> _Stretches:
        prompts: dict[str, list[_Prompt]] = {"alone": [], "beside": []}
        steps: dict[str, list[float]] = {"alone": [], "beside": []}
        for _ in range(_NUM_ROUNDS):
            prompts["alone"] += (alone := await self._prompts_together(num_tokens, num_prefills, _REST_S))
            alone_s = [prompt.prefill_s for prompt in alone]
            async with self._answering(num_answers) as gaps:
                gaps.clear()
                await asyncio.sleep(max(_MIN_ALONE_S, sum(alone_s) / num_prefills))
                steps["alone"] += gaps
                gaps.clear()
                # Without rests, in which no prompt would be beside the answers.
                prompts["beside"] += await self._prompts_together(num_tokens, num_prefills, 0.0)
                steps["beside"] += gaps
        prefills = {when: [prompt.prefill_s for prompt in timed] for when, timed in prompts.items()}
        overheads = {when: [prompt.overhead_s for prompt in timed] for when, timed in prompts.items()}
        return _Stretches(ratio(prefills), ratio(steps), ratio(overheads))

    async def _prompts_together(self, num_tokens: int, num_prefills: int, rest_s: float) -> list[_Prompt]:
        """Several prompts, as many at a time as there are prefill workers, each time after a rest."""
        timed = []
        for _ in range(_PROMPTS_A_ROUND):
            await asyncio.sleep(rest_s)
            timed += await asyncio.gather(*(self._time_prompt(num_tokens) for _ in range(num_prefills)))
        return timed

    @asynccontextmanager
    async def _answering(self, count: int) -> AsyncIterator[list[float]]:
        """Let this many answers run meanwhile, each followed by the next. Yields a list to which the gaps between their
        tokens are added. Raises TandemError if an answer fails.
        """
        gaps: list[float] = []
        running = [asyncio.Event() for _ in range(count)]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(gaps, is_running)) for is_running in running]
                for is_running in running:
                    await is_running.wait()
                yield gaps
                for answer in answers:
                    answer.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _answer(self, gaps: list[float], is_running: asyncio.Event) -> None:
        """Generate until cancelled. The gap after the first token is not one of steps: KV is handed over in it."""
        num_new = min(_MAX_ANSWER, self._model.max_total_tokens - 1)
        while True:
            times: list[float] = []
            async for _ in self._stream(1, num_new):
                times.append(time.perf_counter())
                if len(times) > 2:
                    is_running.set()
                    gaps.append(times[-1] - times[-2])

    async def _prompt(self, num_tokens: int) -> _Prompt:
        timed = []
        for _ in range(_REPEATS):
            await asyncio.sleep(_REST_S)
            timed.append(astuple(await self._time_prompt(num_tokens)))
        return _Prompt(*(statistics.median(values) for values in zip(*timed, strict=True)))

    async def _time_prompt(self, num_tokens: int) -> _Prompt:
        started_s, first_s, timing = time.perf_counter(), None, None
        async for event in self._stream(num_tokens, 2):
            first_s = first_s or time.perf_counter() - started_s
            timing = event.timing or timing
        if timing is None or first_s is None:
            raise RunFailed("this router reports no timing: it is older than this command")
        phases = timing.phases_ms
        return _Prompt(phases["prefill"] / 1000, first_s, phases["transfer"] / 1000)

    async def _decode_steps(self, num_workers: int, max_num_seqs: int, pass_tokens: int) -> tuple[Table, float]:
        """Seconds of a decode step by its sequences, without context, and for each token of context."""
        pass_tokens = min(pass_tokens, self._model.max_total_tokens // 2)
        short, long_ = max(1, pass_tokens // 16), pass_tokens
        steps = {}
        for batch in [batch for batch in _BATCHES if batch <= max_num_seqs]:
            steps[batch] = await self.step(batch, num_workers, short)
        batch = max(size for size in steps if size <= 8)
        longer = await self.step(batch, num_workers, long_)
        more_context = longer.context - steps[batch].context
        context_s = (
            max(0.0, (longer.seconds - steps[batch].seconds) / batch / more_context) if more_context > 0 else 0.0
        )
        table = [(size, max(step.seconds - context_s * size * step.context, 1e-6)) for size, step in steps.items()]
        return tuple(table), context_s

    async def step(self, batch: int, num_workers: int, num_tokens: int) -> _Step:
        """The mean gap while `batch` sequences run at each decode worker. Answers get longer until all of them run at
        the same time: if prompts take long beside steps, the first answers end before the last ones begin.
        """
        longest = max(2, min(_MAX_ANSWER, self._model.max_total_tokens - num_tokens))
        num_new = min(2 * _NUM_TOKENS, longest)
        while not (gaps := await self._common_gaps(batch * num_workers, num_tokens, num_new)):
            if num_new == longest:
                raise RunFailed(f"{batch} answers did not run at the same time: the mesh is too small or not idle")
            num_new = min(2 * num_new, longest)
        return _Step(statistics.fmean(gaps), num_tokens + num_new / 2)

    async def _common_gaps(self, num_answers: int, num_tokens: int, num_new: int) -> list[float]:
        """Gaps between tokens from the last answer's first token to the first end of an answer."""
        answers = [self._arrivals(num_tokens, num_new) for _ in range(num_answers)]
        token_times = await asyncio.gather(*answers)
        begun_s, ended_s = max(times[0] for times in token_times), min(times[-1] for times in token_times)
        common = [[at_s for at_s in times if begun_s <= at_s <= ended_s] for times in token_times]
        return [later - earlier for within in common for earlier, later in pairwise(within)]

    async def _arrivals(self, num_tokens: int, num_new: int) -> Sequence[float]:
        return [time.perf_counter() async for _ in self._stream(num_tokens, num_new)]

    def _stream(self, num_tokens: int, num_new: int) -> AsyncGenerator[tandem.TokenEvent, None]:
        prompt = [self._rng.randrange(_FIRST_ID, self._model.vocab_size) for _ in range(num_tokens)]
        return self._client.stream(token_ids=prompt, model=self._model.name, max_new_tokens=num_new, ignore_eos=True)
