"""Conversations as transformers' tokenizers write them, with the tokens that are answers.

Templates of our own in five dialects that models are published with, a small tokenizer for each kind (byte-level BPE, and BPE
of words that begin with a sign for a space), and conversations of our own. Writes golden/chat/: for each dialect a folder with
tokenizer.json and its template, and chat.json with tokens and masks.
"""
import json
import pathlib
import shutil

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

GOLDEN = pathlib.Path(__file__).parent / "golden" / "chat"

TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. Answer in one sentence, please.",
    "Thank you! And of Italy? Rome, since 1871. user assistant system\n\n",
    "def f(x):\n    return x * x  # a comment\n" * 3,
]

CONVERSATIONS = {
    "two turns": [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "Rome, since 1871."},
    ],
    "with a system's message": [
        {"role": "system", "content": "  Answer in one sentence, please.\n"},
        {"role": "user", "content": "def f(x):\n    return x * x"},
        {"role": "assistant", "content": "\nIt squares x.\n\nThank you! "},
    ],
    "signs of other languages": [
        {"role": "user", "content": "Straße, naïve, 東京, 🦀?"},
        {"role": "assistant", "content": "東京 🦀🦀"},
    ],
    "thoughts": [
        {"role": "user", "content": "<tool>A</tool>"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nB", "name": "ours"},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": "<think>Oh.</think>D"},
    ],
    "the last word is the user's": [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "B"},
    ],
}

CHATML = r"""{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# As above, with the answers marked, and with what is done with messages in newer templates.
MARKED = r"""{#- What newer templates do: look back for the last question, drop thoughts, keep counts. -#}
{%- set ns = namespace(turn=0, last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- macro head(role) %}{{ '<|im_start|>' ~ role ~ '\n' }}{% endmacro %}
{%- if tools %}{{- raise_exception('no tools') }}{%- endif %}
{%- if strftime_now is defined and false %}{{- strftime_now('%Y') }}{%- endif %}
{%- if messages[0].role == 'system' %}
    {{- head('system') + messages[0].content.strip() + '<|im_end|>\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.turn = ns.turn + 1 %}
        {{- head('user') + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') if '</think>' in message.content else message['content'] %}
        {{- head('assistant') }}
        {%- if not loop.last and loop.previtem is defined and loop.previtem.role != 'assistant' %}
            {{- ({'turn': ns.turn, 'of': [messages|length, none, ns.open], 'ä<b>': message.get('name', '-')} | tojson) ~ (ns.turn == 1) }}
        {%- endif %}
        {%- generation %}
            {{- content | trim }}{{ '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- raise_exception('unexpected role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- head('assistant') }}
{%- endif %}
"""

LLAMA3 = r"""{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

ZEPHYR = r"""{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def byte_level(specials):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def words(specials):
    """With a sign before the first word of the text alone, and bytes for what has no token."""
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", *specials], show_progress=False)
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pieces.train_from_iterator(TEXT, trainer)
    model = json.loads(pieces.to_str())["model"]
    vocab = model["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pieces.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ["<unk>", *specials]])
    return tokenizer


# Name, tokenizer, special tokens, tokens by name, template, in which file, whether it marks answers.
DIALECTS = [
    ("chatml", byte_level, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, CHATML, "config"),
    ("marked", byte_level, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, MARKED, "jinja"),
    ("llama3", byte_level, ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
     {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, LLAMA3, "list"),
    ("mistral", words, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, MISTRAL, "config"),
    ("zephyr", words, ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, ZEPHYR, "jinja"),
]


def generation(template):
    """The same template with the answers marked by hand: what its own author would have marked."""
    edits = [
        # ChatML
        ("{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
         "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endif %}"),
        # Llama 3
        ("{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}",
         "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}{%- if message['role'] == 'assistant' %}{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}"),
        # Mistral
        ("{{ ' ' + message['content'] | trim + eos_token }}",
         "{% generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}"),
        # Zephyr
        ("{{ '<|assistant|>\\n'  + message['content'] + eos_token }}",
         "{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '' }}"),
    ]
    if "generation %}" in template:
        return template
    for old, new in edits:
        if old in template:
            return template.replace(old, new)
    raise SystemExit("a template without an answer")


def main():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    told = {}
    for name, make, specials, named, template, place in DIALECTS:
        folder = GOLDEN / name
        folder.mkdir(parents=True)
        make(specials).save(str(folder / "tokenizer.json"), pretty=False)
        config = {key: {"content": token, "special": True} if key == "bos_token" else token for key, token in named.items()}
        if place == "jinja":
            (folder / "chat_template.jinja").write_text(template)
        elif place == "list":
            other = {"name": "tool_use", "template": "{{ raise_exception('not this one') }}"}
            config["chat_template"] = [other, {"name": "default", "template": template}]
        else:
            config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
        of_dialect = {}
        for title, messages in CONVERSATIONS.items():
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
            prompt = tokenizer.apply_chat_template(messages[:-1], chat_template=template, tokenize=False, add_generation_prompt=True)
            both = tokenizer.apply_chat_template(messages, chat_template=generation(template), tokenize=True, return_dict=True,
                                                 return_assistant_tokens_mask=True)
            own = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True)["input_ids"]
            assert own == both["input_ids"], (name, title)
            mask = both["assistant_masks"]
            of_dialect[title] = {"text": text, "prompt": prompt, "tokens": own, "answers": "".join(map(str, mask))}
        told[name] = of_dialect
    (GOLDEN / "chat.json").write_text(json.dumps({"conversations": CONVERSATIONS, "dialects": told}, ensure_ascii=False) + "\n")


main()
