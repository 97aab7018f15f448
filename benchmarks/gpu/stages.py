"""The stages of the measurement on a GPU: how long each may take, and the functions that yield its rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A part of the measurement that runs in a process of its own."""

    name: str
    seconds: float
    """The longest it may take."""
    sections: tuple[str, ...]
    """Functions ``module:name`` that yield its rows, in order. If one raises, the next ones run all the same."""
    needs: tuple[str, ...] = ()
    """Packages without which it cannot run, besides those that every stage needs."""
    wants: tuple[str, ...] = ()
    """Packages without which some of its rows are missing."""


def _stage(
    name: str, seconds: float, *sections: str, needs: tuple[str, ...] = (), wants: tuple[str, ...] = ()
) -> Stage:
    return Stage(name, seconds, tuple(f"benchmarks.gpu.{section}" for section in sections), needs, wants)


_TITAN = ("torchtitan", "tyro", "docstring_parser", "typeguard")

CALLS = {
    "first": (
        _stage("run", 80, "product:interrupted_runs", needs=("pyarrow",)),
        _stage("one_rank", 40, "one_rank:one_rank"),
        _stage("machine", 15, "machine:memory", "machine:rates"),
        _stage(
            "parity", 45, "parity:attention", "parity:divided", "parity:experts", "parity:loss", "parity:replaced_flash"
        ),
        _stage("step", 60, "steps:profiled_step"),
        _stage("attention", 30, "kernels:attention"),
        _stage("loss", 20, "kernels:loss"),
        _stage("staging", 20, "staging:staging"),
        _stage("peer", 90, "peer:peer_1b", wants=_TITAN),
    ),
    "second": (
        _stage("training", 90, "steps:training"),
        _stage(
            "recipes",
            75,
            "recipes:numbers_in_nf4",
            "recipes:moments_in_bf16",
            "recipes:optimizers",
            "recipes:tuning",
        ),
        _stage("fp8", 90, "kernels:fp8_products", "steps:fp8"),
        _stage("precision", 40, "steps:precision"),
        _stage("calibrate", 120, "calibration:profile"),
    ),
    "large": (
        _stage("masks", 90, "steps:masks"),
        _stage("peer_3b", 150, "peer:peer_3b", wants=_TITAN),
        _stage("large", 120, "steps:large"),
    ),
}
"""The stages of each call, which fit into eight minutes, the most informative first; the last one needs 141 GB."""

STAGES = {stage.name: stage for call in CALLS.values() for stage in call}
