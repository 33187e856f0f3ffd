"""Small tokenizers with the special tokens and the order of ids that the published ones have."""

from __future__ import annotations

import inspect
import json
import math
import re
import string
from collections.abc import Sequence

from diffusers import HunyuanVideo15Pipeline, QwenImageEditPipeline, QwenImagePipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
)

# About pictures, with quoted text, numbers and punctuation: what the prompts of tests consist of.
SENTENCES = (
    'A sign that says "OPEN" hangs above the door of a small bakery.',
    'A red bicycle leans against a blue wall, next to a poster that reads "SALE 50%".',
    "Two cats and three dogs sleep on a green sofa in the evening light.",
    "a photo of a yellow bird to the left of a purple cup",
    "An astronaut rides a white horse across the desert, oil painting.",
    'The word "HELLO" is written in the sand by a child.',
    "A bowl of ripe fruit: 4 apples, 2 oranges and a bunch of grapes.",
    "The old fisherman mends his net while seagulls circle over the harbour.",
    'Neon letters spell "EBB & FLOW" over a dark street after the rain.',
    "A close-up portrait of a woman with curly hair; soft light, film grain.",
    "There's a mountain behind the lake, and the lake doesn't have a single wave.",
    'A chalkboard with the text "E = mc^2" and the date 1905.',
    "It's 7:30 on the clock of the railway station, platform 12 is empty.",
    "A robot made of copper waters tomatoes (and herbs) on a balcony.",
    'A t-shirt printed with "NO. 1 DAD", folded on a wooden table.',
    "Snow falls on a village; smoke rises from every chimney.",
    "A wide aerial view of rice terraces, the sky full of clouds.",
    'The label of the bottle reads "Vintage 1986", the glass beside it is half full.',
    "A dancer turns slowly while the camera moves around the stage.",
    "Waves roll over the beach, and a boat passes from right to left.",
    "What does the fox see? A quiet forest!",
    "Make the background brighter and change the colour of the car to black.",
    "blurry, low quality, distorted, watermark, extra fingers",
    "A cup of coffee, a stack of books, a pair of glasses and a pencil on a desk.",
)
"""What the tokenizers are trained on."""

# Special tokens in the order of the published vocabularies. Pipelines ask for some by name and cut
# prompts at positions that count them, so none may be missing.
CLIP_START = "<|startoftext|>"
END_OF_TEXT = "<|endoftext|>"
QWEN_SPECIALS = (
    END_OF_TEXT,
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
    ),
    *(
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
)
SYSTEM_PROMPT = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
LLAMA_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<pad>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5's, as far as a system message and a prompt need it."""
BYTES = sorted(ByteLevel.alphabet())
"""The letters that stand for the 256 bytes, in the published order: "!", with which SD3 pads, has
id 0.
"""


def build_clip_tokenizer(pad: str = END_OF_TEXT) -> CLIPTokenizer:
    """Vocabulary in CLIP's order: bytes, bytes that end a word, merges, start, end."""
    # 77 tokens are the length of CLIP's position embeddings, which the model keeps
    letters = [*BYTES, *(f"{letter}</w>" for letter in BYTES)]
    merges = _train_byte_pairs(CLIPTokenizer(), SENTENCES, letters, 300, suffix="</w>")
    words = [*letters, *map("".join, merges), CLIP_START, END_OF_TEXT]
    return CLIPTokenizer(_number_words(words), merges, pad_token=pad, model_max_length=77)


def build_t5_tokenizer() -> T5Tokenizer:
    """A unigram vocabulary of 400 pieces. Its pieces are byte pairs and its scores their
    frequencies.

    (The unigram trainer of the tokenizers library depends on the order of a hash table: no two runs
    give the same bytes.)
    """
    # ids 0, 1 and 2, as in the published vocabulary; "▁" stands for a space
    specials = ["<pad>", "</s>", "<unk>"]
    letters = ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    splitter = T5Tokenizer()
    merges = _train_byte_pairs(splitter, SENTENCES, letters, 400 - len(specials) - len(letters))
    pieces = [*letters, *map("".join, merges)]
    text = "".join(
        word
        for sentence in SENTENCES
        for word, _ in splitter.backend_tokenizer.pre_tokenizer.pre_tokenize_str(sentence)
    )
    # log-probabilities; + 1 for pieces that a longer merge has swallowed everywhere
    scores = [(piece, math.log((text.count(piece) + 1) / len(text))) for piece in pieces]
    return T5Tokenizer([*((special, 0.0) for special in specials), *scores], model_max_length=512)


def build_qwen_tokenizer() -> Qwen2Tokenizer:
    """Vocabulary in Qwen's order: bytes, merges, special tokens.

    The pipelines cut the head of their prompt template off after 34 (image) or 64 (edit) tokens,
    which fits when every word of the head is one token. So the templates are what the merges are
    trained on most.
    """
    # up to the place of the image, or of the prompt
    heads = [
        pipeline.prompt_template_encode.split("<|vision_start|>")[0].split("{}")[0]
        for pipeline in _build_empty_qwen_pipelines()
    ]
    return _train_qwen_tokenizer(heads)


def build_hunyuan_qwen_tokenizer() -> Qwen2Tokenizer:
    """The same of HunyuanVideo-1.5, whose pipeline cuts a head of 108 tokens off."""
    encode = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
    system = encode.parameters["system_message"].default
    tokenizer = _train_qwen_tokenizer([f"system\n{system}", "user\n"])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _train_qwen_tokenizer(heads: list[str]) -> Qwen2Tokenizer:
    # 100 copies: each word of a head is then more frequent than any pair of the sentences
    merges = _train_byte_pairs(Qwen2Tokenizer(), [*SENTENCES, *100 * heads], BYTES, 500)
    words = [*BYTES, *map("".join, merges), *QWEN_SPECIALS]
    return Qwen2Tokenizer(
        _number_words(words),
        merges,
        eos_token="<|im_end|>",
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(QWEN_SPECIALS),
        model_max_length=131072,
    )


def build_qwen3_tokenizer() -> Qwen2Tokenizer:
    """The same with Qwen3's template, as far as a single message needs it; without thinking, an
    empty thought comes first.
    """
    tokenizer = build_qwen_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
        " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if"
        " enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    return tokenizer


def build_mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Vocabulary in the order of Mistral's later models: special tokens, bytes, merges; pads on the
    left.
    """
    tools = (
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
    )
    images = (
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
        *SYSTEM_PROMPT,
    )
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *tools, *images]
    # only its way to split a text is taken; the vocabulary below is this tokenizer's own
    like = Qwen2Tokenizer()
    merges = _train_byte_pairs(like, SENTENCES, BYTES, 400)
    backend = Tokenizer(
        models.BPE(_number_words([*specials, *BYTES, *map("".join, merges)]), merges)
    )
    backend.pre_tokenizer = like.backend_tokenizer.pre_tokenizer
    backend.decoder = like.backend_tokenizer.decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=specials,
        padding_side="left",
        model_max_length=131072,
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
        "[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
        "{% else %}[INST]{{ message.content[0].text }}[/INST]{% endif %}{% endfor %}"
    )
    return tokenizer


def build_llama_tokenizer() -> PreTrainedTokenizerFast:
    """Vocabulary in Llama 3's order: bytes, merges, special tokens; a start token before every
    text.

    HunyuanVideo's pipeline cuts as many tokens off as the head of its template has: what the merges
    are trained on most.
    """
    # without its special tokens, which are never merged
    head = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")[0]
    like = Qwen2Tokenizer()
    merges = _train_byte_pairs(
        like, [*SENTENCES, *100 * [re.sub(r"<\|\w+\|>", "", head)]], BYTES, 500
    )
    backend = Tokenizer(
        models.BPE(_number_words([*BYTES, *map("".join, merges), *LLAMA_SPECIALS]), merges)
    )
    backend.pre_tokenizer = like.backend_tokenizer.pre_tokenizer
    backend.decoder = like.backend_tokenizer.decoder
    start = LLAMA_SPECIALS[0]
    # the id of the start token: the first one after bytes and merges
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, len(BYTES) + len(merges))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token="<|end_of_text|>",
        pad_token="<pad>",
        additional_special_tokens=list(LLAMA_SPECIALS),
        padding_side="right",
        model_max_length=131072,
    )


def build_gemma_tokenizer() -> GemmaTokenizer:
    """Vocabulary in Gemma's order: special tokens, bytes for letters that are not in it, pieces."""
    specials = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    letters = ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    # T5's normaliser writes spaces as "▁", as Gemma's does
    merges = _train_byte_pairs(T5Tokenizer(), SENTENCES, letters, 300)
    words = [*specials, *letters, *map("".join, merges)]
    return GemmaTokenizer(_number_words(words), merges, add_bos_token=True, model_max_length=8192)


def _build_empty_qwen_pipelines() -> list[QwenImagePipeline | QwenImageEditPipeline]:
    # the templates are attributes of instances, which need no parts
    parts = dict.fromkeys(["scheduler", "vae", "text_encoder", "tokenizer", "transformer"])
    return [QwenImagePipeline(**parts), QwenImageEditPipeline(**parts, processor=None)]


def _train_byte_pairs(
    like: PreTrainedTokenizerFast,
    sentences: Sequence[str],
    letters: Sequence[str],
    count: int,
    suffix: str = "",
) -> list[tuple[str, str]]:
    """``count`` merges of ``letters``, trained on sentences that are normalised and split as the
    tokenizer ``like`` does.

    ``suffix`` marks the last letter of a word.
    """
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    tokenizer.normalizer = like.backend_tokenizer.normalizer
    tokenizer.pre_tokenizer = like.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + count,
        # "special" numbers them, and equal counts are ordered by number; else a hash table decides,
        # and no two runs give the same merges
        special_tokens=list(letters),
        limit_alphabet=0,
        end_of_word_suffix=suffix,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def _number_words(words: Sequence[str]) -> dict[str, int]:
    return {word: index for index, word in enumerate(words)}
