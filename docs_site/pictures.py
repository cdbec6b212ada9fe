"""`make pictures`: the pictures of README.md and docs/, each for light and for dark pages, in docs/pictures/.

The pages are those of a real mesh with the bundled model, in headless Chromium; a decode worker is killed under load
before the mesh is shown. The plot has the figures of docs/performance.md.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
# An answer that is right, and one that is too hard for the bundled model: it is wrong, with low confidence.
QUESTIONS = ("Show me the 7 times table.", "What is 869 x 671?")
NUM_STREAMS = 6
WAIT_MS = 60_000
POLL_S = 0.05


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for theme in THEMES:
        plot_throughput(theme)
    with started_mesh() as (address, url), sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for theme in THEMES:
            show_chat(chromium, url, theme)
        with running_streams(address) as client:
            pages = {theme: open_mesh(chromium, url, theme) for theme in THEMES}
            kill_decode_worker(client)
            for theme, page in pages.items():
                page.locator("#incidents li").first.wait_for()
                save(page, f"mesh-{theme}")
        chromium.close()


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
def running_streams(address: str) -> Iterator[tandem.Client]:
    """Keep a few clients busy, each with one question after the other."""
    is_over = threading.Event()
    with tandem.Client(address) as client:

        def ask() -> None:
            while not is_over.is_set():
                for event in client.stream(messages=[{"role": "user", "content": QUESTIONS[0]}], max_new_tokens=200):
                    if is_over.is_set() or event.finish_reason:
                        break

        threads = [threading.Thread(target=ask) for _ in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield client
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


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
    page = open_page(chromium, url, theme, width=1040, height=620)
    for question in QUESTIONS:
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.locator("#stop").wait_for(state="visible")
        page.locator("#send").wait_for(state="visible")
    tokens = page.locator(".answer").last.locator(".token")
    tokens.nth(tokens.count() - 6).hover()  # a digit of the wrong product
    page.get_by_role("tooltip").wait_for(state="visible")
    save(page, f"chat-{theme}")


def open_mesh(chromium: Browser, url: str, theme: str) -> Page:
    """Open the mesh page, and wait until it shows a speed."""
    page = open_page(chromium, f"{url}/mesh", theme, width=1040, height=980)
    expect(page.locator("#decode")).to_contain_text(re.compile(r"[1-9]\d*\s*tokens/s"), timeout=WAIT_MS)
    return page


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
    """Save the visible part of the page as a small PNG, and close the page."""
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path)
    page.close()
    with Image.open(path) as image:
        image.quantize(colors=128, dither=Image.Dither.NONE).save(path, optimize=True)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens/s of one arm at one number of clients: the median, the least and the most of the rounds."""

    clients: int
    arm: str
    median: float
    minimum: float
    maximum: float


_ROW = re.compile(
    r"^\|(?: 135M)? +\| (?P<clients>\d+) \| (?P<arm>[^|]+) \| "
    r"\**(?P<median>\d+)\** \((?P<least>\d+)\.\.(?P<most>\d+)\)",
    re.MULTILINE,
)


def measured_throughput(document: Path) -> list[Throughput]:
    """Read the rounds of the 135M shape beside other engines from docs/performance.md.

    The cell of the shape is empty in all rows of a shape but the first, so the rows of the next shape are cut off.
    """
    text = document.read_text()
    rows = text[text.index("\n| 135M | 1 |") : text.index("\n| 0.5B | 1 |")]
    return [
        Throughput(int(row["clients"]), row["arm"], float(row["median"]), float(row["least"]), float(row["most"]))
        for row in _ROW.finditer(rows)
    ]


_INK = {"light": "#24292f", "dark": "#d0d7de"}
_ARMS = {
    "separated": ("Tandem, separated: --prefill-overflow 0", "#3949ab"),
    "overflow": ("helped by decode: --max-step-stretch 0", "#5c6bc0"),
    "colocated": ("Tandem, colocated", "#9fa8da"),
    "vLLM, W8A8": ("vLLM (CPU, W8A8)", "#ef8f4b"),
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
        axes.set_title("135M, int8, two cores: 256 tokens in, 64 out", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(PICTURES / f"throughput-{theme}.svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    run_program(main)
