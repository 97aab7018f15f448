"""Hypothesis strategies over every schedule and every size that is legal for it."""

from functools import partial

from hypothesis import strategies as st

from llama_core.schedules.registry import build_schedule, schedule_names, schedule_type

CHIMERAS = ("chimera", "chimera_doubling", "chimera_halving")

ranks = st.integers(1, 6)
even_ranks = st.integers(1, 4).map(lambda pairs: 2 * pairs)
microbatches = st.integers(1, 20)
chunks = st.integers(2, 4)


def build(name, num_ranks, num_microbatches, num_chunks=1):
    return build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)


def build_interleaved(num_ranks, num_groups, num_chunks, name="interleaved"):
    return build(name, num_ranks, num_ranks * num_groups, num_chunks)


def legal(name):
    """Return a strategy over the sizes that a schedule's traits allow."""
    kind = schedule_type(name)
    if kind.takes_chunks:
        return st.builds(partial(build_interleaved, name=name), ranks, st.integers(1, 4), chunks)
    return st.builds(partial(build, name), even_ranks if kind.replicas > 1 else ranks, microbatches)


chimera_schedules = st.builds(build, st.sampled_from(CHIMERAS), even_ranks, microbatches)
any_schedule = st.one_of(*map(legal, schedule_names()))
