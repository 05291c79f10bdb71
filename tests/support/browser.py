"""Checks of pages in a real browser at several widths: nothing needs horizontal scrolling."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

WIDTHS = (400, 768, 1280)
SCHEMES = ("light", "dark")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

DRIVER = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = {};
const framed = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.onload = () => setTimeout(() => { faults(page, width, frame.contentDocument); frame.remove(); done(); }, 50);
  frame.src = page;
  document.body.append(frame);
});
function faults(page, width, pane) {
  const list = found[`${page} at ${width}`] = [], root = pane.scrollingElement;
  const dark = pane.defaultView.matchMedia("(prefers-color-scheme: dark)").matches;
  if (!pane.querySelector("h1")) list.push("it has no heading");
  if (dark !== DARK) list.push("it is not in the colours that were asked for");
  if (root.scrollWidth > width) list.push(`it is ${root.scrollWidth} wide`);
  for (const svg of pane.querySelectorAll("svg[role=img]")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    if (box.right > width) list.push(`a figure ends at ${box.right}`);
    for (const text of svg.querySelectorAll("text")) {
      const at = text.getBoundingClientRect();
      if (at.left < box.left - 2 || at.right > box.right + 2) list.push(`cut off: ${text.textContent}`);
      const height = text.getBBox().height * box.width / svg.viewBox.baseVal.width;  // of a line of it on the screen
      if (at.width && height < 7) list.push(`too small: ${text.textContent}`);
    }
  }
}
(async () => {
  for (const page of pages) for (const width of widths) await framed(page, width);
  const result = document.createElement("pre");
  result.textContent = JSON.stringify(found);
  document.body.replaceChildren(result);
})();
</script>"""


def _run(folder: Path, scheme: str, *words: str) -> str:
    assert BROWSER is not None
    options = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    options += [
        "--allow-file-access-from-files",
        f"--blink-settings=preferredColorScheme={SCHEMES[::-1].index(scheme)}",
    ]
    options += ["--no-sandbox"] * (os.geteuid() == 0)
    done = subprocess.run([BROWSER, *options, *words], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def faults(pages: Sequence[Path], scheme: str, folder: Path) -> dict[str, list[str]]:
    """Return the faults of pages, by page and width; the page that drives the browser is written to a folder."""
    driver = folder / f"driver-{scheme}.html"
    values = {"PAGES": [page.as_uri() for page in pages], "WIDTHS": WIDTHS, "DARK": scheme == "dark"}
    text = DRIVER
    for name, value in values.items():
        text = text.replace(name, json.dumps(value))
    driver.write_text(text)
    shown = _run(folder, scheme, "--virtual-time-budget=120000", "--dump-dom", driver.as_uri())
    found = re.search(r"<pre>(.*)</pre>", shown, re.DOTALL)
    assert found is not None, shown[-500:]
    read: dict[str, list[str]] = json.loads(html.unescape(found[1]))
    return read


def screenshot(page: Path, width: int, scheme: str, folder: Path) -> None:
    """Write a screenshot of a page to a folder, for review by eye."""
    picture = folder / f"{page.stem}-{width}-{scheme}.png"
    _run(folder, scheme, f"--window-size={width},2600", f"--screenshot={picture}", page.as_uri())
