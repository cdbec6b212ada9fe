"""The chat page in a real browser, before a model that says what it is told: Markdown, long answers, errors."""

import asyncio
import contextlib
import json
import random
import re
from collections import deque
from pathlib import Path
from typing import Any

import grpc
import pytest
from playwright.async_api import Browser, Page, expect

from tests.e2e.browser import ask, browsing, ended, last_answer, on_pages, press, source
from tests.fakes.sdk_router import Refusal, Script
from tests.service.gateway.http import running_gateway

pytestmark = [*on_pages, pytest.mark.timeout(240)]
SHOWCASE = (Path(__file__).parent / "showcase.md").read_text()
THOUGHTS = "First **one**, then the other."
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

[a](javascript:window.hacked=1) [b](data:text/html,x) ![c](https://example.org/c.png) <https://example.org/d>

$\\href{javascript:window.hacked=1}{x}$ $\\includegraphics{https://example.org/e.png}$ $\\htmlStyle{color:red}{y}$

```html"><img src=x onerror=window.hacked=1>
<script>window.hacked = 1</script>
```

<svg onload="window.hacked = 1"><iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>
"""
# Feeds a text in pieces to the renderer, and returns what is shown at the end, in pieces and at once.
IN_PIECES = """async ([text, sizes]) => {
  const [{ Prose }, { Region }] = await Promise.all([import("/pages/prose.js"), import("/pages/region.js")]);
  const shown = (pieces) => {
    const tokens = [];
    const region = new Region(tokens);
    const element = document.createElement("div");
    const prose = new Prose(element, region);
    for (const piece of pieces) {
      tokens.push({ text: piece, logprob: -0.1, top: [] });
      region.add(piece, tokens.length - 1);
      prose.render();
    }
    prose.render(true);
    for (const token of element.querySelectorAll("span.token:not(.math)")) token.replaceWith(...token.childNodes);
    element.normalize();
    for (const math of element.querySelectorAll(".math")) math.replaceWith(math.getAttribute("aria-label"));
    for (const tabbed of element.querySelectorAll("[data-t]")) tabbed.removeAttribute("data-t");
    return element.innerHTML;
  };
  const pieces = [];
  for (let at = 0; at < text.length; at += pieces.at(-1).length) {
    pieces.push(text.slice(at, at + sizes[pieces.length % sizes.length]));
  }
  return [shown(pieces), shown([text])];
}"""
# Texts whose characters are also in the marks around them.
LOOKALIKES = """| e | 1 | - |
|:-:|--:|---|
| - | : | e |
| 1 | - | : |
| b | 2 | - |
| c | 3 | - |
| e | - | 1 |

1. 1
2. 2
- -
* *
- [x] x

```python
python
```
"""
# Feeds a text, a token a character, to the renderer: up to a cut, then the rest. Returns the characters that were
# painted as another token's.
MISPAINTED = """async ([text, step]) => {
  const [{ Prose }, { Region }] = await Promise.all([import("/pages/prose.js"), import("/pages/region.js")]);
  const tokens = [...text].map((character) => ({ text: character, logprob: -0.1, top: [] }));
  const wrong = [];
  for (let cut = 1; cut < text.length; cut += step) {
    const region = new Region(tokens);
    const element = document.createElement("div");
    const prose = new Prose(element, region);
    const draw = (from, to, isFinal) => {
      for (let number = from; number < to; number++) region.add(tokens[number].text, number);
      prose.render(isFinal);
      for (const span of element.querySelectorAll("span.token:not(.math)")) {
        const { textContent, dataset } = span;
        if (textContent !== tokens[dataset.t].text) wrong.push(`cut at ${cut}: ${textContent} as ${dataset.t}`);
      }
    };
    draw(0, cut, false);
    draw(cut, tokens.length, false);
    draw(tokens.length, tokens.length, true);
  }
  return wrong;
}"""
MANY = """async (count) => {
  const store = await import("/pages/store.js");
  const { add, newChat } = await import("/pages/tree.js");
  for (let number = 0; number < count; number++) {
    const chat = newChat();
    chat.title = `Conversation ${number}`;
    chat.updated -= number * 3_600_000;
    add(chat, null, { role: "user", text: `What about topic${number}?` });
    await store.save(chat);
  }
}"""


async def settled(page: Page) -> None:
    """KaTeX and the highlighter are loaded, and the answer is drawn with them."""
    await expect(page.locator(".katex").first).to_be_attached()
    await expect(page.locator(".hljs-keyword").first).to_be_attached()


async def test_markdown_code_and_formulas(chromium: Browser) -> None:
    script = Script(story=f"<think>{THOUGHTS}</think>\n\n{SHOWCASE}", has_reasoning=True, max_total_tokens=20_000)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        await ask(page, "Show me")
        await settled(page)
        body = last_answer(page).locator("> .text")
        for selector, text in {
            "h2.h1": "A heading",
            "em": "emphasis",
            "strong": "strong text",
            "del": "gone",
            "ol > li:nth-child(2) li em": "one",
            "blockquote": "A quotation of\ntwo lines.",
            "td.right": "1.5",
            ".code .hljs-keyword": "def",
        }.items():
            assert await body.locator(selector).first.text_content() == text
        assert await body.locator("ol").first.locator("> li").count() == 5
        assert await body.locator("tbody tr").count() == 5
        assert await body.locator(".katex").count() == 3
        assert await body.locator(".math.broken").count() == 0
        assert await body.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
        await check_thinking(page)
        await check_colours(page)
        assert await source(page) == SHOWCASE
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await body.locator(".copy-code").click()
        assert (await page.evaluate("navigator.clipboard.readText()")).startswith("def fib")
        await press(page, "Copy")
        assert await page.evaluate("navigator.clipboard.readText()") == SHOWCASE


async def check_thinking(page: Page) -> None:
    thinking = last_answer(page).locator(".thinking")
    await expect(thinking.locator("strong")).to_be_hidden()
    await thinking.locator("summary").click()
    await expect(thinking.locator("strong")).to_have_text("one")


async def test_an_answer_cut_while_thinking_goes_on_thinking(chromium: Browser) -> None:
    """Also where the cut is within the mark that ends it."""
    story = f"<think>{THOUGHTS}</think>\n\n**Both**, then."
    script = Script(story=story, has_reasoning=True)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Max tokens").fill("21")
        await page.keyboard.press("Escape")
        await ask(page, "Think")
        await expect(last_answer(page).locator(".thoughts strong")).to_have_text("one")
        while await page.get_by_role("button", name="Continue").count():
            await press(page, "Continue")
            await ended(page)
        await expect(last_answer(page).locator(".thoughts")).to_have_text("First one, then the other.")
        await expect(last_answer(page).locator("> .text")).to_have_text("Both, then.")
        assert await source(page) == "**Both**, then."


async def check_colours(page: Page) -> None:
    """Every character that is shown has the token that it came from: here each byte is one."""
    tokens = last_answer(page).locator("> .text .token:not(.math)")
    texts = await tokens.evaluate_all("spans => spans.map((span) => [span.dataset.t, span.textContent])")
    raw = f"<think>{THOUGHTS}</think>\n\n{SHOWCASE}".encode()
    plain = [(int(number), text) for number, text in texts if text.isascii()]
    assert len(plain) > 400
    wrong = [(number, text) for number, text in plain if text != "&" and raw[number : number + 1] != text.encode()]
    assert wrong == []
    numbers = [number for number, _ in plain]
    assert numbers == sorted(numbers)


async def test_text_in_pieces_is_shown_as_the_whole_text(chromium: Browser) -> None:
    rng = random.Random(5)
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await page.evaluate("Promise.all([import('/pages/vendor/highlight.min.js'), import('/pages/code.js')])")
        for _ in range(12):
            sizes = [rng.choice([1, 2, 3, 5, 8, 21, 80]) for _ in range(17)]
            pieces, whole = await page.evaluate(IN_PIECES, [SHOWCASE, sizes])
            assert pieces == whole, sizes


@pytest.mark.parametrize(("text", "step"), [(LOOKALIKES, 1), (SHOWCASE.replace("&amp;", "and").replace("😀", ""), 5)])
async def test_each_character_has_its_own_tokens_colour(chromium: Browser, text: str, step: int) -> None:
    """Wherever the text is cut when it is drawn: rows of a long table are drawn without the rows before them."""
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        assert await page.evaluate(MISPAINTED, [text, step]) == []


@pytest.mark.parametrize(
    ("line", "shown", "head"),
    [
        ("- an item with *marks*\n", "<li", ""),
        ("1. one\n", "<li", ""),
        ("words without an end ", "end", ""),
        ("x = 1\n", "x =", "```python\n"),
        ("| a | `b` |\n", "<td", "| a | b |\n|---|---|\n"),
    ],
)
async def test_long_blocks_lose_nothing(chromium: Browser, line: str, shown: str, head: str) -> None:
    number = 9000 // len(line)
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        pieces, whole = await page.evaluate(IN_PIECES, [head + line * number, [7, 100, 31, 3, 250]])
        assert pieces.count(shown) == whole.count(shown) == number * (2 if shown == "<td" else 1)


async def test_what_the_model_says_does_nothing(chromium: Browser) -> None:
    requested: list[str] = []
    async with running_gateway(Script(story=HOSTILE)) as gateway, browsing(chromium, gateway.url) as page:
        page.on("request", lambda request: requested.append(request.url))
        await ask(page, f"{HOSTILE}?")
        assert "hacked" in await source(page)
        await expect(page.locator(".math.broken, .katex").first).to_be_attached()
        await page.wait_for_timeout(300)
        assert await page.evaluate("window.hacked") is None
        assert await page.locator("#turns :is(img, script, svg[onload], iframe, [style*=red])").count() == 0
        links = await page.locator("#turns a").evaluate_all("all => all.map((link) => link.href)")
        assert links == ["https://example.org/c.png", "https://example.org/d"]
        assert [url for url in requested if not url.startswith((gateway.url, "blob:"))] == []


async def test_long_answer_never_blocks_the_page(chromium: Browser) -> None:
    """20,000 tokens. Time of the page's thread, not of a clock, so that other programs do not count."""
    paragraph = "Some **words** of `code`, and more of them to fill a line or two of the page.\n\n"
    story = (paragraph * 300)[:20_000]
    script = Script(story=story, tokens_per_message=8, max_total_tokens=30_000)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        browser = page.context.browser
        assert browser is not None
        await browser.start_tracing(page=page, categories=["toplevel"])
        await page.get_by_label("Message", exact=True).fill("Go")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#stop:visible")
        await page.wait_for_selector("#send:visible", timeout=120_000)  # expect() reads the whole page while it waits
        busy = longest_tasks_ms(await browser.stop_tracing())
        assert await page.locator(".answer .token").count() > 15_000
        assert busy[0] < 100, busy[:10]
        assert busy[3] < 50, busy[:10]
        await check_strip(page)


async def check_strip(page: Page) -> None:
    """A click on the strip goes to a token near its beginning; a button goes back to the end."""
    await page.locator(".heat").click(position={"x": 20, "y": 5})
    assert 0 < await page.evaluate("Number(document.activeElement.dataset.t)") < 3000
    await expect(page.locator(".token:focus")).to_be_in_viewport()
    await page.get_by_role("button", name="Jump to the end").click()
    await expect(page.get_by_role("button", name="Jump to the end")).to_be_hidden()


def longest_tasks_ms(trace: bytes) -> list[float]:
    """CPU time of the tasks of the page's main thread, longest first."""
    events = json.loads(trace)["traceEvents"]
    named = [each for each in events if each.get("name") == "thread_name"]
    mains = {(each["pid"], each["tid"]) for each in named if each["args"]["name"] == "CrRendererMain"}
    tasks = [e for e in events if (e["pid"], e["tid"]) in mains and str(e.get("name")).endswith("RunTask")]
    return sorted((each.get("tdur", 0) / 1000 for each in tasks), reverse=True)


async def test_two_hundred_conversations(chromium: Browser) -> None:
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await page.evaluate(MANY, 200)
        await page.reload()
        await expect(page.locator("#chats .name")).to_have_count(200)
        await page.get_by_label("Search conversations").fill("topic177")
        await expect(page.locator("#chats .name")).to_have_text(["Conversation 177"])
        await page.locator("#chats .name").click()
        await expect(page.locator(".user .text")).to_have_text("What about topic177?")


@pytest.mark.parametrize(
    ("refusal", "title"),
    [
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, trailing=(("retry-after-ms", "2000"),)), "The mesh is busy."),
        (Refusal(grpc.StatusCode.UNAVAILABLE, trailing=(("tandem-error", "NoWorkers"),)), "No worker can answer now."),
        (Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, after_messages=4), "The answer took too long."),
    ],
    ids=["busy", "no-workers", "late"],
)
async def test_errors_are_explained_and_can_be_retried(chromium: Browser, refusal: Refusal, title: str) -> None:
    script = Script(refusals=deque([refusal]))
    async with (
        running_gateway(script) as gateway,
        browsing(chromium, gateway.url, expected="Failed to load resource") as page,
    ):
        await ask(page, "Tell me")
        await expect(page.locator(".problem strong")).to_have_text(title)
        await press(page, "Retry")
        await expect(page.locator(".problem")).to_be_hidden()
        await expect(last_answer(page).locator("> .text")).to_have_text(script.story)


async def test_the_network_goes_and_comes_back(chromium: Browser) -> None:
    script = Script(hold_after_messages=8)
    async with running_gateway(script) as gateway:
        line = Line(int(gateway.url.rpartition(":")[2]))
        await line.open()
        async with browsing(chromium, f"http://127.0.0.1:{line.port}", expected="net::ERR") as page:
            await page.get_by_label("Message", exact=True).fill("Tell me")
            await page.keyboard.press("Enter")
            await asyncio.wait_for(script.holding.wait(), 30)
            await expect(last_answer(page).locator(".token").nth(6)).to_be_attached()
            await line.cut()
            script.hold_after_messages = None
            await expect(page.locator(".problem strong")).to_have_text("The gateway cannot be reached.")
            await expect(page.locator("#model")).to_have_text("not reachable")
            await line.open()
            await expect(page.locator("#model")).to_have_text("fake")
            await press(page, "Retry")
            await expect(last_answer(page).locator("> .text")).to_have_text(script.story)
        await line.cut()


async def test_a_connection_that_dies_in_silence_is_given_up(chromium: Browser) -> None:
    """No end arrives and no error: nothing at all, not even the comments that the gateway sends meanwhile."""
    script = Script(hold_after_messages=8)
    async with running_gateway(script) as gateway:
        line = Line(int(gateway.url.rpartition(":")[2]))
        await line.open()
        async with browsing(chromium, f"http://127.0.0.1:{line.port}") as page:
            await page.clock.install()
            await page.reload()
            await page.get_by_label("Message", exact=True).fill("Tell me")
            await page.keyboard.press("Enter")
            await asyncio.wait_for(script.holding.wait(), 30)
            await expect(last_answer(page).locator(".token").nth(6)).to_be_attached()
            line.flows.clear()
            await page.clock.fast_forward(60_000)
            await expect(page.locator(".problem strong")).to_have_text("The gateway cannot be reached.")
            script.hold_after_messages = None
            line.flows.set()
            await press(page, "Retry")
            await expect(last_answer(page).locator("> .text")).to_have_text(script.story)
        await line.cut()


async def test_what_others_follow_is_deleted_by_two_presses(chromium: Browser) -> None:
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await ask(page, "Tell me")
        await ask(page, "And then?")
        first = page.locator(".user").first
        await first.hover()
        await first.get_by_role("button", name="Delete").click()
        await expect(page.locator(".user .text")).to_have_text(["Tell me", "And then?"])
        await first.get_by_role("button", name="Delete 4 messages?").click()
        await expect(page.locator("#welcome")).to_be_visible()


class Line:
    """A connection to a port of this machine that can be cut, and opened again at the same port. Nothing comes through
    while `flows` is clear.
    """

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self.port = 0
        self.flows = asyncio.Event()
        self.flows.set()
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_the_model_is_chosen_and_two_are_compared(chromium: Browser) -> None:
    models = {"object": "list", "data": [{"id": name, "max_model_len": 1000} for name in ("fake", "other")]}
    asked: list[Any] = []
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await page.route("**/v1/models", lambda route: route.fulfill(json=models))
        page.on("request", lambda each: each.url.endswith("/chat/completions") and asked.append(each.post_data_json))
        await page.reload()
        picker = page.get_by_label("The model that answers")
        await picker.select_option("other")
        await page.reload()
        await expect(picker).to_have_value("other")
        await page.get_by_role("button", name="Compare").click()
        await expect(page.get_by_label("Second model")).to_have_value("fake")
        await ask(page, "Tell me")
        assert [each["model"] for each in asked] == ["other", "fake"]
        await expect(page.locator(".pair .answer > .text")).to_have_text([Script().story] * 2)
        await expect(page.locator(".pair .label")).to_have_text([re.compile("^other, "), re.compile("^fake, ")])


async def test_a_deleted_conversation_stays_deleted(chromium: Browser) -> None:
    script = Script(hold_after_messages=8)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        await page.get_by_label("Message", exact=True).fill("Tell me")
        await page.keyboard.press("Enter")
        await asyncio.wait_for(script.holding.wait(), 30)
        await page.locator(".chat-item").hover()
        delete = page.locator(".chat-item .tools button").last
        await delete.click()
        await delete.click()
        await asyncio.wait_for(script.cancelled.wait(), 30)
        await expect(page.locator("#chats .name")).to_have_count(0)
        await expect(page.locator("#welcome")).to_be_visible()
        await page.reload()
        await expect(page.locator("#chats .none")).to_be_visible()


async def test_settings_are_remembered(chromium: Browser) -> None:
    script = Script()
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Preset", exact=True).select_option("Balanced")
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Name").or_(page.get_by_label("Keep these as a preset")).first.fill("Mine")
        await page.get_by_role("button", name="Save").click()
        await page.get_by_label("Appearance").select_option("dark")
        await page.reload()
        assert await page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
        await ask(page, "Tell me")
        sampling: Any = script.requests[-1].sampling
        assert (round(sampling.temperature, 3), round(sampling.top_p, 3)) == (0.7, 0.95)
        assert not sampling.HasField("max_new_tokens"), "as many as are left"
        assert script.requests[-1].chat.messages[0].content == "Be brief."
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Preset", exact=True).select_option("Exact")
        await page.get_by_label("Preset", exact=True).select_option("Mine")
        await expect(page.get_by_label("Temperature", exact=True)).to_have_value("0.7")
        await expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
async def test_nothing_stands_in_anyones_way(chromium: Browser, scheme: Any, width: int) -> None:
    """axe finds nothing, on the pages and in the settings; a phone gives the conversation five sixths of its screen.

    Tokens are unsure, so their shade is the darkest, and of several letters: axe does not look at the contrast of one.
    """
    axe = pytest.importorskip(
        "axe_playwright_python.async_playwright", reason="no axe (pip install axe-playwright-python)"
    )
    story = f"<think>{THOUGHTS}</think>\n\n{SHOWCASE}"
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 844}}
    script = Script(story=story, has_reasoning=True, bytes_per_token=6, logprob=-5.0, max_total_tokens=20_000)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url, **options) as page:
        found = [await axe.Axe().run(page)]
        await ask(page, "Show me")
        await settled(page)
        if width < 400:
            assert await page.evaluate("document.getElementById('scroller').clientHeight / innerHeight") > 5 / 6
        found.append(await axe.Axe().run(page))
        await page.get_by_role("button", name="Settings").click()
        found.append(await axe.Axe().run(page, context="#settings"))
        await page.goto(f"{gateway.url}/mesh")
        await expect(page.locator(".worker").first).to_be_visible()
        found.append(await axe.Axe().run(page))
        problems = [
            f"{each['id']}: {each['nodes'][0]['html'][:200]}" for one in found for each in one.response["violations"]
        ]
        assert problems == []
