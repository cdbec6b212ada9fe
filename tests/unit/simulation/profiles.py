"""Profiles with round numbers."""

from tandem_cli.simulation.profile import MeshProfile, StepTimes, WorkerProfile

TIMES = StepTimes(
    prompt_s=((100, 0.1), (500, 0.5)), decode_s=((1, 0.01), (11, 0.02)), prompt_context_s=1e-6, decode_context_s=1e-6
)


def worker(**changes: int) -> WorkerProfile:
    limits = {"num_blocks": 1024, "max_batch_tokens": 512, "max_num_seqs": 16, "max_model_len": 2048} | changes
    return WorkerProfile(TIMES, **limits)


def profile(prefill: WorkerProfile | None = None, decode: WorkerProfile | None = None) -> MeshProfile:
    """Messages take 1 ms, transfers 3 ms."""
    return MeshProfile("made up", prefill or worker(), decode or worker(), overhead_s=0.005, transfer_s=0.003)
