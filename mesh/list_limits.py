"""Limits on the lists in messages, checked before the entries are converted.

A message of a few MiB can list a million entries; converting them would block the event loop.
"""

from collections.abc import Sized

from mesh.domain import sampling as limits
from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import MAX_CHOICE_TEXTS
from tandem.v1 import sampling_pb2


def require_counts(message: sampling_pb2.SamplingParams) -> None:
    """Raise InvalidRequest if a list is longer than SamplingParams allows."""
    require_at_most("logit_bias", message.logit_bias, limits.MAX_LOGIT_BIAS)
    require_at_most("stop", message.stop, limits.MAX_STOP_STRINGS)
    require_at_most("stop_token_ids", message.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
    require_at_most("bad_words", message.bad_words, limits.MAX_BAD_WORDS)
    require_at_most("bad_word_ids", message.bad_word_ids, limits.MAX_BAD_WORD_RUNS)
    for sequence in message.bad_word_ids:
        require_at_most("one of bad_word_ids", sequence.ids, limits.MAX_BAD_WORD_TOKENS)
    require_at_most("choice", message.structure.choice.texts, MAX_CHOICE_TEXTS)


def require_at_most(name: str, items: Sized, limit: int) -> None:
    """Raise InvalidRequest, naming the field `name`, if `items` has more than `limit` entries."""
    if len(items) > limit:
        raise InvalidRequest(f"{name} has {len(items)} entries, at most {limit} are allowed")
