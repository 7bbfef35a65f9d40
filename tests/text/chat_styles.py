"""Chat templates for tests, in the styles that models use; each leans on other conventions of transformers."""

from __future__ import annotations

from hetrun.text.chat.template import CHATML

# ruff: noqa: E501  # templates have lines as long as their makers like
STYLES = {
    "chatml": CHATML,
    "llama3": """{{ bos_token }}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>' %}
    {{- head + '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if system is defined and loop.last %}
            {{- ' [INST] ' ~ system ~ '\\n\\n' ~ message.content ~ ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' ~ message.content ~ ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message.content.strip() + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}
{% set ns = namespace(prefix='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set ns.prefix = message['content'] + '\\n\\n' %}
        {% continue %}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
<start_of_turn>{{ role }}
{{ ns.prefix }}{{ message['content'] | trim }}<end_of_turn>
    {% set ns.prefix = '' %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
""",
    "phi3": """{% for message in messages %}
{% if message['role'] in ['system', 'user'] %}{{ '<|' ~ message.role ~ '|>\n' ~ message.content }}<|end|>
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}
{%- generation %}{{ message['content'] + '<|end|>\n' }}{% endgeneration %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
""",
    "zephyr": """{% for message in messages %}
  {# a comment, and spaces before a block #}
  {% if message.role == 'user' %}
{{ '<|user|>\\n' + message.content + eos_token }}
  {% elif message.role == 'system' %}
{{ '<|system|>\\n' + message.content + eos_token }}
  {% else %}
{{ '<|assistant|>\\n'  + message.content + eos_token }}
  {% endif %}
  {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
  {% endif %}
{% endfor %}
""",
    "tools": """{%- if tools %}{{ 'Tools: ' + tools | tojson(indent=2) }}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}{{ loop.index }}:{{ message | tojson }}
{%- if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}""",
    "smollm2": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}
{% set system_message = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}{% set loop_messages = messages[1:] %}
{% else %}{% set system_message = '' %}{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages if message.role in ('user', 'assistant') %}
{% if loop.index0 == 0 %}{% set content = system_message + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' ~ content.strip() ~ ' ' ~ eos_token }}{% endif %}
{% endfor %}""",
    "llama3.1": """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{#- The system message is taken out, so that it can be put where it belongs. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions. To call one, answer with JSON.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there is none!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
            {{- '{"name": "' + tool_call.name + '", ' + '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn a JSON object within <tool_call></tool_call>.<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "nemo": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif (message.tool_calls is defined and message.tool_calls is not none) %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with an optional system message!") }}
    {%- endif %}
{%- endfor %}
""",
    "command-r": """{{ bos_token }}{% if documents %}{{ '## Documents\\n' }}
{%- for document in documents %}{{ '\\nDocument: ' }}{{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{ value }}
{% endfor %}{% endfor %}{% endif %}
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% elif false == true %}{% set loop_messages = messages %}{% set system_message = 'never' %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{% for message in loop_messages %}{% set content = message['content'] or '' %}
{% if message['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    "channels": """{%- macro kind_of(spec, required) -%}
    {%- if spec.type == "array" %}{{ "any[]" if not spec['items'] else kind_of(spec['items'], required) + "[]" }}
    {%- elif spec.type is iterable and spec.type is not string %}{{- spec.type | join(" | ") }}
    {%- elif spec.enum %}{{- '"' + spec.enum|join('" | "') + '"' }}
    {%- else %}{{- spec.type or "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro head() -%}
    {%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- model_identity + "\\nYear: " + strftime_now("%Y") + "\\nReasoning: " + reasoning_effort }}
    {%- set own = namespace(browser=false, python=false) %}
    {%- for name in builtin_tools or [] %}
        {%- if name == "browser" %}{%- set own.browser = true %}{%- elif name == "python" %}{%- set own.python = true %}{%- endif %}
    {%- endfor %}
    {%- if own.python %}{{- "\\nYou have Python." }}{%- endif %}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- head() }}{{- "<|end|>" }}
{%- if messages[0].role in ["system", "developer"] %}
    {%- set rules, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set rules, rest = "", messages %}
{%- endif %}
{%- if rules or tools %}
    {{- "<|start|>developer<|message|>" + rules }}
    {%- for tool in tools or [] %}
        {%- set tool = tool.function %}
        {{- "\\n// " + tool.description + "\\ntype " + tool.name + " = (" }}
        {%- for name, spec in (tool.parameters or {}).properties | default({}) | items %}
            {{- name }}{{- "?" if name not in (tool.parameters.required or []) }}{{- ": " }}
            {{- kind_of(spec, tool.parameters.required or []) }}{{- "," }}
        {%- endfor %}
        {{- ") => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.role == "assistant" %}
        {%- if "content" in message and "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("no channels in content") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("either content or thinking") }}
            {%- elif message.thinking or message.content %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.thinking or message.content) + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson }}{{- "<|call|>" }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson }}{{- "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}""",
    "hermes": """{%- macro json_to_python_type(json_spec) %}
{%- set types = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if types[json_spec.type] is defined %}
    {{- types[json_spec.type] }}
{%- elif json_spec.type == "array" %}
    {{- "list[" + json_to_python_type(json_spec['items']) + "]" }}
{%- elif json_spec.type is iterable and json_spec.type is not string %}
    {{- "Union[" }}{%- for t in json_spec.type %}{{- json_to_python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}{{- "]" }}
{%- else %}
    {{- "Any" }}
{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\n' }}
{%- for tool in tools or [] %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- tool.name + "(" }}
    {%- for name, fields in tool.parameters.properties | default({}) | items %}
        {{- name + ": " + json_to_python_type(fields) }}
        {%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ")\\n" }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role in ("user", "system") or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + {"name": tool_call.function.name, "arguments": tool_call.function.arguments} | tojson(sort_keys=true, separators=(',', ':')) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>tool\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "granite": """{%- set defined = namespace(system = '') %}
{%- if messages[0]['role'] == 'system' %}
  {%- set defined.system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
  {%- set defined.system = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " + strftime_now('%B %d, %Y') + "." %}
  {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + defined.system + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}{%- endif %}
{%- for message in loop_messages %}
  {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + (message['content'] or message.tool_calls | tojson) + '<|end_of_text|>\\n' }}
  {%- if loop.last and add_generation_prompt %}
    {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_of_role|>' }}
  {%- endif %}
{%- endfor %}""",
    "turns": """{% set ns = namespace(n=0, seen=[]) -%}
{% for role, group in messages | groupby('role') %}{{ role }}={{ group | map(attribute='content') | select('defined') | map('length') | sum }} {% endfor %}
{% for row in messages | batch(2) %}[{{ row | map(attribute='role') | join('+') | upper }}]{% endfor +%}
{%- for m in messages if m.role != 'system' %}
{{ loop.index }}/{{ loop.length }} {{ loop.cycle('a', 'b') }} {{ (loop.previtem | default({})).role | default('first') }} {{ m.content | default('') | replace('\\n', ' ') | truncate(12, true) | indent(2) }}
{% else %}
no one
{% endfor %}
{{ pad_token | default('no pad') }} {{ unk_token | default('no unk') }} {{ mood | default('calm', true) }} {{ '%s-%05.2f' | format('x', 3.14159) }} {{ 'a=%d' % 3 }} {{ "{:>5}|{0!r}".format('é') if false else "{:>5}|".format('é') }}
""",
}
