"""The ``config.json`` of a Hugging Face folder: the architecture of a Llama or a relative.

* ``reading``: is this a folder, and which architecture does it describe?
* ``writing``: which ``config.json`` describes this architecture?
* ``families``: the keys that each type of models has, one class each, which both of them ask; a
  file for each maker, and ``layer_types`` and ``experts`` for what several share
* ``rope``: the keys of the rotary embedding, likewise
"""
