"""The pages in a real browser: what a person types, sees and presses, against a real mesh. Skipped without Chromium."""

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Browser, Page, expect

from tests.defects import Repaired
from tests.e2e.browser import ask, browsing, ended, last_answer, on_pages, press, source
from tests.e2e.mesh_process import MeshProcess, mesh
from tests.service.gateway.http import running_gateway
from tests.service.security.keys import KEYS, write_keys

pytestmark = [*on_pages, pytest.mark.timeout(300)]
QUESTION = "Write the times table of 12."
LONG = "Tell me a story about a dragon named Clara."
# Presses Stop as soon as there are three tokens.
STOP_SOON = """() => new MutationObserver((_, observer) => {
  if (document.querySelectorAll("#turns > li:last-child .answer .token").length < 3) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("turns"), { childList: true, subtree: true })"""
COUNT_WORDS = """() => {
  window.announced = [];
  const region = document.getElementById("announce");
  new MutationObserver(() => window.announced.push(region.textContent)).observe(region, { childList: true });
}"""


async def test_chat(chromium: Browser, tmp_path: Path) -> None:
    flags = ("--http-port=0", "--api-keys-file", str(write_keys(tmp_path)))
    async with (
        mesh("tandem-small", tmp_path, *flags) as running,
        browsing(chromium, running.http, expected="401") as page,
    ):
        await check_asking_for_a_key(page)
        await page.get_by_role("button", name="New chat").click()
        await page.evaluate(COUNT_WORDS)
        assert "72" in await ask(page, "What is 27 + 45?")
        await expect(page.locator("#announce")).to_contain_text("confidence")
        assert len(await page.evaluate("announced")) == 2, "that it answers, and the answer: not each token"
        await check_tokens(page)
        await check_continuing(page)
        await check_stopping(page)
        await check_alternatives(page)
        await check_versions(page)
        await check_conversations(page)
        await check_comparing(page)
        await page.get_by_role("button", name="New chat").click()
        await ask(page, "<img src=x onerror=alert(1)>")
        assert await page.locator("#turns img").count() == 0
        for width in (390, 360):
            await page.set_viewport_size({"width": width, "height": 844})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def check_asking_for_a_key(page: Page) -> None:
    settings = page.get_by_role("dialog", name="Settings")
    await expect(settings).to_be_visible()
    await expect(page.get_by_label("API key")).to_be_focused()
    await page.keyboard.press("Escape")
    await ask(page, "What is 27 + 45?")
    await expect(page.locator(".problem strong")).to_have_text("This mesh asks for an API key.")
    await page.get_by_label("API key").fill(KEYS["alice"])
    await page.keyboard.press("Tab")
    await page.keyboard.press("Escape")
    await press(page, "Retry")
    assert "72" in await ended(page)
    await expect(page.locator(".problem")).to_be_hidden()


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
    facts = page.locator(".answer .facts")
    await expect(facts.locator("dl")).to_be_hidden()
    await facts.locator("summary").click()
    for word in ("Confidence", "complete", "First token after", "tokens/s"):
        await expect(facts).to_contain_text(word)


async def check_continuing(page: Page) -> None:
    """Piece by piece it is the text that one long answer has."""
    await page.get_by_role("button", name="New chat").click()
    shown = await ask(page, QUESTION)
    whole = await source(page)
    await page.get_by_role("button", name="New chat").click()
    await set_max_tokens(page, "40")
    await ask(page, QUESTION)
    text = await source(page)
    go_on = page.get_by_role("button", name="Continue")
    while await go_on.count():
        assert whole.startswith(text)
        await go_on.click()
        await ended(page)
        before, text = text, await source(page)
        assert len(text) > len(before)
    assert text == whole
    assert await ended(page) == shown, "blocks go on, too"
    await set_max_tokens(page, "")


async def set_max_tokens(page: Page, number: str) -> None:
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("Max tokens").fill(number)
    await page.keyboard.press("Escape")


@asynccontextmanager
async def answers_token_by_token(page: Page) -> AsyncIterator[None]:
    """A slow network: on a busy machine a whole answer may come in one piece."""
    network = await page.context.new_cdp_session(page)
    conditions = {"offline": False, "latency": 0, "uploadThroughput": -1}
    await network.send("Network.enable")
    await network.send("Network.emulateNetworkConditions", conditions | {"downloadThroughput": 4000})
    yield
    await network.send("Network.emulateNetworkConditions", conditions | {"downloadThroughput": -1})
    await network.detach()


async def check_stopping(page: Page) -> None:
    """The stop button ends the answer at once; the model has more to say."""
    await page.evaluate(STOP_SOON)
    async with answers_token_by_token(page):
        text = await ask(page, QUESTION)
    await expect(last_answer(page).locator(".facts summary")).to_contain_text("stopped by you")
    assert 0 < len(text) < 60
    await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def check_alternatives(page: Page) -> None:
    """From another token than the model chose a new version goes on, which is the same up to there."""
    await page.get_by_role("button", name="New chat").click()
    await ask(page, "What is 27 + 45?")
    before = await source(page)
    await page.locator(".answer .token").nth(3).click()
    panel = page.get_by_role("dialog", name="What else the model considered")
    other = panel.locator("td button").first
    chosen = (await other.inner_text()).replace("␣", " ").replace("↵", "\n")
    await other.click()
    await ended(page)
    after = await source(page)
    same = next(at for at, (one, two) in enumerate(zip(before, after, strict=False)) if one != two)
    assert after[:same] == before[:same]
    assert chosen in after
    await expect(page.locator(".answer .versions")).to_contain_text("2 / 2")
    await page.get_by_role("button", name="Version before").click()
    assert await source(page) == before


async def check_versions(page: Page) -> None:
    """An edited message and a regenerated answer stand beside the old ones."""
    await page.locator(".user").last.hover()
    await page.locator(".user").last.get_by_role("button", name="Edit").click()
    await page.get_by_label("Edit the message").fill("What is 2 + 3?")
    await page.keyboard.press("Enter")
    await ended(page)
    await expect(page.locator(".user .text")).to_have_text("What is 2 + 3?")
    await expect(page.locator(".user .versions")).to_contain_text("2 / 2")
    await press(page, "Regenerate")
    await ended(page)
    await expect(page.locator(".answer .versions")).to_contain_text("2 / 2")
    await press(page, "Delete")
    await expect(page.locator(".answer .versions")).to_have_count(0)


async def check_conversations(page: Page) -> None:
    """Conversations outlive the page; they can be found, renamed, saved and deleted."""
    text = await source(page)
    await page.reload()
    await expect(last_answer(page).locator(".token").first).to_be_visible()
    assert await source(page) == text
    await page.get_by_role("button", name="Settings").click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export as Markdown").click()
    saved = (await (await download.value).path()).read_text()
    assert "## You\n\nWhat is 2 + 3?" in saved
    assert text in saved
    await page.keyboard.press("Escape")
    names = page.locator("#chats .name")
    all_chats = await names.count()
    await page.keyboard.press("Control+k")
    await page.keyboard.type("times table 12")
    assert 0 < await names.count() < all_chats
    await page.get_by_label("Search conversations").fill("")
    first = page.locator(".chat-item").first
    await first.hover()
    await first.get_by_role("button", name="Rename").click()
    await page.get_by_label("New title").fill("Sums")
    await page.keyboard.press("Enter")
    await expect(names.first).to_have_text("Sums")
    await expect(page).to_have_title(re.compile("Sums"))
    await page.locator(".chat-item").last.hover()
    delete = page.locator(".chat-item").last.locator(".tools button").last
    await delete.click()
    await delete.click()
    await expect(names).to_have_count(all_chats - 1)


async def check_comparing(page: Page) -> None:
    """Two answers side by side, one of which is kept."""
    await page.get_by_role("button", name="New chat").click()
    await page.get_by_role("button", name="Compare").click()
    await page.get_by_label("Second temperature").fill("1.5")
    async with answers_token_by_token(page):
        await ask(page, "What is 27 + 45?")
    pair = page.locator(".pair .answer")
    await expect(pair).to_have_count(2)
    for index in range(2):
        await expect(pair.nth(index).locator(".facts summary")).to_contain_text("tokens/s")
    await expect(pair.last.locator(".label")).to_contain_text("temperature 1.5")
    await pair.last.get_by_role("button", name="Keep this one").click()
    await expect(page.locator(".answer")).to_have_count(1)
    await expect(page.locator(".answer .versions")).to_contain_text("2 / 2")
    await page.get_by_role("button", name="Compare").click()


async def check_running(page: Page, url: str) -> None:
    """A request is seen while it runs, in its phase, and among the recent ones when it has ended."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body):
            row = page.locator("#running .running")
            await expect(row).to_contain_text(re.compile(r"Decode, .* 4 \+ [\d,]+ tokens, .*decode-\d"))
            await expect(row.locator(".lane")).to_have_attribute("aria-label", re.compile("decode "))
    await expect(page.locator("#no-running")).to_be_visible()
    stopped = page.locator(".trace .what").filter(has_text="stopped by the client")
    await expect(stopped).to_have_count(1)
    await expect(stopped.locator(".failed")).to_have_count(0)


async def check_finding(page: Page) -> None:
    """Requests are found by their whole id; figures over time are drawn from what has ended."""
    rows = page.locator("#traces > .trace:visible")
    title = await page.locator("#traces summary").first.get_attribute("title")
    assert title
    await page.get_by_label("Find requests").fill(title)
    await expect(rows).to_have_count(1)
    await page.get_by_label("Find requests").fill("no such request")
    await expect(rows).to_have_count(0)
    await page.get_by_label("Find requests").fill("")
    await expect(page.locator("#timeline .chart", has_text="first token").locator("b")).to_contain_text("s")
    # A line takes two readings of the router, which takes one every 5 s.
    await expect(page.locator("#timeline path").first).to_have_attribute("d", re.compile("M.*L"), timeout=60_000)
    chart = page.locator("#timeline .chart").first
    await expect(chart.locator(".axis")).to_have_text(re.compile("10.min.ago.*now"))
    await chart.locator("svg").hover()
    await expect(chart.locator(".foot")).to_have_text(re.compile("ago: "))
    await page.get_by_label("How far back").select_option("a day")
    await expect(page.locator("#timeline path").first).to_have_attribute("d", re.compile("M"))


async def check_draining(page: Page) -> None:
    worker = page.get_by_role("article", name="decode worker decode-1")
    await worker.get_by_role("button", name="Drain", exact=True).click()
    await expect(worker.locator(".state")).to_have_text("▲ draining")
    await worker.get_by_role("button", name="Undrain").click()
    await expect(worker.locator(".state")).to_have_text("● ready")


async def test_mesh_and_killed_workers(chromium: Browser, tmp_path: Path) -> None:
    flags = ("--http-port=0", "--decode", "2")
    async with mesh("tandem-small", tmp_path, *flags) as running:
        async with browsing(chromium, f"{running.http}/mesh") as page:
            await check_mesh_page(page, running)
        async with browsing(chromium, running.http) as page:
            await check_chat_goes_on_when_workers_die(page, running)


@pytest.mark.parametrize(("path", "shown"), [("/", "#ideas button"), ("/mesh", "#advice li")])
async def test_a_page_without_one_of_its_scripts_says_so(
    chromium: Browser, path: str, shown: str, repaired: Repaired
) -> None:
    """As when the gateway is started again while a page loads. A script that comes late is no loss."""
    script = "**/pages/units.js"
    async with running_gateway() as gateway, browsing(chromium, f"{gateway.url}{path}", expected="ERR_FAILED") as page:
        problem = page.get_by_role("alert").filter(has_text="This page has not loaded completely.")
        await expect(page.locator(shown).first).to_be_visible()
        await expect(problem).to_have_count(0)
        await page.route(script, lambda route: route.abort())
        await page.reload()
        await expect(problem).to_be_visible()
        await page.unroute(script)
        await problem.get_by_role("link", name="Load it again").click()
        await expect(page.locator(shown).first).to_be_visible()
        await expect(problem).to_have_count(0)
    repaired("D48", "says so after 8 s, with a link that loads it again")


async def test_the_mesh_page_shows_the_routers_advice(chromium: Browser) -> None:
    async with running_gateway() as gateway, browsing(chromium, f"{gateway.url}/mesh") as page:
        await expect(page.locator("#advice li")).to_have_text(["Add a decode worker: KV is full."])
        await expect(page.get_by_role("list", name="What would help")).to_be_visible()


async def test_the_mesh_page_shows_the_traffic_of_revisions(chromium: Browser) -> None:
    """What was asked for, what came of it, and what an operator changes while the page is open."""
    async with running_gateway() as gateway, browsing(chromium, f"{gateway.url}/mesh") as page:
        await expect(page.locator("#headline")).not_to_contain_text("Asking")
        await expect(page.get_by_role("region", name="Traffic by revision")).to_be_hidden()
        fake = gateway.router.mesh
        fake.traffic, fake.routed = {"chat": {"v2": 1, "v1": 3}}, {"chat": {"v1": 39, "v2": 1}}
        await expect(page.get_by_role("table")).to_contain_text(re.compile("chat requests of the last 40.s"))
        rows = page.locator("#revisions tbody tr")
        await expect(rows).to_have_text(["v1 no workers75\u00a0%97.5\u00a0%39", "v2 no workers25\u00a0%2.5\u00a0%1"])
        assert await page.locator("#revisions .fill").first.evaluate("fill => fill.style.width") == "97.5%"
        assert await page.locator("#revisions i").first.evaluate("mark => mark.style.left") == "75%"
        fake.traffic, fake.routed = {"chat": {"v2": 1}}, {}
        await expect(rows).to_have_text(["v2 no workers100\u00a0%–0"])
        await page.set_viewport_size({"width": 360, "height": 700})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360


async def check_mesh_page(page: Page, running: MeshProcess) -> None:
    await expect(page.locator("#headline")).to_contain_text("Idle")
    worker = page.get_by_role("article", name="decode worker decode-0")
    await expect(worker).to_contain_text("ready")
    lane = page.locator(".trace .lane").first
    await expect(lane).to_have_attribute("aria-label", re.compile("prefill .* decode "))
    await page.locator(".trace summary").first.click()
    await expect(page.locator(".trace table").first).to_contain_text("prefill-0 → decode-")
    await check_running(page, running.http)
    await check_finding(page)
    await check_draining(page)
    running.signal("decode_worker", signal.SIGKILL)
    incidents = page.locator("#incidents")
    await expect(incidents).to_contain_text("is gone", timeout=20_000)
    await expect(incidents.locator("li")).to_have_count(7, timeout=60_000)
    await expect(page.locator(".worker .state", has_text="● ready")).to_have_count(3, timeout=60_000)
    await page.get_by_role("button", name="Pause").click()
    await expect(page.locator("#fresh")).to_have_text("paused")
    await page.set_viewport_size({"width": 360, "height": 700})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 360


async def check_chat_goes_on_when_workers_die(page: Page, running: MeshProcess) -> None:
    whole = await ask(page, LONG)
    await page.get_by_role("button", name="New chat").click()
    await page.get_by_label("Message", exact=True).fill(LONG)
    await page.keyboard.press("Enter")
    await expect(last_answer(page).locator(".token").nth(2)).to_be_visible()
    running.signal("decode_worker", signal.SIGKILL)
    running.signal("decode_worker", signal.SIGKILL)
    text = await ended(page)
    while await page.get_by_role("button", name="Retry").count():  # both were gone for too long: it goes on if asked
        await expect(page.locator(".problem strong")).to_be_visible()
        await press(page, "Retry")
        text = await ended(page)
    assert text == whole
