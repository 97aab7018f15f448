"""Whether data can be trained on, found without tokenising all of it."""

from itertools import islice

from llama_core.config.run import DATALOADER, SAMPLE, DataConfig
from llama_core.data.corpus import BadLines, find_files, read_documents
from llama_core.data.tokenizer import check_fits, load_tokenizer

CHECKED_RECORDS = 1000
"""Records that are read of a source, over all its files."""


def check_data(data: DataConfig, vocab_size: int) -> None:
    """Open every file of the run's data, read its first records and tokenise them. Nothing is written.

    Args:
        data: what is trained on.
        vocab_size: the model's vocabulary, which the tokenizer must fit.

    Raises:
        DataError: if a file, its records or the tokenizer cannot be used.
        EnvironmentMismatchError: if the tokenizer needs a package that is missing.
    """
    if data.source == DATALOADER:
        return
    tokenizer = load_tokenizer(data.tokenizer)
    check_fits(tokenizer, vocab_size)
    for source in (data.source, data.validation):
        if source is None or source == SAMPLE:
            continue
        files, bad_lines = find_files(source), BadLines()
        of_each = -(-CHECKED_RECORDS // len(files))
        for file in files:
            documents = read_documents([file], data.text_field, bad_lines, max_bad_lines=data.max_bad_lines)
            tokenizer.encode_documents([document.text for document in islice(documents, of_each)])
