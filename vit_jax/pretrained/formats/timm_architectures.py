"""What timm states in its code alone, by the architecture's name: arguments of its models.

The files on the hub have the name only. `epsilon` stands for that of the `norm_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vit_jax.models.variants import SIZES

_ROPE: dict[str, Any] = {"use_rot_pos_emb": True, "rope_type": "cat", "rope_temperature": 10_000.0}
_NAVER = _ROPE | {"rope_grid_indexing": "xy", "rope_temperature": 100.0}
_META = _ROPE | {"rope_grid_indexing": "xy", "rope_grid_offset": 1.0, "attn_pool_num_heads": 8}
_DINOV3 = _ROPE | {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True}

# All that match; later ones replace earlier ones.
_ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"vit_.*_clip_.*|beit3_.*|aimv2_.*|vit_pe_.*|.*_(?:dinov3|lingbot).*", {"epsilon": 1e-5}),
    (r".*_quickgelu_.*", {"act_layer": "quick_gelu"}),
    (
        r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.*"
        r"|vit_large_patch16_siglip_(gap_)?512",
        {"act_layer": "gelu_tanh"},
    ),
    (r"eva02_(?!enormous).*|vit_.*_rope_reg\d_.*", _ROPE | {"ref_feat_shape": [16, 16]}),
    (r"vit_.*_rope(_ape)?_224", _NAVER),
    (r"vit_.*_rope_mixed(_ape)?_224", _NAVER | {"rope_type": "mixed", "rope_temperature": 10.0}),
    (r"vit_.*_rope(_mixed)?_ape_224", {"no_embed_class": True}),
    (r"vit_.*_(?:dinov3(?:_qkvb)?|lingbot|sapiens2)", _DINOV3),
    (r"vit_pe_core_base_.*", _META | {"ref_feat_shape": [14, 14]}),
    (r"vit_pe_core_(?:tiny|small|large)_.*", _META | {"ref_feat_shape": [24, 24]}),
    (r"vit_pe_(?:(?:lang|spatial)|core_gigantic)_.*", _META | {"ref_feat_shape": [32, 32]}),
    (r"vit_pe_.*_gigantic_.*", {"rope_grid_offset": 0.0, "num_heads": 16}),
    (r"vit_pe_core_.*|test_vit3", {"pool_include_prefix": True}),
    (r"eva02_enormous_.*|vit_base_patch16_rpn_.*", {"use_post_norm": True}),
    # Heads whose number follows from no other model of these sizes.
    (r"vit_base_patch16_gap_224|eva02_enormous_.*", {"num_heads": 16}),
    (r"vit_giant_patch16_(?:radio_v3|sapiens2)", {"num_heads": 24}),
    (r"vit_huge_plus_patch16_dinov3.*", {"num_heads": 20}),
    (r"vit_(?:7b_patch16_dinov3|5b_patch16_sapiens2)", {"num_heads": 32}),
    (r"aimv2_large_.*", {"num_heads": 8}),
    (r"aimv2_huge_.*", {"num_heads": 12}),
    (r"aimv2_1b_.*", {"num_heads": 16}),
    (r"aimv2_3b_.*", {"num_heads": 24}),
    (r"test_vit2?", {"num_heads": 2}),
    (r"test_vit[34]", {"num_heads": 3}),
)
_HEADS = {(width, mlp_dim): heads for width, _, mlp_dim, heads in SIZES.values()}


def architecture_of(settings: Mapping[str, Any]) -> str:
    """The name in a `config.json`; "" if there is none."""
    inputs = settings.get("pretrained_cfg") or settings  # timm < 0.8 wrote them as one
    return str(settings.get("architecture") or inputs.get("architecture") or "")


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the architecture, and those in the file's `model_args`."""
    architecture, found = architecture_of(settings), dict[str, Any]()
    for pattern, arguments in _ARGUMENTS:
        if re.fullmatch(pattern, architecture):
            found |= arguments
    return found | (settings.get("model_args") or {})


def usual_heads(width: int, mlp_dim: int) -> int:
    """Of an architecture that is not in the table above."""
    return _HEADS.get((width, mlp_dim), max(width // 64, 1))
