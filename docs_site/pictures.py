"""`make pictures`: the pictures of README.md and docs/, each for light and for dark pages, in docs/pictures/.

The pages are those of a real mesh with the bundled model, in headless Chromium. Its load rises for a few minutes, so
that there is something to see over time, and a decode worker is killed in the middle of answers. The plot has the
figures of docs/performance.md.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

import tandem
from docs_site.hooks import ROOT
from mesh.interrupts import run_program

PICTURES = ROOT / "docs" / "pictures"
THEMES = ("light", "dark")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
UP = ("up", "--decode", "2", "--port", "0", "--http-port", "0")
# The expected answers are checked: a picture shows no mistake. The model is not quite sure of the last one.
ANSWERS = {
    "Tell me a story about a dragon.": "Once upon a time there was a dragon named",
    "What is 27 + 45?": "27 + 45 = 60 + 12 = 72.",
    "Spell tandem backwards.": "t-a-n-d-e-m, backwards: m-e-d-n-a-t.",
}
LOAD = "Write the times table of 12."
# Seconds from the beginning to each client's first question.
STARTS_S = (0, 0, 30, 60, 75, 90, 120, 135)
LOAD_S = 180
WAIT_MS = 120_000
POLL_S = 0.05


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        plot_throughput(theme)
    with started_mesh() as (address, url), sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for theme in THEMES:
            show_chat(chromium, url, theme)
        with rising_load(address) as client:
            pages = {theme: open_page(chromium, f"{url}/mesh", theme, width=1040, height=980) for theme in THEMES}
            time.sleep(LOAD_S)
            kill_decode_worker(client)
            for theme, page in pages.items():
                show_mesh(page, theme)
        chromium.close()
    for name in ("chat", "mesh"):
        for theme in THEMES:
            shrink(PICTURES / f"{name}-{theme}.png")


@contextmanager
def started_mesh() -> Iterator[tuple[str, str]]:
    """Start a mesh; yield the addresses of its router and of its pages."""
    with TemporaryDirectory(prefix="tandem-pictures-") as logs:
        command = (sys.executable, "-m", "tandem_cli", *UP, "--log-dir", logs)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1], process.stdout.readline().split()[1]
        finally:
            process.terminate()
            process.wait()


@contextmanager
def rising_load(address: str) -> Iterator[tandem.Client]:
    """Keep more and more clients busy, each with one answer after the other."""
    is_over = threading.Event()
    with tandem.Client(address) as client, ThreadPoolExecutor(len(STARTS_S)) as threads:

        def ask(start_s: float) -> None:
            is_over.wait(start_s)
            while not is_over.is_set():
                client.generate(messages=[{"role": "user", "content": LOAD}], max_new_tokens=200)

        clients = [threads.submit(ask, start_s) for start_s in STARTS_S]
        try:
            yield client
        finally:
            is_over.set()
        for future in clients:
            future.result()


def kill_decode_worker(client: tandem.Client) -> None:
    """Kill a decode worker that generates for somebody."""
    until_s = time.monotonic() + WAIT_MS / 1000
    while not (running := [trace.places[-1].decode_worker for trace in client.mesh().running if trace.places]):
        if time.monotonic() > until_s:
            raise TimeoutError(f"no stream reached a decode worker within {WAIT_MS / 1000:g} s")
        time.sleep(POLL_S)
    [pid] = [worker.pid for worker in client.workers() if worker.worker_id == running[0]]
    os.kill(pid, signal.SIGKILL)


def show_chat(chromium: Browser, url: str, theme: str) -> None:
    page = open_page(chromium, url, theme, width=1040, height=860)
    for question, answer in ANSWERS.items():
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.locator("#stop").wait_for(state="visible")
        page.locator("#send").wait_for(state="visible")
        expect(page.locator(".answer").last.locator("> .text")).to_contain_text(answer)
    page.locator(".answer").last.locator(".token:is(.s2, .s3, .s4)").first.hover()
    page.get_by_role("tooltip").wait_for(state="visible")
    save(page, f"chat-{theme}")


def show_mesh(page: Page, theme: str) -> None:
    """Save the page down to its incidents, once they and the replays are shown."""
    page.locator("#incidents").get_by_text("is gone").first.wait_for()
    expect(page.locator("#figures div", has_text="replays").locator("dd")).to_have_text(re.compile("[1-9]"))
    height = page.locator("section[aria-labelledby=incidents-title]").evaluate(
        "it => it.getBoundingClientRect().bottom"
    )
    page.set_viewport_size({"width": 1040, "height": math.ceil(height) + 16})
    save(page, f"mesh-{theme}")


def open_page(chromium: Browser, url: str, theme: str, *, width: int, height: int) -> Page:
    page = chromium.new_page(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": height},
        device_scale_factor=1.5,
    )
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    return page


def save(page: Page, name: str) -> None:
    """Save the visible part of the page, and close the page."""
    page.screenshot(path=PICTURES / f"{name}.png")
    page.close()


def shrink(path: Path) -> None:
    """Reduce a PNG to a palette. Coverage of all its colours keeps those of few pixels."""
    with Image.open(path) as image:
        colours = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colours.save(path, optimize=True)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens/s of one arm at one number of clients: the median, the least and the most of the rounds."""

    clients: int
    arm: str
    median: float
    minimum: float
    maximum: float


_ROW = re.compile(r"^\| (?:135M, int8)? ?\| (?P<clients>\d+) \|(?P<cells>.+)\|$", re.MULTILINE)
_CELL = re.compile(r"\**(?P<median>\d+)\** \((?P<least>\d+)\.\.(?P<most>\d+)\)")


def measured_throughput(document: Path) -> list[Throughput]:
    """Read the rounds of the 135M shape in int8 on Zen 4, beside other engines, from docs/performance.md.

    The cell of the shape is empty in all rows of a shape but the first, so the rows of the next shape are cut off.
    """
    text = document.read_text()
    text = text[text.index("\n### Zen 4\n") :]
    rows = text[text.index("\n| 135M, int8 | 1 |") : text.index("\n| 0.5B, int8 | 1 |")]
    return [
        Throughput(int(row["clients"]), arm, float(cell["median"]), float(cell["least"]), float(cell["most"]))
        for row in _ROW.finditer(rows)
        for arm, cell in zip(_ARMS, _CELL.finditer(row["cells"]), strict=True)
    ]


_INK = {"light": "#24292f", "dark": "#d0d7de"}
_ARMS = {
    "separated": ("Tandem, separated", "#3949ab"),
    "colocated": ("Tandem, colocated", "#9fa8da"),
    "vLLM": ("vLLM (CPU, W8A8)", "#ef8f4b"),
    "openvino": ("openvino (int8)", "#e6b77a"),
}


def plot_throughput(theme: str) -> None:
    """Draw the figures as bars, one group per number of clients, with the range of the rounds."""
    from matplotlib import pyplot

    rows = measured_throughput(ROOT / "docs" / "performance.md")
    clients = sorted({row.clients for row in rows})
    ink = _INK[theme]
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "tandem",
            "text.color": ink,
            "axes.labelcolor": ink,
            "axes.edgecolor": ink,
            "xtick.color": ink,
            "ytick.color": ink,
        }
    ):
        figure, axes = pyplot.subplots(figsize=(7.6, 3.2))
        for number, (arm, (label, colour)) in enumerate(_ARMS.items()):
            rows_of_arm = [next(row for row in rows if (row.clients, row.arm) == (count, arm)) for count in clients]
            positions = [group + 0.2 * (number - 1.5) for group in range(len(clients))]
            medians = [row.median for row in rows_of_arm]
            ranges = [
                [row.median - row.minimum for row in rows_of_arm],
                [row.maximum - row.median for row in rows_of_arm],
            ]
            axes.bar(positions, medians, 0.18, label=label, color=colour)
            axes.errorbar(positions, medians, ranges, fmt="none", ecolor=ink, elinewidth=0.8, capsize=2)
        axes.set_xticks(range(len(clients)), [f"{count} client{'s' if count > 1 else ''}" for count in clients])
        axes.set_ylabel("tokens/s")
        axes.set_title("135M, int8, two cores of a Zen 4 EPYC: 256 tokens in, 64 out", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(PICTURES / f"throughput-{theme}.svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    run_program(main)
