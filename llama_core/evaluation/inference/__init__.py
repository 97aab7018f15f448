"""A model that only computes.

* ``row_losses``, ``scoring``: the loss of rows, and how probable given texts are
* ``generation``, ``batched_generation``: the tokens after one prompt, and after several at once
* ``divided``: several ranks divide the matrices, the layers or the texts
"""
