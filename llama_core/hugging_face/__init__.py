"""Folders of weights as Hugging Face and PEFT write them: their names, files and checks. No torch.

* ``weight_names``: Hugging Face's names and shapes for our weights
* ``weight_files``: the headers of safetensors files; ``nf4``, ``mxfp4``, ``block_fp8``: matrices in few bits
* ``peft``: folders of adapters
* ``generation_config``: the tokens that end a text
* ``pretrained``: where a run's initial weights are, a checkpoint of another run included, and whether they fit
* ``servers/``: what vLLM, SGLang and llama.cpp make of an exported folder
* ``bases``: is the base of adapters still the same?

``config.config_json`` reads and writes ``config.json``, since a configuration may take its model from one.
``training.stored_weights`` loads what is found here into a model, and ``runs.export`` writes such a folder.
"""
