import math
from collections import Counter
from itertools import pairwise

import pytest
from corpora import byte_cache, chosen, texts
from hypothesis import given
from hypothesis import strategies as st

from llama_core.data import entropy
from llama_core.data.entropy import token_entropies
from llama_core.data.selection import everything
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
    taken = sorted(data.draw(st.sets(st.sampled_from(range(len(documents))), min_size=1)))
    selection = chosen(byte_cache(documents, num_shards=data.draw(st.integers(1, 3))), taken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "CHUNK_TOKENS", chunk)
        measured = token_entropies(selection, VOCAB)
    unigram, bigram = direct_entropies([documents[number] for number in taken])
    assert measured.unigram == pytest.approx(unigram)
    assert measured.bigram == pytest.approx(bigram, abs=1e-12)


@given(texts)
def test_context_never_makes_the_next_token_less_certain(documents):
    measured = token_entropies(everything(byte_cache(documents)), VOCAB)
    assert measured.bigram + 1e-12 >= 0
    assert measured.bigram <= measured.unigram + 1e-12
