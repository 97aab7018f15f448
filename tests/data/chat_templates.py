"""Published chat templates, rewritten as far as the tests need them.

Sources: the tokenizer_config.json of meta-llama/Meta-Llama-3-8B-Instruct, meta-llama/Llama-2-7b-chat-hf and
meta-llama/Llama-3.1-8B-Instruct on huggingface.co; for ChatML, huggingface.co/docs/transformers/chat_templating; for
Mistral, tokenizer V1 in docs.mistral.ai/cookbook/concept-deep-dive-tokenization-templates.
"""

PUBLIC_LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{{ (bos_token if loop.index0 == 0 else '') + content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PUBLIC_LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set turns, system = messages[1:], messages[0]['content'] %}"
    "{% else %}{% set turns, system = messages, false %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
PUBLIC_MISTRAL = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set first, turns = messages[0].content + '\n\n', messages[1:] %}"
    "{% else %}{% set first, turns = '', messages %}{% endif %}"
    "{% for m in turns %}"
    "{% if m.role == 'user' %}{{ ' [INST] ' + (first if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = (
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' }}"
    "{{ strftime_now('%d %b %Y') }}{{ '<|eot_id|>' }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content|trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
    {%- if message.role == 'assistant' %}

{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}

    {%- else %}

{{ message.content }}<|im_end|>
    {%- endif %}

{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Marks the assistant's text. The text is trimmed: a byte-level tokenizer leaves a leading space out of its offsets,
and transformers then marks no token of the text."""
FORGETFUL = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ (' (end)' if loop.last else '\n') }}{% endfor %}"
"""Renders a message differently at the end than inside."""
