"""Filter and policy over made-up snapshots."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.block_hashes import block_hashes, state_hash
from mesh.domain.kv import KVLayout
from mesh.domain.worker import Adapter, WorkerState
from router.admission.placement import NoPlacement, Placement, place
from router.admission.prefix_chain import PrefixChain
from router.admission.roster import InFlight
from router.tenants import Tenant
from router.workers.membership import WorkerView
from tests.fakes.requests import make_request
from tests.fakes.router_views import BLOCK, LAYOUT, decode, prefill, query, snapshot


def names(placed: Any) -> Any:
    if not isinstance(placed, Placement):
        return placed
    return placed.prefill and placed.prefill.worker_id, placed.decode.worker_id


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([], NoPlacement.NO_DECODE_WORKER),
        ([prefill()], NoPlacement.NO_DECODE_WORKER),
        ([decode()], (None, "d0")),
        ([prefill(), decode()], ("p0", "d0")),
        ([prefill(state=WorkerState.DRAINING), decode()], (None, "d0")),
        ([prefill(state=WorkerState.LOST), decode()], (None, "d0")),
        ([prefill(state=WorkerState.STALLED), decode()], (None, "d0")),
        ([prefill(), decode(state=WorkerState.STALLED)], NoPlacement.NO_DECODE_WORKER),
        ([prefill(), decode(state=WorkerState.DRAINING)], NoPlacement.NO_DECODE_WORKER),
        ([prefill(model="other"), decode()], (None, "d0")),
        ([prefill(), decode(model="other")], NoPlacement.NO_DECODE_WORKER),
        ([prefill(), decode(tokenizer_fingerprint="other")], NoPlacement.NO_DECODE_WORKER),
        ([prefill(), decode(num_blocks=2)], NoPlacement.TOO_LARGE),
        ([prefill(), decode(max_model_len=11)], NoPlacement.TOO_LARGE),
        ([prefill(), decode(num_blocks=2), decode("d1")], ("p0", "d1")),
        ([prefill(), decode(num_blocks=2), decode("d1", state=WorkerState.LOST)], NoPlacement.AWAY),
        ([prefill(num_blocks=1), decode()], (None, "d0")),  # the prompt does not fit the prefill worker
        ([prefill(), decode(max_num_seqs=0)], NoPlacement.NO_DECODE_CAPACITY),
    ],
)
def test_filters(views: list[Any], expected: Any) -> None:
    assert names(place(query(8), snapshot(*views))) == expected


def test_seats_are_left_to_canaries_while_workers_wait_to_be_proven() -> None:
    nearly_full = InFlight(num_seqs=3)
    for unproven, expected in ((frozenset(), (None, "d0")), (frozenset({"p0"}), NoPlacement.NO_DECODE_CAPACITY)):
        mesh = snapshot(decode(max_num_seqs=4), in_flight={"d0": nearly_full}, unproven=unproven)
        assert names(place(query(), mesh)) == expected


def test_unreachable_workers_get_nothing() -> None:
    mesh = snapshot(decode(), decode("d1"), unreachable=frozenset({"d0"}))
    assert names(place(query(), mesh)) == (None, "d1")


@pytest.mark.parametrize(
    ("unproven", "local_only", "expected"),
    [
        ({"d0"}, {"d1"}, (None, "d1")),
        ({"d0"}, {}, ("p0", "d1")),
        ({"p0"}, {}, (None, "d0")),
        ({}, {"d0"}, (None, "d0")),
        ({"d0", "d1"}, {}, NoPlacement.NO_DECODE_WORKER),
    ],
)
def test_workers_get_what_they_are_trusted_with(unproven: Any, local_only: Any, expected: Any) -> None:
    sets = {"unproven": frozenset(unproven), "local_only": frozenset(local_only)}
    assert names(place(query(), snapshot(prefill(), decode(), decode("d1"), **sets))) == expected


@pytest.mark.parametrize(
    ("in_flight", "free_blocks", "fits"),
    [
        (InFlight(), 16, True),
        (InFlight(num_seqs=4), 16, False),
        (InFlight(num_seqs=1, num_blocks=13), 3, True),
        (InFlight(num_seqs=1, num_blocks=14), 2, False),
        (InFlight(num_seqs=1, num_blocks=14, num_unreported_blocks=14), 16, False),
        # The report still counts a finished sequence: what this router has there counts.
        (InFlight(), 0, True),
        # Shared prefixes: the report knows better.
        (InFlight(num_seqs=2, num_blocks=14), 5, True),
    ],
)
def test_room_on_decode(in_flight: InFlight, free_blocks: int, fits: bool) -> None:
    placed = place(query(8), snapshot(decode(free_blocks=free_blocks), in_flight={"d0": in_flight}))
    assert isinstance(placed, Placement) is fits


def test_a_prompt_that_fills_the_whole_worker_fits() -> None:
    assert isinstance(place(query(64, max_total_tokens=64), snapshot(decode())), Placement)


@pytest.mark.parametrize(
    ("in_flight", "num_tokens", "fits"),
    [
        (InFlight(), 60, True),  # an idle worker takes any length
        (InFlight(num_seqs=1, num_blocks=2, prefill_tokens=31, short_prefill_tokens=31), 8, True),
        (InFlight(num_seqs=1, num_blocks=2, prefill_tokens=32, short_prefill_tokens=32), 8, False),
        (InFlight(num_seqs=1, num_blocks=2, prefill_tokens=10**6), 8, True),  # goes beside a long one
        (InFlight(num_seqs=1, num_blocks=2, prefill_tokens=31), 9, True),
        (InFlight(num_seqs=1, num_blocks=2, prefill_tokens=32), 9, False),
        (InFlight(num_seqs=1, num_blocks=2, prefill_tokens=32, short_prefill_tokens=32), 9, True),
        (InFlight(num_seqs=1, num_blocks=15, prefill_tokens=0), 8, False),  # memory held by a transfer
    ],
)
def test_room_on_prefill(in_flight: InFlight, num_tokens: int, fits: bool) -> None:
    mesh = snapshot(prefill(), decode(num_blocks=100), in_flight={"p0": in_flight})
    assert isinstance(place(query(num_tokens), mesh), Placement) is fits


def test_cached_prefix_attracts_and_load_repels() -> None:
    ids = range(8)
    assert names(place(query(), snapshot(prefill(), prefill("p1", cached=ids), decode()))) == ("p1", "d0")
    busy = {"p1": InFlight(num_seqs=1, num_blocks=2, prefill_tokens=20, short_prefill_tokens=20)}
    mesh = snapshot(prefill(), prefill("p1", cached=ids), decode(), in_flight=busy)
    assert names(place(query(), mesh)) == ("p0", "d0")
    assert names(place(query(), snapshot(decode(), decode("d1", cached=ids)))) == (None, "d1")
    loaded = {"d0": InFlight(num_seqs=2, num_blocks=4)}
    assert names(place(query(), snapshot(decode(), decode("d1"), in_flight=loaded))) == (None, "d1")


def test_a_short_prompt_goes_where_no_long_one_is() -> None:
    busy = {"p0": InFlight(num_seqs=1, num_blocks=2, prefill_tokens=10**6)}
    mesh = snapshot(prefill(), prefill("p1"), decode(), in_flight=busy)
    assert names(place(query(), mesh)) == ("p1", "d0")
    assert names(place(query(), snapshot(prefill(), decode(), in_flight=busy))) == ("p0", "d0"), "or beside it"


def test_equal_workers_are_chosen_by_name() -> None:
    mesh = snapshot(prefill("p1"), prefill("p0"), decode("d1"), decode("d0"))
    assert names(place(query(), mesh)) == ("p0", "d0")


def test_workers_that_failed_are_the_last_resort() -> None:
    avoid = query(avoid=frozenset({"d0", "p0"}))
    assert names(place(avoid, snapshot(prefill(), prefill("p1"), decode(), decode("d1")))) == ("p1", "d1")
    assert names(place(avoid, snapshot(prefill(), decode()))) == ("p0", "d0")


def test_what_a_worker_has_cached_that_failed_the_request_counts_for_none() -> None:
    size = {"num_blocks": 10**6, "max_model_len": 5000}
    small, large = (decode(name, max_num_seqs=slots, **size) for name, slots in (("d0", 8), ("d1", 64)))
    failed = decode("d2", cached=range(4000), **size)
    mesh = snapshot(prefill(**size), small, large, failed, in_flight={"d1": InFlight(num_seqs=6)})
    assert names(place(query(4000, avoid=frozenset({"d2"})), mesh)) == ("p0", "d0")


@pytest.mark.parametrize(
    ("threshold", "cached", "expected"),
    [(0, 0, "p0"), (8, 0, "p0"), (9, 0, None), (5, 4, None), (4, 4, "p0"), (1, 8, None)],
)
def test_short_uncached_prompts_stay_on_decode(threshold: int, cached: int, expected: str | None) -> None:
    mesh = snapshot(prefill(), decode(cached=range(cached)), prefill_threshold=threshold)
    placed = place(query(8), mesh)
    assert isinstance(placed, Placement)
    assert (placed.prefill and placed.prefill.worker_id) == expected


@pytest.mark.parametrize(
    ("overflow", "waiting", "cached", "expected"),
    [
        (0, 0, 0, NoPlacement.NO_PREFILL_CAPACITY),
        (3, 0, 0, NoPlacement.NO_PREFILL_CAPACITY),
        (8, 0, 0, (None, "d0")),
        (8, 1, 0, NoPlacement.NO_PREFILL_CAPACITY),
        (8, 4, 4, (None, "d0")),
        (16, 8, 0, (None, "d0")),
        # A prompt that is alone there may have twice as many tokens.
        (4, 0, 0, (None, "d0")),
        (4, 1, 0, NoPlacement.NO_PREFILL_CAPACITY),
        (3, 0, 4, (None, "d0")),
    ],
)
def test_decode_helps_while_prefill_is_full(overflow: int, waiting: int, cached: int, expected: object) -> None:
    full = InFlight(num_seqs=1, prefill_tokens=10**6, short_prefill_tokens=10**6)
    busy = {"p0": full, "d0": InFlight(num_seqs=1, prefill_tokens=waiting)}
    workers = (prefill(), decode(cached=range(cached)))
    placed = place(query(8), snapshot(*workers, in_flight=busy, prefill_overflow=overflow))
    assert (placed if isinstance(placed, NoPlacement) else names(placed)) == expected
    idle = place(query(8), snapshot(*workers, in_flight={"d0": busy["d0"]}, prefill_overflow=overflow))
    assert names(idle) == ("p0", "d0")


def test_where_kv_did_not_arrive_from_the_decode_worker_prefills() -> None:
    cut_off = query(cut_off=frozenset({"p0"}))
    assert names(place(cut_off, snapshot(prefill(), prefill("p1"), decode()))) == ("p1", "d0")
    assert names(place(cut_off, snapshot(prefill(), decode()))) == (None, "d0")


def test_prefill_locally_when_asked() -> None:
    assert names(place(query(prefill_locally=True), snapshot(prefill(), decode()))) == (None, "d0")


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24))
def test_cached_tokens_are_the_common_blocks(prompt: list[int], cached: list[int]) -> None:
    mine, theirs = (block_hashes(ids, BLOCK, "m") for ids in (prompt, cached))
    common = 0
    while common < min(len(mine), len(theirs)) and mine[common] == theirs[common]:
        common += 1
    chain = PrefixChain(prompt, "m")
    assert chain.num_cached_tokens(decode(cached=cached)) == common * BLOCK
    assert PrefixChain(prompt, "another tenant").num_cached_tokens(decode(cached=cached)) == 0


def test_an_encoders_prefix_is_worth_nothing_to_another_prompt() -> None:
    view = decode(cached=())
    view.cached.update(block_hashes(range(12), BLOCK, "m", range(9)))
    assert PrefixChain(range(12), "m", range(9)).num_cached_tokens(view) == 12 // BLOCK * BLOCK
    assert PrefixChain(range(12), "m", range(10)).num_cached_tokens(view) == 0
    assert PrefixChain(range(12), "m").num_cached_tokens(view) == 0


@pytest.mark.parametrize(
    ("snapshots", "reusable", "expected"), [((), 0, "p0"), ((2, 5), 8, "p1"), ((2, 4, 5), 16, "p1")]
)
def test_a_recurrent_model_goes_on_from_a_snapshot(snapshots: tuple[int, ...], reusable: int, expected: str) -> None:
    """Only up to a state need a worker compute nothing. KV that arrives brings its state along."""
    layout, hashes = replace(LAYOUT, state_blocks=1), block_hashes(range(24), BLOCK, "m")
    warm = prefill("p1", layout=layout, cached=range(16))
    warm.cached.update(state_hash(hashes[number - 1]) for number in snapshots)
    chain = PrefixChain(range(24), "m")
    assert (chain.num_cached_tokens(warm), chain.num_reusable_tokens(warm)) == (16, reusable)
    busy = {"p1": InFlight(num_seqs=1, prefill_tokens=4)}
    placed = place(query(24), snapshot(prefill(layout=layout), warm, decode(layout=layout), in_flight=busy))
    assert names(placed) == (expected, "d0")


def test_a_chain_hashes_only_what_somebody_has() -> None:
    chain = PrefixChain(range(4000), "m")
    assert chain.num_cached_tokens(decode(cached=range(8))) == 8
    assert len(chain._hashes) == 3


def test_layouts_keep_their_own_block_size() -> None:
    layout = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")
    placed = place(query(8), snapshot(decode(layout=layout, num_blocks=2)))
    assert isinstance(placed, Placement)


MINE = Adapter("mine", "digest-of-mine")


def test_only_workers_with_the_adapter_are_chosen() -> None:
    """An idle worker without it loses to a busy one that has it, for prompts and for decoding."""
    wanted = query(adapter=MINE.digest)
    views = [decode("a"), decode("b", adapters=(MINE,)), prefill("c"), prefill("d", adapters=(MINE,))]
    busy = {name: InFlight(num_seqs=2, num_blocks=8, prefill_tokens=8) for name in ("b", "d")}
    placed = place(wanted, snapshot(*views, in_flight=busy))
    assert isinstance(placed, Placement)
    assert placed.prefill is not None
    assert (placed.prefill.worker_id, placed.decode.worker_id) == ("d", "b")
    without_prefill = place(wanted, snapshot(*views[:3]))
    assert isinstance(without_prefill, Placement)
    assert (without_prefill.prefill, without_prefill.decode.worker_id) == (None, "b")


def big(name: str, **changes: Any) -> WorkerView:
    """A decode worker with 64 slots, whose KV is nowhere near full."""
    return decode(name, **({"max_num_seqs": 64, "num_blocks": 100_000, "max_model_len": 10_000} | changes))


def with_seqs(*num_seqs: int, blocks_of_each: int = 0) -> dict[str, InFlight]:
    """So many sequences at d0, d1, ..."""
    return {f"d{number}": InFlight(count, count * blocks_of_each) for number, count in enumerate(num_seqs)}


@pytest.mark.parametrize(("num_workers", "template"), [(2, 16), (2, 48), (4, 16)])
def test_a_template_that_prompts_share_draws_no_crowd(num_workers: int, template: int) -> None:
    """Even if it is most of each prompt, and only one worker has it."""
    views = [big(f"d{number}", cached=range(template if number == 0 else 0)) for number in range(num_workers)]
    num_seqs = [0] * num_workers
    for _ in range(16):
        placed = place(query(template + 3), snapshot(*views, in_flight=with_seqs(*num_seqs)))
        assert isinstance(placed, Placement)
        num_seqs[views.index(next(view for view in views if view.info is placed.decode))] += 1
    fair = 16 // num_workers
    assert sum(num_seqs) == 16
    assert max(num_seqs) <= fair * (1 + template / 128) + 1


@pytest.mark.parametrize(
    ("cached", "elsewhere", "num_seqs", "expected"),
    [
        (1024, 0, 7, "d1"),  # 1,024 tokens are worth eight sequences at an idle worker
        (1024, 0, 9, "d0"),
        (1024, 8, 63, "d1"),  # they would delay nine others there: 80 sequences
        (128, 8, 16, "d1"),  # eight run there, and this one once more
        (128, 8, 18, "d0"),
        (3072, 0, 23, "d1"),
        (3072, 0, 25, "d0"),
        (9000, 0, 63, "d1"),
        (9000, 0, 64, "d0"),  # full
    ],
)
def test_a_long_conversation_stays_with_its_kv(cached: int, elsewhere: int, num_seqs: int, expected: str) -> None:
    """Until the imbalance costs more than to compute it anew, or no slot is free."""
    views = [big("d0"), big("d1", cached=range(cached))]
    placed = place(query(cached + 8), snapshot(*views, in_flight=with_seqs(elsewhere, num_seqs)))
    assert names(placed) == (None, expected)


@pytest.mark.parametrize(("num_seqs", "expected"), [(1, "d1"), (2, "d0")])
def test_where_kv_is_scarce_a_sequence_is_worth_its_blocks(num_seqs: int, expected: str) -> None:
    """160 tokens are 40 of 128 blocks, and 156 cached ones are worth 1.2 sequences."""
    views = [big("d0", num_blocks=128), big("d1", num_blocks=128, cached=range(156))]
    in_flight = with_seqs(0, num_seqs, blocks_of_each=41)
    assert names(place(query(160), snapshot(*views, in_flight=in_flight))) == (None, expected)


def test_workers_of_any_size_fill_alike_with_what_all_or_none_of_them_have_cached() -> None:
    """What only a full worker has cached counts for none."""
    for all_have, full_has in ((0, 0), (4000, 0), (0, 4000)):
        small, large = big("d0", max_num_seqs=8, cached=range(all_have)), big("d1", cached=range(all_have))
        full = big("d2", cached=range(full_has))
        for num_seqs, expected in (((1, 9), "d0"), ((1, 7), "d1")):
            mesh = snapshot(small, large, full, in_flight=with_seqs(*num_seqs, 64))
            assert names(place(query(4010), mesh)) == (None, expected)


def test_a_worker_pays_for_lacking_tokens_by_its_size() -> None:
    """256 tokens are two sequences: a quarter of a worker with eight slots, 1/32 of one with 64."""
    small, large = big("d0", max_num_seqs=8), big("d1")
    small_has, large_has = big("d0", max_num_seqs=8, cached=range(256)), big("d1", cached=range(256))
    for views, num_seqs, expected in (
        ((small_has, large), (0, 0), "d0"),
        ((small_has, large), (1, 0), "d1"),
        ((small, large_has), (0, 15), "d1"),
        ((small, large_has), (0, 17), "d0"),
    ):
        assert names(place(query(260), snapshot(*views, in_flight=with_seqs(*num_seqs)))) == (None, expected)


def test_a_session_goes_on_where_it_was() -> None:
    """If it is long enough to be worth a batch of one more."""
    mesh = snapshot(big("d0"), big("d1"), in_flight=with_seqs(0, 1))
    assert names(place(query(600), mesh)) == (None, "d0")
    assert names(place(query(600, home="d1"), mesh)) == (None, "d1")
    assert names(place(query(600, home="gone"), mesh)) == (None, "d0")
    assert names(place(query(24, home="d1"), mesh)) == (None, "d0")


def test_a_session_moves_to_more_of_its_kv_or_away_from_a_full_worker() -> None:
    warm = snapshot(decode(cached=range(24)), decode("d1"))
    assert names(place(query(24, home="d1"), warm)) == (None, "d0")
    busy = decode("d1", max_num_seqs=4)
    full = snapshot(decode(), busy, in_flight={"d1": InFlight(num_seqs=3)})
    assert names(place(query(24, home="d1"), full)) == (None, "d0")


def test_an_adapter_that_nobody_has_is_told_from_no_worker() -> None:
    assert place(query(adapter=MINE.digest), snapshot(decode())) is NoPlacement.NO_ADAPTER
    assert place(query(adapter=MINE.digest), snapshot()) is NoPlacement.NO_DECODE_WORKER


def test_a_prefix_under_another_adapter_is_cold() -> None:
    specs = [make_request("r", range(32), cache_namespace="m", adapter=adapter) for adapter in ("", "one", "two")]
    view = decode()
    view.cached.update(block_hashes(range(32), BLOCK, specs[1].kv_scope))
    assert [PrefixChain(spec.token_ids, spec.kv_scope).num_cached_tokens(view) for spec in specs] == [0, 32, 0]


def test_a_foreign_tenants_prefix_is_cold() -> None:
    ids = range(32)
    view = decode(cached=ids)
    assert PrefixChain(ids, "m").num_cached_tokens(view) == 32
    assert PrefixChain(ids, Tenant("alice").cache_namespace("m")).num_cached_tokens(view) == 0
