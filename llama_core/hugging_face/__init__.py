"""Folders of weights as Hugging Face and PEFT write them: their names, files and checks. No torch.

``config.config_json`` reads and writes their ``config.json``, since a configuration may take its model from one;
``training.weights`` loads what is found here into a model, and ``runs.export`` writes such a folder.
"""
