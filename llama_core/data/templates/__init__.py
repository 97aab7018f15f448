"""What turns the messages of a conversation into text.

* ``chat_template``: the Jinja of a tokenizer, and the spans of the assistant's text
* ``confined``, ``rendering``: templates are rendered in a sandbox, in a process with limits
* ``message_keys``, ``tool_calls``: what else a message may hold
"""
