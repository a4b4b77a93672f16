"""The report in a real browser. Chromium is a system package (Debian: ``chromium``); without it these are not run."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from mlflashpoint.timings import page
from mlflashpoint.timings.compare import compare
from tests.timings.helpers import timing_set

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(
    _CHROMIUM is None and not os.environ.get("REQUIRE_CHROMIUM"),
    reason="NOT RUN: no chromium on PATH (apt-get install chromium)",
)

#: run in the page: its state goes into an attribute that --dump-dom shows
_PROBE = """<script>
addEventListener('load', () => {
  const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const root = getComputedStyle(document.body);
  const drawings = [...document.querySelectorAll('svg')].map(svg => ({
    box: box(svg),
    texts: [...svg.querySelectorAll('text')].map(text => ({
      text: text.firstChild.data, box: box(text), style: text.className.baseVal, fill: getComputedStyle(text).fill
    })),
    marks: [...svg.querySelectorAll('.dot')].map(mark => ({
      box: box(mark), title: mark.querySelector('title').textContent
    }))
  }));
  document.body.setAttribute('data-probe', JSON.stringify({
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    background: root.backgroundColor, ink: root.color, drawings,
    scroll: document.documentElement.scrollWidth, width: document.documentElement.clientWidth,
    texts: [...document.querySelectorAll('h1, h2, p, li, td, th')].map(element => ({
      text: element.textContent, ink: getComputedStyle(element).color, box: box(element)
    })),
    tables: [...document.querySelectorAll('.wide')].map(wide => [wide.scrollWidth, wide.clientWidth])
  }));
});
</script>"""


def _report(control: float = 18.4) -> str:
    durable = [18.2, 18.3, 18.4, 18.35, 18.25]
    memory = [0.6, 0.61, 0.62, 0.63, 0.645, 1.1, 0.59]
    one = timing_set("baseline", {"save-checkpoint": durable})
    other = timing_set(
        "flashpoint",
        {
            "save-checkpoint": [value * control / 18.3 for value in durable],
            "save-checkpoint-non-persistent": memory,
            "flashpoint-save": [value * 0.9 for value in memory],
            "flashpoint-commit": [value * 3 for value in memory],
        },
        notes=("x.log: 3 torn pieces of timings were left out",),
    )
    return page.render(compare(one, other, headline=True))


def _chromium(folder: Path, html: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert _CHROMIUM is not None, "no chromium on PATH (apt-get install chromium)"
    (folder / "report.html").write_text(html)
    command = [
        _CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        *options,
        (folder / "report.html").as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def _probed(folder: Path, *options: str, width: int = 1200, html: str | None = None) -> dict[str, Any]:
    # the page forbids scripts; the probe's copy has to allow them
    with_probe = re.sub(r"<meta http-equiv=[^>]*>", "", html or _report()).replace("</body>", f"{_PROBE}</body>")
    done = _chromium(folder, with_probe, "--dump-dom", f"--window-size={width},2000", *options)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


def _pixels(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of RGB or RGBA pixels of a PNG file without interlacing."""
    data = path.read_bytes()
    width, height, depth, kind, *_ = struct.unpack(">IIBBBBB", data[16:29])
    assert (depth, kind) in ((8, 2), (8, 6))
    size, place, packed = {2: 3, 6: 4}[kind], 8, b""
    while place < len(data):
        length, name = struct.unpack(">I4s", data[place : place + 8])
        packed += data[place + 8 : place + 8 + length] if name == b"IDAT" else b""
        place += length + 12
    raw, rows, above = zlib.decompress(packed), [], bytearray(width * size)
    for row in range(height):
        start = row * (width * size + 1)
        kind, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * size])
        for index in range(len(line)) if kind else ():
            left = line[index - size] if index >= size else 0
            up = above[index]
            if kind == 4:
                corner = above[index - size] if index >= size else 0
                near = min((left, up, corner), key=lambda value: abs(left + up - corner - value))
            else:
                near = (0, left, up, (left + up) // 2)[kind]
            line[index] = (line[index] + near) % 256
        rows.append(bytes(line))
        above = line
    return width, height, rows


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _overlap(one: list[float], other: list[float]) -> bool:
    # bounding boxes of text include the room above and below the letters
    return min(one[2], other[2]) - max(one[0], other[0]) > 1 and min(one[3], other[3]) - max(one[1], other[1]) > 4


def test_the_browser_loads_the_page_without_a_complaint_or_a_request(tmp_path: Path) -> None:
    done = _chromium(tmp_path, _report(), "--dump-dom", "--log-net-log=" + str(tmp_path / "net.json"))
    assert "CONSOLE" not in done.stderr
    events = (tmp_path / "net.json").read_text()
    urls = set(re.findall(r'"url":"((?:http|file)[^"]+)"', events))
    # the browser's own services apart
    assert {url for url in urls if "google" not in url and "gvt1" not in url} <= {(tmp_path / "report.html").as_uri()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_schemes(tmp_path: Path, scheme: str) -> None:
    state = _probed(tmp_path, *(["--force-dark-mode"] if scheme == "dark" else []))
    assert state["dark"] == (scheme == "dark")
    assert (_luminance(state["background"]) > 0.5) == (scheme == "light")
    texts = [text["ink"] for text in state["texts"]]
    texts += [text["fill"] for drawing in state["drawings"] for text in drawing["texts"]]
    card = "rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 30, 39)"
    assert min(_contrast(ink, card) for ink in texts) >= 4.5


@pytest.mark.parametrize("width", [1200, 500])
def test_nothing_sticks_out_of_the_page(tmp_path: Path, width: int) -> None:
    state = _probed(tmp_path, width=width)
    assert state["scroll"] <= state["width"]
    if width == 1200:
        assert all(scroll <= client for scroll, client in state["tables"])


def _assert_texts_are_apart(drawing: dict[str, Any]) -> None:
    left, top, right, bottom = drawing["box"]
    texts = drawing["texts"]
    assert len(texts) > 10
    for index, text in enumerate(texts):
        box = text["box"]
        assert left - 1 <= box[0] and box[2] <= right + 1 and top - 1 <= box[1] and box[3] <= bottom + 1, text
        for other in texts[index + 1 :]:
            assert not _overlap(box, other["box"]), (text["text"], other["text"])


def test_texts_in_the_drawings_lie_inside_and_do_not_overlap(tmp_path: Path) -> None:
    for drawing in _probed(tmp_path)["drawings"]:
        _assert_texts_are_apart(drawing)


@pytest.mark.parametrize("letters", ["abcde", "m", "W", "検", "flashpoint-save[MODEL-PARALLEL]", "i"])
def test_long_names_in_wide_letters_lie_inside_too(tmp_path: Path, letters: str) -> None:
    name = (letters * 64)[:64]
    arms = [timing_set(f"{n}{name}"[:64], {"save-checkpoint": [1.0, 1.1], name: [2.0, 2.5]}) for n in "AB"]
    for drawing in _probed(tmp_path, html=page.render(compare(*arms)))["drawings"]:
        _assert_texts_are_apart(drawing)


@pytest.mark.parametrize("count", [6, 7, 9, 40])
def test_names_of_any_number_of_timers_stand_beside_their_arm(tmp_path: Path, count: int) -> None:
    timers = {f"flashpoint-save[{number}]": [0.5 + number / 1000, 0.6] for number in range(count)}
    # all means near the upper end, or near the lower one: there they are pushed the furthest
    for spread in (1.0, 40.0):
        arms = [timing_set(label, {"save-checkpoint": [0.6 * spread, 0.61], **timers}) for label in ("one", "other")]
        drawing = _probed(tmp_path, html=page.render(compare(*arms)))["drawings"][0]
        _assert_texts_are_apart(drawing)
        border = next(text["box"][1] for text in drawing["texts"] if text["text"] == "other")
        names = [text["box"] for text in drawing["texts"] if text["style"] == "series"]
        assert len(names) == 2 * (count + 1)
        assert sum(box[3] <= border for box in names) == count + 1


def test_every_save_is_a_mark_at_its_height(tmp_path: Path) -> None:
    over_time, spread = _probed(tmp_path)["drawings"]
    # 5 + 5 + 7 + 7 saves that stall; the background's 7 are in the distribution only
    saves = [mark for mark in over_time["marks"] if "step" in mark["title"]]
    assert len(saves) == 24
    assert len(spread["marks"]) == 31
    heights = {mark["title"]: mark["box"][1] for mark in saves}
    slow = heights["flashpoint, save-checkpoint-non-persistent: 1.100s, step 30, run 1"]
    fast = heights["flashpoint, save-checkpoint-non-persistent: 590.0ms, step 35, run 1"]
    durable = next(height for title, height in heights.items() if title.startswith("flashpoint, save-checkpoint:"))
    assert durable < slow < fast


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_in_the_schemes_colours(tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "picture.png"
    options = ["--force-dark-mode"] if scheme == "dark" else []
    _chromium(tmp_path, _report(), f"--screenshot={picture}", "--window-size=500,260", *options)
    width, height, rows = _pixels(picture)
    assert (width, height) == (500, 260)
    size = len(rows[0]) // width
    seen = {row[place : place + 3] for row in rows for place in range(0, len(row), size)}
    page_colour, *arms = {
        "light": ("f6f7f9", "56657a", "00796b"),
        "dark": ("0f141a", "a9b8cb", "43cdb8"),
    }[scheme]
    assert rows[2][:3].hex() == page_colour
    assert {bytes.fromhex(arm) for arm in arms} <= seen


def test_an_invalid_comparison_is_red(tmp_path: Path) -> None:
    state = _probed(tmp_path, html=_report(control=25.0))
    ink = next(text["ink"] for text in state["texts"] if text["text"] == "This comparison is invalid")
    assert ink == "rgb(179, 38, 30)"


def test_it_prints_on_white_also_from_a_dark_screen(tmp_path: Path) -> None:
    paper = tmp_path / "report.pdf"
    _chromium(tmp_path, _report(), f"--print-to-pdf={paper}", "--no-pdf-header-footer", "--force-dark-mode")
    data = paper.read_bytes()
    assert data.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert 1 <= pages <= 4
    drawn = b"".join(
        zlib.decompress(found[1])
        for found in re.finditer(rb"FlateDecode[^>]*>>\s*stream\r?\n(.*?)endstream", data, re.S)
    )
    fills = {
        tuple(round(float(part) * 255) for part in found.split()) for found in re.findall(rb"([\d. ]+) rg\b", drawn)
    }
    white, candidate, dark_page, dark_card = (255, 255, 255), (0, 0x69, 0x5C), (0x0F, 0x14, 0x1A), (0x17, 0x1E, 0x27)
    assert {white, candidate} <= fills
    assert not {dark_page, dark_card} & fills
