"""Tiny models of timm: the wide ones by the arguments of their constructors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo_entry import CLASSES, Entry, Inputs, timm_images


def timm_entry(
    name: str,
    build: Callable[[Any], nn.Module],
    inputs: Callable[[], Inputs],
    *,
    named: bool = False,
    refused: str = "",
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

    return Entry(name, at, inputs, rebuild, named, refused)


def created(model: str, **settings: Callable[[Any], Any] | Any) -> Callable[[Any], nn.Module]:
    """A model by its registered name. Settings that are functions are functions of the factor."""

    def build(k: Any) -> nn.Module:
        import timm

        values = {n: v(k) if callable(v) and not isinstance(v, type) else v for n, v in settings.items()}
        return timm.create_model(model, pretrained=False, num_classes=CLASSES, **values)

    return build


def constructed(cls: str, **settings: Callable[[Any], Any] | Any) -> Callable[[Any], nn.Module]:
    """A model by its class in timm.models."""

    def build(k: Any) -> nn.Module:
        import timm

        values = {n: v(k) if callable(v) and not isinstance(v, type) else v for n, v in settings.items()}
        return getattr(timm.models, cls)(num_classes=CLASSES, **values)

    return build


def times(*sizes: int) -> Callable[[Any], Any]:
    """The sizes times the factor: one of them, or a tuple."""
    return lambda k: sizes[0] * k if len(sizes) == 1 else tuple(size * k for size in sizes)


def timm_entries() -> list[Entry]:
    small, medium, large = timm_images(16), timm_images(32), timm_images(64)
    vit = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": times(32), "num_heads": times(4)}
    swin = {"img_size": 16, "patch_size": 2, "window_size": 4, "depths": (2, 1), "embed_dim": times(8)}
    swin |= {"num_heads": times(2, 4)}
    mixer = {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": times(16)}
    stages = {"depths": (1, 1, 2, 1), "dims": times(8, 12, 16, 24)}
    return [
        timm_entry("timm_vit", constructed("VisionTransformer", **vit), small, named=True),
        timm_entry("timm_swin", constructed("SwinTransformer", **swin), small, named=True),
        timm_entry("timm_mixer", constructed("MlpMixer", **mixer), small, named=True),
        timm_entry("timm_convnext", constructed("ConvNeXt", **stages), medium, named=True),
        timm_entry("timm_regnety", regnety, medium, named=True),
        timm_entry("timm_vit_layer_scale", constructed("VisionTransformer", init_values=0.1, **vit), small),
        timm_entry("timm_vit_qk_norm", constructed("VisionTransformer", qk_norm=True, **vit), small),
        timm_entry("timm_vit_average", constructed("VisionTransformer", global_pool="avg", **vit), small),
        timm_entry("timm_convnextv2", constructed("ConvNeXt", use_grn=True, ls_init_value=None, **stages), medium),
        timm_entry("timm_swinv2", constructed("SwinTransformerV2", **swin), small),
        timm_entry("timm_gmlp", constructed("MlpMixer", **mixer, **_blocks("SpatialGatingBlock")), small),
        timm_entry("timm_resmlp", constructed("MlpMixer", **mixer, **_blocks("ResBlock")), small),
        timm_entry("timm_cait", constructed("Cait", **vit), small),
        timm_entry("timm_xcit", constructed("Xcit", **vit | {"patch_size": 8, "img_size": 32}), medium),
        timm_entry("timm_beit", constructed("Beit", **vit), small),
        timm_entry("timm_eva02", constructed("Eva", **vit, **EVA02), small),
        timm_entry("timm_deit_distilled", created("deit_tiny_distilled_patch16_224", **vit), small),
        timm_entry("timm_efficientnet", created("efficientnet_b0", **EFFICIENTNET), medium),
        timm_entry("timm_mobilenetv3", created("mobilenetv3_small_100", **EFFICIENTNET), medium),
        timm_entry("timm_densenet", densenet, medium),
        timm_entry("timm_resnet", resnet("BasicBlock"), medium),
        timm_entry("timm_resnet_bottleneck", resnet("Bottleneck"), medium),
        timm_entry("timm_poolformer", metaformer("poolformer_s12"), large),
        timm_entry("timm_caformer", metaformer("caformer_s18"), large),
        timm_entry("timm_maxvit", maxvit, large),
        timm_entry("timm_pit", created("pit_ti_224", **PIT), medium),
        timm_entry("timm_crossvit", crossvit, medium),
        timm_entry("timm_pvt_v2", created("pvt_v2_b0", **PVT), medium),
        timm_entry("timm_edgenext", created("edgenext_xx_small", **EDGENEXT), medium),
        timm_entry("timm_vgg", vgg, medium),
        timm_entry("timm_twins", created("twins_pcpvt_small", **TWINS), large),
        timm_entry("timm_ghostnet", created("ghostnet_100", width=lambda k: 0.25 * k), medium),
        timm_entry("timm_mambaout", created("mambaout_femto", depths=(1, 1, 1, 1), dims=times(8, 12, 16, 24)), medium),
        timm_entry("timm_inception_next", created("inception_next_tiny", **INCEPTION), large),
        timm_entry("timm_focalnet", created("focalnet_tiny_srf", embed_dim=times(8), depths=(1, 1)), medium),
        timm_entry("timm_coat_lite", created("coat_lite_tiny", **COAT), medium),
    ]


def _blocks(block: str) -> dict[str, Any]:
    from timm.models import mlp_mixer

    return {"block_layer": getattr(mlp_mixer, block)}


EVA02 = {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True, "use_rot_pos_emb": True, "use_abs_pos_emb": True}
INCEPTION = {"depths": (1, 1), "dims": times(16, 32)}
EFFICIENTNET = {"channel_multiplier": lambda k: 0.25 * k}
PIT = {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": lambda k: (8, 8, 8), "heads": times(2, 4, 8)}
PVT = {"embed_dims": times(8, 16, 24, 32), "num_heads": times(1, 2, 3, 4), "depths": (1, 1, 1, 1)}
EDGENEXT = {"dims": times(8, 16, 24, 32), "heads": times(2, 2, 2, 2), "depths": (2, 2, 2, 2)}
TWINS = {"img_size": 64, "embed_dims": times(8, 16, 24, 32), "num_heads": times(1, 2, 3, 4), "depths": (1, 1, 1, 1)}
COAT = {"img_size": 32, "embed_dims": times(8, 16, 24, 32), "num_heads": times(2), "serial_depths": (1, 1, 1, 1)}


def regnety(k: Any) -> nn.Module:
    from timm.models.regnet import RegNet, RegNetCfg

    cfg = RegNetCfg(depth=4, w0=16 * k, wa=16.0 * k, wm=2.0, group_size=8, se_ratio=0.25, stem_width=8 * k)
    return RegNet(cfg, num_classes=CLASSES)


def densenet(k: Any) -> nn.Module:
    from timm.models import DenseNet

    return DenseNet(growth_rate=4 * k, block_config=(2, 2), num_classes=CLASSES, bn_size=2)


def resnet(block: str) -> Callable[[Any], nn.Module]:
    def build(k: Any) -> nn.Module:
        from timm.models import resnet as module

        channels = tuple(size * k for size in (8, 12, 16, 24))
        return module.ResNet(getattr(module, block), (1, 1, 1, 1), CLASSES, channels=channels, stem_width=8 * k)

    return build


def metaformer(model: str) -> Callable[[Any], nn.Module]:
    return created(model, depths=(1, 1, 1, 1), dims=times(32, 32, 64, 64))


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


def vgg(k: Any) -> nn.Module:
    from timm.models.vgg import VGG

    return VGG([8 * k, "M", 16 * k, "M"], num_classes=CLASSES, norm_layer=nn.BatchNorm2d)
