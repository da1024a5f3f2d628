"""Pictures of the page of a default run, docs/page-light.png and docs/page-dark.png, with Chromium.

Run after `python train.py --use lab.tools.page` and `python -m lab.tools.page
runs/embedded-shear-1`: `pip install playwright && python -m lab.records.page_pictures`.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

from playwright.sync_api import sync_playwright

with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path="/usr/bin/chromium")
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1240, "height": 900})
        page = context.new_page()
        page.goto(Path("runs/embedded-shear-1/credit.html").absolute().as_uri())
        page.screenshot(path=f"docs/page-{scheme}.png")
