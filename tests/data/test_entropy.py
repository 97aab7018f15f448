import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from corpora import byte_cache, texts
from hypothesis import given
from hypothesis import strategies as st

from llama_core.data import entropy
from llama_core.data.entropy import token_entropies
from llama_core.data.tokenizer import ByteTokenizer

VOCAB = ByteTokenizer.vocab_size


def direct_entropies(documents):
    """The definition, counted pair by pair."""
    encoded = [ids.tolist() for ids in ByteTokenizer().encode_documents(documents)]
    pairs = Counter(pair for ids in encoded for pair in pairwise(ids))
    targets = Counter(token for ids in encoded for token in ids[1:])
    contexts = Counter(token for ids in encoded for token in ids[:-1])
    total = sum(pairs.values())
    unigram = -sum(n / total * math.log(n / total) for n in targets.values())
    bigram = -sum(n / total * math.log(n / contexts[first]) for (first, _), n in pairs.items())
    return unigram, bigram


@given(documents=texts, data=st.data(), chunk=st.integers(1, 40))
def test_entropies_match_the_definition_for_any_chunk_and_choice(documents, data, chunk):
    chosen = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)).filter(any))
    cache = byte_cache(documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "CHUNK_TOKENS", chunk)
        measured = token_entropies(cache.tokens, cache.offsets, np.array(chosen), VOCAB)
    unigram, bigram = direct_entropies([text for text, take in zip(documents, chosen, strict=True) if take])
    assert measured.unigram == pytest.approx(unigram)
    assert measured.bigram == pytest.approx(bigram, abs=1e-12)


@given(texts)
def test_context_never_makes_the_next_token_less_certain(documents):
    cache = byte_cache(documents)
    measured = token_entropies(cache.tokens, cache.offsets, np.ones(len(documents), np.bool_), VOCAB)
    assert measured.bigram + 1e-12 >= 0
    assert measured.bigram <= measured.unigram + 1e-12
