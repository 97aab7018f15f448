"""Published chat templates that know tools, rewritten as far as the tests need them.

Sources: the tokenizer_config.json of meta-llama/Llama-3.1-8B-Instruct, Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-0.6B,
mistralai/Mistral-7B-Instruct-v0.3 and NousResearch/Hermes-2-Pro-Llama-3-8B on huggingface.co. Left out are the tools
that Llama brings along, what a variable of the caller would change, and Hermes's names of most types. What looks like a
slip of Hermes's, such as a lone quotation mark, is in the published one.
"""

LLAMA31 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prompt, turns = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set prompt, turns = '', messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ ('Environment: ipython\\n' if tools is not none else '') }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' ~ prompt ~ '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if not turns %}{{ raise_exception("Cannot put tools in a first user message that is missing!") }}{% endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond with a JSON ' }}
    {{- 'for a function call with its proper arguments that best answers the given prompt.\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- 'Do not use variables.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
    {{- turns[0].content | trim ~ '<|eot_id|>' }}
    {%- set turns = turns[1:] %}
{%- endif %}
{%- for m in turns %}
    {%- if m.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson ~ '}' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_QWEN_TOOLS = """{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are ' }}
    {{- 'provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": ' }}
    {{- '<args-json-object>}\\n</tool_call><|im_end|>\\n' }}"""
_QWEN_RESULT = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
_QWEN_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
QWEN25 = f"""{{%- set first = messages[0].content if messages[0].role == 'system' else
    'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}}
{{{{- '<|im_start|>system\\n' ~ first }}}}
{{%- if tools %}}
    {{{{- '\\n\\n' }}}}
    {_QWEN_TOOLS}
{{%- else %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for m in messages %}}
    {{%- if m.role == 'user' or m.role == 'system' and not loop.first or m.role == 'assistant' and not m.tool_calls %}}
        {{{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}
    {{%- elif m.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant' ~ ('\\n' + m.content if m.content else '') }}}}
        {{%- for call in m.tool_calls %}}
            {{%- set call = call.function if call.function is defined else call %}}
            {{{{- '\\n<tool_call>\\n{{"name": "' ~ call.name ~ '", "arguments": ' }}}}
            {{{{- call.arguments | tojson ~ '}}\\n</tool_call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif m.role == 'tool' %}}
        {_QWEN_RESULT}
    {{%- endif %}}
{{%- endfor %}}
{_QWEN_PROMPT}"""
QWEN3 = f"""{{%- set system = messages[0].role == 'system' %}}
{{%- if tools %}}
    {{{{- '<|im_start|>system\\n' ~ (messages[0].content + '\\n\\n' if system else '') }}}}
    {_QWEN_TOOLS}
{{%- elif system %}}
    {{{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- set seen = namespace(question=-1) %}}
{{%- for m in messages %}}
    {{%- set is_result = '<tool_response>' in m.content and '</tool_response>' in m.content %}}
    {{%- if m.role == 'user' and not is_result %}}{{% set seen.question = loop.index0 %}}{{% endif %}}
{{%- endfor %}}
{{%- for m in messages %}}
    {{%- if m.role == 'user' or m.role == 'system' and not loop.first %}}
        {{{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}
    {{%- elif m.role == 'assistant' %}}
        {{%- set thought, content = m.reasoning_content or '', m.content %}}
        {{%- if not thought and '</think>' in content %}}
            {{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}}
            {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
        {{%- endif %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > seen.question and (loop.last or thought) %}}
            {{{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}}}
        {{%- else %}}
            {{{{- content }}}}
        {{%- endif %}}
        {{%- for call in m.tool_calls or [] %}}
            {{{{- '\\n' if not loop.first or content else '' }}}}
            {{%- set call = call.function or call %}}
            {{{{- '<tool_call>\\n{{"name": "' ~ call.name ~ '", "arguments": ' }}}}
            {{{{- call.arguments if call.arguments is string else call.arguments | tojson }}}}
            {{{{- '}}\\n</tool_call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif m.role == 'tool' %}}
        {_QWEN_RESULT}
    {{%- endif %}}
{{%- endfor %}}
{_QWEN_PROMPT}"""
"""Gives a turn an empty thought at the end of a conversation, and not inside it."""

MISTRAL3 = """{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == asked[-1] %}
            {{- ' [AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}
                    {{- ', ' if not loop.last }}
                {%- endfor %}
                {{- '}}' ~ ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- '] [/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- ' [INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- ' [TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- '] ' ~ eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + ' ' + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- ' [TOOL_RESULTS] {"call_id": "' + m.tool_call_id + '", "content": ' + m.content | string }}
        {{- '} [/TOOL_RESULTS] ' }}
    {%- endif %}
{%- endfor %}"""
"""Tells of the tools before the last question."""

HERMES = """{{- bos_token }}
{{- 'You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags.' }}
{{- " You may call one or more functions to assist with the user query. Don't make assumptions about what values to " }}
{{- 'plug into functions. Here are the available tools: <tools> ' }}
{%- for tool in tools %}
    {%- set tool = tool.function if tool.function is defined else tool %}
    {{- '{"type": "function", "function": {"name": ' ~ tool.name ~ '", "description": "' ~ tool.name ~ '(' }}
    {%- for name, field in tool.parameters.properties.items() %}
        {{- name ~ ': ' ~ ('str' if field.type == 'string' else 'int') ~ ('' if loop.last else ', ') }}
    {%- endfor %}
    {{- ') - ' ~ tool.description ~ '\\n\\n' }}
    {%- for name, field in tool.parameters.properties.items() %}
        {{- ('    Args:\\n' if loop.first else '') ~ '        ' ~ name ~ '(' }}
        {{- ('str' if field.type == 'string' else 'int') ~ '): ' ~ field.description | trim }}
    {%- endfor %}
    {{- '", "parameters": ' ~ (tool.parameters | tojson if tool.parameters.properties else '{}') ~ '}' }}
    {{- '' if loop.last else '\\n' }}
{%- endfor %}
{{- ' </tools>Use the following pydantic model json schema for each tool call you will make: ' }}
{{- '{"properties": {"arguments": {"title": "Arguments", "type": "object"}, "name": {"title": "Name", ' }}
{{- '"type": "string"}}, "required": ["arguments", "name"], "title": "FunctionCall", "type": "object"}\\n' }}
{{- 'For each function call return a json object with function name and arguments within <tool_call></tool_call> ' }}
{{- 'XML tags as follows:\\n<tool_call>\\n{"arguments": <args-dict>, "name": <function-name>}\\n</tool_call>' }}
{{- '<|im_end|>' }}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') or m.role == 'assistant' and m.tool_calls is not defined %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<tool_call>\\n' }}
        {%- for call in m.tool_calls %}
            {{- '{ "arguments": ' ~ call.function.arguments | tojson ~ ', "name": "' ~ call.function.name }}
            {{- '"}\\n</tool_call> ' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' ~ m.name ~ '", "content": ' ~ m.content | tojson }}
        {{- '}\\n</tool_response> <|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

OURS = """{% for tool in tools or [] %}{{ '<tool>' ~ tool.function.name ~ '</tool>' }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<assistant>' }}{% generation %}{{ m.content or '' }}
        {%- for call in m.tool_calls or [] %}{{ '<call>' ~ call.function | tojson ~ '</call>' }}{% endfor %}
        {{- '</assistant>' }}{% endgeneration %}
    {%- else %}
        {{- '<' ~ m.role ~ '>' ~ m.content ~ '</' ~ m.role ~ '>' }}
    {%- endif %}
{%- endfor %}
{{- '<assistant>' if add_generation_prompt }}"""
"""Marks the assistant's text."""

PUBLISHED = {"Llama 3.1": LLAMA31, "Qwen2.5": QWEN25, "Qwen3": QWEN3, "Mistral v0.3": MISTRAL3, "Hermes 2 Pro": HERMES}
