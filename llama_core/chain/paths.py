"""Paths of a run's data that hold wherever its processes start."""

from llama_core.config.settings import DATALOADER, SAMPLE, DataConfig
from llama_core.data.files.remote import is_remote
from llama_core.data.sample import sample_tokenizer
from llama_core.data.templates.chat_template import BUILT_IN
from llama_core.data.tokenizer import BYTES
from llama_core.records.files import cache_directory, user_path


def data_from_anywhere(data: DataConfig) -> DataConfig:
    """Return ``data`` with absolute paths: workers start, and runs are resumed, in other directories."""
    given = data.model_dump(include={"tokenizer", "chat_template", "cache_dir"}, exclude_none=True)
    paths = {key: absolute(value) for key, value in given.items()}
    if data.tokenizer == SAMPLE:  # its file is what the run depends on, and what an export copies
        paths["tokenizer"] = str(sample_tokenizer(cache_directory(data.cache_dir)).absolute())
    return data.with_each_path(absolute).model_copy(update=paths)


def absolute(path: str) -> str:
    """Return a path of data that holds everywhere; a name that is no path as it is."""
    by_name = {SAMPLE, DATALOADER, BYTES, *BUILT_IN}
    return path if path in by_name or is_remote(path) else str(user_path(path).absolute())
