"""Small corpora for tests: files, and token caches in memory."""

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from llama_core.data.bad_lines import BadLines
from llama_core.data.chat import ChatFormat, ConversationCounts, encode
from llama_core.data.corpus import Document
from llama_core.data.formats import FormatCounts
from llama_core.data.selection import hold_out_known
from llama_core.data.shards.shard import IGNORED, IS_CONVERSATION, OFFSETS, TEXT_HASHES, TOKENS, Shard, ShardFacts
from llama_core.data.shards.token_cache import TokenCache
from llama_core.data.templates.chat_template import BUILT_IN, ChatTemplate
from llama_core.data.tokenizer import ByteTokenizer

NOWHERE = Path("/dev/null/nowhere")
"""A folder that cannot be made."""
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


@dataclass(frozen=True, eq=False)
class MemoryShard(Shard):
    """A shard whose arrays are in memory."""

    arrays: Mapping[str, np.ndarray]

    def array(self, name):
        return self.arrays[name]


def memory_shard(lengths, hashes, tokens=None, ignored=None, is_conversation=None):
    """A shard of documents of these lengths and hashes, which ascend; by default of tokens that count up."""
    offsets = np.cumsum([0, *lengths])
    arrays = {
        TOKENS: np.arange(offsets[-1]) if tokens is None else tokens,
        OFFSETS: offsets,
        TEXT_HASHES: np.asarray(hashes, np.uint64),
        IGNORED: ignored,
        IS_CONVERSATION: is_conversation,
    }
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values() if array is not None)).hexdigest()
    facts = ShardFacts(len(lengths), int(offsets[-1]), ignored is not None, digest)
    return MemoryShard(NOWHERE, facts, arrays[TOKENS].dtype, arrays)


def memory_cache(shards, conversations=None):
    counts = conversations or ConversationCounts()
    return TokenCache(tuple(shards), ByteTokenizer.eos_id, NOWHERE, BadLines(), FormatCounts(), counts)


def byte_cache(documents, chat=None, num_shards=1):
    """A cache of texts and, with ``chat``, of conversations, in their order."""
    chat = chat or chat_of()
    tokenizer = ByteTokenizer()
    read = [
        Document(item, "nowhere:1") if isinstance(item, str) else chat.document(item, "nowhere:1") for item in documents
    ]
    turns = [document.turns for document in read]
    encoded = [(ids, np.zeros(len(ids), bool) if mask is None else mask) for ids, mask in encode(tokenizer, read)]
    shards = []
    for own in np.array_split(np.arange(len(documents)), num_shards):
        if len(own):
            chats = np.array([turns[number] is not None for number in own])
            masks = {"ignored": np.concatenate([encoded[number][1] for number in own]), "is_conversation": chats}
            tokens = np.concatenate([encoded[number][0] for number in own])
            lengths = [len(encoded[number][0]) for number in own]
            shards.append(memory_shard(lengths, own, tokens, **(masks if chats.any() else {})))
    return memory_cache(shards, sum((ConversationCounts.of(turn) for turn in turns if turn), ConversationCounts()))


def chosen(cache, numbers):
    """Select some documents of a cache, by their numbers through all shards."""
    hashes = np.concatenate([shard.text_hashes for shard in cache.shards])
    others = np.setdiff1d(hashes, hashes[list(numbers)])
    known = memory_cache([memory_shard([1] * len(others), others)])
    return hold_out_known({"": cache}, [known])[""].train


def texts_in(selection):
    """The documents of a selection as text, in order."""
    found = []
    for part in selection.parts:
        offsets = part.shard.offsets
        for span in part.spans:
            bounds = pairwise(offsets[span.first : span.last + 1].tolist())
            found += [ByteTokenizer().decode(part.shard.tokens[begin:end].tolist()) for begin, end in bounds]
    return found
