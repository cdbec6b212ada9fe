"""A mesh whose KV goes over gloo, in processes of its own: equal answers to the bit, also when workers are killed."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import tandem
from tests.e2e.mesh_process import pools_are_whole, wait_serving
from tests.e2e.test_ranks import ONE, ask, long_prompts, ranked_mesh, requests
from tests.mesh_in_process import moves_kv
from tests.waiting import until_told

GLOO = (
    *("--set", "prefill.kv_transports=gloo", "--set", "decode.kv_transports=gloo", "--log-level", "debug"),
    "--prefill-overflow=0",  # all prompts are transferred, also where the prefill worker is busy
)
ASKED = [*requests(40), *long_prompts()]


async def ask_in_turn(client: tandem.AsyncClient) -> list[tuple[tandem.Token, ...]]:
    """Alone, so that the same passes are computed each time."""
    return [tokens for request in ASKED for tokens in await ask(client, [request])]


def ids(answers: list[tuple[tandem.Token, ...]]) -> list[list[int]]:
    return [[token.id for token in tokens] for tokens in answers]


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_equal_to_shared_memory_to_the_bit(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """`make test` compares gloo with transformers, in test_parity.py."""
    model = checkpoint("llama-tied")
    async with ranked_mesh(model, tmp_path / "shm", ONE, ONE) as (_, client):
        expected = await ask_in_turn(client)
    async with ranked_mesh(model, tmp_path / "gloo", ONE, ONE, *GLOO) as (running, client):
        assert await ask_in_turn(client) == expected  # with log-probs
        await pools_are_whole(client)
        logs = "".join(path.read_text() for path in running.log_dir.glob("*.log"))
        assert logs.count('"transport": "gloo"') >= len(ASKED)
        assert '"event": "replay"' not in logs


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_workers_that_start_again_get_new_pairs(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    async with ranked_mesh(checkpoint("llama-tied"), tmp_path, ONE, ONE, *GLOO) as (running, client):
        expected = ids(await ask(client, ASKED))
        for role in ("prefill", "decode", "prefill"):
            await wait_serving(client, role, running.signal(f"{role}_worker", signal.SIGKILL))
            await until_told(partial(moves_kv, client), bool)  # a decode worker serves before KV has come to it
            assert ids(await ask(client, ASKED)) == expected
        await pools_are_whole(client)
        logs = "".join(path.read_text() for path in running.log_dir.glob("*.log"))
        assert logs.count('"transport": "gloo"') >= 4 * len(ASKED)
        assert '"event": "replay"' not in logs
