"""Draws docs/guides/view-{light,dark}.png: how batches of a class-sorted dataset mix, in a browser.

.venv/bin/python tools/draw_view.py docs/guides
"""

from __future__ import annotations

import colorsys
import io
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

import shardio

NAMES = ("circle", "square", "triangle", "ring", "cross", "star", "bar", "dots", "wave", "grid")
EACH, SIDE = 800, 96
PICTURES = {"light": "shuffle_buffer=200", "dark": "shuffle_buffer=all"}
VIEW = "order=training&batch_size=128&step=3"


def color(hue: float, strength: float, value: float) -> tuple[int, ...]:
    return tuple(int(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, strength, value))


def shape(draw: ImageDraw.ImageDraw, label: int, x: float, y: float, r: float, turn: float) -> None:
    """Draw the shape of a class around (x, y)."""
    fill, box = color(label / 10, 0.6, 0.85), (x - r, y - r, x + r, y + r)
    if label == 0:
        draw.ellipse(box, fill=fill)
    elif label in (1, 2, 6):
        draw.regular_polygon((x, y, r), {1: 4, 2: 3, 6: 6}[label], rotation=turn, fill=fill)
    elif label == 3:
        draw.ellipse(box, outline=fill, width=int(r / 3))
    elif label == 4:
        draw.line((x - r, y, x + r, y), fill, int(r / 2))
        draw.line((x, y - r, x, y + r), fill, int(r / 2))
    elif label == 5:
        angles = np.linspace(0, 2 * np.pi, 11)[:-1] + turn
        radii = np.where(np.arange(10) % 2, 0.45 * r, r)
        points = zip(x + radii * np.cos(angles), y + radii * np.sin(angles), strict=True)
        draw.polygon([(float(a), float(b)) for a, b in points], fill=fill)
    elif label == 7:
        for at in np.linspace(0, 2 * np.pi, 6)[:-1] + turn:
            a, b = x + 0.7 * r * np.cos(at), y + 0.7 * r * np.sin(at)
            draw.ellipse((a - r / 4, b - r / 4, a + r / 4, b + r / 4), fill=fill)
    elif label == 8:
        across = np.linspace(0, 2 * SIDE, 60)
        draw.line([(a, y + 0.6 * r * np.sin(a / 14 + turn)) for a in across], fill, int(r / 4))
    else:
        for at in np.linspace(-r, r, 4):
            draw.line((x - r, y + at, x + r, y + at), fill, 5)
            draw.line((x + at, y - r, x + at, y + r), fill, 5)


def image(label: int, random: np.random.Generator) -> bytes:
    """Return a JPEG of a class."""
    picture = Image.new("RGB", (2 * SIDE, 2 * SIDE), color(label / 10 + 0.5, 0.12, 0.97))
    x, y = random.uniform(0.35, 0.65, 2) * 2 * SIDE
    shape(
        ImageDraw.Draw(picture),
        label,
        x,
        y,
        random.uniform(0.18, 0.34) * 2 * SIDE,
        random.uniform(0, 360),
    )
    out = io.BytesIO()
    picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(out, "JPEG", quality=88)
    return out.getvalue()


def pack(folder: Path) -> None:
    """Pack shapes in the order of their classes."""
    random = np.random.default_rng(0)
    with shardio.Writer(folder, shard_size="256KiB", classes=NAMES) as writer:
        for label, name in enumerate(NAMES):
            for number in range(EACH):
                key = f"{name}/{number:05d}.jpg"
                writer.write({"__key__": key, "image": image(label, random), "label": label})


def save(page: Page, file: Path) -> None:
    """Save what a page shows, in few colours."""
    page.wait_for_load_state("networkidle")
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        pack(Path(scratch) / "shapes")
        command = [sys.executable, "-m", "shardio", "view", f"{scratch}/shapes", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
            assert viewer.stdout is not None
            try:
                url = json.loads(viewer.stdout.readline())["url"]
                chromium = driver.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--no-sandbox"]
                )
                for scheme, buffer in PICTURES.items():
                    page = chromium.new_page(
                        viewport={"width": 1200, "height": 720}, color_scheme=scheme
                    )
                    page.goto(f"{url}&{VIEW}&{buffer}")
                    page.wait_for_url(lambda now: "token=" not in now)
                    save(page, out / f"view-{scheme}.png")
                chromium.close()
            finally:
                viewer.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
