"""timm's names for Vision Transformers, hybrids and DeiT (`timm.models.vision_transformer`)."""

from __future__ import annotations

from vit_jax.pretrained.formats.rows import (
    CONV,
    HEADS_BIAS,
    HEADS_IN,
    HEADS_OUT,
    SAME,
    Row,
    fused,
    layer,
    norm,
)

_ATTENTION = "MultiHeadDotProductAttention_0"
_QKV = ("query", "key", "value")


def _fused_heads(ours: str, names: tuple[str, ...], theirs: str) -> tuple[Row, Row]:
    return (
        Row(tuple(f"{ours}/{n}/kernel" for n in names), (f"{theirs}.weight",), fused(HEADS_IN)),
        Row(tuple(f"{ours}/{n}/bias" for n in names), (f"{theirs}.bias",), fused(HEADS_BIAS)),
    )


def _out(ours: str, theirs: str) -> tuple[Row, Row]:
    return layer(f"{ours}/out", theirs, HEADS_OUT)


_OURS_BLOCK = "Transformer/encoderblock_{i}"
_OURS_UNIT = "block{b}/unit{u}"
_THEIR_UNIT = "patch_embed.backbone.stages.{b-1}.blocks.{u-1}"

_SHARED: tuple[Row, ...] = (
    Row(("cls",), ("cls_token",), SAME),
    Row(("dist",), ("dist_token",), SAME),
    Row(("Transformer/posembed_input/pos_embedding",), ("pos_embed",), SAME),
    *layer("embedding", "patch_embed.proj", CONV),
    *norm(f"{_OURS_BLOCK}/LayerNorm_0", "blocks.{i}.norm1"),
    *_fused_heads(f"{_OURS_BLOCK}/{_ATTENTION}", _QKV, "blocks.{i}.attn.qkv"),
    *_out(f"{_OURS_BLOCK}/{_ATTENTION}", "blocks.{i}.attn.proj"),
    *norm(f"{_OURS_BLOCK}/LayerNorm_1", "blocks.{i}.norm2"),
    *layer(f"{_OURS_BLOCK}/MlpBlock_0/Dense_0", "blocks.{i}.mlp.fc1"),
    *layer(f"{_OURS_BLOCK}/MlpBlock_0/Dense_1", "blocks.{i}.mlp.fc2"),
    *norm("Transformer/encoder_norm", "norm"),
    *layer("pre_logits", "pre_logits.fc"),  # only in files of timm before 0.6
    *layer("head", "head"),
    *layer("head_dist", "head_dist"),
)

_MAP_HEAD: tuple[Row, ...] = (
    Row(("MAPHead_0/probe",), ("attn_pool.latent",), SAME),
    *layer(f"MAPHead_0/{_ATTENTION}/query", "attn_pool.q", HEADS_IN, HEADS_BIAS),
    *_fused_heads(f"MAPHead_0/{_ATTENTION}", ("key", "value"), "attn_pool.kv"),
    *_out(f"MAPHead_0/{_ATTENTION}", "attn_pool.proj"),
    *norm("MAPHead_0/LayerNorm_0", "attn_pool.norm"),
    *layer("MAPHead_0/MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
    *layer("MAPHead_0/MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
)

_RESNET: tuple[Row, ...] = (
    Row(("conv_root/kernel",), ("patch_embed.backbone.stem.conv.weight",), CONV),
    *norm("gn_root", "patch_embed.backbone.stem.norm"),
    *(
        Row((f"{_OURS_UNIT}/{ours}/kernel",), (f"{_THEIR_UNIT}.{theirs}.weight",), CONV)
        for ours, theirs in (
            ("conv1", "conv1"),
            ("conv2", "conv2"),
            ("conv3", "conv3"),
            ("conv_proj", "downsample.conv"),
        )
    ),
    *(
        row
        for ours, theirs in (
            ("gn1", "norm1"),
            ("gn2", "norm2"),
            ("gn3", "norm3"),
            ("gn_proj", "downsample.norm"),
        )
        for row in norm(f"{_OURS_UNIT}/{ours}", f"{_THEIR_UNIT}.{theirs}")
    ),
)

# The stem alone (R+Ti/16) is timm's whole backbone, without the name `stem`.
_STEM_ONLY: tuple[Row, ...] = (
    Row(("conv_root/kernel",), ("patch_embed.backbone.conv.weight",), CONV),
    *norm("gn_root", "patch_embed.backbone.norm"),
)


def rows(*, stem_only: bool) -> tuple[Row, ...]:
    """The whole table. `stem_only`: the hybrid has no ResNet stage (R+Ti/16)."""
    return _SHARED + _MAP_HEAD + (_STEM_ONLY if stem_only else _RESNET)
