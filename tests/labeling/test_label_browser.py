"""The page in a real browser: simulated raters look at the pictures and press keys."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from label_cases import make_comparison, opened, serving, write_rollouts
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ebbflow.data.pairs import read_pairs
from ebbflow.labeling.sources import load_rollouts

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
LOOK = """["left", "right"].map(side => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const context = canvas.getContext("2d");
    context.drawImage(document.querySelector(`#${side} img`), 0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data[0];
})"""
"""The grey levels of both pictures, as they are on the screen."""
READY = "body[data-ready]:not([data-ready=''])"
"""Both pictures of a pair are on the screen."""
SECONDS = 60
"""Until a browser that says nothing is given up: far more than anything takes."""
KEYS = {"left": "ArrowLeft", "right": "ArrowRight", "tie": "ArrowDown", "undo": "Backspace"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * SECONDS)
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM) as browser,
    ):
        yield browser


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[[], Page]]:
    """Opens pages of raters that share nothing in the browser."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(browser.new_context()).new_page()


@pytest.fixture
def page(new_page: Callable[[], Page]) -> Page:
    return new_page()


def begin(page: Page, address: str, rater: str) -> None:
    page.goto(address)
    page.get_by_label("Your name").fill(rater)
    page.keyboard.press("Enter")
    expect(page.locator(f"{READY}, #finished:visible").first).to_be_attached()


def press(page: Page, answer: str, answered: int) -> None:
    """Press a key and wait until the page shows so many answers and the next pair, if there is
    one."""
    page.keyboard.press(KEYS[answer])
    wait_for_answers(page, answered)


def wait_for_answers(page: Page, answered: int) -> None:
    expect(page.locator("body")).to_have_attribute("data-answered", str(answered))
    expect(page.locator(f"{READY}, #finished:visible").first).to_be_attached()


def answers(page: Page) -> int:
    return int(page.locator("body").get_attribute("data-answered"))


def shown_pair(page: Page) -> str:
    return page.locator("body").get_attribute("data-ready")


def rate(page: Page, count: int = 1000) -> int:
    """Prefer the brighter picture until there is no pair left; returns how many were answered."""
    done = 0
    while done < count and page.locator("#compare").is_visible():
        left, right = page.evaluate(LOOK)
        press(page, "left" if left > right else "right", answers(page) + 1)
        done += 1
    return done


def test_two_raters_at_once_say_what_they_see(page, new_page, tmp_path):
    wins = [True, False, True, True, False, False]
    with (
        opened(make_comparison(tmp_path, wins), tmp_path / "a") as session,
        serving(session) as address,
    ):
        pages = [page, new_page()]
        for rater, its in zip(("Anna", "Ben"), pages, strict=True):
            begin(its, address, rater)
        assert [shown_pair(its) for its in pages] == [
            session.order_of_pairs(rater)[0] for rater in ("Anna", "Ben")
        ]
        for step in range(3):  # in turns, so that both are under way at the same time
            assert [rate(its, 2) for its in pages] == [2, 2]
            for its in pages:
                expect(its.locator("#progress")).to_have_js_property("value", 2 * step + 2)
        for its in pages:
            expect(its.locator("#count")).to_have_text("6 answered · 0 pairs left")
            expect(its.locator("#why")).to_contain_text("answered all pairs")
        assert session.measure_agreement() == 1
        for rater in ("Anna", "Ben"):
            assert {
                key: answer.preferred_picture
                for key, answer in session.answers.answers_of_rater(rater).items()
            } == {f"{index}-0": int(won) for index, won in enumerate(wins)}
        begin(third := new_page(), address, "Cleo")
        expect(third.locator("#agreement")).to_have_text("2 raters, agreement α = 1.00")
    evidence = json.loads((tmp_path / "a" / "evidence.json").read_text())
    assert (evidence["answers"]["candidate"], evidence["answers"]["champion"]) == (6, 6)
    assert [
        pair.chosen[0, 0, 0] > pair.rejected[0, 0, 0]
        for pair in read_pairs(tmp_path / "a" / "pairs.parquet")
    ] == [True] * 6


def test_the_test_stops_both_raters(page, new_page, tmp_path):
    with (
        opened(make_comparison(tmp_path, [True] * 40), tmp_path / "a") as session,
        serving(session) as address,
    ):
        other = new_page()
        begin(page, address, "Anna")
        begin(other, address, "Ben")
        assert rate(page) == 8
        expect(page.locator("#why")).to_contain_text("a decision is reached")
        expect(page.locator("#reopen")).to_be_hidden()
        other.keyboard.press(KEYS["left"])
        expect(other.locator("#finished")).to_be_visible()
        expect(other.locator("#problem")).to_contain_text("nothing was saved")
        assert len(session.answers.standing) == 8
        for shown in (page, other):
            expect(shown.locator("body")).not_to_contain_text("candidate", ignore_case=True)
    assert json.loads((tmp_path / "a" / "evidence.json").read_text())["decision"] == "candidate"


def test_a_reload_and_a_new_server_resume_in_the_same_order(page, tmp_path):
    task = make_comparison(tmp_path, [True, False] * 3)
    for count in (2, 4):
        with opened(task, tmp_path / "a") as session, serving(session) as address:
            begin(page, address, " anna  b ")
            assert answers(page) == count - 2
            assert shown_pair(page) == session.order_of_pairs("anna b")[count - 2]
            assert rate(page, 1) == 1
            page.reload()
            wait_for_answers(page, count - 1)
            assert shown_pair(page) == session.order_of_pairs("anna b")[count - 1]
            assert rate(page, 1) == 1
    assert [answer.pair for answer in session.answers.standing] == session.order_of_pairs("anna b")[
        :4
    ]


def test_keys_of_the_keyboard_answer_pairs(page, tmp_path):
    with (
        opened(make_comparison(tmp_path, [True, False] * 3), tmp_path / "a") as session,
        serving(session) as address,
    ):
        begin(page, address, "Anna")
        first = shown_pair(page)
        page.keyboard.press(KEYS["undo"])  # there is nothing to take back
        for count, answer in enumerate(("left", "right", "tie"), start=1):
            press(page, answer, count)
        for count in (2, 1, 0):
            press(page, "undo", count)
        assert shown_pair(page) == first
        press(page, "tie", 1)
        page.locator("#left").click()
        wait_for_answers(page, 2)
        for modifier in ("Alt", "Control", "Meta"):  # the browser's own keys
            page.keyboard.press(f"{modifier}+{KEYS['left']}")
        said = [
            json.loads(line)["answer"]
            for line in (tmp_path / "a" / "answers.jsonl").read_text().splitlines()
        ]
        assert said == ["left", "right", "tie", "undo", "undo", "undo", "tie", "left"]


def test_keys_that_come_too_fast_answer_no_pair_that_was_not_seen(page, tmp_path):
    with opened(
        make_comparison(tmp_path, [True, False] * 10), tmp_path / "a", all_pairs=True
    ) as session:
        with serving(session) as address:
            begin(page, address, "Anna")
            hasty = """for (let press = 0; press < 9; press++)
                document.dispatchEvent(
                    new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}))"""
            page.evaluate(hasty)
            wait_for_answers(page, 1)
            assert rate(page) == 19
        assert list(session.answers.answers_of_rater("Anna")) == session.order_of_pairs("Anna")


HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>{{7*7}}${7*7}",
    "\u202eesrever \u2028 <b>bold</b>\nsecond line",
]


def test_prompts_are_shown_as_they_are_and_run_nothing(page, tmp_path):
    asked = []
    said = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    with (
        opened(make_comparison(tmp_path, [True] * 4, HOSTILE), tmp_path / "a") as session,
        serving(session) as address,
    ):
        begin(page, address, "Anna")
        shown = []
        for _ in HOSTILE:
            shown.append(page.locator("#prompt").text_content())
            expect(page.locator("#prompt > *")).to_have_count(0)
            rate(page, 1)
        assert sorted(shown) == sorted(HOSTILE)
        expect(page).to_have_title("Which picture is better?")
        expect(page.locator("script")).to_have_count(1)
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((address, "data:,"))] == []
    assert said == []


def test_a_name_that_is_none_is_refused_with_the_reason(page, tmp_path):
    with (
        opened(make_comparison(tmp_path, [True]), tmp_path / "a") as session,
        serving(session) as address,
    ):
        page.goto(address)
        page.get_by_label("Your name").fill("<b>")
        page.keyboard.press("Enter")
        expect(page.locator("#refused")).to_contain_text("a name has 1 to 40 letters")
        page.goto("about:blank")
        page.goto(f"{address}#%E0%A4%A")
        expect(page.locator("#start")).to_be_visible()
        page.goto("about:blank")
        page.goto(f"{address}#Zo%C3%A9")
        expect(page.locator("#who")).to_have_text("Zoé")


def test_a_server_that_is_gone_is_told_and_nothing_is_shown_as_saved(page, tmp_path):
    with opened(make_comparison(tmp_path, [True] * 5), tmp_path / "a") as session:
        with serving(session) as address:
            begin(page, address, "Anna")
            rate(page, 1)
        page.keyboard.press(KEYS["left"])
        expect(page.locator("#problem")).to_contain_text("does not answer")
        assert answers(page) == 1
        assert len(session.answers.standing) == 1


def test_the_rollouts_of_one_policy(page, tmp_path):
    task = load_rollouts(*write_rollouts(tmp_path, groups=3, group_size=4), max_pairs=100, seed=0)
    with opened(task, tmp_path / "a") as session, serving(session) as address:
        begin(page, address, "Anna")
        assert rate(page) == 6
    assert all(
        (pair.chosen > pair.rejected).all() for pair in read_pairs(tmp_path / "a" / "pairs.parquet")
    )


@contextmanager
def another_site(folder: Path) -> Iterator[str]:
    """A web server on another port of this machine, which to a browser is the same site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


ATTACK = """
const body = JSON.stringify({rater: "anna", pair: PAIR, answer: "left"});
const tried = [
  fetch(TARGET + "answer", {method: "POST", body, headers: {"Content-Type": "application/json"}}),
  fetch(TARGET + "answer", {method: "POST", body, mode: "no-cors"}),
  fetch(TARGET + "undo", {method: "POST", body: '{"rater": "anna"}', mode: "no-cors"}),
  fetch(TARGET + "state?rater=anna"),
];
const image = new Image();
const seen = new Promise(done => {
  image.onload = () => done("loaded");
  image.onerror = () => done("refused");
});
image.src = TARGET + "picture/" + PAIR + "/left?rater=anna";
Promise.allSettled(tried).then(async all => {
  const read = await Promise.all(
    all.map(one => one.status === "fulfilled" ? one.value.text() : "refused"));
  document.body.dataset.done = JSON.stringify([...read, await seen]);
});
"""


def test_another_page_that_even_has_the_address_reads_and_writes_nothing(page, tmp_path):
    with (
        opened(make_comparison(tmp_path, [True] * 5), tmp_path / "a") as session,
        serving(session) as address,
    ):
        session.record_answer("anna", session.order_of_pairs("anna")[0], "tie")
        pair = session.order_of_pairs("anna")[1]
        script = ATTACK.replace("TARGET", json.dumps(address)).replace("PAIR", json.dumps(pair))
        (tmp_path / "index.html").write_text(
            f"<body><iframe src='{address}'></iframe><script>{script}</script>"
        )
        with another_site(tmp_path) as site:
            page.goto(site)
            expect(page.locator("body[data-done]")).to_have_count(1)
            read = json.loads(page.locator("body").get_attribute("data-done"))
        assert read == ["refused"] * 5
        assert [answer.answer for answer in session.answers.standing] == ["tie"]
