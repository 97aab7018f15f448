"""What a run has learnt, to read: the trained model continues ``tracking.prompts`` on this machine."""

import shlex

from llama_core.errors import TrainingInfraError
from llama_core.evaluation.generate import TextModel
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.measurements import Sample, Samples, TrainingSummary
from llama_core.runs.console import say
from llama_core.runs.loading import load_config

MAX_TOKENS = 48
"""Most tokens of a continuation."""
TEMPERATURE = 0.7
"""Small models repeat themselves at a lower one, and lose the thread at a higher one."""


def say_samples(run: RunDirectory, trained: TrainingSummary) -> None:
    """Let the model continue the run's prompts, record and print the texts, and say what to try next."""
    config = load_config(run)
    prompts = config.tracking.prompts
    if not prompts:
        return
    samples = []
    try:
        for number, prompt in enumerate(prompts):
            seed = config.training.seed + number
            model = TextModel(run.path, max_new_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed)
            samples.append(Sample(prompt, "".join(model.continue_text(prompt))))
    except TrainingInfraError as error:  # the run has finished all the same
        say("learnt", f"no samples: {error}")
        return
    write_json(run.samples, Samples(trained.steps, tuple(samples)))
    say("learnt", "what it has learnt, from the words before the bar:")
    for sample in samples:
        first, *others = f"{sample.prompt}|{sample.text}".rstrip().splitlines()
        say("", first)
        for line in others:
            say("", line)


def say_next(run: RunDirectory, trained: TrainingSummary) -> None:
    """Print three commands to try on a finished run that has samples."""
    prompts = load_config(run).tracking.prompts
    if not prompts:
        return
    here = shlex.quote(str(run.path))
    say("next", f"training-infra generate {here} --prompt {shlex.quote(prompts[0])} --temperature {TEMPERATURE}")
    say("next", f"training-infra train --resume --run-dir {here} --steps {2 * trained.steps}   # twice as long")
    say("next", "training-infra train --model tiny_llama3_50m --device cpu --data my-texts.jsonl --steps 100")
