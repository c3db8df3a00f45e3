"""Tiny models of timm: the wide ones by the arguments of their constructors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from zoo_entry import CLASSES, Entry, Inputs, given


def timm_entry(
    name: str,
    build: Callable[[Any], nn.Module],
    inputs: Callable[[], Inputs],
    named: bool = False,
) -> Entry:
    """`build(k)` gives the model of k times the width. A reload loads the state into a newly built model."""

    def at(factor: float) -> nn.Module:
        return build(int(factor) if float(factor).is_integer() else factor).eval()

    def rebuild(net: nn.Module, folder: str) -> nn.Module:
        path = f"{folder}/state.pt"
        torch.save(net.state_dict(), path)
        dtype = next(net.parameters()).dtype
        fresh = at(net.zoo_factor).to(dtype)
        fresh.load_state_dict(torch.load(path))
        return fresh

    return Entry(name, at, inputs, rebuild, named)


def created(model: str, **settings: Callable[[Any], Any] | Any) -> Callable[[Any], nn.Module]:
    """A model by its registered name, or its class in timm.models. Functions are settings by the factor."""

    def build(k: Any) -> nn.Module:
        import timm

        make = getattr(timm.models, model, None) or partial(timm.create_model, model, pretrained=False)
        values = {n: v(k) if callable(v) and not isinstance(v, type) else v for n, v in settings.items()}
        return make(num_classes=CLASSES, **values)

    return build


def times(*sizes: int) -> Callable[[Any], Any]:
    """The sizes times the factor: one of them, or a tuple."""
    return lambda k: sizes[0] * k if len(sizes) == 1 else tuple(size * k for size in sizes)


def timm_entries() -> list[Entry]:
    small, medium, large = (given(x=(3, size, size)) for size in (16, 32, 64))
    vit = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": times(32), "num_heads": times(4)}
    swin = {"img_size": 16, "patch_size": 2, "window_size": 4, "depths": (2, 1), "embed_dim": times(8)}
    swin |= {"num_heads": times(2, 4)}
    mixer = {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": times(16)}
    one_ratio = mixer | {"mlp_ratio": 4}
    stages = {"depths": (1, 1, 2, 1), "dims": times(8, 12, 16, 24)}
    return [
        timm_entry("timm_vit", created("VisionTransformer", **vit), small, named=True),
        timm_entry("timm_swin", created("SwinTransformer", **swin), small, named=True),
        timm_entry("timm_mixer", created("MlpMixer", **mixer), small, named=True),
        timm_entry("timm_convnext", created("ConvNeXt", **stages), medium, named=True),
        timm_entry("timm_regnety", regnety, medium, named=True),
        timm_entry("timm_vit_layer_scale", created("VisionTransformer", init_values=0.1, **vit), small),
        timm_entry("timm_vit_qk_norm", created("VisionTransformer", qk_norm=True, **vit), small),
        timm_entry("timm_vit_average", created("VisionTransformer", global_pool="avg", **vit), small),
        timm_entry("timm_convnextv2", created("ConvNeXt", use_grn=True, ls_init_value=None, **stages), medium),
        timm_entry("timm_swinv2", created("SwinTransformerV2", **swin), small),
        timm_entry("timm_gmlp", created("MlpMixer", **one_ratio, **_gated_blocks()), small),
        timm_entry("timm_resmlp", created("MlpMixer", **one_ratio, **_affine_blocks()), small),
        timm_entry("timm_cait", created("Cait", **vit), small),
        timm_entry("timm_xcit", created("Xcit", **vit | {"patch_size": 8, "img_size": 32}), medium),
        timm_entry("timm_beit", created("Beit", **vit), small),
        timm_entry("timm_eva02", created("Eva", **vit, **EVA02), small),
        timm_entry("timm_deit_distilled", created("deit_tiny_distilled_patch16_224", **vit), small),
        timm_entry("timm_efficientnet", efficientnet, medium),
        timm_entry("timm_mobilenetv3", mobilenetv3, medium),
        timm_entry("timm_densenet", densenet, medium),
        timm_entry("timm_resnet", resnet("BasicBlock"), medium),
        timm_entry("timm_resnet_bottleneck", resnet("Bottleneck"), medium),
        timm_entry("timm_poolformer", metaformer("Pooling"), large),
        timm_entry("timm_caformer", metaformer("SepConv", "Attention"), large),
        timm_entry("timm_maxvit", maxvit, large),
        timm_entry("timm_pit", created("pit_ti_224", **PIT), medium),
        timm_entry("timm_crossvit", crossvit, medium),
        timm_entry("timm_pvt_v2", created("pvt_v2_b0", **PVT), medium),
        timm_entry("timm_edgenext", created("edgenext_xx_small", **EDGENEXT), medium),
        timm_entry("timm_twins", created("twins_pcpvt_small", **TWINS), large),
        timm_entry("timm_mambaout", created("mambaout_femto", depths=(1, 1, 1, 1), dims=times(8, 12, 16, 24)), medium),
        timm_entry("timm_inception_next", created("inception_next_tiny", **INCEPTION), large),
        timm_entry("timm_focalnet", created("FocalNet", embed_dim=times(8), depths=(1, 1)), medium),
        timm_entry("timm_coat_lite", created("coat_lite_tiny", **COAT), medium),
    ]


def _gated_blocks() -> dict[str, Any]:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import SpatialGatingBlock

    return {"block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp}


def _affine_blocks() -> dict[str, Any]:
    from timm.models.mlp_mixer import Affine, ResBlock

    return {"block_layer": ResBlock, "norm_layer": Affine}


EVA02 = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True, "use_rot_pos_emb": True, "use_abs_pos_emb": True}
INCEPTION = {"depths": (1, 1), "dims": times(16, 32)}
PIT = {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": lambda k: (8, 8, 8), "heads": times(2, 4, 8)}
PVT = {"embed_dims": times(8, 16, 24, 32), "num_heads": times(1, 2, 3, 4), "depths": (1, 1, 1, 1)}
EDGENEXT = {"dims": times(8, 16, 24, 32), "heads": times(2, 2, 2, 2), "depths": (2, 2, 2, 2)}
TWINS = {"img_size": 64, "embed_dims": times(8, 16, 24, 32), "num_heads": times(1, 2, 3, 4), "depths": (1, 1, 1, 1)}
COAT = {"img_size": 32, "embed_dims": times(16, 32, 48, 64), "num_heads": times(8), "serial_depths": (1, 1, 1, 1)}
COAT |= {"crpe_window": lambda k: {3: 2 * k, 5: 3 * k, 7: 3 * k}}


def regnety(k: Any) -> nn.Module:
    from timm.models.regnet import RegNet, RegNetCfg

    cfg = RegNetCfg(depth=8, w0=8 * k, wa=8.0 * k, wm=2.0, group_size=8, se_ratio=0.25, stem_width=8 * k)
    return RegNet(cfg, num_classes=CLASSES)


def densenet(k: Any) -> nn.Module:
    from timm.models import DenseNet

    return DenseNet(growth_rate=4 * k, block_config=(2, 2), num_classes=CLASSES, bn_size=2)


def resnet(block: str) -> Callable[[Any], nn.Module]:
    def build(k: Any) -> nn.Module:
        from timm.models import resnet as module

        channels = tuple(size * k for size in (12, 16, 24, 32))
        return module.ResNet(getattr(module, block), (1, 1, 1, 1), CLASSES, channels=channels, stem_width=8 * k)

    return build


def metaformer(*mixers: str) -> Callable[[Any], nn.Module]:
    """PoolFormer by its token mixer, CAFormer by two: one for the first stage, one for the second."""

    def build(k: Any) -> nn.Module:
        from timm.models import metaformer as module

        kinds = [getattr(module, name) for name in (mixers * 2)[:2]]
        norms = [module.LayerNormNoBias if kind is module.Attention else module.LayerNorm2dNoBias for kind in kinds]
        dims = (32 * k, 64 * k)
        return module.MetaFormer(num_classes=CLASSES, depths=(1, 1), dims=dims, token_mixers=kinds, norm_layers=norms)

    return build


def efficientnet(k: Any) -> nn.Module:
    from timm.models._efficientnet_builder import decode_arch_def, round_channels
    from timm.models.efficientnet import EfficientNet

    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r2_k3_s2_e4_c24_se0.25"]])
    return EfficientNet(
        blocks, CLASSES, num_features=40 * k, stem_size=16, round_chs_fn=partial(round_channels, multiplier=k)
    )


def mobilenetv3(k: Any) -> nn.Module:
    from timm.models._efficientnet_builder import decode_arch_def, round_channels
    from timm.models.mobilenetv3 import MobileNetV3

    blocks = decode_arch_def([["ds_r1_k3_s2_e1_c16_se0.25_nre"], ["ir_r1_k5_s2_e4_c24_se0.25"], ["cn_r1_k1_s1_c32"]])
    return MobileNetV3(
        blocks, CLASSES, num_features=40 * k, stem_size=16, round_chs_fn=partial(round_channels, multiplier=k)
    )


def maxvit(k: Any) -> nn.Module:
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

    transformer = MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), grid_size=(4, 4))
    cfg = MaxxVitCfg(
        embed_dim=(16 * k, 24 * k), depths=(1, 1), block_type=("M", "M"), stem_width=8 * k, transformer_cfg=transformer
    )
    return MaxxVit(cfg, img_size=64, num_classes=CLASSES)


def crossvit(k: Any) -> nn.Module:
    from timm.models.crossvit import CrossVit

    return CrossVit(
        img_size=32,
        img_scale=(1.0, 0.5),
        patch_size=(8, 8),
        num_classes=CLASSES,
        embed_dim=(16 * k, 32 * k),
        depth=((1, 1, 1),),
        num_heads=(2 * k, 4 * k),
    )
