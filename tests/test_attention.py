"""One table says which kernel computes attention: each choice of a run follows from what its layers need."""

import re
from dataclasses import replace
from itertools import product

import pytest

from llama_core.attention import (
    KERNELS,
    AttentionNeeds,
    check_cached,
    chosen_kernel,
    kernel_told,
    kernels_of,
    refusal,
)
from llama_core.config.models import model_spec
from llama_core.errors import PlanError

PLAIN = AttentionNeeds(8, 4, 64)
NEEDS = {
    "all": PLAIN,
    "window": PLAIN._replace(window=16),
    "documents": PLAIN._replace(documents=True),
    "both": PLAIN._replace(window=16, documents=True),
}
CHUNK = PLAIN._replace(chunk=16)
RUNS = {
    ("cuda", "bf16", "auto", 1): ("causal", "varlen"),
    ("cuda", "fp16", "auto", 1): ("causal", "varlen"),
    ("cuda", "fp32", "auto", 1): ("causal", "masked"),
    ("cpu", "bf16", "auto", 1): ("cpu causal", "cpu masked"),
    ("cpu", "fp32", "auto", 1): ("causal", "cpu masked"),
    ("cpu", "fp16", "auto", 1): ("causal", "masked"),
    ("cpu", "fp64", "auto", 1): ("causal", "masked"),
    ("cuda", "bf16", "auto", 2): ("ring", "gathered"),
    ("cuda", "fp32", "auto", 2): ("ring", "masked ring"),
    ("cpu", "bf16", "auto", 2): ("ring", "masked ring"),
    ("cuda", "bf16", "ulysses", 2): ("ulysses", "varlen ulysses"),
    ("cpu", "bf16", "ulysses", 2): ("ulysses", "masked ulysses"),
    ("cuda", "bf16", "ulysses", 1): ("causal", "varlen"),
    ("cuda", "bf16", "math", 1): ("all scores", "masked scores"),
    ("cpu", "fp32", "math", 1): ("all scores", "masked scores"),
}
"""The kernel where a query sees all before it, and where it does not: by device, dtype, what is asked for, and cp."""
WITHOUT_BACKWARD = {"cpu causal": "causal", "cpu masked": "masked"}
"""What a kernel stands in for where a backward follows."""
STAND_INS = [kernel for kernel in KERNELS if kernel.only_trains]


@pytest.mark.parametrize(("run", "names"), RUNS.items(), ids=str)
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_a_run_has_the_first_kernel_that_serves_all_of_its_layers(run, names, needs):
    device, dtype, asked, cp = run
    kernel = chosen_kernel([PLAIN, needs], device=device, dtype=dtype, asked=asked, cp=cp)
    assert kernel.name == names[bool(needs.traits)]
    assert kernel.divides_rows == (cp > 1)
    evaluating = chosen_kernel([PLAIN, needs], device=device, dtype=dtype, asked=asked, cp=cp, trains=False)
    assert evaluating.name == WITHOUT_BACKWARD.get(kernel.name, kernel.name)
    for layer in (PLAIN, needs):
        assert kernel_told(layer, kernel.told, asked=asked, cp=cp) is evaluating


@pytest.mark.parametrize(("run", "names"), RUNS.items(), ids=str)
@pytest.mark.parametrize("needs", [CHUNK, CHUNK._replace(window=4, documents=True)])
def test_a_chunk_is_a_document_to_all_but_gathered_keys(run, names, needs):
    device, dtype, asked, cp = run
    kernel = chosen_kernel([PLAIN, needs], device=device, dtype=dtype, asked=asked, cp=cp)
    assert kernel.name == ("masked ring" if names[1] == "gathered" else names[1])


@pytest.mark.parametrize("of_scores", [{"soft_cap": 20.0}, {"soft_cap": 20.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("run", [run for run in RUNS if run[3] == 1], ids=str)
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_a_soft_cap_is_served_by_the_kernels_that_hold_all_scores(run, needs, of_scores):
    device, dtype, asked, cp = run
    other = needs._replace(**of_scores)
    kernel = chosen_kernel([needs, other], device=device, dtype=dtype, asked=asked, cp=cp)
    assert kernel.name == RUNS["cpu", "fp32", "math", 1][bool(needs.traits)]
    assert kernel_told(other, kernel.told, asked=asked) is kernel


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_sinks_change_no_choice(run, needs):
    device, dtype, asked, cp = run
    both = [needs, needs._replace(sinks=True)]
    if not refusal([needs], asked=asked, cp=cp):
        kernels = [chosen_kernel([each], device=device, dtype=dtype, asked=asked, cp=cp) for each in both]
        assert kernels[0] is kernels[1]


def test_every_kernel_is_the_choice_of_some_run():
    chosen = {name for names in RUNS.values() for name in names} | set(WITHOUT_BACKWARD.values())
    assert chosen == {kernel.name for kernel in KERNELS if not kernel.is_cached}


@pytest.mark.parametrize("first", STAND_INS, ids=lambda kernel: kernel.name)
def test_what_stands_in_for_a_kernel_where_a_cpu_trains_is_to_planning_the_same(first):
    torchs = replace(first, name=WITHOUT_BACKWARD[first.name], device="", dtypes=frozenset(), only_trains=False)
    assert torchs in KERNELS


@pytest.mark.parametrize("needs", [PLAIN, NEEDS["window"], CHUNK, CHUNK._replace(window=4)])
@pytest.mark.parametrize("of_scores", [{}, {"soft_cap": 20.0}, {"sinks": True}], ids=str)
def test_a_cache_serves_windows_chunks_soft_caps_and_sinks(needs, of_scores):
    check_cached([PLAIN, needs._replace(**of_scores)])
    assert all(kernel.is_cached for kernel in kernels_of("auto", cached=True))


def test_a_cache_refuses_in_one_line_what_it_does_not_serve():
    with pytest.raises(
        PlanError,
        match=r"\Aattention with documents and window has no kernel among those of a cache "
        r"\(cache, cache with all scores\), so no text can be generated\Z",
    ):
        check_cached([PLAIN, NEEDS["both"]])


def test_what_no_kernel_serves_is_refused_in_one_line():
    assert not kernels_of("math", cp=2)
    said = (
        "attention with documents and window has no kernel among those of cp=2 and attention=math (no kernel); use cp=1"
    )
    needs = [PLAIN, NEEDS["both"]]
    assert refusal(needs, asked="math", cp=2) == said
    with pytest.raises(PlanError, match=re.escape(said) + r"\Z"):
        chosen_kernel(needs, device="cpu", dtype="fp32", asked="math", cp=2)
    assert not refusal(needs, cp=2)


def test_a_need_that_no_row_names_is_refused_everywhere_and_blames_no_setting():
    class Biased(AttentionNeeds):
        traits = frozenset({"bias by distance"})

    needs = [Biased(8, 4, 64)]
    for cp in (1, 2):
        assert refusal(needs, cp=cp).endswith(")")
    with pytest.raises(
        PlanError, match=r"\Aattention with bias by distance has no kernel among those of cp=1 and attention=auto "
    ):
        kernel_told(needs[0], "mask")


@pytest.mark.parametrize(("window", "chunk", "length"), [*product((0, 1, 3, 8, 20), (0, 1, 3, 4, 20), (1, 8))])
def test_the_share_of_causal_scores_is_that_of_the_scores_counted(window, chunk, length):
    seen = [min(query % (chunk or length) + 1, window or length) for query in range(length)]
    causal = length * (length + 1) / 2
    needs = PLAIN._replace(window=window, chunk=chunk)
    assert needs.share_of_causal(length) == pytest.approx(sum(seen) / causal)


def test_a_layer_needs_what_its_model_says():
    spec = replace(model_spec("mistral_7b"), windowed_layers=(1, 3))
    assert [spec.attention(layer).window for layer in range(4)] == [0, 4096, 0, 4096]
    assert spec.attentions == {AttentionNeeds(32, 8, 128), AttentionNeeds(32, 8, 128, 4096)}
    assert [traits.attention for traits in spec.layers[:2]] == [spec.attention(0), spec.attention(1)]


def test_only_layers_that_rotate_see_chunks():
    spec = replace(model_spec("llama3_8b"), nope_layers=(1, 3), attention_chunk=512)
    assert [spec.attention(layer).chunk for layer in range(4)] == [512, 0, 512, 0]
