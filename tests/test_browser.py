"""harness/page.html in a real browser: what pointing shows, the keyboard, hostile text, nothing
leaves it.

It needs Chromium or Chrome, and `pip install playwright`, and is skipped without.
"""

import math
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from made import GOOD, HOSTILE, Numbers, long_group, page_row, without_text

from credit.batch import Batch
from credit.measures import effective_weights
from credit.methods import oracle
from credit.shear_settings import Settings, closest_by_rollout, group_weights, in_nbar
from harness import page
from tasks.toy import FirstError


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
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
        page.on(
            "requestfailed",
            lambda request: blocked.add(request.url) if request.failure == "csp" else None,
        )
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
    return card(shown, number).locator(".token").nth(place)


def foot(shown):
    return shown.locator("footer").text_content()


def press(shown, name):
    """Clicks a button."""
    shown.get_by_role("button", name=name).click()


def click_at(shown, number, place, length):
    """Clicks a token's place in the strip of its rollout."""
    box = card(shown, number).locator("svg").bounding_box()
    shown.mouse.click(box["x"] + box["width"] * (place + 0.5) / length, box["y"] + 5)


def wrong_row(*parts, **other):
    """A rollout with a wrong answer."""
    return page_row(*parts, **{"score": 0.0, "advantage": -1.0} | other)


def shades(shown, number, *places):
    """How strongly tokens are shaded, "0" to "1"."""
    strength = "token => token.style.getPropertyValue('--strength')"
    return [token(shown, number, place).evaluate(strength) for place in places]


def marked(shown, name):
    """The rollout in which tokens are marked, and their text; None where none are."""
    sections = shown.locator(f"section:has(.{name})")
    if not sections.count():
        return None
    number = int(sections.get_attribute("aria-label").split()[1].strip(","))
    return number, "".join(sections.locator(f".{name}").all_text_contents())


def states_group():
    """Rows of 4 rollouts of 24 tokens, with the spans that training finds closest."""
    states = torch.randn(4, 24, 5, generator=torch.Generator().manual_seed(3))
    mask, correct = torch.ones(4, 24, dtype=torch.bool), torch.tensor([True, False, True, False])
    settings = Settings(window=8, stride=4, eps=0.3)
    omega, nbar, closest = group_weights(states, mask, correct, settings)
    spans = closest_by_rollout(in_nbar(closest, nbar), mask, correct, 8, 4)
    rows = []
    for number, make in enumerate([page_row, wrong_row] * 2):
        tokens = [f"{'abcd'[number]}{place} " for place in range(24)]
        rows.append(make(tokens, omega[number].tolist(), spans=spans[number]))
    return rows


def test_pointing_at_a_token_lights_up_the_closest_opposing_span(look):
    """Where it stands; the foot says its text, its rollout and the distance."""
    group = states_group()
    shown = look(page.as_html([group], "states"))
    for number, place in ((0, 1), (1, 13), (3, 23)):
        token(shown, number + 1, place).hover()
        row = group[number]
        covering = [span for span in row["spans"] if span.start <= place < span.end]
        start, end, _, other, begin, stop = max(covering, key=lambda span: span.distance)
        assert marked(shown, "now") == (number + 1, row["tokens"][place])
        assert marked(shown, "here") == (number + 1, "".join(row["tokens"][start:end]))
        opposing = "".join(group[other]["tokens"][begin:stop])
        assert marked(shown, "there") == (other + 1, opposing)
        weight = f"{row['weights']['shear'][place]:.3g}"
        side = "wrong" if row["score"] else "right"
        for words in (
            f"has weight {weight}: its credit is A",
            f"of rollout {other + 1}.",
            f"lies {weight} from the closest span of the {side} rollouts",
        ):
            assert words in foot(shown)
    press(shown, "grpo")  # which has no distances
    assert marked(shown, "now") and marked(shown, "here") is None
    assert "weight 1:" in foot(shown) and "lies" not in foot(shown)
    assert not shown.locator("#steps").is_visible() and shown.locator("#above").is_disabled()
    shown.keyboard.press("Escape")
    assert marked(shown, "here") is None and "Point at a token" in foot(shown)


def test_the_keyboard_reaches_tokens_lines_groups_and_methods(look):
    """Tab to a rollout, arrows to its tokens and lines; outside of rollouts arrows change the
    group.
    """
    parts = ["a", "b\n", "c", "d\n", "e"], [0.1 * place for place in range(5)]
    shown = look(page.as_html([[page_row(*parts), page_row(*parts, score=0.0)], [GOOD]], "keys"))
    for _ in range(20):
        shown.keyboard.press("Tab")
        if shown.evaluate("document.activeElement.className") == "text":
            break
    went = []
    for key in ("Right", "Right", "Down", "Right", "Up", "Left"):
        shown.keyboard.press(f"Arrow{key}")
        went.append(marked(shown, "now")[1])
    for key in ("End", "Home"):
        shown.keyboard.press(key)
        went.append(marked(shown, "now")[1])
    assert went == ["a", "b\n", "c", "d\n", "c", "b\n", "e", "a"]
    assert "(token 1 of 5) has weight 0:" in foot(shown)
    shown.locator("#next").focus()
    shown.keyboard.press("Enter")
    assert shown.locator("section").count() == 1 and shown.locator("#next").is_disabled()
    shown.locator("#previous").focus()
    shown.keyboard.press("ArrowLeft")
    assert shown.locator("section").count() == 2


def test_it_opens_on_an_error_about_the_middle_and_says_what_is_seen(look):
    """Right answers with an error are right by luck, kinds are words, buttons change the method
    over the rollouts.
    """
    flat = list("abcdef"), [0.5] * 6
    early, lucky = wrong_row(*flat, first_error=[0, "copy", 1]), page_row(*flat)
    lucky["first_error"] = [3, "lookup", 4]
    weights = [0.1, 0.1, 0.5, 0.5, 0.9, 0.9]
    middle = wrong_row(["a ", "b ", "c ", "d", " ", "f"], weights, first_error=[2, "arith", 5])
    shown = look(page.as_html([[early, page_row(["g"], [1.0])], [lucky, middle]], "two groups"))
    assert shown.locator("#choice").evaluate("choice => choice.selectedIndex") == 1
    assert marked(shown, "now") == (2, "d")
    assert card(shown, 1).locator("h2").text_content().startswith("\u2713 right by luck")
    assert card(shown, 1).locator(".kind").text_content() == "\u2717 wrong value put in"
    assert card(shown, 2).locator(".error").all_text_contents() == ["c ", "d", " "]
    assert "SHEAR is told only" in shown.locator("#about").text_content()
    assert shades(shown, 2, 0) == ["0.111"]
    press(shown, "oracle")
    assert "is told the first error" in shown.locator("#about").text_content()
    assert shades(shown, 2, 1, 2, 4, 5) == ["0.000", "1.000", "1.000", "0.000"]
    assert shades(shown, 1, 0, 3) == ["1.000"] * 2
    assert marked(shown, "now") == (2, "d")
    click_at(shown, 2, 5, 6)
    assert marked(shown, "now") == (2, "f")


def test_it_opens_beside_a_right_rollout_without_an_error(look):
    """Not on the clearer error whose closest rollout is right by luck; both lead, and the foot
    covers neither.
    """
    flat = list("abcd"), [0.5] * 4
    by_luck = page_row(*flat, first_error=[1, "copy", 2])
    clear = wrong_row(*flat, first_error=[2, "copy", 3], spans=[[0, 4, 0.5, 0, 0, 4]])
    late = clear | {"first_error": [3, "copy", 4], "spans": [[0, 4, 0.5, 2, 0, 4]]}
    groups = [[by_luck, wrong, page_row(list("efgh"), [0.5] * 4)] for wrong in (clear, late)]
    shown = look(page.as_html(groups, "pairs"))
    assert marked(shown, "now") == (2, "d") and marked(shown, "there") == (3, "efgh")
    first = [section.get_attribute("aria-label")[:9] for section in shown.locator("section").all()]
    assert first == ["rollout 3", "rollout 2", "rollout 1"]
    foot = shown.locator("footer").bounding_box()
    for mark in (".here", ".there"):
        box = shown.locator(mark).last.bounding_box()
        assert box["y"] + box["height"] <= foot["y"]


def test_the_foot_has_a_place_of_its_own(look):
    """Below the rollouts, never over them; the keyboard scrolls the token into sight."""
    rows = []
    for number in (0, 1):
        span = [70, 80, 0.5, 1 - number, 70, 80]
        rows.append(page_row(["line\n"] * 80, [0.5] * 80, spans=[span], score=number))
    shown = look(page.as_html([rows], "tall"))
    view, foot = shown.locator("#view").bounding_box(), shown.locator("footer").bounding_box()
    assert view["y"] + view["height"] <= foot["y"] and foot["y"] + foot["height"] <= 800
    shown.locator(".text").first.focus()
    shown.keyboard.press("End")
    number, _ = marked(shown, "now")
    box = token(shown, number, 79).bounding_box()
    assert view["y"] <= box["y"] and box["y"] + box["height"] <= foot["y"]


def test_shades_can_begin_at_the_floor(look):
    """The smallest weight of the group is then not shaded, the largest as before; GRPO has no
    floor.
    """
    row = page_row(list("abc"), [0.1, 0.3, 0.5], spans=[[0, 3, 0.5, 1, 0, 1]])
    shown = look(page.as_html([[row, wrong_row(["d"], [0.2])]], "floor"))
    plain, above = ["0.200", "0.600", "1.000"], ["0.000", "0.500", "1.000"]
    assert shades(shown, 1, 0, 1, 2) == plain
    for expected in (above, plain):
        press(shown, "shade above the floor")
        assert shades(shown, 1, 0, 1, 2) == expected
    assert "floor (0.1:" in shown.locator("#steps").text_content()


def test_equal_verdicts_give_no_credit_and_before_stands_beside_after(look):
    """The half says so, nothing in it is shaded, and its weights of 1 count in no scale; the page
    opens on neither, a button shows both.
    """
    both = [make(["a"], [0.5], when="before training") for make in (wrong_row, page_row)]
    both += [page_row(["b"], [1.0], when="after training", advantage=0.0)] * 2
    shown = look(page.as_html([both, [GOOD]], "pair"))
    assert shown.locator("section").count() == 1
    press(shown, "before and after")
    before, after = (heading.text_content() for heading in shown.locator("h3").all())
    assert before == "before training: 1 of 2 right"
    assert after.startswith("after training: 2 of 2 right. Equal verdicts")
    assert "no token gets credit" in after
    left, right = (half.bounding_box() for half in shown.locator(".cards").all())
    assert left["y"] == right["y"] and left["x"] < right["x"]
    assert [*shades(shown, 1, 0), *shades(shown, 3, 0)] == ["1.000", "0.000"]


def test_controls_are_those_of_training(look):
    """On a wrong rollout with an error, one without, a right one by luck, and one without a
    verdict.
    """
    scores, advantages = [0.0, 0.0, 1.0, None], [-1.0, -1.0, 2.0, 0.0]
    errors = [[1, "arith", 3], None, [0, "copy", 1], None]
    rows = []
    for score, advantage, error in zip(scores, advantages, errors, strict=True):
        about = dict(score=score, advantage=advantage, first_error=error)
        rows.append(page_row(list("abcd"), [0.5] * 4, **about))
    found = [error and FirstError(*error) for error in errors]
    task = SimpleNamespace(first_error=lambda problem, tokens: found[int(tokens[0])])
    mask = torch.ones(4, 4, dtype=torch.bool)
    context = SimpleNamespace(task=task, tokenizer=Numbers())
    rewards, of_rollouts = torch.tensor([0.0, 0.0, 1.0, math.nan]), torch.tensor(advantages)
    batch = Batch(without_text(mask), rewards, of_rollouts, 4, [{}], ["drawn"] * 4)
    expected = effective_weights(oracle(batch, context), of_rollouts, mask)
    weights = look(page.as_html([rows], "controls")).evaluate("groups[0].map(row => row.weights)")
    assert [each["oracle"] for each in weights] == expected.tolist()
    assert all(each["grpo"] == [1] * 4 for each in weights)
    scaled = GOOD | {"weights": {"grpo": [0.5, 0.5]}}  # by --negative-scale
    shown = look(page.as_html([[scaled]], "scaled"))
    assert shown.evaluate("groups[0][0].weights") == scaled["weights"]


def test_signs_and_unknown_weights_are_seen_without_colour(look):
    """A negative weight turns the sign of A around and is wavy; an unknown one is dashed; so says
    the legend.
    """
    row = wrong_row(["a", "b", "c", "d", ""], [0.5, -0.25, None, math.nan, 0.0])
    unsure = page_row(["e"], [1.0], score=None, advantage=0.0)
    shown = look(page.as_html([[row, unsure]], "signs"))
    tokens = shown.locator("main .token")
    classes = [tokens.nth(place).get_attribute("class").split() for place in range(-6, 0)]
    unknown = {"even", "unknown"}
    expected = [{"down"}, {"up", "turned"}, unknown, unknown, {"even"}, {"even"}]
    assert [{*names} - {"token", "now"} for names in classes] == expected
    legend = shown.locator("#legend").text_content()
    assert "wavy: sign turned" in legend and "dashed: weight unknown" in legend
    assert "first error" not in legend
    assert card(shown, 2).locator("h2").text_content().startswith("? no verdict")


def test_hostile_text_is_shown_as_text(look):
    """In every place, and even without the policy: no element, no script, no request comes
    of it.
    """
    everything, flat = "".join(HOSTILE), [0.5] * len(HOSTILE)
    about = dict.fromkeys(("problem", "reason", "answer"), everything)
    weights = dict.fromkeys(("shear", *HOSTILE), flat)
    row = wrong_row(HOSTILE, flat, **about, first_error=[1, HOSTILE[2], 3])
    other = page_row(HOSTILE, flat, **about, first_error=[0, "__proto__", 1])
    for number, each in enumerate((row, other)):
        each |= {"weights": weights, "spans": [[0, 9, 0.5, 1 - number, 0, 9]]}
    text = re.sub("<meta http-equiv[^>]*>", "", page.as_html([[row, other]], everything))
    shown = look(text)
    assert not shown.evaluate("window.ran ?? document.title === 'ran'")
    elements = "[...document.querySelectorAll('*')].map(element => element.localName)"
    counts = Counter(shown.evaluate(elements))
    foreign = "img iframe base form input object math link".split()
    assert not sum(counts[name] for name in foreign)
    assert (counts["a"], counts["script"], counts["style"]) == (1, 2, 1)  # a: to the paper
    plain = "token => token.innerText === '' ? '' : token.textContent"

    def told(text):
        return text.replace("\r\n", "\n").replace("\ud800", "\ufffd")

    for place, text in enumerate(HOSTILE):
        assert told(token(shown, 1, place).evaluate(plain)) == told(text)
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
        row["spans"] = [[1000, 1100, 0.5, 3 if row["score"] else 0, 2000, 2100]]
    shown = look(page.as_html([group], "long"))
    assert shown.locator("main .token").count() == 8 * 3000
    click_at(shown, 1, 1050, 3000)
    assert marked(shown, "there")[0] == 4
    for number, place in ((1, 1050), (4, 2000)):
        outer = card(shown, number).locator(".text").bounding_box()
        inner = token(shown, number, place).bounding_box()
        assert outer["y"] <= inner["y"] <= outer["y"] + outer["height"]
