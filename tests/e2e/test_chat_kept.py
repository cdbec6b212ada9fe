"""What the chat page keeps, in several tabs, when it closes and where it may keep nothing; and how it is left."""

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.e2e.browser import ask, browsing, ended, last_answer, on_pages, press
from tests.fakes.sdk_router import Script
from tests.service.gateway.http import running_gateway

pytestmark = [*on_pages, pytest.mark.timeout(240)]
# As where a person blocks all site data.
NO_STORAGE = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
  Object.defineProperty(window, name, { get: () => { throw new DOMException("denied", "SecurityError"); } });
}"""
DEAF = "BroadcastChannel.prototype.postMessage = () => {};"
QUESTIONS = """async () => {
  const { load } = await import("/pages/store.js");
  const { nodes } = await load(location.hash.slice(1));
  return Object.values(nodes).filter(({ role }) => role === "user").map(({ text }) => text).sort();
}"""


# Packs tokens before and after some are added, a list that is unpacked again likewise. Returns what each time was read.
PACK_TWICE = """async (count) => {
  const { pack, unpack } = await import("/pages/pack.js");
  let read = 0;
  const top = [{ id: 7, text: "", logprob: -2 }];
  const token = (id) => ({ id, text: `t${id}`, top, get logprob() { return read++, -0.5; } });
  const entry = ({ id, text, logprob }) => [id, text, logprob];
  const plain = (list) => JSON.stringify(list.map((each) => [entry(each), each.top.map(entry)]));
  const numRead = (list) => {
    const before = read;
    pack(list);
    return read - before;
  };
  const tokens = Array.from({ length: count }, (_, id) => token(id));
  const first = numRead(tokens);
  tokens.push(token(count), token(count + 1));
  const second = numRead(tokens);
  const again = unpack(structuredClone(pack(tokens)));
  const isSame = plain(again) === plain(tokens);
  again.push(token(count + 2));
  const third = numRead(again);
  return [first, second, third, isSame && plain(unpack(pack(again))) === plain(again)];
}"""


async def other_tab(page: Page) -> Page:
    """The same conversation once more."""
    other = await page.context.new_page()
    await other.goto(page.url)
    await expect(other.locator(".user .text").first).to_be_visible()
    return other


async def delete(page: Page, number: int) -> None:
    turn = page.locator(".user").nth(number)
    await turn.hover()
    await turn.get_by_role("button", name="Delete").click()
    await turn.get_by_role("button", name="Delete 2 messages?").click()


def questions(page: Page) -> Any:
    return page.locator(".user .text")


@pytest.mark.parametrize("count", [0, 1000])
async def test_tokens_that_were_packed_are_not_packed_again(chromium: Browser, count: int) -> None:
    """A long answer is saved every few seconds while it grows."""
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        assert await page.evaluate(PACK_TWICE, count) == [count, 2, 1, True]


async def test_tabs_that_know_nothing_of_each_other_lose_nothing(chromium: Browser) -> None:
    """Turns of both are kept, and what one deleted stays deleted."""
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await page.context.add_init_script(DEAF)
        await page.reload()
        await ask(page, "One")
        await ask(page, "Two")
        other = await other_tab(page)
        await delete(page, 1)
        await ask(page, "Three")
        await expect(questions(other)).to_have_text(["One", "Two"])
        await press(other, "Regenerate")
        await ended(other)
        await expect(questions(other)).to_have_text(["One", "Three"])
        await ask(other, "Four")
        await ask(page, "Five")
        for each in (page, other):
            await each.reload()
            await expect(questions(each)).to_have_text(["One", "Three", re.compile("Four|Five")])
            assert await each.evaluate(QUESTIONS) == ["Five", "Four", "One", "Three"]
        await expect(page.locator(".user").last.locator(".versions")).to_contain_text("/ 2")


async def test_tabs_show_what_others_have_made_of_a_conversation(chromium: Browser) -> None:
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await ask(page, "One")
        other = await other_tab(page)
        await ask(page, "Two")
        await expect(questions(other)).to_have_text(["One", "Two"])
        await delete(other, 1)
        await expect(questions(page)).to_have_text(["One"])
        await page.locator(".user").hover()
        await page.locator(".user").get_by_role("button", name="Edit").click()
        await ask(other, "Three")
        await page.get_by_label("Edit the message").fill("Once")
        await page.keyboard.press("Enter")
        await ended(page)
        assert await page.evaluate(QUESTIONS) == ["Once", "One", "Three"]
        await other.locator(".chat-item").hover()
        trash = other.locator(".chat-item .tools button").last
        await trash.click()
        await trash.click()
        await expect(page.locator("#welcome")).to_be_visible()
        await expect(page.locator("#chats .name")).to_have_count(0)


async def test_a_page_that_closes_keeps_what_it_shows(chromium: Browser) -> None:
    script = Script(hold_after_messages=8)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        await page.get_by_label("Message", exact=True).fill("Tell me")
        await page.keyboard.press("Enter")
        await asyncio.wait_for(script.holding.wait(), 30)
        await expect(last_answer(page).locator(".token").nth(6)).to_be_attached()
        text = await last_answer(page).locator("> .text").text_content()
        await page.reload()
        await expect(last_answer(page).locator("> .text")).to_have_text(text or "nothing")
        await expect(last_answer(page).locator(".facts summary")).to_contain_text("left while it ran")
        await expect(page.locator("#chats .name")).to_have_text(["Tell me"])
        script.hold_after_messages = None
        await press(page, "Continue")
        await ended(page)
        await expect(last_answer(page).locator("> .text")).to_have_text(script.story)
        await page.reload()
        await expect(last_answer(page).locator("> .text")).to_have_text(script.story)


async def test_an_answer_without_a_text_says_why(chromium: Browser) -> None:
    script = Script(hold_after_messages=0)
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url) as page:
        await page.get_by_label("Message", exact=True).fill("Tell me")
        await page.keyboard.press("Enter")
        await expect(page.locator("#chats .name")).to_have_text(["Tell me"])
        await expect(last_answer(page).locator(".facts")).to_be_hidden()
        await page.reload()
        await expect(last_answer(page).locator(".facts summary")).to_have_text("left while it ran")
        await expect(last_answer(page).get_by_role("button", name="Regenerate")).to_be_visible()


async def test_a_browser_that_keeps_nothing_chats_all_the_same(chromium: Browser) -> None:
    async with running_gateway() as gateway, browsing(chromium, "about:blank") as page:
        await page.context.add_init_script(NO_STORAGE)
        await page.goto(gateway.url)
        notice = page.locator("#notice")
        await expect(notice).to_contain_text("keeps no conversations")
        assert await ask(page, "One") == Script().story
        await expect(notice).to_contain_text("keeps no conversations")
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("API key").fill("mine")
        await page.get_by_label("Appearance").select_option("dark")
        await page.keyboard.press("Escape")
        async with page.expect_request("**/v1/chat/completions") as asked:
            await ask(page, "Two")
        assert (await asked.value).headers["authorization"] == "Bearer mine"
        await page.get_by_role("button", name="New chat").click()
        await page.locator("#chats .name").click()
        await expect(questions(page)).to_have_text(["One", "Two"])
        await page.goto(f"{gateway.url}/mesh")
        await expect(page.locator(".worker").first).to_be_visible()


async def test_back_leads_out_of_a_conversation_and_into_the_last_one(chromium: Browser) -> None:
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        await ask(page, "One")
        await page.get_by_role("button", name="New chat").click()
        await expect(page.locator("#welcome")).to_be_visible()
        await page.go_back()
        await expect(questions(page)).to_have_text(["One"])
        await page.go_back()
        await expect(page.locator("#welcome")).to_be_visible()
        await page.go_forward()
        await expect(questions(page)).to_have_text(["One"])
        await page.goto(f"{gateway.url}/#nothing")
        await expect(page.locator("#notice")).to_have_text("This conversation is not in this browser.")
        await expect(page.locator("#welcome")).to_be_visible()


async def test_a_wrong_key_is_told_apart_from_none(chromium: Browser) -> None:
    async def answer(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            await route.continue_()
        else:
            await route.fulfill(status=401, json={"error": {"message": "no"}})

    async with running_gateway() as gateway, browsing(chromium, gateway.url, expected="401") as page:
        await page.route("**/v1/models", answer)
        await page.reload()
        settings, said = page.get_by_role("dialog", name="Settings"), page.locator("#key-status")
        await expect(page.get_by_label("API key")).to_be_focused()
        await expect(said).to_have_text("")
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await expect(said).to_have_text("This key was not accepted.")
        await page.get_by_label("API key").fill("right")
        await page.keyboard.press("Enter")
        await expect(settings).to_be_hidden()
        await expect(page.locator("#model")).to_have_text("fake")
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("API key").fill("wrong")
        await page.keyboard.press("Tab")
        await expect(said).to_have_text("This key was not accepted.")


async def test_escape_closes_the_sidebar_before_it_stops_an_answer(chromium: Browser) -> None:
    script = Script(hold_after_messages=8)
    phone = {"viewport": {"width": 390, "height": 844}}
    async with running_gateway(script) as gateway, browsing(chromium, gateway.url, **phone) as page:
        await page.get_by_label("Message", exact=True).fill("Tell me")
        await page.keyboard.press("Enter")
        await asyncio.wait_for(script.holding.wait(), 30)
        menu = page.get_by_role("button", name="Conversations", exact=True)
        await menu.click()
        await page.keyboard.press("Escape")
        await expect(page.locator("#sidebar")).to_be_hidden()
        await expect(menu).to_be_focused()
        await expect(page.locator("#stop")).to_be_visible()
        await page.keyboard.press("Escape")
        await asyncio.wait_for(script.cancelled.wait(), 30)
        await expect(last_answer(page).locator(".facts summary")).to_contain_text("stopped by you")


async def test_the_enter_that_ends_a_composition_sends_nothing(chromium: Browser) -> None:
    """Safari sends it behind the composition's end, with the code of keys that an input method has taken."""
    async with running_gateway() as gateway, browsing(chromium, gateway.url) as page:
        field = page.get_by_label("Message", exact=True)
        await field.fill("にほん")
        await field.evaluate(
            "(each) => each.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', keyCode: 229, bubbles: true }))"
        )
        await expect(field).to_have_value("にほん")
        await expect(page.locator("#welcome")).to_be_visible()
