"""The bytes of a source.

* ``source_file``: one file, opened, decompressed, and refused if it changes meanwhile
* ``remote``: files in object stores and on web servers
* ``splits``: which files are for training, and which are data at all
* ``raw_record``, ``stored_ids``: a record as a file holds it, and token ids read piece by piece
"""
