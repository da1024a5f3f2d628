"""lab/tools/page.html in a real browser: pointing, the keyboard, hostile text, and no requests.

It needs Chromium or Chrome, and `pip install playwright`; otherwise it is skipped.
"""

import re
import shutil
from pathlib import Path

import pytest
from builders.case_files import cases
from pages import HOSTILE, page_row

from lab.tools import page

CASES = Path(__file__).with_name("cases")
WAIT_MS = 300_000  # a busy machine is slow


def groups_of(name):
    """The groups of a page in lab/tests/cases/pages.jsonl."""
    pages = {case["page"]: case["groups"] for case in cases("pages.jsonl", CASES)}
    return [[page_row(**row) for row in rows] for rows in pages[name]]


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not program:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")
    with playwright.sync_playwright() as driver:
        options = dict(executable_path=program, args=["--no-sandbox"], timeout=WAIT_MS)
        browser = driver.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture
def look(chromium, tmp_path):
    """A function that opens groups, or a page of lab/tests/cases/pages.jsonl, in a browser.

    `change` alters the page's text first. No request may leave the page, and no error may come.
    """
    asked = set()
    said = []
    path = tmp_path / "page.html"

    def forget(request):
        if request.failure == "csp":
            asked.remove(request.url)

    def load(groups, change=str):
        groups = groups_of(groups) if isinstance(groups, str) else groups
        path.write_text(change(page.as_html(groups, "title")))
        shown = chromium.new_page(viewport={"width": 1200, "height": 800})
        shown.set_default_timeout(WAIT_MS)
        shown.on("request", lambda request: asked.add(request.url))
        shown.on("requestfailed", forget)
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("dialog", lambda dialog: said.append(dialog.message))
        shown.goto(path.as_uri())
        return shown

    yield load
    for context in chromium.contexts:
        context.close()
    assert said == [] and asked == {path.as_uri()}


def card(shown, number):
    """A rollout's card; rollouts count from 1 on the page."""
    return shown.locator(f'section[aria-label^="rollout {number},"]')


def token(shown, number, place):
    return card(shown, number).locator(".token").nth(place)


def foot(shown):
    return shown.locator("footer").text_content()


def press(shown, name):
    """Click a button."""
    shown.get_by_role("button", name=name).click()


def marked(shown, name):
    """The rollout in which tokens are marked, and their text; None where none are."""
    sections = shown.locator(f"section:has(.{name})")
    if not sections.count():
        return None
    number = int(sections.get_attribute("aria-label").split()[1].strip(","))
    return number, "".join(sections.locator(f".{name}").all_text_contents())


def test_pointing_at_a_token_lights_up_the_closest_opposing_span(look):
    """The span is marked in its rollout; the foot tells token, rollout and distance."""
    shown = look("spans")
    token(shown, 1, 1).hover()  # two spans hold it, of which the second has the larger distance
    assert marked(shown, "now") == (1, "b")
    assert marked(shown, "here") == (1, "bcd") and marked(shown, "there") == (2, "gh")
    assert "has weight 0.4: its credit is A" in foot(shown)
    assert "lies 0.4 from the closest span of the wrong rollouts" in foot(shown)
    assert "of rollout 2." in foot(shown)
    press(shown, "grpo")  # which has no distances
    assert marked(shown, "now") and marked(shown, "here") is None
    assert "weight 1:" in foot(shown) and "lies" not in foot(shown)
    shown.keyboard.press("Escape")
    assert marked(shown, "now") is None and "Point at a token" in foot(shown)


def test_the_keyboard_reaches_tokens_lines_groups_and_methods(look):
    """Tab goes to a rollout, arrows to its tokens and lines.

    Outside of rollouts arrows change the group.
    """
    shown = look("keys")
    for _ in range(20):
        shown.keyboard.press("Tab")
        if shown.evaluate("document.activeElement.className") == "text":
            break
    went = []
    for key in "ArrowRight ArrowRight ArrowDown ArrowRight ArrowUp ArrowLeft End Home".split():
        shown.keyboard.press(key)
        went.append(marked(shown, "now")[1])
    assert went == ["a", "b\n", "c", "d\n", "c", "b\n", "e", "a"]
    shown.locator("#next").focus()
    shown.keyboard.press("Enter")
    assert shown.locator("section").count() == 1
    shown.locator("#previous").focus()
    shown.keyboard.press("ArrowLeft")
    assert shown.locator("section").count() == 2


def test_hostile_text_is_shown_as_text(look):
    """Hostile text makes no element, script or request anywhere, even without the policy."""
    everything = "".join(HOSTILE)
    flat = [0.5] * len(HOSTILE)
    about = dict.fromkeys(("problem", "reason", "answer"), everything)
    row = page_row(HOSTILE, flat, **about, score=0, advantage=-1, first_error=[1, HOSTILE[2], 3])
    row["weights"] = dict.fromkeys(("shear", *HOSTILE), flat)
    shown = look([[row]], lambda text: re.sub("<meta http-equiv[^>]*>", "", text))
    assert not shown.evaluate("window.ran ?? document.title === 'ran'")
    foreign = "img,iframe,base,form,input,object,math,link"
    assert not shown.locator(foreign).count()
    assert shown.locator("script").count() == 2 and shown.locator("style").count() == 1
    plain = "token => token.innerText === '' ? '' : token.textContent"

    def told(text):
        return text.replace("\r\n", "\n").replace("\ud800", "\ufffd")

    for place, text in enumerate(HOSTILE):
        assert told(token(shown, 1, place).evaluate(plain)) == told(text)
        token(shown, 1, place).dispatch_event("pointerover", {"bubbles": True})
        assert marked(shown, "now")[0] == 1
    assert shown.get_by_role("button", name=HOSTILE[2]).count() == 1
