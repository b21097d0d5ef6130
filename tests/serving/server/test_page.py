"""The page at ``/`` in Debian's Chromium, against a server of the embedded pair in this process."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, Page, expect  # noqa: E402
from specdec.serving.server.service import Service  # noqa: E402
from support.pages import (  # noqa: E402
    CHROMIUM,
    FLAGS,
    TEMPLATE,
    UNREADABLE,
    boxed,
    finish,
    generate,
    opened,
    sends,
    serving,
    texts_of,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
KEY = "a-key-of-this-server"
ASKED = {"model": "embedded", "temperature": 0.7, "top_p": 0.9, "seed": 0, "drafter": "model", "rule": "coupled"}
PRODUCERS = ("accepted", "recovered", "bonus", "plain")


@pytest.fixture(scope="module")
def server(pair) -> Iterator[tuple[str, Service]]:
    with serving(pair, TEMPLATE) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server) -> Iterator[Page]:
    with opened(browser, server[0]) as page:
        expect(page.locator("#status")).to_have_text("Ready.")
        yield page


def test_a_text_and_its_steps_are_those_of_the_api(page, server):
    page.fill("#prompt", "def read(self, size=-1):")
    generate(page, 24)
    body = {**ASKED, "prompt": "def read(self, size=-1):", "max_tokens": 24, "specdec": {"steps": True}}
    told = httpx.post(server[0] + "/v1/completions", json=body, timeout=60).json()
    choice, usage = told["choices"][0], told["usage"]
    steps, stats = choice["specdec"]["steps"], choice["specdec"]["stats"]

    assert "".join(texts_of(page, "#drafted .token")) == choice["text"] == "".join(texts_of(page, "#plain .token"))
    tokens = [token for step in steps for token in step["tokens"]]
    for producer in PRODUCERS:
        assert texts_of(page, f"#drafted .{producer}") == [text for _, text, by in tokens if by == producer]
    counts = Counter(by for _, _, by in tokens)
    assert texts_of(page, "#legend li") == [f"{name} {counts[name]}" for name in PRODUCERS]
    assert counts["accepted"] == usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert sum(counts.values()) == usage["completion_tokens"]
    assert page.locator("#plain .plain").count() == 24

    rows = page.locator("#speeds tr:not([aria-hidden])")
    assert texts_of(page, "#speeds tr:first-child td")[1:] == [f"{stats['tau']:.2f}", "24", str(stats["steps"])]
    assert rows.nth(1).locator("td").all_text_contents()[1:] == ["1.00", "24", "24"]
    expect(page.locator("#ratio")).to_contain_text("times as fast as plain decoding. The texts are the same")
    rates = [f"{100 * rate:.0f} %" for rate in stats["by_position"]]
    assert texts_of(page, "#bars td:last-child") == rates

    page.focus("#at")
    for number, step in enumerate(steps, 1):
        page.keyboard.press("Home" if number == 1 else "ArrowRight")
        expect(page.locator("#where")).to_have_text(f"Step {number} of {len(steps)}")
        check_step(page, step)
    page.click("#back")
    check_step(page, steps[-2])
    page.click("#drafted .token >> nth=0")
    check_step(page, steps[0])


def check_step(page: Page, step: dict) -> None:
    """What is shown of a step: its drafts, and what became of each."""
    kept, (_, last, by) = [t for t in step["tokens"] if t[2] == "accepted"], step["tokens"][-1]
    drafts = [boxed(text) for _, text in step["drafts"]]
    cards = [f"draft {i}{text}✓ accepted" for i, text in enumerate(drafts[: len(kept)], 1)]
    if by == "recovered":
        cards.append(f"draft {len(kept) + 1}{drafts[len(kept)]} → {boxed(last)}✗ replaced")
    cards += [f"draft {i}{drafts[i - 1]}not used" for i in range(len(cards) + 1, len(drafts) + 1)]
    alone = {"bonus": "+ bonus", "plain": "plain"}.get(by)  # plain: K adapts, down to 0
    cards += [f"no draft{boxed(last)}{alone}"] if alone else []
    assert texts_of(page, "#cards li") == cards
    assert texts_of(page, "#drafted .shown-step") == [text for _, text, _ in step["tokens"]]
    expect(page.locator("#told")).to_contain_text(f"“{boxed(last)}”")


def test_switches_reach_the_request(page):
    asked: list[dict] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.post_data else None)
    page.fill("#prompt", "import os\nimport")
    for name, value in (("drafter", "lookup"), ("num_drafts", "2"), ("rule", "token")):
        page.select_option(f"#{name}", value)
    for name, value in (("temperature", "0.25"), ("top_p", "0.8"), ("seed", "7")):
        page.fill(f"#{name}", value)
    generate(page, 5)
    page.select_option("#num_drafts", "0")
    page.uncheck("#compare")
    generate(page, 4)
    assert texts_of(page, "#legend li")[-1] == "plain 4" and page.locator("#plain").is_hidden()
    expect(page.locator("#told")).to_contain_text("Nothing was drafted")

    common = {"model": "embedded", "drafter": "lookup", "rule": "token", "prompt": "import os\nimport", "seed": 7}
    common |= {"temperature": 0.25, "top_p": 0.8}
    common |= {"stream": True, "stream_options": {"include_usage": True}, "specdec": {"steps": True}}
    changes = [
        {"max_tokens": 5, "num_drafts": 2},
        {"max_tokens": 5, "num_drafts": 0},
        {"max_tokens": 4, "num_drafts": 0},
    ]
    assert asked == [{**common, **change} for change in changes]


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stopping_cancels(page, server, way):
    page.fill("#max_tokens", "400")
    page.fill("#temperature", "1")
    page.click("#go")
    expect(page.locator("#stop")).to_be_focused()
    page.wait_for_selector("#drafted .token")
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text(re.compile(r"Stopped after \d+ tokens\."))
    expect(page.locator("#go")).to_be_focused()
    assert page.locator("#plain .token").count() == 0
    (lane,) = (lane for lane in server[1].lanes.running if (lane.drafter, lane.rule) == ("model", "coupled"))
    end = time.monotonic() + 10
    while (busy := in_use(lane)) and time.monotonic() < end:
        time.sleep(0.01)
    assert busy == 0


def in_use(lane) -> int:
    usage = lane.engine.usage
    return usage.live + usage.prefilling + usage.waiting + usage.cache_tokens_used


def test_a_conversation(page):
    asked: list[list[dict]] = []
    page.on("request", lambda request: asked.append(request.post_data_json["messages"]) if request.post_data else None)
    page.check("[value=chat]")
    page.uncheck("#compare")
    for content in ("Why?", "And <b>then</b>?"):
        page.fill("#prompt", content)
        generate(page, 6)
    first = {"role": "user", "content": "Why?"}
    answer = {"role": "assistant", "content": "".join(texts_of(page, "#talk .assistant .token"))}
    assert asked == [[first], [first, answer, {"role": "user", "content": "And <b>then</b>?"}]]
    assert texts_of(page, "#talk li") == ["Why?", answer["content"], "And <b>then</b>?"]
    page.click("text=New conversation")
    assert page.locator("#talk li").count() == page.locator("#drafted .token").count() == 0


def test_the_keyboard_is_enough(page):
    order = ["[value=prompt]", "#prompt", "#drafter", "#num_drafts", "#rule", "#temperature", "#top_p", "#seed"]
    order += ["#max_tokens", "#go", "#compare", "#drafted", "#back", "#next", "#play", "#at"]
    page.uncheck("#compare")
    sends(
        page,
        {"specdec": {"steps": [{"drafts": [], "tokens": [[0, "a", "plain"]]}] * 3}},
        {"finish_reason": "stop", "specdec": {}},
    )
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    finish(page)
    page.keyboard.press("Shift+Tab")
    for selector in order:
        expect(page.locator(selector)).to_be_focused()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", selector
        page.keyboard.press("Tab")
    for _ in range(4):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_text("Step 2 of 3")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#where")).to_have_text("Step 3 of 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_on_a_narrow_screen_in_both_schemes(browser, server, scheme):
    with opened(browser, server[0], color_scheme=scheme, viewport={"width": 360, "height": 640}) as page:
        tokens = [[0, "word" * 30, "accepted"], [1, "\n\n\t", "recovered"]]
        steps = [{"drafts": [[0, "word" * 30], [2, " x"], [3, "y"]], "tokens": tokens}]
        steps += [
            {"drafts": [], "tokens": [[1, "a", "plain"]]},
            {"drafts": None, "tokens": [[1, "a", "accepted"], [1, "b", "recovered"]]},  # a tree
            {"drafts": [[1, "a"]], "tokens": [[1, "a", "accepted"], [1, "b", "bonus"]]},
        ]
        stats = {"stats": {"tokens_per_second": 123456.78}}
        sends(page, {"specdec": {"steps": steps}}, {"finish_reason": "stop", "specdec": stats})
        page.fill("#prompt", "wide" * 100)
        page.click("#go")
        finish(page)
        for number in range(4):
            page.evaluate("show", number)
            assert page.evaluate(UNREADABLE) == [True]
            assert page.evaluate("document.documentElement.scrollWidth") == 360
        styles = {
            page.evaluate(f"getComputedStyle(document.querySelector('#legend .{p}')).textDecorationStyle")
            for p in PRODUCERS
        }
        assert len(styles) == len(PRODUCERS)  # not by colour alone
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(244, 246, 248)"
        assert light == (scheme == "light")


def test_generated_text_stays_text_and_hides_nothing(page):
    told = "<img src=x onerror=alert(1)>", "a\u202eb", "\x1b[31m", "\u200b", "\x85", "\x00", "é\t\n", "\U000e0041"
    step = {
        "drafts": [*([0, text] for text in told), [1, "\u2066"]],
        "tokens": [*([0, text, "accepted"] for text in told), [1, "\u200d", "recovered"]],
    }
    sends(
        page,
        {"text": "".join(told) + "\u200d\ufeff", "specdec": {"steps": [step]}},
        {"finish_reason": "stop", "specdec": {}},
    )
    page.uncheck("#compare")
    page.fill("#prompt", "\u202d")
    page.click("#go")
    finish(page)
    expected = [
        "U+202D",
        told[0],
        "aU+202Eb",
        "U+001B[31m",
        "U+200B",
        "U+0085",
        "U+0000",
        "é\t\n",
        "U+E0041",
        "U+200D",
        "U+FEFF",
    ]
    assert page.locator("#drafted").text_content() == "".join(expected)
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", page.inner_text("main")
    )
    assert page.locator("img").count() == 0
    policy = page.request.get(page.url).headers["content-security-policy"]
    assert "'unsafe" not in policy and "default-src 'none'" in policy and "trusted-types 'none'" in policy


def answering(answer: dict | None):
    """What answers a request with this; None: not at all."""
    return lambda route: route.abort() if answer is None else route.fulfill(**answer)


def test_errors_are_told_in_words(browser, server):
    def told(message: str) -> dict:
        return {"error": {"message": message}}

    cases = [
        (
            {"status": 429, "headers": {"Retry-After": "3"}, "json": told("full")},
            "The server is busy: full. Try again in 3 s.",
        ),
        ({"status": 400, "json": told("top_p: got 2")}, "The server refused: top_p: got 2"),
        ({"status": 502, "body": "<html>"}, "The server failed: Bad Gateway"),
        ({"body": f"data: {json.dumps(told('no distribution'))}\n\n"}, "The server failed: no distribution"),
        ({"body": 'data: {"choices": []}\n\n'}, "The connection ended before the text did."),
        (None, "The server does not answer. Is it still running?"),
    ]
    with opened(browser, server[0], tolerated="Failed to load resource") as page:
        for answer, words in cases:
            page.route("**/v1/completions", answering(answer))
            page.click("#go")
            expect(page.get_by_role("alert")).to_have_text(words)
            expect(page.locator("#go")).to_be_enabled()
            page.unroute("**/v1/completions")
        broken = "new Response(new ReadableStream({ start: (controller) => controller.error(new TypeError()) }))"
        page.evaluate(f"fetch = async () => {broken}")
        page.click("#go")
        expect(page.get_by_role("alert")).to_have_text("The connection ended before the text did.")


def test_a_key_is_asked_for_where_one_is_needed(browser, pair):
    with serving(pair, None, (KEY,)) as (url, _), opened(browser, url, tolerated="status of 401") as page:
        expect(page.locator("#key")).to_be_focused()
        for key in ("a-wrong-key", KEY):
            assert page.evaluate("sessionStorage.length") == 0
            page.fill("#key", key)
            page.keyboard.press("Enter")
            if key != KEY:
                expect(page.get_by_role("alert")).to_have_text("The server does not know this API key.")
        expect(page.locator("#status")).to_have_text("Ready.")
        assert page.locator("#key-form").is_hidden() and page.get_by_role("alert").text_content() == ""
        generate(page, 2)
        page.reload()
        expect(page.locator("#status")).to_have_text("Ready.")
        assert page.evaluate("[JSON.stringify(localStorage), document.cookie, location.search]") == ["{}", "", ""]
        assert page.locator("[value=chat]").is_disabled()  # this server's tokenizer has no chat template
        page.evaluate("sessionStorage.setItem('specdec-key', 'withdrawn')")
        page.fill("#max_tokens", "2")
        page.click("#go")
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        finish(page)  # what was asked for goes on
