"""Compiles the CPU kernels ahead of time, so that the first worker on a machine starts without compiling.

    python -m engine.compile [MODEL_FOLDER]

Machine code is kept on disk (`engine/kernels/cpu/compiler.py`). It depends on the types of weights and KV, not on the
model's shape and weights. Where the model runs in the eager decoder, only the kernels that it uses are compiled.
"""

import sys
import time
from pathlib import Path

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.load_runner import load_model_runner
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec

_BUNDLED = Path(__file__).resolve().parents[1] / "demo_model" / "tandem-small"
_COMBINATIONS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"quantize": "int8", "kv_dtype": "float16"},
    {"quantize": "int8", "kv_dtype": "int8"},
    {"quantize": "int4", "kv_dtype": "int8"},
)
_PROMPT_TOKENS = 20


def main() -> None:
    """Run a prompt and a decode step with each combination of types."""
    model_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else _BUNDLED
    for types in _COMBINATIONS:
        start_s = time.perf_counter()
        _run(RunnerSettings(model_dir, "cpu", load_format="dummy", num_blocks=4, **types))  # type: ignore[arg-type]
        names = ", ".join(f"{name} {value}" for name, value in types.items())
        sys.stderr.write(f"{names}: {time.perf_counter() - start_s:.1f} s\n")


def _run(settings: RunnerSettings) -> None:
    runner = load_model_runner(settings)
    sampling = SamplingParams(max_new_tokens=2, seed=0, ignore_eos=True)
    sequence = SequenceState(SequenceSpec("compile", 0, tuple(range(1, _PROMPT_TOKENS + 1)), _PROMPT_TOKENS, sampling))
    sequence.block_table = [0, 1]
    for count in (_PROMPT_TOKENS, 1):
        batch = ScheduledBatch((ScheduledSequence(sequence, sequence.num_computed_tokens, count),))
        tokens = runner.begin(batch)()[0].tokens
        sequence.num_computed_tokens += count
        sequence.token_ids += [token.id for token in tokens]


if __name__ == "__main__":
    main()
