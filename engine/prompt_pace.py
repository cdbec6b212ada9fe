"""PromptPace: how many prompt tokens a step may compute beside decodes, so that running streams keep their pace."""

_MEASURE_EVERY = 16
_MIN_TOKENS = 8  # a prompt always gets ahead
_WEIGHT = 0.25  # of the newest step in a moving average


class PromptPace:
    """Limits a step with prompts to about `max_stretch` times the seconds of a step without them. Pure: no clock.

    It estimates both from moving averages of past steps, so a single step may take longer. At least 8 prompt tokens go
    in a step. While prompts and decodes come together, one step in 16 has no prompts, so that the averages follow the
    number of running sequences. 0 means no limit.
    """

    def __init__(self, max_stretch: float = 0.0) -> None:
        self._max_stretch = max_stretch
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._mixed_steps = 0

    def max_prompt_tokens(self) -> int | None:
        """Most prompt tokens of the next step if it also decodes. None: no limit; 0: a step without prompts is due, to
        be measured.
        """
        if not self._max_stretch:
            return None
        if self._decode_s is None or self._mixed_steps >= _MEASURE_EVERY - 1:
            return 0
        if not self._token_s:
            return _MIN_TOKENS
        return max(_MIN_TOKENS, int((self._max_stretch - 1) * self._decode_s / self._token_s))

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step. Steps without decodes do not count: no stream waited for its next token.

        `num_decoding` counts sequences that decode (ScheduledBatch.num_decoding): a prompt's last token, if it is alone
        in its step, counts as a decode. Its time is that of a decode, too.
        """
        if num_decoding == 0:
            return
        if num_prompt_tokens == 0:
            self._decode_s = _average(self._decode_s, seconds)
            self._mixed_steps = 0
        elif self._decode_s is not None:
            self._token_s = _average(self._token_s, max(0.0, seconds - self._decode_s) / num_prompt_tokens)
            self._mixed_steps += 1


def _average(average: float | None, newest: float) -> float:
    return newest if average is None else average + _WEIGHT * (newest - average)
