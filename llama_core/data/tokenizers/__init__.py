"""A tokenizer from its files.

* ``files``, ``sentencepiece``: those of Hugging Face and of SentencePiece
* ``limits``: what a tokenizer from somebody may cost
"""
