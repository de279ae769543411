"""Places on the disk that options name: what cannot be used is refused with the reason, and looking
changes nothing."""

import os
from pathlib import Path

import pytest

from server.places import file_fault, folder_fault

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def test_a_file_needs_a_folder_to_be_in(tmp_path: Path) -> None:
    assert file_fault(tmp_path / "trace.jsonl") == ""
    assert file_fault(tmp_path) == "is a folder; it must name a file"
    assert file_fault(tmp_path / "absent" / "x") == f"there is no folder '{tmp_path}/absent'"
    (tmp_path / "file").write_text("kept")
    assert file_fault(tmp_path / "file" / "x") == f"there is no folder '{tmp_path}/file'"
    assert file_fault(tmp_path / "file") == ""
    assert file_fault(Path("/dev/full")) == ""
    assert file_fault(Path("trace.jsonl")) == ""
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "kept")]


def test_a_folder_is_there_or_can_be_made(tmp_path: Path) -> None:
    assert folder_fault(tmp_path) == ""
    assert folder_fault(tmp_path / "a" / "b" / "c") == ""
    assert folder_fault(Path("absent/here")) == ""
    (tmp_path / "file").touch()
    assert folder_fault(tmp_path / "file") == "is a file; it must be a folder"
    below = f"'{tmp_path}/file' is a file; it must be a folder"
    assert folder_fault(tmp_path / "file" / "x" / "y") == below
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@as_user
def test_what_may_not_be_written_is_said(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    assert file_fault(locked / "x") == "may not be written by this user"
    assert folder_fault(locked / "x") == "may not be written by this user"
