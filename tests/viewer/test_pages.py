"""What a user sees of `shardio view`, in a real browser."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image
from support import LIMIT_S, reading, small_datasets
from support.trees import environment
from support.viewer_pages import (
    CLASSES,
    EACH,
    FIELDS,
    HOSTILE,
    PIXELS,
    N,
    is_near,
    key,
    painted,
    rgb,
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with boxes as COCO has them, and a mask whose left half is class 1."""

    def of(number: int) -> dict[str, Any]:
        out = io.BytesIO()
        mask = Image.new("L", (48, 32))
        mask.paste(1, (0, 0, 24, 32))
        mask.save(out, "PNG")
        boxes = [{"bbox": [4.0, 2.0, 10.0, 8.0], "label": 1}, {"bbox": [30, 20, 8, 4], "label": 3}]
        values = {"__key__": b"%d" % number, "image": painted(number), "mask": out.getvalue()}
        return values | {"annotations": boxes}

    fields = (*FIELDS[:2], ("mask", "image"), ("annotations", "json"))
    folder = tmp_path_factory.mktemp("viewed") / "scenes"
    return small_datasets.make(folder, [3], fields=fields, sample=of, classes=CLASSES)


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, viewer: Any) -> Iterator[Open]:
    """Opens a page of a viewer: `opened(dataset, "/summary")`. Errors of its scripts are ours."""
    contexts, faults = [], []

    def open_page(dataset: Path, path: str = "/", **options: Any) -> Any:
        site = viewer(dataset)
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(1000 * LIMIT_S)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        token = site.url.rpartition("?")[2]
        page.goto(f"{site.base}{path}{'&' if '?' in path else '?'}{token}")
        page.wait_for_url(lambda url: "token=" not in url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def settled(page: Any) -> Any:
    """The page, once it waits for no index any more: until then it loads itself again."""
    return ready(page, "!document.querySelector('meta[http-equiv=refresh]')")


def ready(page: Any, what: str, told: Any = None) -> Any:
    """The page, once that is true of one that is loaded: before, no key of it does anything."""
    page.wait_for_load_state()  # without scripts, what follows looks once
    page.wait_for_function(f"told => document.readyState == 'complete' && {what}", arg=told)
    return page


def keys(page: Any) -> list[str]:
    """The keys on a page of records, in its order."""
    settled(page)
    return page.locator(".grid > li > a").evaluate_all("all => all.map(one => one.title)")


SIDES = """all => Promise.all(all.map(async one => {
  one.loading = "eager";
  await one.decode();
  return one.naturalWidth;
}))"""


# ------------------------------------------------------------------------------------ the records


def test_the_grid_shows_the_records_in_storage_order(opened: Open, colors: Path) -> None:
    page = opened(colors)
    assert keys(page) == [key(number) for number in range(96)]
    pixels = page.locator(".grid img").evaluate_all(PIXELS)
    assert len(pixels) == 96
    assert all(is_near(found, rgb(number)) for number, found in enumerate(pixels))
    page.keyboard.press("n")
    page.wait_for_url("**/?start=96")
    assert keys(page) == [key(number) for number in range(96, 192)]
    pixels = page.locator(".grid img").evaluate_all(PIXELS)
    assert all(is_near(found, rgb(96 + number)) for number, found in enumerate(pixels))
    page.get_by_role("link", name="Last").first.click()
    assert keys(page) == [key(number) for number in range(192, N)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle_buffer": 16, "seed": 3, "epoch": 2, "rank": 1, "world_size": 2, "spans": 4},
        {"shuffle": False},
        {"unit": 2, "rank": 1, "world_size": 3, "tail": "pad"},
    ],
    ids=str,
)
def test_a_batch_on_the_page_is_the_batch_of_training(
    opened: Open, colors: Path, options: dict[str, Any]
) -> None:
    given = {"batch_size": 16} | options
    epoch = given.pop("epoch", 0)
    dataset = reading.keyed(colors, **({"shuffle_buffer": None, "spans": None} | given))
    dataset.set_epoch(epoch)
    batches = reading.batches(dataset)
    address = "&".join(
        f"{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in (given | {"epoch": epoch}).items()
    )
    page = opened(colors, f"/?order=training&{address}")
    for step in (0, 3, len(batches) - 1):
        if step:
            page.goto(f"{page.url.partition('&step')[0]}&step={step}")
        assert keys(page) == batches[step]
        assert f"Step {step} of {len(batches)}" in page.locator("h2").first.inner_text()


def test_one_sees_how_well_a_buffer_mixes(opened: Open, colors: Path) -> None:
    page = opened(colors, "/?order=training&batch_size=20&shuffle_buffer=all")
    mixed = settled(page).locator(".mix p").inner_text()
    assert re.fullmatch(
        r"4 classes in this batch \(a uniform shuffle: about 4\), from 3 of 4 .*", mixed
    )
    assert page.locator(".steps li").all_inner_texts() == [str(step) for step in range(10)]
    bars = page.locator(".mixing svg").first.locator("path").count()
    assert bars == len(CLASSES)
    page.goto(page.url.replace("shuffle_buffer=all", "shuffle=0"))
    assert settled(page).locator(".mix p").inner_text().startswith("1 class in this batch")


def test_records_are_filtered_searched_and_sorted(opened: Open, colors: Path) -> None:
    page = opened(colors)
    page.get_by_label("Class").select_option("cat")  # is shown at once
    page.wait_for_url("**/?label=2")
    assert keys(page) == [key(number) for number in range(2 * EACH, 3 * EACH)]
    page.get_by_label("Where").fill("width>=5")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?*where=*")
    wanted = [number for number in range(2 * EACH, 3 * EACH) if number % 7 >= 5]
    assert keys(page) == [key(number) for number in wanted]
    page.get_by_label("Sort").select_option("width")
    page.wait_for_url("**/?*sort=width*")
    assert keys(page) == [key(n) for n in sorted(wanted, key=lambda n: (n % 7, n))]
    page.get_by_label("greatest first").check()
    page.wait_for_url("**/?*descending=1*")
    assert keys(page) == [key(n) for n in sorted(wanted, key=lambda n: (-(n % 7), n))]
    page.get_by_role("link", name="Reset").click()
    page.wait_for_url("**/")
    page.keyboard.press("/")
    page.keyboard.type("DOG/019")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?search=DOG/019")
    assert keys(page) == [key(number) for number in range(190, 200)]


def test_a_query_that_cannot_be_met_says_so_and_keeps_the_form(opened: Open, colors: Path) -> None:
    page = settled(opened(colors, "/?where=nothing%3E1"))
    assert "nothing" in page.get_by_role("alert").inner_text()
    assert page.get_by_label("Where", exact=True).input_value() == "nothing>1"
    for path, words in (
        ("/?start=x", "start: expected a whole number from 0 on, found 'x'"),
        ("/?order=up", "order: expected storage or training, found 'up'"),
        ("/record/200", "record 200"),
        ("/nowhere", "there is no such page"),
        ("/static/../server.py", "there is no such page"),
    ):
        page.goto(page.url.partition("/?")[0].rstrip("/") + path)
        assert words in page.locator("main").inner_text()
        page.go_back()


def test_every_view_has_an_address(opened: Open, colors: Path) -> None:
    page = opened(colors, "/?order=training&batch_size=16&seed=5&step=4")
    shown = keys(page)
    page.get_by_role("link", name="Next").first.click()
    page.wait_for_url("**step=5*")
    assert keys(page) != shown
    page.go_back()
    assert keys(page) == shown
    page.reload()
    assert keys(page) == shown
    other = page.context.new_page()
    other.goto(page.url)
    assert keys(other) == shown
    # What is left as it was is not in the address.
    page.get_by_label("Seed").fill("0")
    page.get_by_label("Step").fill("")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/\?order=training&batch_size=16$"))


# ------------------------------------------------------------------------------------- one record


def test_a_record_page_tells_all_of_it(opened: Open, colors: Path) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "shardio", "ls", colors, "--json"],
        capture_output=True,
        env=environment(),
        check=True,
    )
    row = json.loads(listed.stdout)["records"][123]
    page = opened(colors, "/record/123")
    assert "Record 123" in page.locator("h1").inner_text()
    text = page.locator(".about").inner_text()
    for words in (f"{row['offset']:,} to ", "2 of 4", "right", "PNG, 48 x 32", "int\n4"):
        assert words in text, text
    assert key(123) in page.locator(".key").inner_text()
    (pixel,) = page.locator("img.large").evaluate_all(PIXELS)
    assert tuple(pixel) == rgb(123)  # the stored file itself
    crops = page.locator(".crops-row img").evaluate_all(PIXELS)
    assert len(crops) == 4
    assert all(is_near(found, rgb(123)) for found in crops)


def test_boxes_and_masks_lie_over_the_image_with_a_switch(opened: Open, scenes: Path) -> None:
    page = opened(scenes, "/record/1")
    names = ("x", "y", "width", "height")
    boxes = page.locator(".boxes rect").evaluate_all(
        "(all, names) => all.map(one => names.map(name => +one.getAttribute(name)))", names
    )
    assert boxes == [[4, 2, 10, 8], [30, 20, 8, 4]]
    assert page.locator(".boxes text").all_text_contents() == ["bee", "dog"]
    image, layer = (page.locator(what).bounding_box() for what in ("img.large", "svg.layer"))
    assert image == layer
    mask = page.locator("img.masks")
    alpha = mask.evaluate("""async one => {
      await one.decode();
      const drawn = document.createElement("canvas").getContext("2d");
      drawn.drawImage(one, 0, 0);
      return [2, 40].map(x => drawn.getImageData(x, 9, 1, 1).data[3]);
    }""")
    assert alpha[0] > 0 and alpha[1] == 0  # class 0 is transparent
    for switch, what in (("boxes (2)", ".boxes"), ("mask", ".masks"), ("crops", ".crops")):
        shown = page.locator(what).first.is_visible()
        page.get_by_role("checkbox", name=switch).set_checked(not shown)
        assert page.locator(what).first.is_visible() is not shown


def test_what_is_switched_is_in_the_address(opened: Open, scenes: Path) -> None:
    page = opened(scenes, "/record/1?where=label%3Da%FF&boxes=0")
    kinds = ("boxes", "masks", "crops")

    def shown(one: Any) -> list[bool]:
        return [one.locator(f".{kind}").first.is_visible() for kind in kinds]

    assert shown(page) == [False, True, False]
    page.get_by_role("checkbox", name="mask").uncheck()
    page.get_by_role("checkbox", name="crops").check()
    assert page.url.endswith("/record/1?where=label%3Da%FF&boxes=0&masks=0&crops=1")
    other = page.context.new_page()
    other.goto(page.url)
    assert shown(other) == shown(page) == [False, False, True]
    other.get_by_role("checkbox", name="boxes (2)").check()
    other.get_by_role("checkbox", name="crops").uncheck()
    assert other.url.endswith("/record/1?where=label%3Da%FF&masks=0")  # what is usual is left out
    other.get_by_label("Seed").fill("7")  # the form of the crops keeps the others
    other.get_by_role("button", name="Draw").click()
    other.wait_for_url("**seed=7*")
    assert shown(other) == [True, False, False]


def test_crops_are_those_of_the_options_asked_for(opened: Open, colors: Path) -> None:
    page = opened(colors, "/record/5")
    before = page.locator(".crops-row li p").all_inner_texts()
    for name, value in (("Size", "32"), ("Least scale", "0.9"), ("From epoch", "2")):
        page.get_by_label(name).fill(value)
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "scale=0.9" in url)
    after = page.locator(".crops-row li p").all_inner_texts()
    assert [text.split()[1] for text in after] == ["2", "3", "4", "5"]
    assert after[0].split()[2:] != before[2].split()[2:]
    assert page.locator(".crops-row img").evaluate_all(SIDES) == [32] * 4


def test_a_record_is_found_by_number_and_by_key(opened: Open, colors: Path) -> None:
    page = opened(colors)
    for text, number in (("150", 150), (key(7), 7)):
        page.keyboard.press("g")
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/record/{number}")
    page.keyboard.press("g")
    page.keyboard.type("no such key")
    page.keyboard.press("Enter")
    page.wait_for_url("**/go?*")
    assert "'no such key' is neither" in page.locator("main").inner_text()


def test_keys_walk_through_the_order_that_one_came_from(opened: Open, colors: Path) -> None:
    page = opened(colors, "/?order=training&batch_size=16&step=2")
    first, second = keys(page)[:2]
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/record/*")
    assert second in page.locator(".key").inner_text()
    page.keyboard.press("k")
    ready(page, "document.querySelector('.key').innerText.includes(told)", first)
    page.keyboard.press("k")  # the last one of the batch before
    ready(page, "!document.querySelector('.key').innerText.includes(told)", first)
    before = page.locator(".key").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_url("**step=1**")
    assert keys(page)[-1] in before
    assert page.evaluate("document.activeElement.title") in before  # one comes back to it


def test_arrows_move_by_rows_of_the_grid(opened: Open, colors: Path) -> None:
    page = opened(colors)
    active = "document.activeElement.title"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(active) == key(0)
    page.keyboard.press("ArrowDown")
    columns = page.evaluate(
        "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
    )
    assert columns > 3
    assert page.evaluate(active) == key(columns)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(active) == key(1)
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # the focus is seen
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()


# ------------------------------------------------------------------------------------ its looks


def test_light_and_dark_follow_the_system(opened: Open, colors: Path) -> None:
    def lightness(page: Any, what: str, name: str) -> float:
        value = page.evaluate(f"getComputedStyle(document.querySelector('{what}')).{name}")
        return sum(map(float, re.findall(r"[\d.]+", value)[:3])) / 3

    for scheme, is_dark in (("light", False), ("dark", True)):
        page = opened(colors, color_scheme=scheme)
        ground, text = lightness(page, "html", "backgroundColor"), lightness(page, "body", "color")
        assert (ground < 60 and text > 200) if is_dark else (ground > 230 and text < 60)


@pytest.mark.parametrize("javascript", [True, False])
def test_nothing_is_wider_than_a_phone(
    opened: Open, colors: Path, hostile: Path, javascript: bool
) -> None:
    for dataset, paths in (
        (
            colors,
            ("/", "/?order=training&batch_size=16&spans=4", "/record/5", "/summary", "/damage"),
        ),
        (hostile, ("/", "/record/8", "/summary", "/?order=training&batch_size=4")),
    ):
        page = opened(
            dataset, viewport={"width": 390, "height": 844}, java_script_enabled=javascript
        )
        for path in paths:
            page.goto(page.url.partition("?")[0].rstrip("/").split("/record")[0] + path)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width == 390, (dataset.name, path)
            page.go_back()


def test_pages_are_whole_without_scripts(opened: Open, colors: Path) -> None:
    page = opened(colors, java_script_enabled=False)
    page.get_by_label("Key contains").fill("bee/0050")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/?search=bee/0050")
    page.get_by_role("link", name="bee/0050").click()
    page.wait_for_url(re.compile("/record/50"))
    page.get_by_role("link", name="All records").click()
    page.wait_for_url(re.compile(r"/\?search=bee/0050&start=50#r50$"))
    page.get_by_role("link", name="Summary").click()
    settled(page).get_by_role("link", name="dog").click()
    assert len(keys(page)) == EACH


def test_a_screen_reader_finds_its_way(opened: Open, colors: Path) -> None:
    page = opened(colors, "/?order=training&batch_size=16")
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    nameless = """() => [...document.querySelectorAll("input, select, button, a, img, svg[role]")]
      .filter(one => one.type !== "hidden" && !(one.labels?.length || one.ariaLabel
        || one.textContent.trim() || one.alt || one.querySelector("img[alt]")))
      .map(one => one.outerHTML)"""
    assert page.evaluate(nameless) == []


# ---------------------------------------------------------------------------------- its safety


TOUCHED = """() => {
  for (const one of document.querySelectorAll("*")) one.dispatchEvent(new MouseEvent("mouseover"));
  return window.ran ?? null;
}"""


def test_names_are_text_and_nothing_else(opened: Open, hostile: Path) -> None:
    paths = ["/", "/summary", "/damage?check=0", "/?order=training&batch_size=4"]
    paths += [f"/record/{number}" for number in range(len(HOSTILE))]
    page = opened(hostile, "/")
    root = page.url.rstrip("/")
    paths += [f"/?search={quote(name)}" for name in HOSTILE[:6]]
    paths += [
        f"/?where={quote(HOSTILE[1])}",
        f"/?sort={quote(HOSTILE[0])}",
        f"/go?record={quote(HOSTILE[1])}",
    ]
    for path in paths:
        page.goto(root + path)
        assert page.evaluate(TOUCHED) is None, path
        found = page.locator("script, [onerror], [onmouseover], [onclick], a[href^='javascript:']")
        assert [one.get_attribute("src") for one in found.all()] in (["/static/viewer.js"], []), (
            path
        )
    page.goto(root + "/")
    titles = keys(page)
    assert titles[0] == HOSTILE[0]
    assert titles[1] == HOSTILE[1] + r"\xff"
    assert titles[4] == HOSTILE[4]  # no template
    assert titles[6] == r"a\x00b\x1b[31m\r\n\x7f"
    assert titles[7] == r"\u202eright to left\u2066\xff"


def test_no_page_asks_anybody_else(opened: Open, colors: Path) -> None:
    page = opened(colors, "/")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    root = page.url.rstrip("/")
    for path in ("/", "/record/3", "/summary", "/damage", "/?order=training"):
        page.goto(root + path)
    assert len(asked) > 50
    assert all(url.startswith(root + "/") for url in asked)


def test_another_site_s_page_gets_nothing_but_may_link_here(
    browser: Any, viewer: Any, colors: Path
) -> None:
    site = viewer(colors)
    context = browser.new_context()
    page = context.new_page()
    assert page.goto(site.base + "/").status == 403
    assert "shardio view" in page.locator("main").inner_text()
    # A chat or a notebook has the printed address as a link.
    page.route(
        "http://elsewhere.test/",
        lambda route: route.fulfill(
            content_type="text/html",
            body=f"<a href='{site.url}'>open</a><img src='{site.base}/image/0?side=64'>",
        ),
    )
    page.goto("http://elsewhere.test/")
    page.get_by_role("link").click()
    page.wait_for_url(site.base + "/")
    assert len(keys(page)) == 96
    assert context.cookies()[0]["httpOnly"] and context.cookies()[0]["sameSite"] == "Strict"
    # The browser has the cookie now, and gives it to no other site's page.
    page.goto("http://elsewhere.test/")
    assert page.locator("img").evaluate("one => one.decode().then(() => 1, () => 0)") == 0
    context.close()
