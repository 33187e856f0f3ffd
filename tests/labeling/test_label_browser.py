"""The page in a real browser: simulated raters look at the pictures and press keys."""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from headless import CHROMIUM, Browser, Page, headless
from label_cases import make_comparison, opened, serving, write_rollouts

from ebbflow.data.pairs import read_pairs
from ebbflow.labeling.sources import load_rollouts

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(
        not os.environ.get("EBBFLOW_BROWSER_TESTS"), reason="set EBBFLOW_BROWSER_TESTS=1: Chromium does not always answer"
    ),
]
LOOK = """["left", "right"].map(side => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const context = canvas.getContext("2d");
    context.drawImage(document.querySelector(`#${side} img`), 0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data[0];
})"""
"""The grey levels of both pictures, as they are on the screen."""
ANSWERED = "Number(document.body.dataset.answered)"
VISIBLE = "!document.getElementById('{}').hidden"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with headless(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Page:
    browser.events.clear()
    return browser.page()


def begin(page: Page, address: str, rater: str) -> None:
    page.open(address)
    page.wait_for(VISIBLE.format("start"))
    page.type(rater)
    page.enter()
    page.wait_for("document.body.dataset.ready || !document.getElementById('finished').hidden")


def press(page: Page, answer: str, expected: int) -> None:
    """Press a key and wait until the page shows so many answers."""
    page.press(answer)
    page.wait_for(f"{ANSWERED} === {expected} && (document.body.dataset.ready || {VISIBLE.format('finished')})")


def rate(page: Page, count: int = 1000) -> int:
    """Prefer the brighter picture until there is no pair left; returns how many were answered."""
    done = 0
    while done < count and page.evaluate(VISIBLE.format("compare")):
        left, right = page.evaluate(LOOK)
        press(page, "left" if left > right else "right", page.evaluate(ANSWERED) + 1)
        done += 1
    return done


def text(page: Page, name: str) -> str:
    return str(page.evaluate(f"document.getElementById('{name}').textContent"))


def test_two_raters_at_once_say_what_they_see(page, browser, tmp_path):
    wins = [True, False, True, True, False, False]
    with opened(make_comparison(tmp_path, wins), tmp_path / "a") as session, serving(session) as address:
        pages = [page, browser.page()]
        for rater, its in zip(("Anna", "Ben"), pages, strict=True):
            begin(its, address, rater)
        orders = [its.evaluate("document.body.dataset.ready") for its in pages]
        assert orders == [session.order(rater)[0] for rater in ("Anna", "Ben")]
        for step in range(3):  # in turns, so that both are under way at the same time
            assert [rate(its, 2) for its in pages] == [2, 2]
            assert [its.evaluate("document.getElementById('progress').value") for its in pages] == [2 * step + 2] * 2
        assert [text(its, "count") for its in pages] == ["6 answered · 0 pairs left"] * 2
        assert all("answered all pairs" in text(its, "why") for its in pages)
        assert session.agreement() == 1
        for rater in ("Anna", "Ben"):
            assert {key: answer.preferred for key, answer in session.answers.of(rater).items()} == {
                f"{index}-0": int(won) for index, won in enumerate(wins)
            }
        page.open("about:blank")
        begin(page, address, "Cleo")
        assert text(page, "agreement") == "2 raters, agreement α = 1.00"
    evidence = json.loads((tmp_path / "a" / "evidence.json").read_text())
    assert (evidence["answers"]["candidate"], evidence["answers"]["champion"]) == (6, 6)
    assert [pair.chosen[0, 0, 0] > pair.rejected[0, 0, 0] for pair in read_pairs(tmp_path / "a" / "pairs.parquet")] == [True] * 6


def test_the_test_stops_both_raters(page, browser, tmp_path):
    with opened(make_comparison(tmp_path, [True] * 40), tmp_path / "a") as session, serving(session) as address:
        other = browser.page()
        begin(page, address, "Anna")
        begin(other, address, "Ben")
        assert rate(page) == 8
        assert "a decision is reached" in text(page, "why")
        assert page.evaluate("document.getElementById('reopen').hidden")
        other.press("left")
        other.wait_for(VISIBLE.format("finished"))
        assert "nothing was saved" in text(other, "problem")
        assert len(session.answers.standing) == 8
        for shown in (page, other):
            assert "candidate" not in shown.evaluate("document.body.innerText").lower()
    assert json.loads((tmp_path / "a" / "evidence.json").read_text())["decision"] == "candidate"


def test_a_reload_and_a_new_server_resume_in_the_same_order(page, tmp_path):
    task = make_comparison(tmp_path, [True, False] * 3)
    for count in (2, 4):
        with opened(task, tmp_path / "a") as session, serving(session) as address:
            begin(page, address, " anna  b ")
            assert page.evaluate(ANSWERED) == count - 2
            assert page.evaluate("document.body.dataset.ready") == session.order("anna b")[count - 2]
            assert rate(page, 1) == 1
            page.load("Page.reload")
            page.wait_for(f"{ANSWERED} === {count - 1} && document.body.dataset.ready === '{session.order('anna b')[count - 1]}'")
            assert rate(page, 1) == 1
            page.open("about:blank")
    assert [answer.pair for answer in session.answers.standing] == session.order("anna b")[:4]


def test_keys(page, tmp_path):
    with opened(make_comparison(tmp_path, [True, False] * 3), tmp_path / "a") as session, serving(session) as address:
        begin(page, address, "Anna")
        first = page.evaluate("document.body.dataset.ready")
        page.press("undo")  # there is nothing to take back
        for count, answer in enumerate(("left", "right", "tie"), start=1):
            press(page, answer, count)
        for count in (2, 1, 0):
            press(page, "undo", count)
        assert page.evaluate("document.body.dataset.ready") == first
        press(page, "tie", 1)
        page.evaluate("document.getElementById('left').click()")
        page.wait_for(f"{ANSWERED} === 2 && document.body.dataset.ready")
        for modifiers in (1, 2, 4):
            page.press("left", modifiers=modifiers)  # Alt, Control, Meta: the browser's own
        said = [json.loads(line)["answer"] for line in (tmp_path / "a" / "answers.jsonl").read_text().splitlines()]
        assert said == ["left", "right", "tie", "undo", "undo", "undo", "tie", "left"]


def test_keys_that_come_too_fast_answer_no_pair_that_was_not_seen(page, tmp_path):
    with opened(make_comparison(tmp_path, [True, False] * 10), tmp_path / "a", all_pairs=True) as session:
        with serving(session) as address:
            begin(page, address, "Anna")
            hasty = """for (let press = 0; press < 9; press++)
                document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}))"""
            page.evaluate(hasty)
            page.wait_for(f"{ANSWERED} === 1 && document.body.dataset.ready")
            assert rate(page) == 19
        assert list(session.answers.of("Anna")) == session.order("Anna")


HOSTILE = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>{{7*7}}${7*7}",
    "\u202eesrever \u2028 <b>bold</b>\nsecond line",
]


def test_prompts_are_shown_as_they_are_and_run_nothing(page, browser, tmp_path):
    with opened(make_comparison(tmp_path, [True] * 4, HOSTILE), tmp_path / "a") as session, serving(session) as address:
        begin(page, address, "Anna")
        shown = []
        for _ in HOSTILE:
            shown.append(text(page, "prompt"))
            assert page.evaluate("document.getElementById('prompt').childElementCount") == 0
            rate(page, 1)
        assert sorted(shown) == sorted(HOSTILE)
        assert page.evaluate("document.title") == "Which picture is better?"
        assert page.evaluate("document.scripts.length") == 1
    asked = {event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")}
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((address, "data:,"))] == []
    assert [event["entry"]["text"] for event in browser.seen("Log.entryAdded")] == []
    assert browser.seen("Runtime.exceptionThrown") == []


def test_a_name_that_is_none_is_refused_with_the_reason(page, tmp_path):
    with opened(make_comparison(tmp_path, [True]), tmp_path / "a") as session, serving(session) as address:
        page.open(address)
        page.type("<b>")
        page.enter()
        page.wait_for(VISIBLE.format("refused"))
        assert text(page, "refused").startswith("a name has 1 to 40 letters")
        page.open("about:blank")
        page.open(f"{address}#%E0%A4%A")
        page.wait_for(VISIBLE.format("start"))
        page.open("about:blank")
        page.open(f"{address}#Zo%C3%A9")
        page.wait_for("document.body.dataset.ready")
        assert text(page, "who") == "Zoé"


def test_a_server_that_is_gone_is_told_and_nothing_is_shown_as_saved(page, tmp_path):
    with opened(make_comparison(tmp_path, [True] * 5), tmp_path / "a") as session:
        with serving(session) as address:
            begin(page, address, "Anna")
            rate(page, 1)
        page.press("left")
        page.wait_for(VISIBLE.format("problem"))
        assert "does not answer" in text(page, "problem")
        assert page.evaluate(ANSWERED) == 1
        assert len(session.answers.standing) == 1


def test_the_rollouts_of_one_policy(page, tmp_path):
    task = load_rollouts(*write_rollouts(tmp_path, groups=3, group_size=4), max_pairs=100, seed=0)
    with opened(task, tmp_path / "a") as session, serving(session) as address:
        begin(page, address, "Anna")
        assert rate(page) == 6
    assert all((pair.chosen > pair.rejected).all() for pair in read_pairs(tmp_path / "a" / "pairs.parquet"))


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
const seen = new Promise(done => { image.onload = () => done("loaded"); image.onerror = () => done("refused"); });
image.src = TARGET + "picture/" + PAIR + "/left?rater=anna";
Promise.allSettled(tried).then(async all => {
  const read = await Promise.all(all.map(one => one.status === "fulfilled" ? one.value.text() : "refused"));
  document.body.dataset.done = JSON.stringify([...read, await seen]);
});
"""


def test_another_page_that_even_has_the_address_reads_and_writes_nothing(page, tmp_path):
    with opened(make_comparison(tmp_path, [True] * 5), tmp_path / "a") as session, serving(session) as address:
        session.answer("anna", session.order("anna")[0], "tie")
        pair = session.order("anna")[1]
        script = ATTACK.replace("TARGET", json.dumps(address)).replace("PAIR", json.dumps(pair))
        (tmp_path / "index.html").write_text(f"<body><iframe src='{address}'></iframe><script>{script}</script>")
        with another_site(tmp_path) as site:
            page.open(site)
            page.wait_for("document.body.dataset.done")
            read = json.loads(page.evaluate("document.body.dataset.done"))
        assert read == ["refused"] * 5
        assert [answer.answer for answer in session.answers.standing] == ["tie"]
