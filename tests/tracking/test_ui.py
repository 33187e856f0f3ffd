"""The addresses that `ebbflow ui` prints, and the server behind them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from ebbflow.recipe import Recipe
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import TrackingError, connect_to_store
from ebbflow.tracking.ui import list_pages, serve_ui


def test_every_page_is_in_the_mode_that_has_the_registry(recipe: Recipe) -> None:
    run = start_run(recipe, None)
    addresses = list_pages("http://127.0.0.1:5000", run.experiment_id)
    assert addresses["runs"].startswith(
        f"http://127.0.0.1:5000/#/experiments/{run.experiment_id}/runs?"
    )
    assert all("workflowType=machine_learning" in address for address in addresses.values())
    assert "/#/models?" in addresses["registry"]


def test_a_server_without_runs_is_named(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = start_run(recipe, None).tracking_uri
    monkeypatch.setattr(
        "ebbflow.tracking.ui.connect_to_store", lambda server: connect_to_store(uri)
    )
    with pytest.raises(TrackingError, match="no experiment 'nothing' yet; run a recipe first"):
        serve_ui("http://server:5000", "nothing", 5000, False, print)


def test_a_store_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="no MLflow store at .*; run this where the pipeline"):
        serve_ui(f"sqlite:///{tmp_path}/runs/mlflow.db", "ebbflow", 5000, False, print)
    assert not list(tmp_path.iterdir())


def test_the_pages_of_a_server_are_its_own(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(recipe, None)
    shown = []
    opened = []
    monkeypatch.setattr(
        "ebbflow.tracking.ui.connect_to_store", lambda uri: connect_to_store(run.tracking_uri)
    )
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert serve_ui("http://server:5000/", "ebbflow", 5000, True, shown.append) == 0
    assert len(shown) == 3
    assert all(" http://server:5000/#/" in line for line in shown)
    assert opened == [shown[0].split()[-1]]


def test_no_browser_is_opened_without_a_display(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(recipe, None)
    opened = []
    monkeypatch.setattr(
        "ebbflow.tracking.ui.connect_to_store", lambda uri: connect_to_store(run.tracking_uri)
    )
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert serve_ui("http://server:5000", "ebbflow", 5000, True, lambda line: None) == 0
    assert opened == []


def test_another_server_at_the_port_is_not_taken_for_its_own(recipe: Recipe) -> None:
    uri = start_run(recipe, None).tracking_uri
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(TrackingError, match="is taken .*; set another --port"),
    ):
        serve_ui(uri, recipe.tracking.experiment, other.getsockname()[1], False, print)


@pytest.mark.exhaustive
def test_the_command_serves_what_it_prints(store: Path, recipe: Recipe, tmp_path: Path) -> None:
    start_run(recipe, None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "recipe.yaml").write_text(f"output: {store}\n")
    command = [
        str(Path(sys.executable).with_name("ebbflow")),
        "ui",
        "--recipe",
        str(tmp_path / "recipe.yaml"),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout
    try:
        line = next(line for line in process.stdout if line.startswith("registry"))
        (address,) = re.findall(r"http://\S+", line)
        assert b"MLflow" in urlopen(address).read()
    finally:
        process.terminate()
        assert process.wait() == 0
        process.stdout.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
