"""From the paths of a source to its records.

* ``find``, ``splits``, ``remote``: the files of a source, those held out among them, and files in object stores
* ``source_file``: one file, opened and decompressed
* ``file_kinds``: a row for each kind of file, with the function that reads it
* ``json_values``, ``parquet``, ``token_files``, ``undivided``, ``stored_ids``: the longer of these functions
* ``formats``, ``raw_record``: what a record is read as
* ``corpus``: the documents of a source, one by one
"""
