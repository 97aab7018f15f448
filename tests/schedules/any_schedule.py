"""Hypothesis strategies over every schedule and every size that is legal for it."""

from functools import partial

from hypothesis import strategies as st

from llama_core.schedules.registry import build_schedule

CHIMERAS = ("chimera", "chimera_doubling", "chimera_halving")

ranks = st.integers(1, 6)
even_ranks = st.integers(1, 4).map(lambda pairs: 2 * pairs)
microbatches = st.integers(1, 20)
chunks = st.integers(2, 4)


def build(name, num_ranks, num_microbatches, num_chunks=1):
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)


def build_interleaved(num_ranks, num_groups, num_chunks):
    return build("interleaved", num_ranks, num_ranks * num_groups, num_chunks)


chimera_schedules = st.builds(build, st.sampled_from(CHIMERAS), even_ranks, microbatches)
any_schedule = st.one_of(
    *(st.builds(partial(build, name), ranks, microbatches) for name in ("gpipe", "1f1b", "zb_h1", "zbv")),
    *(st.builds(partial(build, name), even_ranks, microbatches) for name in CHIMERAS),
    st.builds(build_interleaved, ranks, st.integers(1, 4), chunks),
)
