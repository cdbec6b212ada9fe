"""The pages in a real browser: what a person types, sees and presses, against a real mesh. Skipped without Chromium."""

import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.e2e.mesh_process import mesh

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (apt-get install chromium)"),
    pytest.mark.timeout(240),
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
QUESTION = "Write the times table of 12."
# Presses Stop as soon as there are three tokens.
STOP_SOON = """() => new MutationObserver((_, observer) => {
  if (document.querySelectorAll(".answer:last-child .token").length < 3) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("turns"), { childList: true, subtree: true })"""
COUNT_WORDS = """() => {
  window.announced = [];
  const region = document.getElementById("announce");
  new MutationObserver(() => window.announced.push(region.textContent)).observe(region, { childList: true });
}"""


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[Page]:
    """A page at `url`; complaints of the browser, about the content policy too, fail the test."""
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(**options)
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        await page.goto(url)
        yield page
        await browser.close()
    assert complaints == []


async def ask(page: Page, question: str) -> str:
    """Type it, wait for the end, and return the answer."""
    await page.get_by_label("Message").fill(question)
    await page.keyboard.press("Enter")
    return await ended(page)


async def ended(page: Page) -> str:
    """The last answer's text, once it has ended."""
    answer = page.locator(".answer").last
    await expect(answer.locator(".facts")).to_contain_text("Ended:", timeout=30_000)
    return await answer.locator(".text").inner_text()


async def test_chat(tmp_path: Path) -> None:
    async with mesh("tandem-small", tmp_path, "--http-port=0") as running, browsing(running.http) as page:
        await page.evaluate(COUNT_WORDS)
        assert "72" in await ask(page, "What is 27 + 45?")
        assert len(await page.evaluate("announced")) == 2, "that it answers, and the answer: not each token"
        await check_tokens(page)
        await check_continuing(page)
        await check_stopping(page)
        await page.get_by_role("button", name="New chat").click()
        await ask(page, "<img src=x onerror=alert(1)>")
        assert await page.locator("#turns img").count() == 0
        await page.set_viewport_size({"width": 360, "height": 700})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360


async def check_tokens(page: Page) -> None:
    """Pointing at a token, or going there with the keys, shows what else the model considered."""
    tip = page.get_by_role("tooltip")
    tokens = page.locator(".answer .token")
    await tokens.nth(2).hover()
    await expect(tip).to_contain_text("log-prob")
    assert await tip.locator("tr").count() >= 6
    await tokens.first.focus()
    await page.keyboard.press("ArrowRight")
    await expect(tokens.nth(1)).to_be_focused()
    await expect(tokens.nth(1)).to_have_attribute("aria-describedby", "tip")
    await expect(page.locator(".answer .facts")).to_contain_text("Confidence")
    await expect(page.locator(".answer .facts")).to_contain_text("complete")


async def check_continuing(page: Page) -> None:
    """Piece by piece it is the text that one long answer has."""
    await page.get_by_role("button", name="New chat").click()
    whole = await ask(page, QUESTION)
    await page.get_by_role("button", name="New chat").click()
    await page.get_by_label("Max tokens").fill("40")
    text = await ask(page, QUESTION)
    go_on = page.get_by_role("button", name="Continue")
    while await go_on.count():
        assert whole.startswith(text)
        await go_on.click()
        before, text = text, await ended(page)
        assert len(text) > len(before)
    assert text == whole
    await page.get_by_label("Max tokens").fill("256")


async def check_stopping(page: Page) -> None:
    """The stop button ends the answer at once; the model has more to say."""
    await page.evaluate(STOP_SOON)
    text = await ask(page, QUESTION)
    await expect(page.locator(".answer").last.locator(".facts")).to_contain_text("stopped by you")
    assert 0 < len(text) < 60
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def check_running(page: Page, url: str) -> None:
    """A request is seen while it runs, in its phase, and among the recent ones when it has ended."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body):
            row = page.locator("#running .running")
            await expect(row).to_contain_text(re.compile(r"Decode, .* 4 \+ [\d,]+ tokens, .*decode-\d"))
            await expect(row.locator(".lane")).to_have_attribute("aria-label", re.compile("decode "))
    await expect(page.locator("#no-running")).to_be_visible()
    await expect(page.locator(".trace .what").filter(has_text="CancelledError")).to_have_count(1)


async def test_mesh(tmp_path: Path) -> None:
    flags = ("--http-port=0", "--decode", "2")
    async with mesh("tandem-small", tmp_path, *flags) as running, browsing(f"{running.http}/mesh") as page:
        await expect(page.locator("#headline")).to_contain_text("Idle")
        worker = page.get_by_role("article", name="decode worker decode-0")
        await expect(worker).to_contain_text("ready")
        lane = page.locator(".trace .lane").first
        await expect(lane).to_have_attribute("aria-label", re.compile("prefill .* decode "))
        await page.locator(".trace summary").first.click()
        await expect(page.locator(".trace table").first).to_contain_text("prefill-0 → decode-")
        await check_running(page, running.http)
        running.signal("decode_worker", signal.SIGKILL)
        incidents = page.locator("#incidents")
        await expect(incidents).to_contain_text("is gone", timeout=20_000)
        await expect(incidents.locator("li")).to_have_count(5, timeout=60_000)
        await expect(page.locator(".worker .state", has_text="● ready")).to_have_count(3, timeout=60_000)
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator("#fresh")).to_have_text("paused")
        await page.set_viewport_size({"width": 360, "height": 700})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
