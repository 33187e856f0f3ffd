"""The page's server: what it answers, and whom it refuses."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urljoin, urlsplit

import pytest
from fastapi.testclient import TestClient
from label_cases import (
    level,
    make_comparison,
    opened,
    rate,
    send_answers,
    serving,
    write_evaluation,
)

from ebbflow.labeling import server
from ebbflow.labeling.server import build_app, run_label_server
from ebbflow.labeling.sources import LabelError, load_comparison
from ebbflow.rewards import server_limits
from ebbflow.storage.disk import DiskFullError

TOKEN = "t0ken"
BASE = "http://127.0.0.1:8080"
SAME = {"Origin": BASE}
HOSTILE = "<script>document.title='owned'</script>\u2028{{7*7}} </style> &amp; \"'"


@pytest.fixture
def session(tmp_path):
    prompts = [HOSTILE, *(f"prompt {index}" for index in range(1, 6))]
    with opened(
        make_comparison(tmp_path, [True, False] * 3, prompts), tmp_path / "answers"
    ) as session:
        yield session


@pytest.fixture
def client(session):
    with TestClient(build_app(session, "127.0.0.1", TOKEN), base_url=BASE) as client:
        yield client


def state(client, rater="anna"):
    return client.get(f"/{TOKEN}/state", params={"rater": rater}).json()


def answer(client, said="left", rater="anna", pair=None, **headers):
    body = {"rater": rater, "pair": pair or state(client, rater)["pair"]["key"], "answer": said}
    return client.post(f"/{TOKEN}/answer", json=body, headers=SAME | headers)


def test_a_rater_goes_through_all_pairs(client, session):
    for left in range(6, 0, -1):
        now = state(client)
        assert (now["answered"], now["left"], now["total"], now["finished"]) == (
            6 - left,
            left,
            6,
            None,
        )
        sides = [
            client.get(f"/{TOKEN}/picture/{now['pair']['key']}/{side}?rater=anna")
            for side in ("left", "right")
        ]
        assert {side.headers["content-type"] for side in sides} == {"image/png"}
        said = "left" if level(sides[0].content) > level(sides[1].content) else "right"
        done = answer(client, said).json()
        assert (done["answered"], done["left"]) == (7 - left, left - 1)
    assert (done["pair"], done["next"], done["finished"]) == (None, None, "all")
    assert [
        answer.preferred_picture
        for answer in sorted(session.answers.standing, key=lambda one: one.pair)
    ] == [1, 0] * 3
    evidence = json.loads((session.folder / "evidence.json").read_text())
    assert (evidence["answers"]["candidate"], evidence["decision"]) == (3, "undecided")


def test_raters_are_independent_and_agreement_is_shown(client):
    assert answer(client, "tie").json()["answered"] == 1
    assert state(client, "ben")["answered"] == 0
    assert state(client)["agreement"] is None
    for rater in ("anna", "ben"):
        while (now := state(client, rater))["pair"]:
            first = client.get(f"/{TOKEN}/picture/{now['pair']['key']}/left?rater={rater}").content
            answer(client, "left" if level(first) in (200, *range(120, 130)) else "right", rater)
    now = state(client)
    assert now["raters"] == 2
    assert -1 <= now["agreement"] <= 1


def test_undo_shows_the_last_pair_again(client):
    first = state(client)["pair"]["key"]
    answer(client)
    now = client.post(f"/{TOKEN}/undo", json={"rater": "anna"}, headers=SAME).json()
    assert (now["pair"]["key"], now["answered"]) == (first, 0)
    assert client.post(f"/{TOKEN}/undo", json={"rater": "anna"}, headers=SAME).status_code == 409


def test_a_rater_cannot_undo_the_answer_of_another(client, session):
    answer(client)
    with TestClient(build_app(session, "127.0.0.1", TOKEN), base_url=BASE) as other:
        state(other, "ben")
        refused = other.post(f"/{TOKEN}/undo", json={"rater": "anna"}, headers=SAME)
    assert refused.status_code == 409
    assert "was given in another browser" in refused.json()["detail"]
    assert len(session.answers.standing) == 1
    assert client.post(f"/{TOKEN}/undo", json={"rater": "anna"}, headers=SAME).status_code == 200
    assert session.answers.standing == []


def test_a_second_window_of_a_rater_cannot_answer_twice(client, session):
    first = state(client)["pair"]["key"]
    assert answer(client, pair=first).status_code == 200
    assert answer(client, pair=first).status_code == 409
    assert len(session.answers.standing) == 1


def test_what_a_rater_gets_does_not_depend_on_who_is_the_candidate(tmp_path):
    """Swapped policies: the same state, and every picture on the other side."""
    seen = []
    for number, names in enumerate(("ab", "ba")):
        levels = {"a": [10, 20, 30], "b": [110, 120, 130]}
        paths = [
            write_evaluation(tmp_path / str(number) / f"{role}.parquet", name, levels[name])
            for role, name in enumerate(names)
        ]
        task = load_comparison(*paths, max_pairs=9, seed=0)
        with opened(task, tmp_path / f"answers {number}") as session:
            with TestClient(build_app(session, "127.0.0.1", TOKEN), base_url=BASE) as client:
                now = state(client)
                pictures = [
                    client.get(f"/{TOKEN}/picture/{now['pair']['key']}/{side}?rater=anna")
                    for side in ("left", "right")
                ]
                page = re.sub(r'nonce="[^"]*"', "", client.get(f"/{TOKEN}/").text)
            headers = [
                {name: value for name, value in one.headers.items() if "policy" not in name}
                for one in pictures
            ]
            seen.append((page, now, headers, [level(one.content) for one in pictures]))
    assert seen[0][:3] == seen[1][:3]
    assert seen[0][3] == seen[1][3][::-1]


def test_prompts_are_data_and_never_in_the_page(client, session):
    (pair,) = [pair for pair in session.pairs.values() if pair.prompt == HOSTILE]
    for position, key in enumerate(session.order_of_pairs("anna")):
        if key == pair.key:
            rate(session, "anna", position)
    answered = client.get(f"/{TOKEN}/state", params={"rater": "anna"})
    assert answered.headers["content-type"] == "application/json"
    assert answered.json()["pair"]["prompt"] == HOSTILE
    assert "owned" not in client.get(f"/{TOKEN}/").text


def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(client):
    page = client.get(f"/{TOKEN}/")
    assert page.status_code == 200
    assert re.findall(r'<[^>]+ (?:src|srcset|href|action)="([^"]*)"', page.text) == ["data:,"]
    assert not re.findall(r"url\(|@import|//\w+\.", page.text)
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', page.text))
    assert (
        policy["default-src"]
        == policy["base-uri"]
        == policy["form-action"]
        == policy["frame-ancestors"]
        == "'none'"
    )
    assert policy["script-src"] == policy["style-src"] == f"'nonce-{nonce}'"
    assert (policy["img-src"], policy["connect-src"]) == ("'self' data:", "'self'")
    assert (page.headers["cache-control"], page.headers["x-content-type-options"]) == (
        "no-store",
        "nosniff",
    )
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page.text)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/wrong/",
        "/wrong/state?rater=anna",
        f"/{TOKEN}x/",
        "//",
        "/favicon.ico",
        "/%C3%A9/",
        "/docs",
    ],
)
def test_without_the_token_there_is_nothing(client, path):
    found = client.get(path)
    assert (found.status_code, found.text) == (404, "Open the address that the terminal shows.")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "10.0.0.7:8080",
        "",
        "[::1",
        "localhost.evil",
    ],
)
def test_a_page_whose_name_was_rebound_to_this_address_is_refused(client, host):
    for path in (f"/{TOKEN}/", f"/{TOKEN}/state?rater=anna"):
        assert client.get(path, headers={"Host": host}).status_code == 403
    assert answer(client, Host=host, Origin=f"http://{host}").status_code == 403


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:9999", "[::1]:8080", "LOCALHOST"])
def test_this_machine_is_known_by_its_own_names(client, host):
    assert client.get(f"/{TOKEN}/", headers={"Host": host}).status_code == 200
    assert answer(client, Host=host, Origin=f"http://{host}").status_code == 200


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("0.0.0.0", "10.0.0.7:8080", 200),
        ("0.0.0.0", "evil.example", 403),
        ("box.lan", "box.lan:8080", 200),
        ("127.0.0.1", "box.lan", 403),
    ],
)
def test_on_other_addresses_it_goes_by_them(session, bound, host, status):
    with TestClient(build_app(session, bound, TOKEN), base_url=BASE) as client:
        assert client.get(f"/{TOKEN}/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "http://evil.example",
        "http://127.0.0.1:3000",
        "http://127.0.0.1:8080.evil",
        "http://[",
        "file://",
        "http://",
    ],
)
def test_another_page_of_the_same_browser_cannot_answer(client, session, origin):
    body = {"rater": "anna", "pair": state(client)["pair"]["key"], "answer": "left"}
    headers = {} if origin is None else {"Origin": origin}
    for path in ("answer", "undo"):
        assert client.post(f"/{TOKEN}/{path}", json=body, headers=headers).status_code == 403
    assert not session.answers.standing


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_page_cannot_read_but_may_link_here(client, session, site):
    key = state(client)["pair"]["key"]
    headers = {"Sec-Fetch-Site": site}
    assert client.get(f"/{TOKEN}/", headers=headers).status_code == 200
    for path in ("state?rater=anna", f"picture/{key}/left?rater=anna"):
        assert client.get(f"/{TOKEN}/{path}", headers=headers).status_code == 403
    assert answer(client, **headers).status_code == 403
    assert not session.answers.standing


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"rater": "anna", "pair": "0-0", "answer": "best"}, 422),
        ({"rater": "../x", "pair": "0-0", "answer": "left"}, 422),
        ({"rater": "anna", "pair": 7, "answer": "left"}, 422),
        ({"rater": "anna", "pair": "0-0", "answer": "left", "at": "1970"}, 422),
        ({"rater": "anna", "pair": "nowhere", "answer": "left"}, 409),
        ([], 422),
        ({"rater": "anna", "pair": "x" * 5000, "answer": "left"}, 413),
    ],
)
def test_what_is_no_answer_is_refused(client, session, body, status):
    assert client.post(f"/{TOKEN}/answer", json=body, headers=SAME).status_code == status
    assert not session.answers.standing


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}],
)
def test_an_answer_is_json_which_other_pages_may_not_send(client, session, headers):
    body = json.dumps({"rater": "anna", "pair": state(client)["pair"]["key"], "answer": "left"})
    assert client.post(f"/{TOKEN}/answer", content=body, headers=SAME | headers).status_code == 422
    assert not session.answers.standing


def test_a_body_without_a_length_is_refused(client):
    assert (
        client.post(f"/{TOKEN}/answer", content=iter([b"{", b"}"]), headers=SAME).status_code == 413
    )


@pytest.mark.parametrize(
    "path",
    [
        "picture/9-9/left?rater=anna",
        "picture/0-0/middle?rater=anna",
        "picture/0-0/left",
        "state",
        "state?rater=%2F",
    ],
)
def test_what_is_not_there(client, path):
    assert client.get(f"/{TOKEN}/{path}").status_code in (404, 422)


def test_a_full_disk_is_told_and_the_answer_can_be_given_again(client, session, monkeypatch):
    append = session.answers.append_answer

    def full(given):
        raise DiskFullError("full")

    monkeypatch.setattr(session.answers, "append_answer", full)
    refused = answer(client)
    assert (refused.status_code, refused.json()["detail"]) == (
        507,
        "The answer was not saved: the disk is full.",
    )
    monkeypatch.setattr(session.answers, "append_answer", append)
    assert answer(client).status_code == 200


def test_no_result_is_shown_before_the_end_or_after_it(client):
    for _ in range(6):
        shown = answer(client, "tie").json()
        assert set(shown) == {
            "rater",
            "total",
            "answered",
            "left",
            "pair",
            "next",
            "finished",
            "raters",
            "agreement",
        }


def test_the_address_has_a_new_token_each_time_and_is_announced(session, monkeypatch):
    addresses = []
    started = []
    monkeypatch.setattr(
        server.uvicorn.Server,
        "run",
        lambda self, sockets: started.append((self.config, sockets[0].getsockname())),
    )
    for _ in range(2):
        run_label_server(session, "127.0.0.1", 0, addresses.append)
    tokens = [
        re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", address) for address in addresses
    ]
    assert tokens[0][2] != tokens[1][2]
    assert [(at[0], at[1]) for _, at in started] == [
        ("127.0.0.1", int(token[1])) for token in tokens
    ]
    assert not any(config.access_log for config, _ in started)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("0.0.0.0", socket.gethostname()),
        ("::1", "[::1]"),
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_address_has_a_name_that_the_server_goes_by(session, monkeypatch, host, name):
    addresses = []
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda self, sockets: None)
    run_label_server(session, host, 0, addresses.append)
    named = urlsplit(addresses[0]).netloc
    assert named.rpartition(":")[0] == name
    with TestClient(build_app(session, host, TOKEN), base_url=BASE) as client:
        assert client.get(f"/{TOKEN}/", headers={"Host": named}).status_code == 200


def test_results_are_written_as_the_server_ends(session):
    with TestClient(build_app(session, "127.0.0.1", TOKEN), base_url=BASE) as client:
        answer(client)
        assert not (session.folder / "evidence.json").exists()
    assert json.loads((session.folder / "evidence.json").read_text())["pairs"]["answered"] == 1
    assert (session.folder / "pairs.parquet").exists()


def test_a_port_that_is_taken_is_an_error(session):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(LabelError, match="cannot listen there"),
    ):
        run_label_server(session, "127.0.0.1", taken.getsockname()[1], str)
    with pytest.raises(LabelError, match=r"host = 'nowhere\.invalid'"):
        run_label_server(session, "nowhere.invalid", 0, str)


def test_a_real_server_answers_those_who_have_the_address(session):
    with serving(session) as address:
        with urllib.request.urlopen(f"{address}state?rater=anna", timeout=30) as answered:
            assert json.loads(answered.read())["total"] == 6
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(urljoin(address, "/"), timeout=30)


def test_many_raters_at_once_lose_no_answer(tmp_path):
    with opened(make_comparison(tmp_path, [True, False] * 8), tmp_path / "a") as session:
        with serving(session) as address, ThreadPoolExecutor(6) as pool:
            raters = [f"rater{number}" for number in range(6)]
            assert (
                list(pool.map(lambda rater: send_answers(address, rater, 100), raters)) == [16] * 6
            )
        assert len((tmp_path / "a" / "answers.jsonl").read_text().splitlines()) == 96


def test_connections_without_a_request_starve_nobody(session, monkeypatch):
    """A rater's page opens however many others hold connections on which they send half a
    request."""
    monkeypatch.setattr(server_limits, "MAX_CONNECTIONS", 2)
    with serving(session) as address, ExitStack() as held:
        target = (urlsplit(address).hostname, urlsplit(address).port)
        connections = [
            held.enter_context(socket.create_connection(target, timeout=60)) for _ in range(3)
        ]
        for connection in connections:
            connection.sendall(b"GET / HTTP/1.1\r\n")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert answer.status == 200
