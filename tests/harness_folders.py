"""A small Llama of Hugging Face with a tokenizer, and tasks of lm-evaluation-harness, all made here."""

import json
from pathlib import Path

import tokenizers
import torch
import yaml
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from llama_core.data.templates.chat_template import LLAMA3, MARKERS

CONTEXT = 96
TEXT = "one two three four five six seven eight nine ten red green blue what is the colour of a house and a tree"
WORDS = TEXT.split()
SENTENCES = [" ".join(WORDS[(start * 7 + place * 5) % len(WORDS)] for place in range(9)) for start in range(60)]
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def make_folder(folder, *, adds_bos=True, chat=True, seed=0):
    """Write a model with random weights, whose answers depend on what it reads."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [BOS, EOS, *MARKERS["llama3"][1:]]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=markers,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    if chat:
        settings["chat_template"] = LLAMA3.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(seed)
    ends = [tokenizer.token_to_id(EOS), tokenizer.token_to_id("<|eot_id|>")]
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=ends,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


TASKS = {
    "toy_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
            {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
        ],
        "metadata": {"version": 2.0},
    },
    "toy_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        "metadata": {"version": 1.0},
    },
    "toy_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}} =",
        "doc_to_target": "{{told}}",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True},
            {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
        ],
        "metadata": {"version": 1.0},
    },
}
"""A task for each kind of request."""


def make_tasks(folder, tasks=TASKS, num_documents=10):
    """Write tasks with their documents, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, first in (("train", 0), ("test", 20)):
        documents = [
            {
                "question": SENTENCES[first + number],
                "choices": WORDS[number % 5 : number % 5 + 4],
                "answer": number % 4,
                "text": " ".join(SENTENCES[first + number : first + number + 1 + 3 * (number % 5)]),
                "told": WORDS[number],
            }
            for number in range(num_documents)
        ]
        Path(folder, f"{part}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    files = {part: str(folder / f"{part}.jsonl") for part in ("train", "test")}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "training_split": "train"}
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test"} | data | task))
    return folder
