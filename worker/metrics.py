"""Metrics of workers (engine steps, batch, memory, prefix cache, KV transfers)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.kv.disk import DiskCounts
from mesh.domain.tokens import SequenceFailure
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.metrics import GAP_SECONDS, SECONDS, TOKENS, new_registry
from worker.ranks.states import RankTimes

_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


class WorkerMetrics:
    """The metrics of one worker. Both roles use the same metric names, with different values of the label `role`."""

    def __init__(self, role: WorkerRole) -> None:
        self.registry = new_registry()
        self._role = role.value
        self._load_s = Gauge(
            "tandem_engine_load_seconds", "Seconds of loading the model", ["role", "phase"], registry=self.registry
        )
        self._step_s = self._histogram("engine_step_seconds", "Seconds of an engine step", GAP_SECONDS)
        self._step_tokens = self._histogram("engine_step_tokens", "Tokens a step computed", TOKENS)
        self._batch_size = self._histogram("engine_batch_size", "Sequences of a step", _BATCH_SIZES)
        self._cache_queries = self._counter(
            "engine_prefix_cache_queries", "Prompt tokens looked up in this worker's prefix cache"
        )
        self._cache_hits = self._counter(
            "engine_prefix_cache_hits", "Prompt tokens found in this worker's prefix cache"
        )
        self._preemptions = self._counter("engine_preemptions", "Sequences that lost their blocks to older ones")
        self._transfer_s = self._histogram("engine_kv_transfer_seconds", "Start to end of a KV transfer", SECONDS)
        self._failures = Counter(
            "tandem_engine_sequence_failures",
            "Sequences that failed on this worker",
            ["role", "reason"],
            registry=self.registry,
        )
        for reason in SequenceFailure:  # Prometheus sees no increase where a series begins with 1
            self._failures.labels(self._role, reason.value)

    def watch(self, info: WorkerInfo, load: Callable[[], WorkerLoad], state: Callable[[], WorkerState]) -> None:
        """Also export the load of the last heartbeat, so that no scrape waits for an engine step. `load` and `state`
        are called on any thread."""
        self.registry.register(_Load(info, load, state))

    def loaded(self, seconds: Mapping[str, float]) -> None:
        """Record how long each phase of loading the model took; see engine.loading.load_phases."""
        for phase, value in seconds.items():
            self._load_s.labels(self._role, phase).set(value)

    def watch_ranks(self, pids: Sequence[int]) -> None:
        """Also export the CPU time of each rank. `pids` are those of ranks 1 and up."""
        self.registry.register(RankTimes(self._role, pids))

    def watch_kv_disk(self, counts: DiskCounts) -> None:
        """Also export what became of blocks of KV on disk."""
        self.registry.register(_KvDisk(self._role, counts))

    def stepped(self, num_seqs: int, num_tokens: int, seconds: float) -> None:
        """Record one engine step. Called on the engine's thread."""
        self._step_s.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._batch_size.observe(num_seqs)

    def looked_up(self, num_tokens: int) -> None:
        """Record the length of a new prompt, which is looked up in the prefix cache."""
        self._cache_queries.inc(num_tokens)

    def cached(self, num_tokens: int) -> None:
        """Record how many of a prompt's tokens were in the prefix cache."""
        self._cache_hits.inc(num_tokens)

    def preempted(self, num_seqs: int) -> None:
        self._preemptions.inc(num_seqs)

    def transferred(self, seconds: float) -> None:
        self._transfer_s.observe(seconds)

    def failed(self, reason: SequenceFailure) -> None:
        self._failures.labels(self._role, reason.value).inc()

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"tandem_{name}", about, ["role"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._role)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"tandem_{name}", about, ["role"], registry=self.registry).labels(self._role)


class _KvDisk(Collector):
    """The counts of a DiskCache."""

    def __init__(self, role: str, counts: DiskCounts) -> None:
        self._role = role
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        about = "Blocks of KV evicted to disk (written, dropped) and looked for there (found, damaged)"
        family = CounterMetricFamily("tandem_engine_kv_disk_blocks", about, labels=["role", "event"])
        for event, count in asdict(self._counts).items():
            family.add_metric([self._role, event], count)
        yield family


class _Load(Collector):
    """The load in a worker's heartbeats, as metrics."""

    def __init__(self, info: WorkerInfo, load: Callable[[], WorkerLoad], state: Callable[[], WorkerState]) -> None:
        self._info = info
        self._load = load
        self._state = state

    def collect(self) -> Iterator[Metric]:
        info, load, state = self._info, self._load(), self._state()
        used = 1 - load.free_blocks / info.num_blocks
        yield self._gauge("engine_requests_running", "Sequences in the batch", load.num_running)
        yield self._gauge("engine_requests_waiting", "Sequences waiting for a slot or for KV", load.num_waiting)
        yield self._gauge("engine_max_num_seqs", "Maximum sequences in the batch", info.max_num_seqs)
        yield self._gauge("engine_pending_tokens", "Prompt tokens not yet computed", load.pending_tokens)
        yield self._gauge("engine_kv_cache_usage_ratio", "Share of KV blocks in use, prefix cache not counted", used)
        yield self._gauge("engine_kv_blocks", "KV blocks", info.num_blocks)
        num_ranks = info.tensor_parallel * info.pipeline_parallel
        yield self._gauge("engine_ranks", "Processes that compute each step together", num_ranks)
        yield self._gauge("engine_stages", "Pipeline stages of these processes", info.pipeline_parallel)
        yield self._gauge("engine_ready", "1 if the worker takes work", state is WorkerState.READY)
        yield self._counter("engine_generation_tokens", "Tokens sampled", load.generated_tokens)
        yield self._counter("engine_prompt_tokens", "Prompt tokens computed", load.computed_tokens)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens proposed", load.drafted_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted", load.accepted_tokens)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tandem_{name}", about, labels=["role"])
        family.add_metric([self._info.role.value], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tandem_{name}", about, labels=["role"])
        family.add_metric([self._info.role.value], value)
        return family


class PrefillMetrics(WorkerMetrics):
    """Metrics of a prefill worker: those of all workers, and the KV that it sends."""

    def __init__(self) -> None:
        super().__init__(WorkerRole.PREFILL)
        self._sent = Counter("tandem_kv_sent_bytes", "KV sent and verified", ["transport"], registry=self.registry)

    def sent(self, num_bytes: int, transport: str, seconds: float) -> None:
        """Record a finished transfer of one prompt's KV."""
        self._sent.labels(transport).inc(num_bytes)
        self.transferred(seconds)


class DecodeMetrics(WorkerMetrics):
    """Metrics of a decode worker: those of all workers, and the origin of its sequences' KV."""

    def __init__(self) -> None:
        super().__init__(WorkerRole.DECODE)
        self._started = Counter(
            "tandem_decode_sequences",
            "Sequences, by where their KV comes from",
            ["kv"],
            registry=self.registry,
        )
        for kv in ("transferred", "computed", "shared"):
            self._started.labels(kv)

    def started(self, num_tokens: int, kv: str) -> None:
        """Record a new sequence. Its KV is "transferred", "computed" here, or "shared" with another choice."""
        self.looked_up(num_tokens)
        self._started.labels(kv).inc()
