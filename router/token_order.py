"""Generated tokens in order, each once, however messages about them arrive."""

from mesh.domain.tokens import FinishReason, SampledToken, StepOutput

Batch = tuple[tuple[SampledToken, ...], FinishReason | None]


class TokenOrder:
    """Two workers report on one sequence, so a later token may come before the first, and a replay may repeat some.

    What comes early is kept until the gap is closed; what was seen before is dropped.
    """

    def __init__(self) -> None:
        self.next_index = 0
        self._early: list[StepOutput] = []

    def accept(self, output: StepOutput) -> list[Batch]:
        """Tokens that are due now, with the finish reason that follows the last one, if any."""
        if output.first_index > self.next_index:
            self._early.append(output)
            return []
        due = [self._cut(output)]
        while (early := self._pop_due()) is not None:
            due.append(self._cut(early))
        return due

    def restart(self) -> None:
        """A new attempt begins: what the old one sent early will come again."""
        self._early.clear()

    def _pop_due(self) -> StepOutput | None:
        for place, output in enumerate(self._early):
            if output.first_index <= self.next_index:
                return self._early.pop(place)
        return None

    def _cut(self, output: StepOutput) -> Batch:
        """Leave out what was seen before. The finish reason holds only if nothing is known to follow."""
        num_seen = self.next_index - output.first_index
        tokens = output.tokens[num_seen:] if num_seen else output.tokens
        self.next_index += len(tokens)
        is_last = output.first_index + len(output.tokens) == self.next_index
        return tokens, output.finish_reason if is_last else None
