"""The kinds of records that objectives read, a file each: how its records are recognised, read, rendered and packed.

A kind is a row of ``llama_core/objectives/records.py``, which names its file here. The rest of this room asks the file
for what differs between kinds, and knows none of them by name.
"""
