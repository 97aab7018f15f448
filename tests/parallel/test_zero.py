import gc
import math
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from io import StringIO

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import (
    ADAPTED,
    DORA,
    NUM_STEPS,
    PRINCIPAL,
    SEQ_LEN,
    TIED,
    TRAINING,
    UNTIED,
    held_out_microbatches,
    make_batch,
    train,
    undefined,
    with_rows_before,
)
from tiers import nightly
from toy_objective import Masked

from llama_core.config.models import model_spec
from llama_core.errors import CheckpointError, EnvironmentMismatchError, PlanError
from llama_core.models.kto import Kto
from llama_core.models.llama import build_llama
from llama_core.models.preferences import Dpo, PreferenceObjective
from llama_core.parallel.deepspeed import DeepSpeedModel, deepspeed_config
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checksums import file_sum
from llama_core.training.optimizer import build_optimizer

MASKED = Masked()
DPO = Dpo(beta=0.5, label_smoothing=0.1)
KTO = Kto(beta=0.05, desirable_weight=1.0, undesirable_weight=1.5)
DeepSpeedPlan = partial(ParallelPlan, dp_shard=2, zero_backend="deepspeed", microbatch_size=2, num_microbatches=2)


def build(plan, spec=UNTIED, dtype=torch.float32, objective=None, training=TRAINING):
    optimizer = partial(build_optimizer, training=training)
    return DeepSpeedModel(
        spec,
        plan,
        device=torch.device("cpu"),
        compute_dtype=dtype,
        build_optimizer=optimizer,
        objective=objective,
    )


def own_microbatches(plan, step, objective=None):
    batch = make_batch(step, plan.batch_size, documents=True)
    own = batch.split(plan.batch_size // plan.dp)[dist.get_rank()]
    return with_rows_before(own.split(plan.rows_per_forward), objective)


def take_step(model, step, on_phase=lambda phase: None, max_grad_norm=TRAINING.max_grad_norm):
    microbatches = own_microbatches(model.plan, step, model.model.objective)
    loss = model.forward_backward(microbatches, loss_scale=1.0, on_phase=on_phase)
    grad_norm, updated = model.update(
        loss,
        learning_rate=TRAINING.learning_rate,
        max_grad_norm=max_grad_norm,
        loss_scale=1.0,
        on_phase=on_phase,
    )
    return float(loss), float(grad_norm), bool(updated)


def weights_of(model):
    from deepspeed.utils import safe_get_full_fp32_param

    trained = {name: p for name, p in model.model.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(p).clone().numpy() for name, p in trained.items()}


@cache
def two_ranks(plan, spec=UNTIED, dtype=torch.float32, objective=None):
    return run_ranks(2, trained, plan, spec, dtype, objective)


def trained(plan, spec, dtype, objective):
    phases = []
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        model = build(plan, spec, dtype, objective)
        model.initialize_weights(seed=1)
        initial = weights_of(model)
        losses, norms, _ = zip(*(take_step(model, step, phases.append) for step in range(NUM_STEPS)), strict=True)
        evaluation, _ = model.evaluate(held_out_microbatches(plan, objective=objective))
        answers = None
        if isinstance(objective, PreferenceObjective):
            rows = held_out_microbatches(plan)
            answers = model.measure_rows(objective.of_reference, objective.num_referred(SEQ_LEN), rows).numpy()
    return {
        "answers": answers,
        "losses": losses,
        "norms": norms,
        "phases": phases,
        "initial": initial,
        "weights": weights_of(model),
        "evaluation": evaluation,
        "output": out.getvalue(),
        "compiled graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


@cache
def alone(spec, objective=None):
    return train(ParallelPlan(num_microbatches=8), spec, torch.float32, documents=True, draw=False, objective=objective)


def assert_equal_within_rounding(ranks, expected):
    for ours in ranks:
        np.testing.assert_allclose(ours["losses"], expected["losses"][""], rtol=1e-6)
        np.testing.assert_allclose(ours["norms"], expected["norms"][""], rtol=1e-6)
        np.testing.assert_allclose(ours["evaluation"], expected["evaluation"][""], rtol=1e-6)
        assert ours["weights"].keys() == expected["gradients"].keys()
        for name, weight in ours["weights"].items():
            # Adam divides a gradient by its own size, so rounding one near zero moves a weight by part of a step
            np.testing.assert_allclose(
                weight, expected["weights"][name], rtol=0, atol=0.02 * TRAINING.learning_rate, err_msg=name
            )


@pytest.mark.parametrize(
    ("spec", "choices"),
    [
        (TIED, {"zero_stage": 2, "offload": "optimizer"}),
        nightly(ADAPTED, {"zero_stage": 1}),
        nightly(UNTIED, {"zero_stage": 1, "compile": True}),
        nightly(UNTIED, {"zero_stage": 2, "recompute": "selective"}),
        nightly(UNTIED, {"zero_stage": 3, "recompute": "selective"}),
        nightly(TIED, {"zero_stage": 3, "offload": "parameters", "recompute": "full", "recomputed_layers": (2,)}),
        nightly(ADAPTED, {"zero_stage": 3, "offload": "optimizer", "recompute": "selective"}),
        nightly(DORA, {"zero_stage": 2}),
        nightly(DORA, {"zero_stage": 3, "recompute": "full"}),
        nightly(PRINCIPAL, {"zero_stage": 3}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_training_matches_one_process_without_deepspeed(spec, choices):
    assert_equal_within_rounding(two_ranks(DeepSpeedPlan(**choices), spec), alone(spec))


@pytest.mark.parametrize("stage", [2, nightly(3)])
def test_another_objective_matches_one_process_too(stage):
    expected = alone(UNTIED, MASKED)
    assert_equal_within_rounding(two_ranks(DeepSpeedPlan(zero_stage=stage), objective=MASKED), expected)
    assert expected["losses"][""] != pytest.approx(alone(UNTIED)["losses"][""], rel=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stage", "spec", "objective"),
    [
        (2, ADAPTED, DPO),
        nightly(3, UNTIED, DPO),
        nightly(3, ADAPTED, DPO),
        nightly(2, UNTIED, KTO),
        nightly(3, ADAPTED, KTO),
    ],
)
def test_answers_match_one_process_too(stage, spec, objective):
    ranks = two_ranks(DeepSpeedPlan(zero_stage=stage), spec, objective=objective)
    expected = alone(spec, objective)
    assert_equal_within_rounding(ranks, expected)
    for ours in ranks:
        np.testing.assert_allclose(ours["answers"], expected["answers"][""], rtol=1e-5)


@pytest.mark.parametrize("stage", [nightly(1), 2, nightly(3)])
def test_bf16_starts_from_the_same_fp32_weights_and_stays_near_fp32(stage):
    drawn = {name: p.detach().numpy() for name, p in build_llama(UNTIED, device="cpu", seed=1).named_parameters()}
    for ours in two_ranks(DeepSpeedPlan(zero_stage=stage), dtype=torch.bfloat16):
        for name, weight in ours["initial"].items():
            np.testing.assert_array_equal(weight, drawn[name], err_msg=name)
        # eight bits of mantissa round by up to 2**-9, and losses and norms are means over many roundings
        np.testing.assert_allclose(ours["losses"], alone(UNTIED)["losses"][""], rtol=2**-9)
        np.testing.assert_allclose(ours["norms"], alone(UNTIED)["norms"][""], rtol=2**-9)


@pytest.mark.parametrize("stage", [nightly(1), 2, nightly(3)])
def test_nothing_is_printed(stage):
    for ours in two_ranks(DeepSpeedPlan(zero_stage=stage), dtype=torch.bfloat16):
        assert ours["output"] == ""


def test_the_callback_sees_every_forward_and_backward():
    for ours in two_ranks(DeepSpeedPlan(zero_stage=2), dtype=torch.bfloat16):
        assert ours["phases"] == (["forward", "backward"] * 2 + ["optimizer"]) * NUM_STEPS


@pytest.mark.nightly
def test_blocks_are_compiled_only_if_the_plan_says_so():
    for stage, compiled in ((1, True), (2, False)):
        plan = DeepSpeedPlan(zero_stage=stage, compile=compiled, recompute="none" if compiled else "selective")
        for ours in two_ranks(plan):
            assert (ours["compiled graphs"] > 0) is compiled


def forwards_of_layers():
    """Return how often each layer's attention runs in one step of two microbatches."""
    plan = DeepSpeedPlan(zero_stage=3, recompute="full", recomputed_layers=(2,))
    model, counts = build(plan), [0] * UNTIED.num_layers
    model.initialize_weights(seed=1)

    def count(layer, *_):
        counts[layer] += 1

    for name, block in model.model.layers.items():
        block.attention.register_forward_hook(partial(count, int(name)))
    take_step(model, 0)
    return counts


@pytest.mark.nightly
def test_only_the_layers_of_the_plan_are_recomputed():
    assert run_ranks(2, forwards_of_layers) == [[4] * 2 + [2] * 2] * 2


def not_finite_on_a_rank():
    found = []
    for stage in (1, 2, 3):
        model = build(DeepSpeedPlan(zero_stage=stage), dtype=torch.bfloat16)
        model.initialize_weights(seed=1)
        found.append(list(model.non_finite_weights()))
        model.set_weights(lambda part: [weight.data.fill_(math.inf) for weight in part.parameters()])
        found.append(sorted(model.non_finite_weights()) == sorted(name for name, _ in model.model.named_parameters()))
    return found


def test_weights_that_are_not_finite_are_found_on_every_rank_at_every_stage():
    assert run_ranks(2, not_finite_on_a_rank) == [[[], True] * 3] * 2


def first_norms_with_compression():
    norms = []
    for stage in (1, 2, 3):
        model = build(DeepSpeedPlan(zero_stage=stage, gradient_compression="bf16"))
        model.initialize_weights(seed=1)
        norms.append(take_step(model, 0)[1])
    return norms


@pytest.mark.nightly
def test_compressed_gradients_are_rounded_to_bf16_in_transit():
    exact = alone(UNTIED)["norms"][""][0]
    for norms in run_ranks(2, first_norms_with_compression):
        assert all(1e-6 < abs(norm / exact - 1) < 2**-9 for norm in norms)


def norms_of_clipped_gradients():
    norms = []
    for choices in ({"zero_stage": 1}, {"zero_stage": 2, "offload": "optimizer"}, {"zero_stage": 3}):
        model = build(DeepSpeedPlan(**choices), dtype=torch.bfloat16)
        model.initialize_weights(seed=1)
        before = take_step(model, 0, max_grad_norm=0.25)[1]
        shards = [state["exp_avg"] for state in model.engine.optimizer.optimizer.state.values()]
        square = torch.nn.utils.get_total_norm(shards).square()
        dist.all_reduce(square)
        norms.append((before, float(square.sqrt()) / (1 - TRAINING.beta1)))
    return norms


@pytest.mark.nightly
def test_gradients_are_clipped_by_the_norm_over_all_ranks():
    """After one step the first moments are the clipped gradients, scaled."""
    for norms in run_ranks(2, norms_of_clipped_gradients):
        for before, after in norms:
            assert before > 0.5
            assert after == pytest.approx(0.25, rel=1e-4)


def resumed(plan, dtype, folder):
    """Return the last steps, then the final weights, of an undisturbed run and of one resumed from its checkpoint."""
    first = build(plan, dtype=dtype)
    first.initialize_weights(seed=1)
    for step in range(2):
        take_step(first, step)
    sums = first.save(folder / ".writing").result()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / ".writing").rename(folder / "whole")
        files = [file for file in (folder / "whole" / "deepspeed").rglob("*") if file.is_file()]
        assert sums == {str(file.relative_to(folder / "whole")): file_sum(file) for file in files}
    undisturbed = [take_step(first, step) for step in (2, 3)]
    second = build(plan, dtype=dtype)
    second.set_weights(undefined)
    second.load(folder / "whole")
    again = [take_step(second, step) for step in (2, 3)]
    return undisturbed, again, weights_of(first), weights_of(second)


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        nightly({"zero_stage": 1}, torch.bfloat16),
        ({"zero_stage": 2, "offload": "optimizer"}, torch.float32),
        nightly({"zero_stage": 3, "offload": "parameters"}, torch.bfloat16),
    ],
)
def test_a_run_resumed_from_its_renamed_checkpoint_matches_an_undisturbed_one(tmp_path, choices, dtype):
    for undisturbed, again, weights, weights_again in run_ranks(2, resumed, DeepSpeedPlan(**choices), dtype, tmp_path):
        assert again == undisturbed
        for name, weight in weights.items():
            np.testing.assert_array_equal(weights_again[name], weight, err_msg=name)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]  # it writes only into the given folder


def decayed_apart(stage, before, after, folder):
    """Return a matrix, and the same after a step with each of two decays, the first of which the checkpoint has."""
    saved = build(DeepSpeedPlan(zero_stage=stage), training=TRAINING.model_copy(update={"weight_decay": before}))
    saved.initialize_weights(seed=1)
    take_step(saved, 0)
    saved.save(folder / "saved").result()
    dist.barrier()
    name = "layers.0.attention.wq.weight"
    matrices = [weights_of(saved)[name]]
    for decay in (before, after):
        model = build(DeepSpeedPlan(zero_stage=stage), training=TRAINING.model_copy(update={"weight_decay": decay}))
        model.load(folder / "saved")
        take_step(model, 1)
        matrices.append(weights_of(model)[name])
    return matrices


@pytest.mark.parametrize(("stage", "before", "after"), [(2, 0.5, 0.0), nightly(1, 0.0, 0.5), nightly(3, 0.5, 2.0)])
def test_a_run_that_goes_on_with_another_decay_decays_as_much(tmp_path, stage, before, after):
    for start, same, other in run_ranks(2, decayed_apart, stage, before, after, tmp_path):
        less = TRAINING.learning_rate * (after - before) * start
        np.testing.assert_allclose(same - other, less, rtol=0, atol=1e-7)


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def load_with_a_bomb(stage, folder):
    """Resume from a checkpoint with a file that would run code; a rank makes the folder "ran" if it does."""
    model = build(DeepSpeedPlan(dp_shard=1, zero_stage=stage))
    model.save(folder / "saved")
    for file in (folder / "saved" / "deepspeed").iterdir():
        whole = file.read_bytes()
        torch.save(torch.load(file, weights_only=False) | {"more": Bomb(folder / "ran")}, file)
        with pytest.raises(CheckpointError, match="a file is damaged, or holds something else than DeepSpeed writes"):
            model.load(folder / "saved")
        file.write_bytes(whole)
    model.load(folder / "saved")


@pytest.mark.parametrize("stage", [nightly(1), 2, nightly(3)])
def test_resuming_from_files_of_deepspeed_runs_no_code_in_them(tmp_path, stage):
    run_ranks(1, load_with_a_bomb, stage, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def with_and_without_a_spoiled_step(stage, dtype):
    """Return the outcome of a step with an infinite loss on one rank, and the final weights with and without it."""
    models = [build(DeepSpeedPlan(zero_stage=stage), dtype=dtype) for _ in range(2)]
    for model in models:
        model.initialize_weights(seed=1)
        take_step(model, 0)
    spoiled = models[0].model
    whole_head = spoiled.head
    spoiled.head = lambda *inputs: whole_head(*inputs) + (math.inf if dist.get_rank() == 0 else 0.0)
    outcome = take_step(models[0], 50)
    spoiled.head = whole_head
    for model in models:
        take_step(model, 1)
    return outcome, *(weights_of(model) for model in models)


@pytest.mark.parametrize(
    ("stage", "dtype"), [nightly(1, torch.bfloat16), (2, torch.float32), nightly(3, torch.float32)]
)
def test_a_step_with_an_infinite_loss_on_one_rank_leaves_no_trace(stage, dtype):
    for (loss, grad_norm, updated), weights, expected in run_ranks(2, with_and_without_a_spoiled_step, stage, dtype):
        assert not updated
        assert not math.isfinite(loss)
        assert not math.isfinite(grad_norm)
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, expected[name], err_msg=name)


def live_bytes():
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when inspected
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and not item.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def bytes_per_parameter(stage, dtype):
    """Return the bytes per parameter that the model holds after a step, and after an evaluation."""
    before = live_bytes()
    model = build(DeepSpeedPlan(zero_stage=stage), dtype=dtype)
    model.initialize_weights(seed=1)
    take_step(model, 0)
    after_step = live_bytes()
    model.evaluate(own_microbatches(model.plan, 99))
    return [(held - before) / UNTIED.num_parameters for held in (after_step, live_bytes())]


@pytest.mark.parametrize(
    ("stage", "dtype", "expected"),
    [
        nightly(1, torch.bfloat16, 2 + 12 / 2 + 4),
        nightly(2, torch.float32, 4 + 12 / 2),
        (2, torch.bfloat16, 2 + 12 / 2),
        nightly(3, torch.bfloat16, (2 + 12 + 4) / 2 + 4),  # the last 4: the buffer, of a model below its limit
    ],
)
def test_between_steps_a_rank_holds_the_bytes_of_its_stage(stage, dtype, expected):
    for held in run_ranks(2, bytes_per_parameter, stage, dtype):
        assert held == pytest.approx([expected, expected], rel=0.01)


DEEP = replace(UNTIED, num_layers=8)


def most_gathered_parameters():
    """Return the most parameters gathered at the end of a block's forward or backward, in the second step."""
    model = build(DeepSpeedPlan(zero_stage=3), DEEP)
    model.initialize_weights(seed=1)
    take_step(model, 0)
    counts = []

    def count(*_):
        counts.append(sum(parameter.numel() for parameter in model.model.parameters()))

    for block in model.model.layers.values():
        block.register_forward_hook(count)
        block.register_full_backward_hook(count)
    take_step(model, 1)
    return max(counts)


@pytest.mark.nightly
def test_stage_3_gathers_two_blocks_besides_the_tables():
    norms = (2 * DEEP.num_layers + 1) * DEEP.hidden_size
    a_matrix = DEEP.hidden_size * DEEP.ffn_size  # gathered when needed, whatever the limit
    limit = 2 * (DEEP.layer_parameters + DEEP.embedding_parameters) + norms + a_matrix
    assert limit < DEEP.num_parameters / 2
    for most in run_ranks(2, most_gathered_parameters):
        assert DEEP.layer_parameters < most <= limit


def check_refusals(folder):
    with pytest.raises(PlanError, match="the plan has 4 ranks, but 1 were started"):
        build(DeepSpeedPlan(dp_shard=4, zero_stage=1))
    model = build(DeepSpeedPlan(dp_shard=1, zero_stage=1))
    with pytest.raises(ValueError, match="loss_scale=2"):
        model.forward_backward([], loss_scale=2.0, on_phase=lambda phase: None)
    with pytest.raises(PlanError, match=r"was written by another backend; .* of 1 DeepSpeed ranks at stage 1"):
        model.load(folder)
    build(DeepSpeedPlan(dp_shard=1, zero_stage=2)).save(folder)
    with pytest.raises(PlanError, match="was written by 1 DeepSpeed ranks at stage 2 in float32"):
        model.load(folder)
    sys.modules["deepspeed"] = None
    with pytest.raises(EnvironmentMismatchError, match="pip install 'deepspeed"):
        build(DeepSpeedPlan(dp_shard=1, zero_stage=1))


def test_impossible_requests_are_refused_with_the_remedy(tmp_path):
    run_ranks(1, check_refusals, tmp_path)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"tp": 2, "zero_stage": 1}, "not with tp=2"),
        ({"pp": 2, "zero_stage": 2}, "not with pp=2"),
        ({"cp": 2, "zero_stage": 3}, "not with cp=2"),
        ({"dp_replicate": 2, "zero_stage": 3}, "not with dp_replicate=2"),
        ({"zero_stage": 0, "dp_shard": 1}, "needs zero_stage 1, 2 or 3"),
        ({"zero_stage": 2, "offload": "parameters"}, "offload=parameters needs zero_stage=3"),
        ({"zero_stage": 2, "gradient_compression": "powersgd"}, "use bf16"),
    ],
)
def test_a_plan_that_deepspeed_cannot_run_is_refused(choices, reason):
    with pytest.raises(PlanError, match=reason):
        DeepSpeedPlan(**choices)


def config_of(device_type="cuda", dtype=torch.bfloat16, spec=UNTIED, **choices):
    return deepspeed_config(DeepSpeedPlan(**choices), spec, device_type=device_type, compute_dtype=dtype)


@pytest.mark.parametrize(
    ("stage", "offload", "sections"),
    [
        (2, "none", set()),
        (2, "optimizer", {"offload_optimizer"}),
        (3, "parameters", {"offload_optimizer", "offload_param"}),
    ],
)
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_offloaded_states_are_in_host_memory_pinned_for_a_gpu(stage, offload, sections, device_type):
    zero = config_of(device_type, zero_stage=stage, offload=offload)["zero_optimization"]
    assert {key for key in zero if key.startswith("offload")} == sections
    for section in sections:
        assert zero[section] == {"device": "cpu", "pin_memory": device_type == "cuda"}


@pytest.mark.parametrize(("compression", "dtype"), [("none", "fp32"), ("bf16", "bf16")])
def test_gradients_travel_in_fp32_unless_they_are_compressed(compression, dtype):
    assert config_of(zero_stage=2, gradient_compression=compression)["communication_data_type"] == dtype


def test_buffers_do_not_grow_with_a_large_model():
    small, large = (
        config_of(zero_stage=3, spec=spec)["zero_optimization"] for spec in (UNTIED, model_spec("llama3_405b"))
    )
    assert small["reduce_bucket_size"] == UNTIED.num_parameters
    assert large["reduce_bucket_size"] == large["stage3_prefetch_bucket_size"] == 50_000_000
