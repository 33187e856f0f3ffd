"""The logs of a Ray cluster are collected while it is there."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import pytest
import ray
from ray_worker import forked_workers

from ebbflow.online.ray_logs import save_cluster_logs


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        forked_workers(tmp_path_factory.mktemp("ray") / "socket"),
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else all other processes of the machine go first
        ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
        yield
        ray.shutdown()


def _speak() -> None:
    print("a word of an actor", flush=True)


def test_the_logs_of_every_machine_are_packed() -> None:
    ray.get(ray.remote(num_cpus=0)(_speak).remote())
    saved: dict[str, bytes] = {}
    save_cluster_logs(saved.__setitem__)
    ((name, packed),) = saved.items()
    assert name.endswith(".tar.gz")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        texts = {name: file.read() for name, file in files.items() if file}
    assert any("raylet" in name for name in texts)
    assert any(b"a word of an actor" in text for text in texts.values())


def test_logs_that_cannot_be_saved_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str, packed: bytes) -> None:
        raise OSError("the bucket is gone")

    save_cluster_logs(fail)
    assert "the bucket is gone" in caplog.text
