"""Small corpora for tests: as files, and as token caches that were never on disk."""

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from llama_core.data.corpus import BadLines
from llama_core.data.token_cache import TokenCache
from llama_core.data.tokenizer import ByteTokenizer

texts = st.lists(st.text("abc é", min_size=1, max_size=12), min_size=1, max_size=12)


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def byte_cache(documents):
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_documents(documents)
    return TokenCache(
        tokens=np.concatenate(encoded),
        offsets=np.cumsum([0, *map(len, encoded)]),
        text_hashes=np.arange(len(documents), dtype=np.uint64),
        tokenizer_fingerprint=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        bad_lines=BadLines(),
        path=Path("nowhere"),
    )
