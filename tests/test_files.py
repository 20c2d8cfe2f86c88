"""Atomic replacement and locks between processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sader.errors import OutputError
from sader.files import files_under, locked, remove_partial_files, write_atomically


def test_old_content_stays_when_a_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*the disk is full\. Free some space"):
        write_atomically(path, [b"n", b"ew"])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_synced_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    for name in ("fsync", "replace"):
        honest = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, honest=honest: (done.append(name), honest(*given))[1])
    write_atomically(tmp_path / "folder" / "a", [b"n", b"ew"])
    assert done == ["fsync", "replace", "fsync"]
    assert (tmp_path / "folder" / "a").read_bytes() == b"new"


def test_partial_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.17.partial").write_bytes(b"half")
    (tmp_path / "b").write_bytes(b"whole")
    remove_partial_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_lock_excludes_other_processes_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = "import sys, time; from pathlib import Path; from sader.files import locked\n"
    program += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match="busy now"), locked(path, busy="busy now"):
            pass
        holder.kill()
        holder.wait()
    with locked(path), pytest.raises(OutputError, match="another process holds"), locked(path):
        pass


def test_an_error_under_a_lock_is_raised(tmp_path):
    with pytest.raises(OSError, match="of the block"), locked(tmp_path / "lock"):
        raise OSError("of the block")


def test_partial_files_of_killed_writers_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".a.txt.{ended.pid}.partial").touch()
    (tmp_path / f".b.txt.{ended.pid}.partial").touch()
    (tmp_path / f".a.txt.{os.getppid()}.partial").touch()
    write_atomically(tmp_path / "a.txt", b"new")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.txt", f".b.txt.{ended.pid}.partial", f".a.txt.{os.getppid()}.partial"}


def test_links_to_folders_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for path in (here / "b" / "1", here / "c", elsewhere / "2"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (here / "a").symlink_to(elsewhere)
    (here / "d").symlink_to(elsewhere)  # the same folder again is no loop
    (here / "b" / "up").symlink_to(here)
    (elsewhere / "back").symlink_to(here)
    (here / "self").symlink_to(here / "self")
    found = [path.relative_to(here).as_posix() for path in files_under(here)]
    assert found == ["c", "self", "a/2", "b/1", "d/2"]
    (tmp_path / "link").symlink_to(here)
    assert len(list(files_under(tmp_path / "link"))) == len(found)
    assert list(files_under(tmp_path / "missing")) == []
