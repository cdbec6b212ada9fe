"""Moving a sequence's KV from one runner to another; shared by the CPU and the GPU tests."""

from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import KVSpan, Span
from tests.component.driving import Driver, Run
from tests.component.parity import prompts
from tests.fakes.requests import make_request

NUM_NEW = 8


def move_kv(source: ModelRunner, from_blocks: list[int], target: ModelRunner, to_blocks: list[int], group: int) -> None:
    """Copy blocks layer group by layer group, through a buffer, as a transfer does."""
    num_layers = source.kv_cache.layout.num_layers
    for first in range(0, num_layers, group):
        count = min(group, num_layers - first)
        span = KVSpan(Span(first, count), source.kv_cache.span.heads)
        payload = bytearray(source.kv_cache.payload_bytes(len(from_blocks), span))
        source.kv_cache.read_blocks(from_blocks, span, memoryview(payload))
        target.kv_cache.write_blocks(to_blocks, span, bytes(payload))


def check_round_trip(settings: RunnerSettings) -> None:
    """A prompt that runs on one runner continues on another, whose blocks are others, with the same tokens."""
    prompt = prompts()[2]
    here, there = Driver(load_model_runner(settings), seed=1), Driver(load_model_runner(settings), seed=2)
    whole = here.add(make_request("r", prompt, max_new_tokens=NUM_NEW))
    here.step((whole, len(prompt)))
    moved = there.add(make_request("r", prompt, max_new_tokens=NUM_NEW))
    there.reserve(moved.sequence, len(prompt))
    move_kv(here.runner, whole.sequence.block_table, there.runner, moved.sequence.block_table, group=2)
    continue_from(moved, whole)
    here.finish(whole)
    there.finish(moved)
    assert moved.token_ids == whole.token_ids
    assert [token.logprob for token in moved.tokens[1:]] == [token.logprob for token in whole.tokens[1:]]


def continue_from(moved: Run, whole: Run) -> None:
    moved.sequence.num_computed_tokens = whole.sequence.num_computed_tokens
    moved.sequence.token_ids.append(whole.tokens[0].id)
    moved.tokens.append(whole.tokens[0])
