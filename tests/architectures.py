"""Small networks of ``transformers``, made from their configurations: what the sweep over architectures trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, EXAMPLES, PIXELS = 29, 5, 3, 16
"""Words of the vocabulary, tokens of a sequence, examples of a batch (other than tokens, heads and layers), and pixels
along the side of an image.
"""

SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 12,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": PIXELS,
    "patch_size": 8, "num_channels": 2, "num_labels": 3,
}  # fmt: skip
SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": WORDS,
    "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (6, 6), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "apply_spec_augment": False, "layerdrop": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
NO_DROPOUT = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "attention_dropout", "dropout",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout", "classifier_dropout", "embed_dropout",
    "resid_dropout", "emb_pdrop", "dropout_rate", "attn_dropout", "drop_path_rate", "classifier_dropout_prob",
    "activation_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "embedding_dropout",
)  # fmt: skip


def tokens(random: torch.Generator, examples: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (examples, LENGTH), generator=random)}


def pairs(random: torch.Generator, examples: int) -> dict[str, Tensor]:
    """Of a translation: sequences of different lengths."""
    target = torch.randint(3, WORDS, (examples, LENGTH - 1), generator=random)
    return {**tokens(random, examples), "decoder_input_ids": target}


def images(random: torch.Generator, examples: int, pixels: int = PIXELS) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(examples, 2, pixels, pixels, generator=random, dtype=torch.float64)}


def large_images(random: torch.Generator, examples: int) -> dict[str, Tensor]:
    return images(random, examples, 32)


def image_and_text(random: torch.Generator, examples: int) -> dict[str, Tensor]:
    return {**tokens(random, examples), **images(random, examples)}


def sound(random: torch.Generator, examples: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(examples, 120, generator=random, dtype=torch.float64)}


def features(
    random: torch.Generator, examples: int, frames: int = 12, channels_first: bool = True
) -> dict[str, Tensor]:
    """Of speech: eight numbers a frame, and the words that were said."""
    shape = (examples, 8, frames) if channels_first else (examples, frames, 8)
    words = torch.randint(3, WORDS, (examples, LENGTH), generator=random)
    return {"input_features": torch.randn(shape, generator=random, dtype=torch.float64), "decoder_input_ids": words}


def frames_first(random: torch.Generator, examples: int) -> dict[str, Tensor]:
    return features(random, examples, channels_first=False)


def logits(output: Any) -> Tensor:
    """What the loss reads: the first output that is one tensor of numbers."""
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if (found := output.get(name)) is not None:
            return found
    raise ValueError(f"none of the outputs {list(output)} is one to train on")


def hidden(output: Any) -> Tensor:
    """Of two towers: embeddings of images and texts side by side (a contrastive loss would mix the examples)."""
    return torch.cat([output["image_embeds"], output["text_embeds"]], -1)


@dataclass(frozen=True)
class Architecture:
    """A class of ``transformers`` with its configuration, a batch for it, and what the loss reads of its output."""

    family: str
    model: str
    config: str
    sizes: Mapping[str, Any]
    batch: Callable[[torch.Generator, int], dict[str, Tensor]] = tokens
    read: Callable[[Any], Tensor] = logits

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        for each in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
            for name in NO_DROPOUT:
                if isinstance(getattr(each, name, None), float):
                    setattr(each, name, 0.0)
        config.use_cache, config._experts_implementation = False, "eager"  # torch multiplies groups in float32 alone
        return getattr(transformers, self.model)(config).to(dtype).train()


def encoder(name: str, head: str = "ForMaskedLM", **sizes: Any) -> Architecture:
    return Architecture("encoder", f"{name}{head}", f"{name}Config", {**SIZES, **sizes})


def decoder(name: str, head: str = "ForCausalLM", family: str = "decoder", **sizes: Any) -> Architecture:
    return Architecture(family, f"{name}{head}", f"{name}Config", {**SIZES, **sizes})


def seq2seq(name: str, head: str = "ForConditionalGeneration", **sizes: Any) -> Architecture:
    return Architecture("encoder-decoder", f"{name}{head}", f"{name}Config", {**SEQ2SEQ, **sizes}, pairs)


def vision(
    name: str, head: str = "ForImageClassification", batch: Callable[..., dict[str, Tensor]] = images, **sizes: Any
) -> Architecture:  # fmt: skip
    return Architecture("vision", f"{name}{head}", f"{name}Config", {**IMAGE, **sizes}, batch)


def speech(name: str, head: str, batch: Callable[..., dict[str, Tensor]] = sound, **sizes: Any) -> Architecture:
    return Architecture("audio", f"{name}{head}", f"{name}Config", {**SPEECH, **sizes}, batch)


GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}

ARCHITECTURES: dict[str, Architecture] = {
    "bert": encoder("Bert"),
    "roberta": encoder("Roberta"),
    "camembert": encoder("Camembert"),
    "xlm-roberta": encoder("XLMRoberta"),
    "albert": encoder("Albert", embedding_size=8),
    "electra": encoder("Electra", embedding_size=8),
    "distilbert": encoder("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    "deberta-v2": encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4),
    "mpnet": encoder("MPNet"),
    "modernbert": encoder("ModernBert", local_attention=4, global_attn_every_n_layers=2),
    "xlm": Architecture(
        "encoder", "XLMWithLMHeadModel", "XLMConfig",
        {"vocab_size": WORDS, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 12,
         "n_langs": 1, "pad_index": 0},
    ),
    "gpt2": decoder("GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=12),
    "gpt-neo": decoder("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=2, window_size=4),
    "gpt-neox": decoder("GPTNeoX"),
    "gpt-j": decoder("GPTJ", n_embd=16, n_layer=2, n_head=2, n_positions=12, rotary_dim=4),
    "gpt-bigcode": decoder("GPTBigCode", n_embd=16, n_layer=2, n_head=2, n_positions=12),
    "opt": decoder("OPT", ffn_dim=24, word_embed_proj_dim=8),
    "biogpt": decoder("BioGpt"),
    "bloom": decoder("Bloom", n_layer=2, n_head=2),
    "llama": decoder("Llama", **GROUPED),
    "mistral": decoder("Mistral", **GROUPED, sliding_window=4),
    "qwen2": decoder("Qwen2", **GROUPED),
    "qwen3": decoder("Qwen3", **GROUPED),
    "gemma": decoder("Gemma", **GROUPED),
    "gemma2": decoder("Gemma2", **GROUPED),
    "gemma3": Architecture("decoder", "Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, **GROUPED}),
    "phi": decoder("Phi"),
    "phi3": decoder("Phi3", **GROUPED),
    "falcon": decoder("Falcon", bias=True, alibi=False, new_decoder_architecture=False),
    "mpt": decoder("Mpt", d_model=16, n_layers=2, n_heads=2, max_seq_len=12),
    "stablelm": decoder("StableLm", num_key_value_heads=2),
    "olmo": decoder("Olmo"),
    "olmo2": decoder("Olmo2"),
    "cohere": decoder("Cohere"),
    "starcoder2": decoder("Starcoder2", num_key_value_heads=1),
    "granite": decoder("Granite"),
    "mixtral": decoder("Mixtral", family="experts", **GROUPED, **EXPERTS),
    "qwen2-moe": decoder(
        "Qwen2Moe", family="experts", **EXPERTS, num_key_value_heads=2, shared_expert_intermediate_size=12
    ),
    "olmoe": decoder("Olmoe", family="experts", **EXPERTS),
    "switch": Architecture(
        "experts", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
        {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "num_experts": 4,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 2,
         "decoder_start_token_id": 0, "expert_capacity": 64, "router_jitter_noise": 0.0}, pairs,
    ),
    "t5": seq2seq("T5", d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "mt5": seq2seq("MT5", d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "bart": seq2seq("Bart"),
    "mbart": seq2seq("MBart", scale_embedding=True),
    "pegasus": seq2seq("Pegasus"),
    "m2m-100": seq2seq("M2M100", scale_embedding=True),
    "marian": seq2seq("Marian", "MTModel"),
    "blenderbot": seq2seq("Blenderbot"),
    "vit": vision("ViT"),
    "deit": vision("DeiT"),
    "beit": vision("Beit", use_mask_token=False),
    "dinov2": vision("Dinov2", mlp_ratio=2),
    "swin": Architecture(
        "vision", "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 4, "num_channels": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
         "window_size": 4, "num_labels": 3}, large_images,
    ),
    "convnext": vision("ConvNext", batch=large_images, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "segformer": vision(
        "Segformer", batch=large_images, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    ),
    "mobilevit": vision(
        "MobileViT", batch=large_images, image_size=32, hidden_sizes=[8, 12, 16], patch_size=2, mlp_ratio=2.0,
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], initializer_range=0.5,  # with 0.02 gradients vanish below 1e-30
    ),
    "resnet": vision(
        "ResNet", batch=large_images, embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"
    ),
    "bit": Architecture(
        "vision", "BitForImageClassification", "BitConfig",
        {"num_channels": 2, "embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1], "num_groups": 2,
         "num_labels": 3}, large_images,
    ),
    "clip": Architecture(
        "vision and text", "CLIPModel", "CLIPConfig",
        {"text_config": {**SIZES, "projection_dim": 8}, "vision_config": {**IMAGE, "projection_dim": 8},
         "projection_dim": 8},
        image_and_text, hidden,
    ),
    "wav2vec2": speech("Wav2Vec2", "ForCTC", feat_extract_norm="layer"),
    "hubert": speech("Hubert", "ForCTC", feat_extract_norm="layer"),
    "whisper": Architecture(
        "audio", "WhisperForConditionalGeneration", "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 12}, features,
    ),
    "speech-to-text": Architecture(
        "audio", "Speech2TextForConditionalGeneration", "Speech2TextConfig",
        {**SEQ2SEQ, "input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 8, "num_conv_layers": 1,
         "conv_kernel_sizes": (3,), "max_source_positions": 12, "max_target_positions": 12}, frames_first,
    ),
    "mamba": decoder("Mamba", family="state space", state_size=4, conv_kernel=3, time_step_rank=4),
    "mamba2": decoder(
        "Mamba2", family="state space", state_size=4, conv_kernel=3, num_heads=4, head_dim=8, n_groups=1, chunk_size=4,
    ),
    "falcon-mamba": decoder("FalconMamba", family="state space", state_size=4, conv_kernel=3, time_step_rank=4),
    "rwkv": decoder("Rwkv", family="state space", attention_hidden_size=16, context_length=12),
    "recurrent-gemma": decoder(
        "RecurrentGemma", family="state space", **GROUPED, lru_width=16, attention_window_size=4,
        block_types=("recurrent", "attention"),
    ),
}  # fmt: skip
"""All of them, by the names that ``transformers`` has for them."""

QUICK = ("bert", "gpt2", "llama", "bart", "opt", "vit", "mixtral", "whisper")
"""The cheap and different ones that the quick tests run."""
