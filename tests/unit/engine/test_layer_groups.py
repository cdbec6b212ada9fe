"""Groups of layers, and when they are announced."""

from engine.model import LayerGroups


def test_a_group_is_announced_once_the_next_is_asked_for() -> None:
    events: list[tuple[str, int, int]] = []
    for first, end in LayerGroups(7, 3, lambda layers: events.append(("written", layers.first, layers.count))):
        events.append(("run", first, end))
    assert events == [
        *(("run", 0, 3), ("written", 0, 3)),
        *(("run", 3, 6), ("written", 3, 3)),
        *(("run", 6, 7), ("written", 6, 1)),
    ]


def test_without_listener_there_is_one_group() -> None:
    assert list(LayerGroups(7, 3)) == [(0, 7)]
