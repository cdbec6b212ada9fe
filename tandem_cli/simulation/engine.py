"""An engine whose steps only take time: the real scheduler plans them, the profile says how long they take.

    post ─▶ commands, run between steps ─▶ schedule ─▶ a step, or many equal ones at once ─▶ update ─▶ on_step

While only decodes run, nothing changes from step to step but the lengths. So as many steps are taken at once as no
sequence ends in, and as blocks are free for. A command in their midst ends them after the step that is under way, as it
would in a real engine. If steps take longer while engines of the other role compute, the running step goes on faster or
slower as soon as those begin or rest, and few steps are taken at once, so that gaps between tokens show it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch import ScheduledBatch
from engine.kv.block_pool import BlockPool
from engine.prompt_pace import PromptPace
from engine.runner import RunnerOutput
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.tokens import SampledToken, SequenceOutput
from tandem_cli.simulation.profile import WorkerProfile

_MAX_STEPS_S = 10.0  # far below the router's stall_timeout_s, after which it would give up a silent sequence
_MAX_STRETCHED_S = 0.05
_MAX_STEPS = 1024  # far below the tokens that the router buffers for a client

Command = Callable[[Scheduler], None]
OnStep = Callable[[list[SequenceOutput], list[SequenceState]], None]
"""Gets the new tokens of one or more equal steps, by sequence, and the sequences that lost their blocks."""


@dataclass(slots=True)
class _Steps:
    """`count` steps of one batch, under way since `begun_s`, each of `alone_s` seconds while all neighbours rest, and
    of `beside_s` while all compute. At `since_s`, `num_done` of them had been computed; from then on each takes
    `step_s`.
    """

    batch: ScheduledBatch
    begun_s: float
    alone_s: float
    beside_s: float
    count: int
    step_s: float
    since_s: float
    timer: asyncio.TimerHandle
    num_done: float = 0.0

    def progress(self, now_s: float) -> float:
        """Steps computed by now, with the computed part of the running one."""
        return self.num_done + (now_s - self.since_s) / self.step_s


class ModelledEngine:
    """One engine on the running event loop. `on_step` is called after each step, before the next one is planned.

    Every sampled token is `token`. `neighbours` returns the share of the other role's engines that compute now; call
    `keep_pace` when it has changed. `on_busy` is told whenever this one begins to compute, and when it rests. Beside
    neighbours, prompts take `prompt_stretch` times as long, by default what the profile says of steps.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        token: SampledToken,
        on_step: OnStep,
        *,
        max_step_stretch: float = 0.0,
        prompt_stretch: float | None = None,
        neighbours: Callable[[], float] = lambda: 0.0,
        on_busy: Callable[[bool], None] = lambda is_busy: None,
    ) -> None:
        self.pool = BlockPool(profile.num_blocks + (1 if profile.windows else 0))  # see NO_BLOCK
        self.busy_s = 0.0
        """Seconds spent in steps that have ended."""
        self.prompt_tokens = 0
        """Prompt tokens computed so far."""
        config = SchedulerConfig(
            profile.block_size,
            max(profile.max_batch_tokens, profile.max_num_seqs),
            profile.max_num_seqs,
            profile.max_model_len,
            prefix_caching=False,
            max_step_stretch=max_step_stretch,
            state_blocks=profile.state_blocks,
            windows=profile.windows,
            windows_are_chunks=profile.windows_are_chunks,
        )
        self.scheduler = Scheduler(config, self.pool)
        self._times = profile.times
        self._stretch = profile.stretch
        self._prompt_stretch = profile.stretch if prompt_stretch is None else prompt_stretch
        self._neighbours = neighbours
        self._on_busy = on_busy
        self._is_busy = False
        self._token = token
        self._on_step = on_step
        self._pace = PromptPace(max_step_stretch)
        self._loop = asyncio.get_running_loop()
        self._commands: list[Command] = []
        self._steps: _Steps | None = None
        self._is_stopped = False

    def post(self, command: Command) -> None:
        """Run `command` between two steps: now if the engine is idle."""
        self._commands.append(command)
        if self._steps is None:
            self._run_commands()
            self._begin()
        elif len(self._commands) == 1:
            self._end_early(self._steps)

    def stop(self) -> None:
        """Compute nothing more. Commands still run."""
        self._is_stopped = True
        if self._steps is not None:
            self._steps.timer.cancel()
        self._steps = None
        self._set_busy(is_busy=False)

    def _set_busy(self, *, is_busy: bool) -> None:
        if is_busy is not self._is_busy:
            self._is_busy = is_busy
            self._on_busy(is_busy)

    def _run_commands(self) -> None:
        while self._commands:  # a command may post another one
            commands, self._commands = self._commands, []
            for command in commands:
                command(self.scheduler)

    def _begin(self) -> None:
        if self._is_stopped:
            return
        batch = self.scheduler.schedule(self._pace.max_prompt_tokens())
        self._set_busy(is_busy=bool(batch.items))
        if not batch.items:
            return
        count = self._num_equal_steps(batch)
        decode_s, prompts_s = self._parts_s(batch, count)
        alone_s, beside_s = decode_s + prompts_s, decode_s * self._stretch + prompts_s * self._prompt_stretch
        step_s, now_s = alone_s + (beside_s - alone_s) * self._neighbours(), self._loop.time()
        timer = self._loop.call_at(now_s + count * step_s, self._finish)
        self._steps = _Steps(batch, now_s, alone_s, beside_s, count, step_s, now_s, timer)

    def keep_pace(self) -> None:
        """The share of neighbours that compute has changed: the rest of the running steps takes longer, or shorter."""
        steps = self._steps
        if steps is None:
            return
        step_s = steps.alone_s + (steps.beside_s - steps.alone_s) * self._neighbours()
        now_s = self._loop.time()
        if step_s != steps.step_s:
            steps.num_done, steps.since_s, steps.step_s = steps.progress(now_s), now_s, step_s
            self._move_end(steps)

    def _move_end(self, steps: _Steps) -> None:
        steps.timer.cancel()
        end_s = steps.since_s + (steps.count - steps.num_done) * steps.step_s
        steps.timer = self._loop.call_at(end_s, self._finish)

    def _parts_s(self, batch: ScheduledBatch, count: int) -> tuple[float, float]:
        """Mean seconds of `count` steps that begin with this batch, while neighbours rest: of the decodes, and what the
        prompts add."""
        num_decodes = batch.num_decodes
        decodes, prompts = batch.items[:num_decodes], batch.items[num_decodes:]
        context = sum(item.end for item in decodes) + num_decodes * (count - 1) / 2
        decode_s = self._times.decode(num_decodes, context) if decodes else 0.0
        if not prompts:
            return decode_s, 0.0
        pairs = sum(item.num_tokens * item.start for item in prompts)
        prompts_s = self._times.prompts(batch.num_tokens - num_decodes, pairs)
        return decode_s, self._times.both(decode_s, prompts_s) - decode_s if decodes else prompts_s

    def _num_equal_steps(self, batch: ScheduledBatch) -> int:
        """Steps in which nothing changes but the lengths; 1 if a prompt is or may be computed in the next step."""
        if batch.num_decodes < len(batch.items) or self.scheduler.load().pending_tokens:
            return 1
        longest_s = _MAX_STEPS_S if self._stretch == 1 else _MAX_STRETCHED_S
        count = min(_MAX_STEPS, max(1, int(longest_s / sum(self._parts_s(batch, 1)))))
        for item in batch.items:
            sequence = item.sequence
            max_new_tokens = (
                min(sequence.spec.max_total_tokens, self.scheduler.config.max_model_len) - sequence.num_tokens
            )
            count = min(count, max_new_tokens)
        # Blocks for the tokens after the first, as for drafts that all turn out right.
        return min((1 + self.scheduler.allocate_for_drafts(item.sequence, count - 1)) for item in batch.items)

    def _end_early(self, steps: _Steps) -> None:
        """Let the running step be the last one."""
        num_begun = int(steps.progress(self._loop.time())) + 1
        if num_begun < steps.count:
            steps.count = num_begun
            self._move_end(steps)

    def _finish(self) -> None:
        steps, self._steps = self._steps, None
        assert steps is not None
        batch, num_decodes = steps.batch, steps.batch.num_decodes
        num_prompt_tokens = batch.num_tokens - num_decodes
        took_s = self._loop.time() - steps.begun_s
        self.busy_s += took_s
        self.prompt_tokens += num_prompt_tokens
        self._pace.observe(num_decodes, num_prompt_tokens, took_s / steps.count)
        tokens = (self._token,) * steps.count
        sampled, unsampled = RunnerOutput(tokens), RunnerOutput()
        outputs = self.scheduler.update(batch, [sampled if item.needs_sampling else unsampled for item in batch.items])
        self._on_step(outputs, self.scheduler.take_preempted())
        self._run_commands()
        if self._steps is None:
            self._begin()
