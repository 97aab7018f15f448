"""Kinds of data files.

* ``kinds``: a row for each, known by the ends of names, with the function that reads it
* ``json_values``, ``parquet``, ``token_files``: the longer of these functions
"""
