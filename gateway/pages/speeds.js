// Rates of workers, from the counters of consecutive states.

const KEPT = 60;

const tokensOf = (worker) => (worker.role === "prefill" ? worker.load.computed_tokens : worker.load.generated_tokens);

/** Tokens and bytes per second of each worker incarnation, and its tokens per second over the last minute. */
export class Speeds {
  constructor() {
    this.before = null;
    this.now = new Map();
  }

  update(state) {
    const seconds = this.before ? state.at_s - this.before.at_s : 0;
    const earlier = new Map(this.before?.workers.map((worker) => [worker.incarnation, worker]));
    const now = new Map();
    for (const worker of state.workers) {
      const then = earlier.get(worker.incarnation);
      const rate = (value, old) => (then && seconds > 0 ? Math.max(0, value - old) / seconds : 0);
      const tokens = rate(tokensOf(worker), then && tokensOf(then));
      const history = [...(this.now.get(worker.incarnation)?.history ?? []), tokens].slice(-KEPT);
      now.set(worker.incarnation, { tokens, bytes: rate(worker.transferred_bytes, then?.transferred_bytes), history });
    }
    [this.before, this.now] = [state, now];
  }

  of(worker) {
    return this.now.get(worker.incarnation);
  }

  /** Sum a rate over the workers of one side. */
  sum(workers, what) {
    return workers.reduce((sum, worker) => sum + this.of(worker)[what], 0);
  }
}
