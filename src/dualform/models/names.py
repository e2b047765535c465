"""Names that Hugging Face gives the parts of a ViT, in files of its hub and in its present classes."""

import re
from typing import Any

PARTS = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.(\w+)", r"patch_embed.proj.\1"),
    (r"layernorm\.(\w+)", r"norm.\1"),
    (r"classifier\.(\w+)", r"head.\1"),
)
IN_BLOCKS = (
    (r"layernorm_before\.(\w+)", r"norm1.\1"),
    (r"layernorm_after\.(\w+)", r"norm2.\1"),
    (r"attention\.attention\.(query|key|value)\.(\w+)", r"attn.\1.\2"),
    (r"attention\.q_proj\.(\w+)", r"attn.query.\1"),
    (r"attention\.k_proj\.(\w+)", r"attn.key.\1"),
    (r"attention\.v_proj\.(\w+)", r"attn.value.\1"),
    (r"attention\.(?:output\.dense|o_proj)\.(\w+)", r"attn.out.\1"),
    (r"(?:intermediate\.dense|mlp\.fc1)\.(\w+)", r"mlp.fc1.\1"),
    (r"(?:output\.dense|mlp\.fc2)\.(\w+)", r"mlp.fc2.\1"),
)


def from_hf(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of ``load_state_dict``: rename the parameters of Hugging Face's ViT to ours, and drop its pooler."""
    if not any(name.startswith((f"{prefix}vit.embeddings.", f"{prefix}embeddings.")) for name in state):
        return
    for name in [name for name in state if name.startswith(prefix)]:
        theirs = name.removeprefix(prefix).removeprefix("vit.")
        if theirs.startswith("pooler."):
            del state[name]
        elif ours := renamed(theirs):
            state[f"{prefix}{ours}"] = state.pop(name)


def renamed(theirs: str) -> str | None:
    """Our name for a Hugging Face parameter, given without the prefix ``vit.``; None if it is unknown."""
    block = re.fullmatch(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)", theirs)
    front, rest, table = (f"blocks.{block[1]}.", block[2], IN_BLOCKS) if block else ("", theirs, PARTS)
    for pattern, ours in table:
        if match := re.fullmatch(pattern, rest):
            return front + match.expand(ours)
    return None
