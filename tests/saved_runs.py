"""Runs of a small model that were saved as if they had trained, with weights that a test makes."""

import torch
from parity import native_engine

from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.retention import Retention
from llama_core.training.checkpoint import Checkpointer

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
SMALL = {"model": "llama3_405b", "architecture": SIZES | {"vocab_size": 320, "max_context": 64}}
CHATML_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@torch.no_grad()
def make_lively(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(mean=float(parameter.ndim == 1), std=0.25, generator=generator)


def save_run(path, settings, prepare, steps=(1,)):
    """Save a run whose weights ``prepare`` makes for each step, as if it had trained."""
    config = RunConfig.from_mapping(SMALL | settings)
    run = RunDirectory(path)
    run.create()
    run.config.write_text(config.to_yaml())
    save_checkpoints(run, config, prepare, steps)
    return run


def save_checkpoints(run, config, prepare, steps=(1,)):
    engine = native_engine(ParallelPlan(), config.spec)
    checkpointer = Checkpointer(run, keep=Retention(3))
    for step in steps:
        prepare(engine, step)
        checkpointer.save(step, engine, {})
    checkpointer.finish()


def always(token):
    """Make a model that says one token whatever it is told: all of its logits but one are zero."""

    def prepare(engine, step):
        make_lively(engine.model, step)
        with torch.no_grad():
            engine.model.norm.weight.fill_(1.0)
            engine.model.tok_embeddings.weight.fill_(1.0)
            engine.model.output.weight.zero_()
            for block in engine.model.layers.values():
                block.attention.wo.weight.zero_()
                block.feed_forward.w2.weight.zero_()
            engine.model.output.weight[token] = 1.0

    return prepare
