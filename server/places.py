"""Whether what an option names on the disk can be what it is for: known before a model is loaded.

Nothing is created, opened or truncated here, so a wrong command leaves the disk as it was. What
cannot even be looked at counts as not being there."""

import os
from pathlib import Path


def file_fault(path: Path) -> str:
    """Why no file can be written at ``path``, as the end of a sentence; empty if one can."""
    if _is_folder(path):
        return "is a folder; it must name a file"
    if not _is_folder(path.parent):
        return f"there is no folder {str(path.parent)!r}"
    if not os.access(path if _exists(path) else path.parent, os.W_OK):
        return "may not be written by this user"
    return ""


def folder_fault(path: Path) -> str:
    """Why ``path`` cannot be a folder that files are kept in, made on the way if need be; empty if
    it can."""
    there = next(place for place in (path, *path.absolute().parents) if _exists(place))
    if not _is_folder(there):
        return f"{'' if there == path else f'{str(there)!r} '}is a file; it must be a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return "may not be written by this user"
    return ""


def _exists(path: Path) -> bool:
    return os.access(path, os.F_OK)


def _is_folder(path: Path) -> bool:
    return _exists(path) and path.is_dir()
