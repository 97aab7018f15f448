"""The text that a model makes of one prompt, with its cache and without."""

import torch
from hugging_face_models import random_tokens

from llama_core.evaluation.inference.generation import Sampling, generate_tokens

PROMPT = random_tokens(1, 40)  # longer than the context before scaling
NUM_TOKENS = 20


def generated(model, **sampling):
    settings = {"num_tokens": NUM_TOKENS, "sampling": Sampling(**sampling)}
    return list(generate_tokens(model, PROMPT[0].tolist(), **settings))


def greedy_without_cache(model):
    tokens = PROMPT
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens[0, PROMPT.shape[1] :].tolist()
