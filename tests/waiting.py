"""Waiting in tests: generous limits, because machines that run tests are busy; errors that name what did not come."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

# No test waits this long unless something is broken: what is measured is asserted, never left to a limit.
LIMIT_S = 60.0
_POLL_S = 0.005
_ASK_S = 0.02

T = TypeVar("T")


async def until(
    condition: Callable[[], object], within_s: float = LIMIT_S, *, state: Callable[[], object] | None = None
) -> None:
    """Return when `condition` holds: for states that announce no change.

    The TimeoutError shows the condition's source and, if given, what `state` returns in the end.
    """
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - nothing announces the change
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise TimeoutError(f"not within {within_s:g} s: {describe(condition, state)}") from None


async def until_told(ask: Callable[[], Awaitable[T]], condition: Callable[[T], object], within_s: float = LIMIT_S) -> T:
    """Return what `ask` returns, once `condition` holds of it: for what others tell when they are asked."""
    told: T | None = None
    try:
        async with asyncio.timeout(within_s):
            while not condition(told := await ask()):  # noqa: ASYNC110
                await asyncio.sleep(_ASK_S)
    except TimeoutError:
        raise TimeoutError(f"not within {within_s:g} s: {describe(condition, lambda: told)}") from None
    return told


def describe(condition: Callable[..., object], state: Callable[[], object] | None = None) -> str:
    """The source of a condition, with the values of the variables that it uses, and a state."""
    try:
        text = " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        text = repr(condition)
    variables = inspect.getclosurevars(condition).nonlocals if inspect.isfunction(condition) else {}
    values = ", ".join(f"{name} = {value!r}" for name, value in variables.items())
    said = [text, *([values] if values else []), *([f"state: {state()!r}"] if state else [])]
    return "; ".join(said)
