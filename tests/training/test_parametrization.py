"""CompleteP: the publication's model, with its factors in the weights, whose activations do not know their width."""

from dataclasses import replace

import pytest
import torch
from parity import TIED, TRAINING, UNTIED, largest_differences, own_microbatches
from tiers import nightly

from llama_core.config.model_spec import BaseShape
from llama_core.config.model_weights import weight_of
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.parallel.apply import ParallelModel
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import NativeEngine, train_step
from llama_core.training.optimizer import build_optimizer

WIDTH, DEPTH = 4.0, 2.0
BASE = BaseShape(width=8, depth=2)
"""What ``UNTIED`` and ``TIED`` have ``WIDTH`` times the width and ``DEPTH`` times the depth of."""
CHOICES = {"epsilon": 1e-4, "weight_decay": 0.5, "max_grad_norm": 1e9}
"""An epsilon and a decay that matter, and no clipping, which goes by the gradients of the weights as they are."""


def engine(spec, **choices):
    parallel = ParallelModel(
        spec,
        ParallelPlan(num_microbatches=2),
        device=torch.device("cpu"),
        compute_dtype=torch.float64,
        weight_dtype=torch.float64,
    ).materialize()
    made = NativeEngine(parallel, build_optimizer(parallel.model, TRAINING.model_copy(update=choices)))
    made.initialize_weights(1)
    return made


def losses(made, num_steps=6, learning_rate=0.02):
    return [
        float(
            train_step(
                made,
                own_microbatches(step % 2, ParallelPlan(num_microbatches=2)),
                learning_rate=learning_rate,
                max_grad_norm=CHOICES["max_grad_norm"],
            ).loss
        )
        for step in range(num_steps)
    ]


def published(name):
    """Return the factors on the rate, the decay and epsilon of a weight in table 1 of the publication."""
    row = weight_of(name)
    if not name.startswith("layers."):
        return 1.0, 1.0, 1 / WIDTH
    if len(row.shape) == 1:
        return 1.0, 1.0, 1 / (WIDTH * DEPTH)
    return 1 / WIDTH, WIDTH, 1 / (WIDTH * DEPTH)


def as_published(spec, scaled):
    """Return the weights of ``scaled`` in the publication's form: factors multiply what layers add, and logits."""
    made = engine(replace(spec, base=None))
    parameters = dict(made.model.named_parameters())
    factors = {"attention.wo.weight": DEPTH, "feed_forward.w2.weight": DEPTH}
    factors["norm.weight" if spec.tied_embeddings else "output.weight"] = WIDTH
    if spec.scaled_embedding:  # the publication's is not: its factor may not grow with the width
        factors |= {"tok_embeddings.weight": WIDTH**0.5, "norm.weight": WIDTH**0.5 if spec.tied_embeddings else 1}
        made.model.embedding_scale /= WIDTH**0.5
    with torch.no_grad():
        for name, parameter in scaled.model.named_parameters():
            factor = next((factor for part, factor in factors.items() if name == part or name.endswith(f".{part}")), 1)
            parameters[name].copy_(factor * parameter)
    for name, module in made.model.named_modules():
        if name.endswith((".wo", ".w2")):
            module.register_forward_hook(lambda module, given, out: out / DEPTH)
        elif name == "norm":
            module.register_forward_hook(lambda module, given, out: out / WIDTH)
    groups = []
    for name, parameter in parameters.items():
        rate, decay, epsilon = published(name)
        decay = decay * CHOICES["weight_decay"] if weight_of(name).decayed else 0.0
        groups.append({"params": [parameter], "rate": rate, "weight_decay": decay, "eps": epsilon * CHOICES["epsilon"]})
    made.optimizer = torch.optim.AdamW(groups, betas=(TRAINING.beta1, TRAINING.beta2), fused=True)
    return made


SCALED = [replace(spec, scaled_embedding=True) for spec in (UNTIED, TIED)]


@pytest.mark.parametrize("spec", [UNTIED, TIED, *SCALED], ids=["untied", "tied", "untied, scaled", "tied, scaled"])
def test_the_weights_with_their_factors_train_as_the_publication_s_model(spec):
    scaled = engine(replace(spec, base=BASE), **CHOICES)
    reference = as_published(spec, scaled)
    found = losses(scaled)
    assert found == pytest.approx(losses(reference), rel=1e-9)
    assert found != pytest.approx(losses(engine(spec, **CHOICES)), rel=1e-3)


@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_model_of_the_base_s_own_sizes_is_an_ordinary_one(spec):
    own = BaseShape(spec.hidden_size, spec.num_layers)
    assert losses(engine(replace(spec, base=own), **CHOICES)) == losses(engine(spec, **CHOICES))


def test_initial_values_are_those_of_the_base_over_the_root_of_the_width():
    wide = dict(engine(replace(UNTIED, base=BASE)).model.named_parameters())
    usual = dict(engine(UNTIED).model.named_parameters())
    whole_layers = {
        "tok_embeddings.weight": 1.0,
        "norm.weight": 1.0,
        "output.weight": 1 / WIDTH,
        "layers.0.attention_norm.weight": 1.0,
        "layers.0.attention.wq.weight": WIDTH**-0.5,
        "layers.3.attention.wo.weight": (WIDTH * DEPTH) ** -0.5,
        "layers.3.feed_forward.w2.weight": (WIDTH * DEPTH) ** -0.5,
        "layers.2.feed_forward.w1.weight": WIDTH**-0.5,
    }
    for name, factor in whole_layers.items():
        torch.testing.assert_close(wide[name], factor * usual[name])


def change_of_logits(spec, learning_rate=0.01, num_steps=4):
    """Return how far some steps move the logits of a batch: the root of their mean square."""
    made = engine(spec)
    (batch, _) = own_microbatches(0, ParallelPlan(num_microbatches=2))
    seen = []

    def keep(module, given, out):
        seen.append(out.detach() @ made.model.output.weight.detach().T)

    handle = made.model.norm.register_forward_hook(keep)
    made.evaluate([batch])
    losses(made, num_steps, learning_rate)
    made.evaluate([batch])
    handle.remove()
    return float((seen[-1] - seen[0]).square().mean().sqrt())


def sized(width, depth=2, base=None):
    return replace(
        UNTIED, hidden_size=width, num_layers=depth, num_heads=width // 8, num_kv_heads=width // 8, ffn_size=2 * width,
        base=base,
    )  # fmt: skip


def test_what_steps_change_in_the_logits_depends_neither_on_width_nor_on_depth():
    """A coordinate check: with the usual factors, the same learning rate moves a wide model far more."""
    base = BaseShape(width=32, depth=2)
    scaled = [change_of_logits(sized(width, base=base)) for width in (32, 128, 512)]
    usual = [change_of_logits(sized(width)) for width in (32, 128, 512)]
    assert max(scaled) < 2 * min(scaled), scaled
    assert usual[-1] > 4 * usual[0], usual
    deep = [change_of_logits(sized(32, depth, base)) for depth in (2, 8, 32)]
    assert max(deep) < 2 * min(deep), deep


@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        nightly(ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2), UNTIED),
        (ParallelPlan(pp=2, schedule="chimera", dp_shard=2, zero_stage=2, num_microbatches=4), TIED),
    ],
    ids=["tp 2 x zero 3, untied", "chimera pp 2 x zero 2, tied"],
)
def test_ranks_train_the_model_of_one_process(plan, spec):
    differences = largest_differences(plan, spec=replace(spec, base=BASE))
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"parametrization": "completep"}, "training.parametrization=completep needs training.base_width and training"),
        ({"parametrization": "completep", "base_width": 64}, "needs training.base_depth: the sizes of the model"),
        ({"base_width": 64}, "training.base_width=64 has no effect with training.parametrization=standard"),
        (
            {"parametrization": "completep", "base_width": 64, "base_depth": 2, "optimizer": "muon"},
            "training.parametrization=completep is not known for training.optimizer=muon; use adamw",
        ),
        (
            {"parametrization": "completep", "base_width": 64, "base_depth": 2, "strategy": "lora"},
            "is for dense models that are trained whole, not for adapters",
        ),
        (
            {"parametrization": "completep", "base_width": 64, "base_depth": 2, "strategy": "moe"},
            "is for dense models that are trained whole, not for experts",
        ),
    ],
)
def test_what_it_lacks_or_is_not_known_for_is_one_line(choices, message):
    strategy = choices.pop("strategy", "standard")
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_mapping({"strategy": strategy, "training": choices})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
