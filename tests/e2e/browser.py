"""Pages in headless Chromium, and what a person does there."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
on_pages = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (apt-get install chromium)"),
    pytest.mark.asyncio(loop_scope="session"),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)


@asynccontextmanager
async def browsing(chromium: Browser, url: str, *, expected: str = "", **options: Any) -> AsyncIterator[Page]:
    """A page at `url` with cookies and storage of its own. The browser's complaints, about the content policy too,
    fail the test, but for `expected`.
    """
    complaints: list[str] = []
    context = await chromium.new_context(**options)
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    await page.goto(url)
    yield page
    await context.close()
    assert [each for each in complaints if not expected or expected not in each] == []


async def ask(page: Page, question: str) -> str:
    """Type it, wait for the end, and return the answer."""
    await page.get_by_label("Message", exact=True).fill(question)
    await page.keyboard.press("Enter")
    return await ended(page)


async def ended(page: Page) -> str:
    """The last answer's text, as it is shown, once it has ended."""
    await expect(page.locator("#send")).to_be_visible(timeout=4 * WAIT_MS)
    return (
        await last_answer(page).locator("> .text").text_content() or ""
    )  # not inner_text: it skips what is out of view


def last_answer(page: Page) -> Locator:
    return page.locator(".answer").last


async def source(page: Page) -> str:
    """The last answer as the model wrote it."""
    await last_answer(page).get_by_role("button", name="Tokens").click()
    text = await last_answer(page).locator("> .text .plain").text_content()
    await last_answer(page).get_by_role("button", name="Tokens").click()
    return text or ""


async def press(page: Page, name: str) -> None:
    """A button under the last answer."""
    await last_answer(page).get_by_role("button", name=name, exact=True).click()
