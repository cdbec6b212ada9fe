"""The pool of pairs: pairs are closed once, never under a user, and never more than allowed."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.transports.resource_pool import AvoidedAddresses, ResourcePool
from tests.waiting import until

MAX_PAIRS = 3
ACTIONS = st.tuples(st.sampled_from(["use", "leave", "retire", "break", "add"]), st.integers(0, 99))


@dataclass(eq=False)
class FakePair:
    num_users: int = 0
    is_broken: bool = False
    is_retired: bool = False
    num_closed: int = 0

    def close(self) -> None:
        assert self.num_users == 0
        self.num_closed += 1


@dataclass
class Model:
    """A pool, and what is known of every pair that it ever had."""

    pool: ResourcePool[int, FakePair] = field(default_factory=lambda: ResourcePool(MAX_PAIRS, idle_s=1000))
    made: list[FakePair] = field(default_factory=list)

    def make(self) -> FakePair:
        self.made.append(FakePair())
        return self.made[-1]

    def open_pairs(self) -> list[FakePair]:
        return [pair for pair in self.made if not pair.num_closed]

    def act(self, action: str, number: int) -> None:
        if action in ("use", "add"):
            self.use(number % 5, always_new=action == "add")
            return
        pairs = [pair for pair in self.open_pairs() if pair.num_users or action != "leave"]
        if not pairs:
            return
        pair = pairs[number % len(pairs)]
        if action == "leave":
            pair.num_users -= 1
            self.pool.leave(pair)
        elif action == "retire":
            pair.is_retired = True
            self.pool.retire(pair)
        else:
            pair.is_broken = True

    def use(self, key: int, *, always_new: bool) -> None:
        before = self.open_pairs()
        pair = None if always_new else self.pool.get(key)
        if pair is None:
            pair = self.pool.add(key, self.make)
            assert (pair is None) == (len(before) == MAX_PAIRS and all(other.num_users for other in before))
        if pair is not None:
            assert (pair.is_broken, pair.is_retired, pair.num_closed) == (False, False, 0)
            pair.num_users += 1
            self.pool.use(pair)

    def check(self) -> None:
        assert all(pair.num_closed <= 1 for pair in self.made)
        assert len(self.pool) == len(self.open_pairs()) <= MAX_PAIRS
        assert all(pair.num_users for pair in self.open_pairs() if pair.is_retired)
        assert all(self.pool.num_users(pair) == pair.num_users for pair in self.open_pairs())


@settings(max_examples=100)
@given(st.lists(ACTIONS, max_size=60))
def test_whatever_happens_pairs_are_closed_once_and_never_under_a_user(actions: list[tuple[str, int]]) -> None:
    async def run() -> None:
        model = Model()
        for action, number in actions:
            model.act(action, number)
            model.check()
        for pair in model.made:
            while pair.num_users:
                pair.num_users -= 1
                model.pool.leave(pair)
        model.check()
        model.pool.close()
        assert all(pair.num_closed == 1 for pair in model.made)

    asyncio.run(run())


async def test_the_pair_that_was_unused_longest_makes_room() -> None:
    model = Model()
    pairs = [model.pool.add(key, model.make) for key in range(3)]
    for pair in (pairs[1], pairs[0], pairs[2]):
        assert pair is not None
        model.pool.use(pair)
        model.pool.leave(pair)
    assert model.pool.add(3, model.make) is not None
    assert model.pool.get(1) is None
    assert [model.pool.get(key) for key in (0, 2)] == [pairs[0], pairs[2]]
    model.pool.close()


async def test_idle_pairs_are_closed_and_used_ones_are_not() -> None:
    pool: ResourcePool[str, FakePair] = ResourcePool(MAX_PAIRS, idle_s=0)
    used, unused = pool.add("used", FakePair), pool.add("unused", FakePair)
    assert used is not None
    assert unused is not None
    pool.use(used)
    await until(lambda: unused.num_closed)
    assert (used.num_closed, pool.get("used"), pool.get("unused")) == (0, used, None)
    pool.leave(used)
    await until(lambda: used.num_closed)
    assert len(pool) == 0


async def test_an_address_is_avoided_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s, loop = 0.0, asyncio.get_running_loop()
    now_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: now_s() + passed_s)
    avoided = AvoidedAddresses()
    assert "a:1" not in avoided
    avoided.add("a:1")
    assert "a:1" in avoided
    assert "b:1" not in avoided
    passed_s = 61.0
    assert "a:1" not in avoided
