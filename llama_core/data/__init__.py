"""From text to batches.

* ``find``, ``corpus``, ``formats``, ``undivided``: the files of a source, its documents, what a record is read as, and
  token ids without a table of documents; ``files/`` and ``file_kinds/`` open and read them
* ``records/``: the kinds of records that objectives read
* ``tokenizer``, ``chat``: texts and conversations become tokens; ``tokenizers/`` and ``templates/`` do the reading and
  the rendering, ``byte_level`` writes the byte tokenizer as files
* ``shards/``: tokens on disk
* ``tokenising``: all of that for the sources of a run
* ``selection``, ``packing``, ``mixture``: documents that are trained on or held out, rows of them, the order of rows
* ``datasets``, ``loaders``: a rank's batches of these rows, or from the user's own code; ``supply`` reads them ahead
* ``check``, ``bad_lines``, ``statistics``, ``entropy``: can data be trained on, what is unusable, what are they?
* ``end_tokens``: the tokens that end a text
* ``sample``: the built-in text
"""
