"""The server's page in a browser: a server in a thread, pages that are watched, and what tests read of them."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect
from specdec import Scheduler, SpeculativeDecoder
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import ServerSettings, bind, url_of
from specdec.serving.server.service import Service

CHROMIUM = shutil.which("chromium")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"


@contextmanager
def serving(pair, template: str | None, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Service]]:
    """The URL of a server in a thread, and what it serves."""
    target, draft, tokenizer = pair
    drafters = {"model": draft, "lookup": PromptLookupDrafter(), "none": None}

    def make(drafter: str, rule: str) -> Scheduler:
        return Scheduler(SpeculativeDecoder(target, drafters[drafter], 4), rows=2, max_length=512, rule=rule)

    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    settings = ServerSettings(port=0, api_keys=keys, drain_seconds=1.0)
    service = Service("embedded", tokenizer, Lanes(make, list(drafters), ["coupled", "token", "block"]), settings)
    started = threading.Event()
    with bind(settings) as bound:
        server = Server(service, bound, started.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.run_until_signal()))
        thread.start()
        try:
            assert started.wait(60)
            yield url_of(bound), service
        finally:
            server.stop()
            thread.join()


@contextmanager
def opened(browser: Browser, url: str, tolerated: str = "$^", **settings) -> Iterator[Page]:
    """A new page, in a profile of its own. It may ask no other host for anything, and its console stays empty but for
    what ``tolerated`` finds."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **settings})
    page = context.new_page()
    page.set_default_timeout(60_000)
    seen: list[str] = []
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else seen.append(request.url))
    page.on("console", lambda m: None if re.search(tolerated, m.text) else seen.append(m.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.goto(url)
    yield page
    assert seen == []
    context.close()


def generate(page: Page, max_tokens: int) -> None:
    page.fill("#max_tokens", str(max_tokens))
    page.click("#go")
    finish(page)


def finish(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("Done", timeout=60_000)
    expect(page.locator("#go")).to_be_enabled()
    page.evaluate("new Promise(requestAnimationFrame)")  # what is drawn once a frame


def texts_of(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def boxed(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "↵") or "(no text)"


def sends(page: Page, *choices: dict, end: str = "data: [DONE]\n\n") -> None:
    """Completions are answered with these choices instead."""
    chunks = [f"data: {json.dumps({'choices': [{'text': '', 'finish_reason': None, **c}]})}\n\n" for c in choices]
    page.route("**/v1/completions", lambda route: route.fulfill(body="".join(chunks) + end))


# Of all elements with text or a value, those whose colours are too close, and those of the controls without a name.
UNREADABLE = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parts(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return getComputedStyle(node).backgroundColor;
    }
  };
  const contrast = (node) => {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const shown = [...document.querySelectorAll("body *")].filter((node) =>
    node.checkVisibility() && !node.disabled && node.type !== "range" && (own(node) || "value" in node));
  const faint = shown.filter((node) => contrast(node) < 4.5)
    .map((node) => `${node.outerHTML.slice(0, 80)} ${contrast(node)}`);
  const nameless = [...document.querySelectorAll("input, select, textarea, button")]
    .filter((node) => !(node.labels?.length || node.ariaLabel || node.textContent.trim())).map((node) => node.id);
  return [shown.length > 60, ...faint, ...nameless];
}"""
