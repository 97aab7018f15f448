"""Small corpora for tests: files, and token caches in memory."""

import gzip
import json
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from llama_core.data.chat import ChatFormat, ConversationCounts, encode
from llama_core.data.chat_template import BUILT_IN, ChatTemplate
from llama_core.data.corpus import BadLines, Document
from llama_core.data.token_cache import TokenCache
from llama_core.data.tokenizer import ByteTokenizer

texts = st.lists(st.text("abc é", min_size=1, max_size=12), min_size=1, max_size=12)
contents = st.text("abc é漢\n ", max_size=6).map(lambda text: f"{text}x{text}")


@st.composite
def conversations(draw):
    """Messages that both Llama 2 and 3 accept: an optional system prompt, then user and assistant in turn."""
    turns = [("user", "assistant")] * draw(st.integers(1, 3))
    roles = [*draw(st.sampled_from([(), ("system",)])), *(role for pair in turns for role in pair)]
    roles += draw(st.sampled_from([(), ("user",)]))
    return [{"role": role, "content": draw(contents)} for role in roles]


@cache
def chat_of(template="llama3", loss_on="assistant", today=date(2026, 1, 31)):
    return ChatFormat(ChatTemplate(BUILT_IN[template], ByteTokenizer.named_tokens, today), loss_on)


def write_jsonl(path, documents):
    """Write strings as texts and lists of messages as conversations."""
    records = ({"text": item} if isinstance(item, str) else {"messages": item} for item in documents)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path, texts):
    """Write strings in the form that the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=100)
        return path
    write_jsonl(path, texts)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def byte_cache(documents, chat=None):
    """A cache of texts and, with ``chat``, of conversations."""
    chat = chat or chat_of()
    tokenizer = ByteTokenizer()
    read = [
        Document(item, "nowhere:1") if isinstance(item, str) else chat.document(item, "nowhere:1") for item in documents
    ]
    turns = [document.turns for document in read]
    encoded = [(ids, np.zeros(len(ids), bool) if mask is None else mask) for ids, mask in encode(tokenizer, read)]
    return TokenCache(
        tokens=np.concatenate([ids for ids, _ in encoded]),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in encoded)]),
        text_hashes=np.arange(len(documents), dtype=np.uint64),
        fingerprint=tokenizer.fingerprint,
        eos_id=tokenizer.eos_id,
        bad_lines=BadLines(),
        path=Path("nowhere"),
        ignored=np.concatenate([mask for _, mask in encoded]) if any(turns) else None,
        is_conversation=np.array([turn is not None for turn in turns]) if any(turns) else None,
        conversations=sum((ConversationCounts.of(turn) for turn in turns if turn), ConversationCounts()),
    )
