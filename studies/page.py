"""Where credit went, to look at: one HTML page of groups of rollouts, every token shaded by its weight.

    python -m studies.diagnose --html credit.html                                    # of groups sampled now
    python -m studies.diagnose --html credit.html --samples runs/NAME/samples.jsonl  # of a training run

A group's rollouts stand side by side, right ones first. Hue is the sign of a token's advantage A x weight, strength is
|weight| relative to the largest of the group, so columns can be compared, and groups only by the legend's numbers. The
true first error, where a task knows it, is outlined. Position, text and weight of a token show on hover; so do the
distances of the spans that cover it, where they are known (a run's samples hold weights only).

The page is one file that needs no network and no other file. What models wrote is hostile: it stands in the page as
JSON without <, > and &, becomes text nodes and attributes, never markup, and a Content-Security-Policy admits nothing
but this file's own script and style, by their hashes. Only the group that is looked at is built; 8 x 3,000 tokens show
in about a second.

Left out: `response`, as tokens are what weights belong to (a character split over several tokens therefore shows as
replacement marks), and `tests`, which can be large. Averages over a whole run are in `harness/report.py` and
`credit/measures.py`.
"""

import base64
import hashlib
import html
import itertools
import json
import math
from pathlib import Path

from harness.report import rows
from tasks.problems import BadInput, cause

SHOWN = "step problem answer score reason first_error advantage tokens weights spans".split()  # keys of a row


def of_run(path: Path) -> str:
    """The page of a run's samples.jsonl; raises BadInput."""
    try:
        return render(group_rows(path), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"--samples {path}: {cause(error)}; give the samples.jsonl of a training run") from error


def group_rows(path: Path) -> list[list[dict]]:
    """A run's samples.jsonl as groups: neighbouring rows of one step and problem.

    A last line that is cut off is left out, as the run may still write it. Raises OSError, and ValueError for what is
    not rows.
    """
    found = rows(path)
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict) or not {"step", "problem"} <= row.keys():
            raise ValueError(f'line {number} has no "step" and "problem"')
    return [list(group) for _, group in itertools.groupby(found, lambda row: (row["step"], row["problem"]))]


def render(groups: list[list[dict]], title: str) -> str:
    """The page, as text of ASCII characters, of groups of rows as `report.sample_rows` makes them.

    "step" may be None. A row may have "spans", of (first token, token after the last, distance). Weights may be
    negative, None or not finite. Raises ValueError where there is nothing to show, and for a row that cannot be shown,
    naming step and rollout.
    """
    if not groups or not all(groups):
        raise ValueError("no rollouts to show")
    plain = [[plain_row(row, place) for place, row in enumerate(group, 1)] for group in groups]
    data = json.dumps(plain, separators=(",", ":"), allow_nan=False)  # ASCII, so also without U+2028 and U+2029
    for mark in "<>&":
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    policy = f"default-src 'none'; script-src {hash_of(SCRIPT)}; style-src {hash_of(STYLE)}"
    values = {"policy": policy, "title": html.escape(title), "style": STYLE, "data": data, "script": SCRIPT}
    page = "".join(values.get(part, part) for part in FRAME.split("@"))
    return page.encode("ascii", "xmlcharrefreplace").decode()


def hash_of(text: str) -> str:
    """What admits an inline script or style to a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def plain_row(row: dict, place: int) -> dict:
    """What the page shows of the `place`-th row of a group, as strict JSON can hold it; raises ValueError."""
    size = len(row["tokens"]) if isinstance(row.get("tokens"), list) else None
    error = row.get("first_error")
    fits = {
        "step": isinstance(row.get("step"), int | None),
        "problem": isinstance(row.get("problem"), str),
        "answer": isinstance(row.get("answer"), str | None),
        "score": is_number(row.get("score")),
        "reason": isinstance(row.get("reason"), str | None),
        "advantage": isinstance(row.get("advantage"), int | float),
        "tokens": size is not None and all(isinstance(token, str) for token in row["tokens"]),
        "weights": are_numbers(row.get("weights"), size),
        "spans": are_spans(row.get("spans", [])),
        "first_error": error is None or is_error(error),
    }
    if wrong := [name for name, fit in fits.items() if not fit]:
        raise ValueError(f'step {row.get("step")}, rollout {place}: "{wrong[0]}" is missing or not as it should be')
    return {name: strict(row[name]) for name in SHOWN if name in row}


def is_number(value) -> bool:
    """A number, or None."""
    return value is None or isinstance(value, int | float)


def are_numbers(values, size: int | None) -> bool:
    """`size` numbers or Nones."""
    return isinstance(values, list) and len(values) == size and all(map(is_number, values))


def are_spans(values) -> bool:
    """A list of (first token, token after the last, distance)."""
    return isinstance(values, list) and all(
        isinstance(span, list | tuple) and len(span) == 3 and all(map(is_number, span)) for span in values
    )


def is_error(value) -> bool:
    """The first token of the first wrong step, its kind and, where known, the token after its last."""
    start, kind, end = (*value, None, None, None)[:3] if isinstance(value, list | tuple) else (None, None, None)
    return isinstance(start, int) and isinstance(kind, str) and isinstance(end, int | None)


def strict(value):
    """A value as strict JSON has it: nan, inf and -inf become text, which the page shows and does not shade."""
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


FRAME = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="@policy@; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@title@</title>
<style>@style@</style>
<header>
<h1>Where credit went <span class="soft">@title@</span></h1>
<nav aria-label="groups">
<button id="previous" aria-label="previous group" title="previous group, left arrow">&larr;</button>
<select id="choice" aria-label="group"></select>
<button id="next" aria-label="next group" title="next group, right arrow">&rarr;</button>
<output id="summary" class="soft"></output>
</nav>
<div id="problem" tabindex="0" role="region" aria-label="problem"></div>
<div id="legend"></div>
</header>
<main id="rollouts" tabindex="0" aria-label="rollouts, right ones first"></main>
<noscript>This page builds its view with a script of its own; allow it to run.</noscript>
<script type="application/json" id="data">@data@</script>
<script>@script@</script>
</html>
"""

# Style and script are ASCII, or their hashes would not be those of what a browser reads.
STYLE = r"""
:root {
  color-scheme: light dark;
  --page: #fff; --card: #fff; --head: #f3f5f8; --ink: #14181d; --soft: #566070; --line: #d5dbe3;
  --up: 86 180 233; --down: 240 165 50; --even: 165 172 182;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1116; --card: #13171d; --head: #1b2129; --ink: #eef1f5; --soft: #a3adba; --line: #303842;
    --up: 0 108 178; --down: 174 78 0; --even: 96 104 116;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; height: 100dvh; display: flex; flex-direction: column;
  background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, sans-serif;
}
body > header { padding: 12px 16px 10px; display: grid; grid-template-columns: minmax(0, 1fr); gap: 8px; }
h1 { margin: 0; font-size: 18px; line-height: 1.2; }
h1 .soft { margin-left: 6px; font-size: 14px; font-weight: normal; }
.soft { color: var(--soft); overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
button, select {
  font: inherit; color: inherit; background: var(--head); height: 32px; padding: 0 10px;
  border: 1px solid var(--line); border-radius: 6px;
}
select { max-width: min(46rem, 60vw); }
button:disabled { color: var(--soft); opacity: .6; }
output { margin-left: 8px; }
:focus-visible { outline: 2px solid rgb(var(--up)); outline-offset: 1px; }
#problem {
  max-height: 6.2em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  padding-left: 10px; border-left: 3px solid var(--line);
}
#legend { display: flex; flex-wrap: wrap; gap: 4px 20px; align-items: center; color: var(--soft); font-size: 12px; }
#legend .token { color: var(--ink); padding: 2px 7px; }
main {
  flex: 1; min-height: 0; overflow: auto; display: flex; align-items: flex-start; gap: 10px; padding: 0 16px 16px;
  border-top: 1px solid var(--line); background: var(--head);
}
section { flex: none; margin-top: 10px; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
section > header {
  position: sticky; top: 0; z-index: 1; padding: 8px 10px 7px; border-bottom: 1px solid var(--line);
  border-radius: 8px 8px 0 0; background: var(--card); font-size: 12px; font-variant-numeric: tabular-nums;
}
h2 { margin: 0 0 2px; font-size: 14px; display: flex; justify-content: space-between; align-items: baseline; }
h2 .soft { font-size: 12px; font-weight: normal; }
dl { margin: 0; display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); column-gap: 24px; }
dl > div { display: flex; justify-content: space-between; gap: 10px; }
dt { color: var(--soft); white-space: nowrap; }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.text { width: calc(var(--columns) * 1ch + 22px); padding: 8px 10px 12px; }
.text, .token { font: 13px/1.8 ui-monospace, Menlo, Consolas, monospace; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
.token { padding-block: 2px; background: rgb(var(--hue) / var(--strength)); }
.token:hover { box-shadow: inset 0 0 0 1px var(--ink); }
.up { --hue: var(--up); }
.down { --hue: var(--down); }
.even { --hue: var(--even); }
.unknown { background: none; text-decoration: underline dashed; text-underline-offset: 3px; }
.newline::before { content: "\21b5"; font-style: normal; color: var(--soft); }
.text .token:empty::before { content: "\2205"; color: var(--soft); }
.error { outline: 2px solid var(--ink); outline-offset: -1px; border-radius: 2px; }
.kind {
  float: right; margin: 3px 0 0 6px; padding: 0 5px; border-radius: 4px;
  background: var(--ink); color: var(--page); font: 600 11px/1.6 system-ui, sans-serif;
}
@media (max-height: 560px) { body { height: auto; } main { max-height: 100dvh; } }
"""

SCRIPT = r"""
"use strict";
const groups = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const isKnown = Number.isFinite;  // not null, not "nan"
let current = 0;

function make(tag, name, ...children) {  // children that are text become text nodes, never markup
  const element = document.createElement(tag);
  element.className = name;
  element.append(...children);
  return element;
}

function short(value) {  // three digits that count
  return isKnown(value) ? String(+value.toPrecision(3)) : String(value ?? "unknown");
}

function quote(text) {  // what is not seen, or turns text around, becomes an escape
  return JSON.stringify(text).replace(/(?! )[\p{C}\p{Z}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

function shade(element, weight, advantage, largest) {
  const credit = weight * advantage;
  element.classList.add("token", credit > 0 ? "up" : credit < 0 ? "down" : "even");
  if (!isKnown(weight)) element.classList.add("unknown");
  element.style.setProperty("--strength", isKnown(weight) && largest ? (Math.abs(weight) / largest).toFixed(3) : 0);
  return element;
}

function tokenOf(row, place, largest) {
  const element = make("span", "");
  row.tokens[place].split("\n").forEach((part, line) => {
    if (line) element.append(make("i", "newline", "\n"));
    if (part) element.append(part);
  });
  const about = [quote(row.tokens[place]), `position ${place} of ${row.tokens.length}`];
  about.push(`weight ${row.weights[place] ?? "unknown"}`);
  const spans = (row.spans ?? []).filter(([start, end]) => start <= place && place < end);
  if (spans.length) about.push(`distances of its spans ${spans.map((span) => short(span[2])).join(", ")}`);
  element.title = about.join("\n");
  return shade(element, row.weights[place], row.advantage, largest);
}

function textOf(row, largest) {
  const text = make("div", "text"), size = row.tokens.length;
  const [start, kind, end] = row.first_error ?? [-1, "", 0];
  const label = make("b", "kind", "\u2717 " + kind), error = make("span", "error");
  label.title = `true first error: ${kind}, from position ${start}`;
  for (let place = 0; place < size; place++) {
    if (place === start) text.append(label, error);
    const inside = place >= start && start >= 0 && place < Math.max(end ?? 0, start + 1);
    (inside ? error : text).append(tokenOf(row, place, largest));
  }
  if (start >= size) text.append(label);
  return text;
}

function verdictOf(row) {
  return isKnown(row.score) ? (row.score > 0.5 ? "\u2713 right" : "\u2717 wrong") : "? no verdict";
}

function rolloutOf(row, number, largest) {
  const known = row.weights.filter(isKnown), list = make("dl", "");
  const mean = known.length ? known.reduce((sum, weight) => sum + weight, 0) / known.length : null;
  const facts = [
    ["reason", row.reason ?? "none"],
    ["advantage", (row.advantage > 0 ? "+" : "") + short(row.advantage)],
    ["mean weight", short(mean)],
    ["tokens", row.tokens.length.toLocaleString("en")],
  ];
  for (const [name, value] of facts) {
    list.append(make("div", "", make("dt", "", name), make("dd", "", String(value))));
  }
  const head = make("header", "", make("h2", "", verdictOf(row), make("span", "soft", `rollout ${number}`)), list);
  const section = make("section", "", head, textOf(row, largest));
  section.setAttribute("aria-label", `rollout ${number}, ${verdictOf(row)}`);
  return section;
}

function legendOf(largest, hasErrors) {
  const sample = (text, ...how) => shade(make("span", "", text), ...how);
  const scale = [-4, -3, -2, -1, 0, 1, 2, 3, 4].map((step) => {
    const weight = (Math.abs(step) / 4) * largest;
    return sample(short(weight), weight, step, largest);
  });
  const parts = [make("span", "", "|weight|: made less likely (A \u00d7 weight < 0) ", ...scale, " more likely (> 0)")];
  parts.push(make("span", "", sample("text", largest, 0, largest), " A = 0"));
  parts.push(make("span", "", sample("text", null, 0, largest), " weight unknown"));
  if (hasErrors) parts.push(make("span", "", make("span", "error", sample("text", 0, 0, 0)), " true first error"));
  return parts;
}

function widthOf(rows) {  // characters of the longest line, within reason
  const lines = rows.flatMap((row) => row.tokens.join("").split("\n"));
  const label = rows.some((row) => row.first_error) ? 12 : 2;  // beside the line of the error
  return Math.min(44, lines.reduce((longest, line) => Math.max(longest, line.length + label), 20));
}

function show(index) {
  current = index;
  const group = groups[index], { problem, answer } = group[0];
  const largest = group.flatMap((row) => row.weights).filter(isKnown).reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  const rank = (row) => (isKnown(row.score) ? (row.score > 0.5 ? 0 : 1) : 2);
  const order = group.map((row, place) => [row, place + 1]).sort(([a], [b]) => rank(a) - rank(b));
  const right = group.filter((row) => rank(row) === 0).length;
  at("summary").textContent = `group ${index + 1} of ${groups.length}, ${right} of ${group.length} right`;
  at("problem").textContent = problem.trimEnd() + (answer == null ? "" : `\nanswer: ${answer}`);
  at("legend").replaceChildren(...legendOf(largest, group.some((row) => row.first_error)));
  at("rollouts").style.setProperty("--columns", widthOf(group));
  at("rollouts").replaceChildren(...order.map(([row, number]) => rolloutOf(row, number, largest)));
  at("rollouts").scrollTo(0, 0);
  at("choice").selectedIndex = index;
  at("previous").disabled = index === 0;
  at("next").disabled = index === groups.length - 1;
}

function move(by) {
  if (groups[current + by]) show(current + by);
}

function press(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], columns = at("rollouts");
  const scrolls = columns.contains(event.target) && columns.scrollWidth > columns.clientWidth;
  if (!by || scrolls || event.target === at("choice") || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  move(by);
}

at("choice").append(...groups.map(([{ step, problem }]) => {
  return make("option", "", `${isKnown(step) ? `step ${step}: ` : ""}${problem.replace(/\s+/g, " ").slice(0, 100)}`);
}));
at("choice").addEventListener("change", () => show(at("choice").selectedIndex));
at("previous").addEventListener("click", () => move(-1));
at("next").addEventListener("click", () => move(1));
document.addEventListener("keydown", press);
show(0);
"""
