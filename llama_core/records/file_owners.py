"""Whose a file is, and who else may change it."""

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory


def other_owner(run: RunDirectory) -> str | None:
    """Return the name of the user who owns a run, or has recorded its job; None if that is this user.

    The records of somebody else may name any job and process of ours.
    """
    for path in (run.path, run.job):
        try:
            owner = path.stat().st_uid
        except FileNotFoundError:
            continue
        if owner != os.getuid():
            return account_name(owner)
    return None


def refuse_foreign(run: RunDirectory, what: str) -> None:
    """Refuse to act on what a run of somebody else records.

    Args:
        run: the run.
        what: completes "only they can", such as ``continue it``.

    Raises:
        RunDirectoryError: if the run is not this user's.
    """
    owner = other_owner(run)
    if owner is not None:
        raise RunDirectoryError(
            f"{run.path} belongs to {owner}: only they can {what}; copy it to a folder of your own to go on from it"
        )


_MAX_LINKS = 40
"""As many as the kernel follows."""
_OF_SUBMITIT = "logs/submitit/submission-*"


def refuse_links(run: RunDirectory, with_links: Iterable[str] = ()) -> None:
    """Refuse to write into a run that holds a link: its files may come from an archive, and would lead us elsewhere.

    Args:
        run: the run.
        with_links: folders in which others make links of their own, as submitit does in its own: each start of a run
            writes new files only there.

    Raises:
        RunDirectoryError: naming the link.
    """
    others = (_OF_SUBMITIT, *with_links)
    for parent, folders, names in os.walk(run.path):
        links = [path for path in (Path(parent, name) for name in (*folders, *names)) if path.is_symlink()]
        if links:
            raise RunDirectoryError(
                f"{links[0]} is a link, and a run writes through none; put what it leads to in its place, or remove it"
            )
        folders[:] = [name for name in folders if not any(map(Path(parent, name).match, others))]


def account_name(user: int) -> str:
    """Return the name of a user's account, by its number."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def who_else_may_write(file: int | Path) -> str:
    """Return which other user may write a file, as a clause after its path; empty if only the administrator may.

    Args:
        file: its descriptor, or the path of a file or a folder; a link is looked at itself.
    """
    found = os.fstat(file) if isinstance(file, int) else file.lstat()
    if found.st_uid not in {os.getuid(), 0}:
        return f"belongs to {account_name(found.st_uid)}"
    return "can be written by other users" if _others_may_write(file, found) else ""


def who_else_may_replace(path: Path, opened: int) -> str:
    """Return who else may put another file at a path, as a clause after it; empty if only the administrator may.

    That file would be theirs, or a link to one of this user's that they have made, such as a copy of an archive.

    Args:
        path: the path, in which each folder and each link is looked at.
        opened: a descriptor of the file that was opened there.
    """
    others, place = _walked(path)
    if not others and not os.path.samestat(place.lstat(), os.fstat(opened)):
        return "was replaced while it was read"
    return others


def who_else_may_fill(folder: Path) -> str:
    """Return who else may put files into a folder, or another one in its place, as a clause after its path.

    Args:
        folder: the folder, which need not exist; it counts as this user's then.
    """
    others, place = _walked(folder)
    if others:
        return others
    return _who_else_may_put_into(place) if place.exists() else ""


def _walked(path: Path) -> tuple[str, Path]:
    """Follow a path, each link in it too; return who else may change where it leads to, and that place.

    What is missing is taken to be no link. If others may change it, the place is where they may.
    """
    left = list(reversed(path.absolute().parts[1:]))
    place = Path("/")
    num_links = 0
    while left:
        if others := _who_else_may_put_into(place):
            return f"is reached through {place}, which {others}", place
        name = left.pop()
        if name == "..":
            place = place.parent
            continue
        try:
            found = (place / name).lstat()
        except FileNotFoundError:
            return "", place.joinpath(name, *reversed(left))
        if not stat.S_ISLNK(found.st_mode):
            place /= name
            continue
        if found.st_uid not in {os.getuid(), 0}:
            return f"is reached through {place / name}, which belongs to {account_name(found.st_uid)}", place
        num_links += 1
        if num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (place / name).readlink()
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        place = Path("/") if target.is_absolute() else place
    return "", place


def _who_else_may_put_into(folder: Path) -> str:
    """Return who else may replace files of a folder: in one such as ``/tmp``, everybody removes only their own."""
    found = folder.lstat()
    is_ours = found.st_uid in {os.getuid(), 0}
    return "" if is_ours and found.st_mode & stat.S_ISVTX else who_else_may_write(folder)


def own_folder(folder: Path) -> Path:
    """Return ``folder``, or one of this user in it if others may put files into ``folder``; it is made if missing.

    Raises:
        OSError: if it cannot be made, or somebody else has made it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid in {os.getuid(), 0} and not _others_may_write(folder, found):
        return folder
    own = folder / f"user-{os.getuid()}"
    with suppress(FileExistsError):
        own.mkdir(mode=0o700)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != _own_id_in(folder) or _others_may_write(own, found):
        raise OSError(errno.EPERM, f"{own} is not ours alone", str(own))
    return own


def _own_id_in(folder: Path) -> int:
    """Return the user to whom files belong that we make in ``folder``: some network file systems show another one."""
    with TemporaryDirectory(dir=folder) as made:
        return Path(made).stat().st_uid


def _others_may_write(file: int | Path, found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    return not _is_group_of_one(found.st_gid) or _has_access_list(file)


def _has_access_list(file: int | Path) -> bool:
    """Return whether a file has a list of users and groups, for whom the group's bits are then the bound."""
    try:
        return "system.posix_acl_access" in os.listxattr(file)
    except OSError:  # a file system without lists
        return False


def _is_group_of_one(group: int) -> bool:
    """Return whether a group is the user's private group, which many systems create for every user."""
    user = pwd.getpwuid(os.getuid())
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
