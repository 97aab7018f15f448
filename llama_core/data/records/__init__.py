"""The kinds of records that objectives read, a file each: how records are recognised, read, rendered and packed.

A kind is a row of ``llama_core/objectives/records.py``, which names its file here: ``documents``, ``pairs`` or
``labelled_answers``. The rest of ``data`` asks the file for what differs between kinds, and knows none of them by name.
``turns`` reads the fields that several kinds have, ``token_masks`` those that say which ids are trained on.
"""
