"""The archive of ended rollouts: nothing lost, whatever dies or fills up, and read once."""

from __future__ import annotations

import errno
import gzip
import json
import os

import pytest
from click.testing import CliRunner

from rollout import archive
from rollout.cli import main
from services.settings import Settings
from services.state import keys
from services.state.rollouts.store import RolloutStore
from tests.helpers.chores import services
from tests.integration.conftest import emptied
from tests.integration.test_retention import ended, submitted, trajectory
from workers.chores import archive as writer

client = emptied


@pytest.fixture
def store(client):
    return RolloutStore(client, Settings())


def archiver(client, directory, owner="w", **settings):
    chosen = Settings(archive_dir=str(directory), **settings)
    return writer.Archiver(services(client, chosen, owner))


def ids(directory):
    return [rollout.id for rollout in archive.read(directory)]


def test_what_has_ended_is_archived_with_its_trajectory_in_the_order_of_completion(client, store, tmp_path):
    done = [ended(store, ids=20, seed=number) for number in range(5)]
    submitted(store)
    writing = archiver(client, tmp_path / "new" / "archive")
    writing.turn()
    records = list(archive.read(tmp_path / "new" / "archive"))
    assert records == [store.get(rollout_id) for rollout_id in done]
    assert records[3].trajectory == trajectory(20, 3)
    later = ended(store, ids=20)
    writing.turn()
    writing.turn()
    assert ids(tmp_path / "new" / "archive") == [*done, later]


def test_more_than_a_batch_is_archived_at_one_look(client, store, tmp_path):
    done = [ended(store, ids=1) for _ in range(writer.BATCH * 2 + 3)]
    archiver(client, tmp_path).turn()
    assert ids(tmp_path) == done


def test_files_are_closed_at_their_size_and_any_tool_reads_them(client, store, tmp_path):
    writing = archiver(client, tmp_path, archive_file_bytes=1)
    done = []
    for _ in range(3):
        done.append(ended(store, ids=20))
        writing.turn()
    names = [path.name for path in archive.files(tmp_path)]
    assert len(names) == 3 and all(name.endswith(".jsonl.gz") for name in names)
    lines = [gzip.decompress(path.read_bytes()).splitlines() for path in archive.files(tmp_path)]
    assert [json.loads(line)["id"] for (line,) in lines] == done


def test_a_crash_before_the_cursor_moved_writes_twice_and_reads_once(client, store, tmp_path):
    done = [ended(store, ids=20) for _ in range(3)]
    archiver(client, tmp_path).turn()
    client.set(keys.ARCHIVE_CURSOR, store.get(done[0]).completion)
    client.delete(keys.ARCHIVE_LOCK)
    archiver(client, tmp_path, owner="next").turn()
    written = [
        line
        for path in archive.files(tmp_path)
        for _, text in archive.members(path)
        for line in text.splitlines()
    ]
    assert len(written) == 5 and ids(tmp_path) == done


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_crash_in_the_middle_of_a_write_costs_nothing(client, store, tmp_path, cut):
    first = ended(store, ids=20)
    archiver(client, tmp_path).turn()
    (path,) = archive.files(tmp_path)
    before = client.get(keys.ARCHIVE_CURSOR)
    second = ended(store, ids=20)
    with path.open("ab") as file:
        # As much of the next member as reached the disk.
        file.write(gzip.compress(store.get(second).model_dump_json().encode() + b"\n")[:cut])
    assert ids(tmp_path) == [first], "a reader does without the torn end"
    assert client.get(keys.ARCHIVE_CURSOR) == before
    client.delete(keys.ARCHIVE_LOCK)
    archiver(client, tmp_path, owner="next").turn()
    assert ids(tmp_path) == [first, second]
    sealed = [path for path in archive.files(tmp_path) if path.name.endswith(".jsonl.gz")]
    assert [json.loads(gzip.decompress(path.read_bytes()))["id"] for path in sealed] == [first], (
        "the torn end is gone"
    )


def test_a_full_disk_moves_no_cursor_and_leaves_no_torn_end(client, store, tmp_path, monkeypatch):
    first = ended(store, ids=20)
    writing = archiver(client, tmp_path)
    writing.turn()
    second = ended(store, ids=20)
    write = os.write

    room = [10]

    def fills_up(fd, data):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "write", fills_up)
        assert writing.turn() == writer.FAULT_PAUSE_S
    assert client.hget(keys.RESULTS_TOTALS, "archive_errors") == "1"
    (path,) = archive.files(tmp_path)
    assert [end for end, _ in archive.members(path)] == [path.stat().st_size]
    writing.turn()
    assert ids(tmp_path) == [first, second]


@pytest.mark.parametrize("empty", [False, True])
def test_a_file_that_is_closed_while_the_archive_is_read_is_read_to_its_end(tmp_path, empty):
    """A successor closes the file of a writer that died, and removes one without a word."""
    file = tmp_path / f"rollouts-1{archive.OPEN_SUFFIX}"
    file.write_bytes(b"" if empty else gzip.compress(b"text"))
    (listed,) = archive.files(tmp_path)
    if empty:
        file.unlink()
    else:
        file.rename(tmp_path / f"rollouts-1{archive.SUFFIX}")
    assert [text for _, text in archive.members(listed)] == ([] if empty else [b"text"])


def test_one_who_is_not_elected_writes_nothing(client, store, tmp_path):
    done = ended(store, ids=20)
    archiver(client, tmp_path, owner="first").turn()
    ended(store, ids=20)
    archiver(client, tmp_path, owner="second").turn()
    assert ids(tmp_path) == [done]


def test_what_went_past_its_retention_unarchived_is_counted_and_not_silent(client, store, tmp_path):
    expired, kept = ended(store, ids=20), ended(store, ids=20)
    client.delete(keys.record(expired))
    archiver(client, tmp_path).turn()
    assert ids(tmp_path) == [kept]
    assert client.hget(keys.RESULTS_TOTALS, "archive_missed") == "1"


def test_the_command_lists_filters_and_flattens(client, store, tmp_path):
    done = [ended(store, ids=20, seed=number) for number in range(3)]
    archiver(client, tmp_path).turn()
    listed = CliRunner().invoke(main, ["archive", "list", str(tmp_path)])
    assert "3 rollouts" in listed.output and "being written" in listed.output
    read = CliRunner().invoke(main, ["archive", "read", str(tmp_path), "--handler", "noop"])
    assert [json.loads(line)["id"] for line in read.output.splitlines()] == done
    assert CliRunner().invoke(main, ["archive", "read", str(tmp_path), "--tag", "none"]).output == ""
    flat = CliRunner().invoke(main, ["archive", "read", str(tmp_path), "--samples"])
    samples = [json.loads(line) for line in flat.output.splitlines()]
    assert samples[1]["response_ids"] == trajectory(20, 1).response_ids
    assert {
        len(samples[1][name]) for name in ("response_ids", "loss_mask", "logprobs", "policy_versions")
    } == {20}
