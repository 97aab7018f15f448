"""From text to batches.

* ``files/``: the records of a source's files
* ``records/``: the kinds of records that objectives read
* ``tokenizers/``, ``chat/``: texts and conversations become tokens
* ``shards/``: tokens on disk
* ``tokenising``: all of that for the sources of a run
* ``selection``, ``packing``, ``mixture``: documents that are trained on or held out, rows of them, the order of rows
* ``datasets``, ``loaders``: a rank's batches of these rows, or from the user's own code; ``supply`` reads them ahead
* ``check``, ``bad_lines``, ``statistics``, ``entropy``: can data be trained on, what is unusable, what are they?
* ``end_tokens``: the tokens that end a text
* ``sample``: the built-in text
"""
