"""Write a folder, such as an export, to the address of one."""

from contextlib import suppress
from pathlib import Path

from llama_core.errors import StorageError
from llama_core.storage.mirror import explained
from llama_core.storage.stores import Store, store_at

LAST = ("adapter_config.json", "config.json")
"""What says what a folder holds, so that nobody takes half of it for a model."""


def refuse_files_at(url: str) -> Store:
    """Return the folder of an address.

    Raises:
        StorageError: if it holds files, or the store does not answer.
    """
    store = store_at(url)
    try:
        found = store.find()
    except OSError as error:
        raise explained(url, error) from None
    if found:
        raise StorageError(f"{url} holds files ({min(found)}); choose another address")
    return store


def copy_folder(folder: Path, url: str) -> None:
    """Copy the files of a folder to an address that holds none; those that describe it come last.

    Raises:
        StorageError: if they cannot be written; what has been written is then removed, as far as the store lets us.
    """
    store = refuse_files_at(url)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names.sort(key=LAST.__contains__)
    written = []
    try:
        for name in names:
            written.append(name)
            store.put(folder / name, name)
    except OSError as error:
        with suppress(OSError):
            store.remove(written)
        raise explained(url, error) from None
