"""Experts of a layer that the calibration prompts hardly reach, so that their own statistics say little.

Their gate_up is rounded with the statistics of all tokens of the layer: it has the same inputs in every expert. Inputs
of down differ from expert to expert, so theirs gets no factors, and is rounded to nearest.
"""

import re
from collections.abc import Mapping, Set

from engine.quantizer.statistics import InputStatistics

MIN_TOKENS = 32
"""An expert with fewer calibration tokens is rare."""
_EXPERT = re.compile(r"(experts\.\d+)\.down")


def find_rare(statistics: Mapping[str, InputStatistics]) -> set[str]:
    """Rare experts as the names of matrices begin, such as experts.3. `statistics`: by the names of matrices."""
    downs = ((_EXPERT.fullmatch(name), seen) for name, seen in statistics.items())
    return {match[1] for match, seen in downs if match and seen.num_tokens < MIN_TOKENS}


def settle_rare(statistics: dict[str, InputStatistics], rare: Set[str]) -> None:
    """Replace the statistics of rare experts by those with which their matrices are rounded."""
    if not rare:
        return
    ups = [name for name in statistics if name.startswith("experts.") and not name.endswith(".down")]
    of_layer = InputStatistics.merged([statistics[name] for name in ups])
    for expert in rare:
        statistics[f"{expert}.down"].clear()
        statistics.update((name, of_layer) for name in ups if name.startswith(f"{expert}."))
