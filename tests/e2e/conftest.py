"""Checkpoints and the browser, shared by the end-to-end tests."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.component.checkpoints import build_checkpoint
from tests.e2e.browser import CHROMIUM, FLAGS
from tests.e2e.reference import Reference
from tests.made_once import made_once


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random checkpoint of a family, built once per test run."""
    return lambda family: made_once(tmp_path_factory, family, partial(build_checkpoint, family))


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """The same checkpoint in transformers."""
    loaded: dict[str, Reference] = {}

    def load(family: str) -> Reference:
        if family not in loaded:
            loaded[family] = Reference.load(checkpoint(family))
        return loaded[family]

    return load


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """One browser for all pages: its tests are marked `on_pages`, and so share the event loop that it lives on."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()
