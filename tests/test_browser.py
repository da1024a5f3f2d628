"""studies/page.html in a real browser: what pointing shows, the keyboard, hostile text, nothing leaves it.

Run: pytest tests/test_browser.py (needs Chromium or Chrome, and `pip install playwright`; skipped without)
"""

import math
import re
import shutil
from collections import defaultdict

import pytest
import torch
from test_page import GOOD, HOSTILE, long_group, rollout
from test_shear import slow_closest

from credit.shear_settings import Settings, closest_by_rollout, group_weights
from studies import page


@pytest.fixture(scope="module")
def chromium():
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(chromium, tmp_path):
    """From a page's text to the page in a browser; no request may leave it, and no error come."""
    asked, blocked, said, contexts = set(), set(), [], []

    def load(text):
        (tmp_path / "page.html").write_text(text)
        contexts.append(chromium.new_context(viewport={"width": 1200, "height": 800}))
        page = contexts[-1].new_page()
        page.on("request", lambda request: asked.add(request.url))
        page.on("requestfailed", lambda request: blocked.add(request.url) if request.failure == "csp" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield load
    for context in contexts:
        context.close()
    assert said == [] and asked - blocked == {(tmp_path / "page.html").as_uri()}


def card(shown, number):
    """A rollout's card; rollouts count from 1 on the page."""
    return shown.locator(f'section[aria-label^="rollout {number},"]')


def token(shown, number, place):
    """A token of a rollout."""
    return card(shown, number).locator(".token").nth(place)


def marked(shown, name):
    """The rollout in which tokens are marked, and their text; None where none are."""
    sections = shown.locator(f"section:has(.{name})")
    if not sections.count():
        return None
    number = int(sections.get_attribute("aria-label").split()[1].strip(","))
    return number, "".join(sections.locator(f".{name}").all_text_contents())


def states_group():
    """Rows of 4 rollouts of 24 tokens, and of each its spans with the opposing ones that POT finds closest."""
    generator = torch.Generator().manual_seed(3)
    mask, correct = torch.ones(4, 24, dtype=torch.bool), torch.tensor([True, False, True, False])
    states = torch.randn(4, 24, 5, generator=generator), mask, correct
    settings = Settings(window=8, stride=4, eps=0.3, tol=1e-5)  # a large eps, as POT takes long near exact transport
    group = []
    stats = defaultdict(list)
    group_weights(*states, settings, stats)
    for row, spans in enumerate(closest_by_rollout(stats["closest"][0], mask, correct, 8, 4)):
        tokens = [f"{'abcd'[row]}{place} " for place in range(24)]
        omega = [max(span.distance for span in spans if span.start <= place < span.end) for place in range(24)]
        verdict = dict(score=float(correct[row]), advantage=1.0 if correct[row] else -1.0)
        group.append(rollout(tokens, omega, spans=spans, **verdict))
    return group, slow_closest(*states, "value", eps=0.3, window=8, stride=4)


def test_pointing_at_a_token_lights_up_the_closest_opposing_span(look):
    """The span that POT names in float64, where it stands; the foot says its text, its rollout and the distance."""
    group, closest = states_group()
    shown = look(page.as_html([group], "states"))
    for row, place in ((0, 1), (1, 13), (3, 23)):
        token(shown, row + 1, place).hover()
        covering = [span for span in closest[row] if span[0] <= place < span[1]]
        start, end, _, other, begin, stop = max(covering, key=lambda span: span[2])
        assert marked(shown, "now") == (row + 1, f"{'abcd'[row]}{place} ")
        assert marked(shown, "here") == (row + 1, "".join(group[row]["tokens"][start:end]))
        assert marked(shown, "there") == (other + 1, "".join(group[other]["tokens"][begin:stop]))
        said = shown.locator("footer").text_content()
        weight = f"{group[row]['weights']['shear'][place]:.3g}"
        assert f"has weight {weight}." in said and f"rollout {other + 1}, at distance {weight}." in said
        assert f"of the {'wrong' if group[row]['score'] else 'right'} attempts" in said
    shown.keyboard.press("Escape")
    assert marked(shown, "here") is None and "Point at a token" in shown.locator("footer").text_content()


def test_the_keyboard_reaches_tokens_lines_groups_and_methods(look):
    """Tab to a rollout, arrows to its tokens and lines; outside of rollouts arrows change the group."""
    texts = ["a", "b\n", "c", "d\n", "e"]
    rows = [rollout(texts, [0.1 * place for place in range(5)], score=score) for score in (1.0, 0.0)]
    shown = look(page.as_html([rows, [GOOD]], "keys"))
    for _ in range(20):
        shown.keyboard.press("Tab")
        if shown.evaluate("document.activeElement.className") == "text":
            break
    went = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "End", "Home"):
        shown.keyboard.press(key)
        went.append(marked(shown, "now")[1])
    assert went == ["a", "b\n", "c", "d\n", "c", "b\n", "e", "a"]
    assert "has weight 0; it is token 1 of 5." in shown.locator("footer").text_content()
    shown.locator("#next").focus()
    shown.keyboard.press("Enter")
    assert shown.locator("section").count() == 1 and shown.locator("#next").is_disabled()
    shown.locator("#previous").focus()
    shown.keyboard.press("ArrowLeft")
    assert shown.locator("section").count() == 2


def test_it_opens_on_an_error_about_the_middle_and_says_what_is_seen(look):
    """Right answers with an error are right by luck, kinds are words, buttons change the method over the rollouts."""
    early = rollout(list("abcdef"), [0.5] * 6, score=0.0, advantage=-1.0, first_error=[0, "copy", 1])
    middle = rollout(["a ", "b ", "c ", "d", " ", "f"], [0.1, 0.1, 0.5, 0.5, 0.9, 0.9], score=0.0, advantage=-1.0)
    middle |= {"first_error": [2, "arith", 5]}
    lucky = rollout(list("abcdef"), [0.5] * 6, first_error=[3, "lookup", 4])
    shown = look(page.as_html(page.with_controls([[early, rollout(["g"], [1.0])], [lucky, middle]]), "two groups"))
    assert shown.locator("#choice").evaluate("choice => choice.selectedIndex") == 1
    assert marked(shown, "now") == (2, "d")
    assert card(shown, 1).locator("h2").text_content().startswith("\u2713 right by luck")
    assert card(shown, 1).locator(".kind").text_content() == "\u2717 wrong value put in"
    assert card(shown, 2).locator(".error").all_text_contents() == ["c ", "d", " "]
    assert "SHEAR saw only" in shown.locator("#about").text_content()
    strength = "token => token.style.getPropertyValue('--strength')"
    assert token(shown, 2, 0).evaluate(strength) == "0.111"
    shown.get_by_role("button", name="oracle").click()
    assert "was told the first error" in shown.locator("#about").text_content()
    assert [token(shown, 2, place).evaluate(strength) for place in (1, 2, 4, 5)] == ["0.000", "1.000", "1.000", "0.000"]
    assert [token(shown, 1, place).evaluate(strength) for place in (0, 3)] == ["1.000", "1.000"]
    assert marked(shown, "now") == (2, "d")
    box = card(shown, 2).locator("svg").bounding_box()
    shown.mouse.click(box["x"] + box["width"] * 5.5 / 6, box["y"] + 5)
    assert marked(shown, "now") == (2, "f")


def test_signs_and_unknown_weights_are_seen_without_colour(look):
    """A negative weight turns the sign of A around and is wavy; an unknown one is dashed; so says the legend."""
    row = rollout(["a", "b", "c", "d", ""], [0.5, -0.25, None, math.nan, 0.0], score=0.0, advantage=-0.5)
    shown = look(page.as_html([[row, rollout(["e"], [1.0], score=None, advantage=0.0)]], "signs"))
    classes = [set(shown.locator("main .token").nth(place).get_attribute("class").split()) for place in range(-6, 0)]
    expected = [{"down"}, {"up", "turned"}, {"even", "unknown"}, {"even", "unknown"}, {"even"}, {"even"}]
    assert [each - {"token", "now"} for each in classes] == expected
    legend = shown.locator("#legend").text_content()
    assert "wavy: sign turned" in legend and "dashed: weight unknown" in legend and "first error" not in legend
    assert card(shown, 2).locator("h2").text_content().startswith("? no verdict")


def test_hostile_text_is_shown_as_text(look):
    """In every place, and even without the policy: no element, no script, no request comes of it."""
    everything = "".join(HOSTILE)
    row = rollout(HOSTILE, [0.5] * len(HOSTILE), problem=everything, reason=everything, answer=everything)
    row |= {"first_error": [1, HOSTILE[2], 3], "spans": [[0, 9, 0.5, 1, 0, 9]], "score": 0.0, "advantage": -1.0}
    row["weights"] = {text: [0.5] * len(HOSTILE) for text in ("shear", *HOSTILE)}
    other = row | {"spans": [[0, 9, 0.5, 0, 0, 9]], "score": 1.0, "advantage": 1.0, "first_error": [0, "__proto__", 1]}
    text = re.sub("<meta http-equiv[^>]*>", "", page.as_html([[row, other]], everything))
    shown = look(text)
    assert not shown.evaluate("window.ran ?? document.title === 'ran'")
    names = set(shown.evaluate("[...document.querySelectorAll('*')].map(element => element.localName)"))
    assert not names & {"img", "iframe", "a", "base", "form", "input", "object", "math", "link"}
    assert shown.locator("script").count() == 2 and shown.locator("style").count() == 1
    plain = "token => token.innerText === '' ? '' : token.textContent"
    for place, text in enumerate(HOSTILE):
        expected = text.replace("\r\n", "\n").replace("\ud800", "\ufffd")
        found = token(shown, 1, place).evaluate(plain).replace("\r\n", "\n").replace("\ud800", "\ufffd")
        assert found == expected
        token(shown, 1, place).dispatch_event("pointerover", {"bubbles": True})
        assert marked(shown, "now")[0] == 1
    assert shown.get_by_role("button", name=HOSTILE[2]).count() == 1


def test_a_script_that_came_into_the_page_is_stopped(look):
    """By the policy, as are its requests."""
    foreign = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
    foreign += "<link rel=stylesheet href=x.css><iframe src=y.html></iframe>"
    shown = look(page.as_html([[GOOD]], "own").replace("<header>", f"{foreign}<header>", 1))
    assert shown.title() == "own" and shown.locator("section").count() == 1


def test_a_long_group_is_whole_and_findable(look):
    """8 x 3,000 tokens; the closest span is scrolled into sight inside of its card."""
    group = long_group()
    for row in group:
        mine = row["score"] == 1
        row["spans"] = [[1000, 1100, 0.5, 3 if mine else 0, 2000, 2100]]
    shown = look(page.as_html([group], "long"))
    assert shown.locator("main .token").count() == 8 * 3000
    box = card(shown, 1).locator("svg").bounding_box()
    shown.mouse.click(box["x"] + box["width"] * 1050.5 / 3000, box["y"] + 5)
    assert marked(shown, "there")[0] == 4
    for number, place in ((1, 1050), (4, 2000)):
        outer, inner = card(shown, number).locator(".text").bounding_box(), token(shown, number, place).bounding_box()
        assert outer["y"] <= inner["y"] <= outer["y"] + outer["height"]
