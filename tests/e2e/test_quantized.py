"""A mesh that serves a quantised checkpoint: prefill and decode in processes of their own."""

from collections.abc import Callable
from pathlib import Path

import tandem
from tests.component.quantized import quantize_checkpoint, twin_of
from tests.e2e.mesh_process import mesh
from tests.e2e.reference import Reference


async def test_awq(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = quantize_checkpoint(checkpoint("qwen3"), tmp_path / "awq", "awq")
    prompt = [(7 * i) % 256 for i in range(45)]
    async with mesh(model, tmp_path) as running, tandem.AsyncClient(running.address) as client:
        result = await client.generate(token_ids=prompt, max_new_tokens=16, ignore_eos=True)
    Reference.load(twin_of(model)).check_greedy(prompt, result.tokens)
