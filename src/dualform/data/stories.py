"""A small pretrained language model: a Llama with 260,000 weights that writes children's stories."""

import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualform.errors import require

from .folder import data_file


class Stories(NamedTuple):
    """A language model and its tokenizer, in Hugging Face's classes."""

    model: Any
    """A ``LlamaForCausalLM``."""
    tokenizer: Any
    """A ``PreTrainedTokenizerFast``."""


def stories() -> Stories:
    """Karpathy's stories260K, trained on TinyStories (Eldan, Li 2023, arXiv 2305.07759), in Hugging Face's classes."""
    data = data_file("stories260k/stories260K.bin").read_bytes()
    width, hidden, layers, heads, groups, words, context = struct.unpack("7i", data[:28])
    llama = require("transformers", "hf")
    config = llama.LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=words, max_position_embeddings=context, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = llama.LlamaForCausalLM(config)
    key = width * groups // heads
    shapes = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (key, width),
        "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "mlp.up_proj": (hidden, width),
    }  # in the order of the file, which has each for all layers at once
    numbers = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy())
    embedding, numbers = numbers[: words * width].reshape(words, width), numbers[words * width :]
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    for name, shape in shapes.items():
        size = layers * int(np.prod(shape))
        for i, weight in enumerate(numbers[:size].reshape(layers, *shape)):
            turns = {"self_attn.q_proj": heads, "self_attn.k_proj": groups}
            weights[f"model.layers.{i}.{name}.weight"] = _halves(weight, turns[name]) if name in turns else weight
        numbers = numbers[size:]
    weights["model.norm.weight"] = numbers[:width]
    model.load_state_dict(weights)
    return Stories(model.eval(), _tokenizer())


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rotary channels: the file rotates neighbouring ones, Hugging Face those half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _tokenizer() -> Any:
    """Byte-pair encoding. The file has a score for each token: pairs that form higher-scored tokens merge first."""
    data, scores = data_file("stories260k/tok512.bin").read_bytes(), {}
    at = 4  # after the length of the longest token
    while at < len(data):
        score, length = struct.unpack_from("fi", data, at)
        scores[data[at + 8 : at + 8 + length].decode().strip("\n")] = score
        at += 8 + length
    vocabulary = {token: i for i, token in enumerate(scores)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(list(vocabulary)[259:], key=scores.__getitem__, reverse=True)  # after 3 marks and 256 bytes
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    parts = require("tokenizers", "hf")
    bpe = parts.Tokenizer(parts.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = parts.normalizers.Prepend(" ")
    bpe.decoder = parts.decoders.Sequence([
        parts.decoders.ByteFallback(), parts.decoders.Fuse(), parts.decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    bpe.post_processor = parts.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return require("transformers", "hf").PreTrainedTokenizerFast(tokenizer_object=bpe, **marks)
