"""How requests for one name are shared out among the revisions that it stands for."""

import math
from collections import Counter

import pytest
from structlog.testing import capture_logs

from mesh.domain.errors import ConfigurationError, InvalidRequest
from router.text.chat import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from router.traffic import (
    RoutedRequests,
    Traffic,
    TrafficTable,
    conversation_key,
    parse_traffic,
    traffic_from_json,
    traffic_to_json,
)
from tests.defects import Repaired

_NUM_REQUESTS = 20_000
KEYS = [conversation_key(TextPrompt(f"question {number}"), "") for number in range(_NUM_REQUESTS)]


class Served:
    """Models a, b and c; those in `away` have no workers."""

    def __init__(self, text: str) -> None:
        self.away: set[str] = set()
        self.now_s = 1000.0
        self.traffic = Traffic(
            parse_traffic(text), ["a", "b", "c"], lambda model: model not in self.away, lambda: self.now_s
        )

    def counts(self, name: str = "chat") -> Counter[str]:
        return Counter(self.traffic.choose(name, key) for key in KEYS)


def within(count: int, share: float) -> bool:
    """True if a binomial count is within five standard deviations of its mean."""
    return abs(count - _NUM_REQUESTS * share) <= 5 * math.sqrt(_NUM_REQUESTS * share * (1 - share))


@pytest.mark.parametrize("weights", [{"a": 90, "b": 10}, {"a": 0.5, "b": 0.5}, {"a": 1, "b": 2, "c": 7}, {"c": 3}])
def test_each_revision_gets_its_share(weights: dict[str, float]) -> None:
    served = Served("")
    served.traffic.share_out("chat", weights)
    counts, total = served.counts(), sum(weights.values())
    assert counts.keys() == weights.keys()
    assert all(within(counts[model], weight / total) for model, weight in weights.items())


def test_only_those_move_that_must() -> None:
    served = Served("chat=a:90,b:10")
    before = [served.traffic.choose("chat", key) for key in KEYS]
    served.traffic.share_out("chat", {"a": 70, "b": 30})
    after = [served.traffic.choose("chat", key) for key in KEYS]
    assert not any(old == "b" and new == "a" for old, new in zip(before, after, strict=True))
    assert within(sum(old != new for old, new in zip(before, after, strict=True)), 0.2)


def test_a_revision_without_workers_leaves_its_share_to_the_others() -> None:
    served = Served("chat=a:60,b:30,c:10")
    before = [served.traffic.choose("chat", key) for key in KEYS]
    served.away.add("b")
    with capture_logs() as logs:
        after = [served.traffic.choose("chat", key) for key in KEYS]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "b")
    assert within(after.count("a"), 60 / 70)
    [line] = logs  # once, not for each request
    assert (line["event"], line["revision"], line["others"]) == (
        "a revision has no workers: others get its share",
        "b",
        ["a", "c"],
    )
    served.away.clear()
    with capture_logs() as logs:
        assert [served.traffic.choose("chat", key) for key in KEYS] == before
    assert [line["event"] for line in logs] == ["a revision has workers again"]


def test_without_any_workers_the_shares_hold() -> None:
    served = Served("chat=a:50,b:50")
    before = served.counts()
    served.away |= {"a", "b"}
    assert served.counts() == before


def test_other_names_stand_for_themselves() -> None:
    served = Served("chat=a:1,b:1")
    assert {served.traffic.choose(name, KEYS[0]) for name in ("a", "b", "other")} == {"a", "b", "other"}
    assert served.traffic.public_names() == ["chat", "c"]


def test_the_turns_of_a_conversation_stay_together() -> None:
    system, first = ChatMessage("system", "be kind"), ChatMessage("user", "hello")
    begun = ChatPrompt((system, first))
    continued = ChatPrompt((system, first, ChatMessage("assistant", "hi"), ChatMessage("user", "and now?")))
    assert conversation_key(begun, "t") == conversation_key(continued, "t")
    others = (
        conversation_key(ChatPrompt((system, ChatMessage("user", "bye"))), "t"),
        conversation_key(ChatPrompt((first,)), "t"),
        conversation_key(begun, "u"),
        conversation_key(TextPrompt("hello"), "t"),
        conversation_key(TokenPrompt([1, 2]), "t"),
        conversation_key(TokenPrompt([1, 3]), "t"),
    )
    assert len({conversation_key(begun, "t"), *others}) == 7


@pytest.mark.parametrize(
    "prompt", [TextPrompt("\ud800"), ChatPrompt(()), ChatPrompt((ChatMessage("system", "x"),)), None]
)
def test_every_prompt_has_a_key(prompt: TextPrompt | ChatPrompt | None) -> None:
    assert conversation_key(prompt, "\ud800")


@pytest.mark.parametrize(
    ("name", "shares", "said"),
    [
        ("a", {"b": 1.0}, "'a' cannot stand for revisions: it must be a name that no model has"),
        ("", {"b": 1.0}, "'' cannot stand"),
        ("chat", {}, "needs a revision with a share above 0"),
        ("new", {"a": 0.0}, "needs a revision with a share above 0"),
        ("a=50", {"b": 50.0}, "'a=50' is no name for revisions: it has one of = : , ;"),
        ("a:50", {"b": 50.0}, "is no name for revisions"),
        ("x,y", {"b": 50.0}, "is no name for revisions"),
        ("x;y", {"b": 50.0}, "is no name for revisions"),
        (" ", {"b": 50.0}, "' ' is no name for revisions: it has blanks around it, or control characters"),
        ("chat\t", {"b": 50.0}, "is no name for revisions: it has blanks around it"),
        ("x\x1b[31m", {"b": 50.0}, r"'x\\x1b\[31m' is no name for revisions: .* or control characters"),
        ("chat", {"d": 1.0}, "'d' is not served here; served: a, b, c"),
        ("chat", {"a": -1.0}, "the share of a must be above 0, or 0 for none, got -1"),
        ("chat", {"a": math.nan}, "the share of a must be above 0"),
        ("chat", {"a": math.inf}, "the share of a must be above 0"),
    ],
)
def test_wrong_shares_are_refused_and_change_nothing(name: str, shares: dict[str, float], said: str) -> None:
    served = Served("chat=a:1")
    before = served.traffic.table
    with pytest.raises(InvalidRequest, match=said):
        served.traffic.share_out(name, shares)
    assert served.traffic.table is before


@pytest.mark.parametrize(
    "text",
    [
        *("chat", "chat=a", "chat=a:x", "chat=d:1", "a=b:1", "chat:1=a:1"),
        *("chat=a:1;chat=b:1", "chat=a:90, a:10", "chat=a:1,b:1,b:0"),  # a slip that would leave all to one of them
    ],
)
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="traffic"):
        Served(text)


def test_a_share_of_0_in_the_settings_is_none() -> None:
    assert Served("chat=a:100,b:0").traffic.table.shares == {"chat": {"a": 100.0}}
    with pytest.raises(ConfigurationError, match="traffic: 'chat' needs a revision with a share above 0"):
        Served("chat=a:0,b:0")


def test_shares_of_0_remove_a_name_for_all_routers(repaired: Repaired) -> None:
    one, two = Served("").traffic, Served("chat=a:1").traffic
    one.share_out("chat", {"a": 90, "b": 10})
    two.adopt(one.table)
    one.share_out("chat", {"a": 0, "b": 0})
    one.began("chat", "a")  # a request that was on its way
    assert one.choose("chat", KEYS[0]) == "chat"
    assert one.public_names() == ["a", "b", "c"]
    two.adopt(traffic_from_json(traffic_to_json(one.table)))
    assert two.public_names() == ["a", "b", "c"]
    with pytest.raises(InvalidRequest, match="needs a revision"):
        one.share_out("chat", {"a": 0})
    two.share_out("chat", {"b": 1})
    one.adopt(two.table)
    assert one.choose("chat", KEYS[0]) == "b"
    repaired("D21", "shares of 0 remove a name, for all routers")


def test_other_routers_read_what_this_one_writes() -> None:
    served = Served("chat=a:90,b:10;other=c:1")
    served.traffic.share_out("chat", {"a": 80, "b": 20, "c": 0})
    written = served.traffic.table
    assert written.shares == {"chat": {"a": 80, "b": 20}, "other": {"c": 1.0}}
    told = traffic_from_json(traffic_to_json(written))
    assert told.shares == {"chat": {"a": 80, "b": 20}}, "what only the settings say is not told"
    assert told.set_at == written.set_at
    served.traffic.share_out("chat", {"a": 1})
    assert served.traffic.table.set_at["chat"] > written.set_at["chat"] > 0


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "shares": {}}', '{"chat": {"shares": {"a": 1}}}'])
def test_what_another_version_writes_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="another version"):
        traffic_from_json(text)


def test_of_each_name_the_last_word_counts() -> None:
    """Two routers are told of different names at once, then one after the other of the same."""
    one, two = Served("chat=a:90,b:10").traffic, Served("chat=a:90,b:10;settled=c:1").traffic
    one.share_out("chat", {"a": 50, "b": 50})
    two.share_out("code", {"c": 1})
    one.adopt(two.table)
    two.adopt(one.table)
    assert one.table.shares == {"chat": {"a": 50, "b": 50}, "code": {"c": 1}}
    assert two.table.shares == {**one.table.shares, "settled": {"c": 1.0}}
    two.share_out("chat", {"a": 1})
    older = one.table
    one.adopt(two.table)
    two.adopt(older)
    assert one.table.shares["chat"] == two.table.shares["chat"] == {"a": 1}


def test_a_model_goes_before_a_name_that_another_router_knows() -> None:
    """As after a restart with one more model, of a name that stood for others before."""
    traffic = Served("").traffic
    traffic.adopt(TrafficTable({"a": {"b": 1.0}, "chat": {"b": 1.0}}, {"a": 1, "chat": 1}))
    assert traffic.choose("a", KEYS[0]) == "a"
    assert traffic.public_names() == ["chat", "a", "c"]


def test_requests_of_the_last_five_minutes_are_counted() -> None:
    served = Served("chat=a:90,b:10")
    traffic = served.traffic
    assert traffic.routed("chat") == RoutedRequests({}, 0.0)
    for model, after_s in (("a", 0.0), ("b", 4.0), ("a", 96.0), ("a", 190.0)):
        served.now_s += after_s
        traffic.began("chat", model)
    assert traffic.routed("chat") == RoutedRequests({"a": 3, "b": 1}, 290.0)
    served.now_s += 20
    assert traffic.routed("chat") == RoutedRequests({"a": 2}, 300.0)
    served.now_s += 1000
    assert traffic.routed("chat") == RoutedRequests({}, 300.0)
    assert traffic.num_routed == {("chat", "a"): 3, ("chat", "b"): 1}


def test_a_steady_stream_is_counted_over_five_minutes() -> None:
    served = Served("chat=a:1")
    for _ in range(1000):
        served.now_s += 1
        served.traffic.began("chat", "a")
    routed = served.traffic.routed("chat")
    assert 290 <= routed.counts["a"] <= 300
    assert routed.span_s == 300


def test_counts_begin_anew_when_shares_change() -> None:
    served = Served("chat=a:1;other=c:1")
    served.now_s += 60
    served.traffic.began("chat", "a")
    served.traffic.began("other", "c")
    served.traffic.share_out("chat", {"a": 1})
    assert served.traffic.routed("chat") == RoutedRequests({"a": 1}, 60.0), "the shares are the same"
    served.traffic.share_out("chat", {"a": 1, "b": 1})
    served.now_s += 5
    served.traffic.began("chat", "b")
    assert served.traffic.routed("chat") == RoutedRequests({"b": 1}, 5.0)
    assert served.traffic.routed("other") == RoutedRequests({"c": 1}, 65.0)
    assert served.traffic.num_routed == {("chat", "a"): 1, ("chat", "b"): 1, ("other", "c"): 1}
