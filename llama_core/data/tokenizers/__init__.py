"""Text to token ids and back.

* ``tokenizer``: bytes, or a Hugging Face tokenizer
* ``files``, ``sentencepiece``: a tokenizer from its files
* ``byte_level``: the byte tokenizer as such files
* ``limits``: what a tokenizer from somebody may cost
"""
