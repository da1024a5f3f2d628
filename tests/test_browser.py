"""harness/page.html in a real browser: what pointing shows, the keyboard, hostile text, nothing
leaves it.

It needs Chromium or Chrome, and `pip install playwright`, and is skipped without.
"""

import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from cases import Numbers, without_text
from test_page import GOOD, HOSTILE, long_group, rollout
from test_shear import slow_closest

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


def shade(shown, number, place):
    """How strongly a token is shaded, 0 to 1."""
    strength = "token => token.style.getPropertyValue('--strength')"
    return token(shown, number, place).evaluate(strength)


def foot(shown):
    return shown.locator("footer").text_content()


def marked(shown, name):
    """The rollout in which tokens are marked, and their text; None where none are."""
    sections = shown.locator(f"section:has(.{name})")
    if not sections.count():
        return None
    number = int(sections.get_attribute("aria-label").split()[1].strip(","))
    return number, "".join(sections.locator(f".{name}").all_text_contents())


def states_group():
    """Rows of 4 rollouts of 24 tokens, and of each its spans with the opposing ones that POT finds
    closest.
    """
    generator = torch.Generator().manual_seed(3)
    mask, correct = torch.ones(4, 24, dtype=torch.bool), torch.tensor([True, False, True, False])
    states = torch.randn(4, 24, 5, generator=generator), mask, correct
    settings = Settings(
        window=8, stride=4, eps=0.3, tol=1e-5
    )  # a large eps, as POT takes long near exact transport
    group = []
    _, nbar, closest = group_weights(*states, settings)
    for row, spans in enumerate(closest_by_rollout(in_nbar(closest, nbar), mask, correct, 8, 4)):
        tokens = [f"{'abcd'[row]}{place} " for place in range(24)]
        omega = [
            max(span.distance for span in spans if span.start <= place < span.end)
            for place in range(24)
        ]
        verdict = dict(score=float(correct[row]), advantage=1.0 if correct[row] else -1.0)
        group.append(rollout(tokens, omega, spans=spans, **verdict))
    return group, slow_closest(*states, "value", eps=0.3, window=8, stride=4)


def test_pointing_at_a_token_lights_up_the_closest_opposing_span(look):
    """The span that POT names in float64, where it stands; the foot says its text, its rollout and
    the distance.
    """
    group, closest = states_group()
    shown = look(page.as_html([group], "states"))
    for row, place in ((0, 1), (1, 13), (3, 23)):
        token(shown, row + 1, place).hover()
        covering = [span for span in closest[row] if span[0] <= place < span[1]]
        start, end, _, other, begin, stop = max(covering, key=lambda span: span[2])
        assert marked(shown, "now") == (row + 1, f"{'abcd'[row]}{place} ")
        assert marked(shown, "here") == (row + 1, "".join(group[row]["tokens"][start:end]))
        assert marked(shown, "there") == (other + 1, "".join(group[other]["tokens"][begin:stop]))
        said = foot(shown)
        weight = f"{group[row]['weights']['shear'][place]:.3g}"
        side = "wrong" if group[row]["score"] else "right"
        assert (
            f"has weight {weight}: its credit is A" in said and f"of rollout {other + 1}." in said
        )
        assert f"lies {weight} from the closest span of the {side} rollouts" in said
    shown.get_by_role("button", name="grpo").click()  # which has no distances
    assert marked(shown, "now") and marked(shown, "here") is None
    assert "weight 1:" in foot(shown) and "lies" not in foot(shown)
    assert not shown.locator("#steps").is_visible() and shown.locator("#above").is_disabled()
    shown.keyboard.press("Escape")
    assert marked(shown, "here") is None and "Point at a token" in foot(shown)


def test_the_keyboard_reaches_tokens_lines_groups_and_methods(look):
    """Tab to a rollout, arrows to its tokens and lines; outside of rollouts arrows change the
    group.
    """
    texts = ["a", "b\n", "c", "d\n", "e"]
    rows = [
        rollout(texts, [0.1 * place for place in range(5)], score=score) for score in (1.0, 0.0)
    ]
    shown = look(page.as_html([rows, [GOOD]], "keys"))
    for _ in range(20):
        shown.keyboard.press("Tab")
        if shown.evaluate("document.activeElement.className") == "text":
            break
    went = []
    for key in (
        "ArrowRight",
        "ArrowRight",
        "ArrowDown",
        "ArrowRight",
        "ArrowUp",
        "ArrowLeft",
        "End",
        "Home",
    ):
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
    early = rollout(
        list("abcdef"), [0.5] * 6, score=0.0, advantage=-1.0, first_error=[0, "copy", 1]
    )
    middle = rollout(
        ["a ", "b ", "c ", "d", " ", "f"], [0.1, 0.1, 0.5, 0.5, 0.9, 0.9], score=0.0, advantage=-1.0
    )
    middle |= {"first_error": [2, "arith", 5]}
    lucky = rollout(list("abcdef"), [0.5] * 6, first_error=[3, "lookup", 4])
    shown = look(page.as_html([[early, rollout(["g"], [1.0])], [lucky, middle]], "two groups"))
    assert shown.locator("#choice").evaluate("choice => choice.selectedIndex") == 1
    assert marked(shown, "now") == (2, "d")
    assert card(shown, 1).locator("h2").text_content().startswith("\u2713 right by luck")
    assert card(shown, 1).locator(".kind").text_content() == "\u2717 wrong value put in"
    assert card(shown, 2).locator(".error").all_text_contents() == ["c ", "d", " "]
    assert "SHEAR is told only" in shown.locator("#about").text_content()
    assert shade(shown, 2, 0) == "0.111"
    shown.get_by_role("button", name="oracle").click()
    assert "is told the first error" in shown.locator("#about").text_content()
    assert [shade(shown, 2, place) for place in (1, 2, 4, 5)] == [
        "0.000",
        "1.000",
        "1.000",
        "0.000",
    ]
    assert [shade(shown, 1, place) for place in (0, 3)] == ["1.000", "1.000"]
    assert marked(shown, "now") == (2, "d")
    box = card(shown, 2).locator("svg").bounding_box()
    shown.mouse.click(box["x"] + box["width"] * 5.5 / 6, box["y"] + 5)
    assert marked(shown, "now") == (2, "f")


def test_it_opens_beside_a_right_rollout_without_an_error(look):
    """Not on the clearer error whose closest rollout is right by luck; both lead, and the foot
    covers neither.
    """
    wrong = dict(score=0.0, advantage=-1.0)
    by_luck = rollout(list("abcd"), [0.5] * 4, first_error=[1, "copy", 2])
    clear = rollout(
        list("abcd"), [0.5] * 4, first_error=[2, "copy", 3], spans=[[0, 4, 0.5, 0, 0, 4]], **wrong
    )
    group = [by_luck, clear, rollout(list("efgh"), [0.5] * 4)]
    late = clear | {"first_error": [3, "copy", 4], "spans": [[0, 4, 0.5, 2, 0, 4]]}
    shown = look(page.as_html([group, [by_luck, late, rollout(list("ijkl"), [0.5] * 4)]], "pairs"))
    assert marked(shown, "now") == (2, "d") and marked(shown, "there") == (3, "ijkl")
    first = [section.get_attribute("aria-label")[:9] for section in shown.locator("section").all()]
    assert first == ["rollout 3", "rollout 2", "rollout 1"]
    foot = shown.locator("footer").bounding_box()
    for mark in (".here", ".there"):
        box = shown.locator(mark).last.bounding_box()
        assert box["y"] + box["height"] <= foot["y"]


def test_the_foot_has_a_place_of_its_own(look):
    """Below the rollouts, never over them; the keyboard scrolls the token into sight."""
    tokens = ["line\n"] * 80
    rows = [
        rollout(tokens, [0.5] * 80, spans=[[70, 80, 0.5, 1 - place, 70, 80]], score=place)
        for place in (0, 1)
    ]
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
    spans = [[0, 3, 0.5, 1, 0, 1]]
    rows = [
        rollout(list("abc"), [0.1, 0.3, 0.5], spans=spans),
        rollout(["d"], [0.2], score=0.0, advantage=-1.0),
    ]
    shown = look(page.as_html([rows], "floor"))
    strengths = [[shade(shown, 1, place) for place in range(3)]]
    for _ in range(2):
        shown.get_by_role("button", name="shade above the floor").click()
        strengths.append([shade(shown, 1, place) for place in range(3)])
    assert strengths == [
        ["0.200", "0.600", "1.000"],
        ["0.000", "0.500", "1.000"],
        ["0.200", "0.600", "1.000"],
    ]
    assert "floor (0.1:" in shown.locator("#steps").text_content()


def test_equal_verdicts_give_no_credit_and_before_stands_beside_after(look):
    """The half says so, nothing in it is shaded, and its weights of 1 count in no scale; the page
    opens on neither, a button shows both.
    """
    both = [
        rollout(["a"], [0.5], when="before training", score=place, advantage=place - 0.5)
        for place in (0, 1)
    ]
    both += [rollout(["b"], [1.0], when="after training", advantage=0.0)] * 2
    shown = look(page.as_html([both, [GOOD]], "pair"))
    assert shown.locator("section").count() == 1
    shown.get_by_role("button", name="before and after").click()
    before, after = (heading.text_content() for heading in shown.locator("h3").all())
    assert before == "before training: 1 of 2 right" and after.startswith(
        "after training: 2 of 2 right. Equal verdicts"
    )
    assert "no token gets credit" in after
    halves = [half.bounding_box() for half in shown.locator(".cards").all()]
    assert halves[0]["y"] == halves[1]["y"] and halves[0]["x"] < halves[1]["x"]
    assert [shade(shown, number, 0) for number in (1, 3)] == ["1.000", "0.000"]


def test_controls_are_those_of_training(look):
    """On a wrong rollout with an error, one without, a right one by luck, and one without a
    verdict.
    """
    errors = [[1, "arith", 3], None, [0, "copy", 1], None]
    rewards = torch.tensor([0.0, 0.0, 1.0, math.nan])
    advantages = torch.tensor([-1.0, -1.0, 2.0, 0.0])
    rows = []
    for score, advantage, error in zip(
        [0.0, 0.0, 1.0, None], advantages.tolist(), errors, strict=True
    ):
        rows.append(
            rollout(list("abcd"), [0.5] * 4, score=score, advantage=advantage, first_error=error)
        )
    found = [error and FirstError(*error) for error in errors]
    task = SimpleNamespace(first_error=lambda problem, tokens: found[int(tokens[0])])
    mask = torch.ones(4, 4, dtype=torch.bool)
    context = SimpleNamespace(task=task, tokenizer=Numbers())
    batch = Batch(without_text(mask), rewards, advantages, 4, [{}], ["drawn"] * 4)
    expected = effective_weights(oracle(batch, context), advantages, mask)
    weights = look(page.as_html([rows], "controls")).evaluate("groups[0].map(row => row.weights)")
    assert [each["oracle"] for each in weights] == expected.tolist()
    assert all(each["grpo"] == [1] * 4 for each in weights)
    scaled = rollout(["a"], [0.5]) | {"weights": {"grpo": [0.5]}}  # by --negative-scale
    assert look(page.as_html([[scaled]], "scaled")).evaluate("groups[0][0].weights") == {
        "grpo": [0.5]
    }


def test_signs_and_unknown_weights_are_seen_without_colour(look):
    """A negative weight turns the sign of A around and is wavy; an unknown one is dashed; so says
    the legend.
    """
    row = rollout(
        ["a", "b", "c", "d", ""], [0.5, -0.25, None, math.nan, 0.0], score=0.0, advantage=-0.5
    )
    shown = look(page.as_html([[row, rollout(["e"], [1.0], score=None, advantage=0.0)]], "signs"))
    classes = [
        set(shown.locator("main .token").nth(place).get_attribute("class").split())
        for place in range(-6, 0)
    ]
    expected = [
        {"down"},
        {"up", "turned"},
        {"even", "unknown"},
        {"even", "unknown"},
        {"even"},
        {"even"},
    ]
    assert [each - {"token", "now"} for each in classes] == expected
    legend = shown.locator("#legend").text_content()
    assert (
        "wavy: sign turned" in legend
        and "dashed: weight unknown" in legend
        and "first error" not in legend
    )
    assert card(shown, 2).locator("h2").text_content().startswith("? no verdict")


def test_hostile_text_is_shown_as_text(look):
    """In every place, and even without the policy: no element, no script, no request comes
    of it.
    """
    everything = "".join(HOSTILE)
    row = rollout(
        HOSTILE, [0.5] * len(HOSTILE), problem=everything, reason=everything, answer=everything
    )
    row |= {
        "first_error": [1, HOSTILE[2], 3],
        "spans": [[0, 9, 0.5, 1, 0, 9]],
        "score": 0.0,
        "advantage": -1.0,
    }
    row["weights"] = {text: [0.5] * len(HOSTILE) for text in ("shear", *HOSTILE)}
    other = row | {
        "spans": [[0, 9, 0.5, 0, 0, 9]],
        "score": 1.0,
        "advantage": 1.0,
        "first_error": [0, "__proto__", 1],
    }
    text = re.sub("<meta http-equiv[^>]*>", "", page.as_html([[row, other]], everything))
    shown = look(text)
    assert not shown.evaluate("window.ran ?? document.title === 'ran'")
    names = set(
        shown.evaluate("[...document.querySelectorAll('*')].map(element => element.localName)")
    )
    assert not names & {"img", "iframe", "base", "form", "input", "object", "math", "link"}
    assert shown.locator("a").count() == 1  # to the paper
    assert shown.locator("script").count() == 2 and shown.locator("style").count() == 1
    plain = "token => token.innerText === '' ? '' : token.textContent"
    for place, text in enumerate(HOSTILE):
        expected = text.replace("\r\n", "\n").replace("\ud800", "\ufffd")
        found = (
            token(shown, 1, place).evaluate(plain).replace("\r\n", "\n").replace("\ud800", "\ufffd")
        )
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
        outer, inner = (
            card(shown, number).locator(".text").bounding_box(),
            token(shown, number, place).bounding_box(),
        )
        assert outer["y"] <= inner["y"] <= outer["y"] + outer["height"]
