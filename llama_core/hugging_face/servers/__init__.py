"""What vLLM, SGLang and llama.cpp make of an exported folder: what they compute, and by which commands. No torch.

* ``findings``: the table ``SERVERS``, and what each server makes of a folder
* ``exported``: a folder, as far as servers differ on it
* ``rules``: what a row of the table is, with the rules, questions and words that several rows have
* ``vllm``, ``sglang``, ``llama_cpp``: a row each, with the questions that only its rules ask
* ``llama_cpp_tokenizer``: llama.cpp's rules on tokenizers

A row has the types of models that a server has itself and what it loses or refuses. It holds for the version that it
names. All of it was read in the servers' sources; ``Rule.was_run`` marks what was also run, and ``llama_cpp`` says how.
"""
