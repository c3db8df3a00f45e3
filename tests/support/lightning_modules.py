"""LightningModules in the style of Lightning's own examples. None of them knows mupscale."""

from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torchmetrics import Accuracy
from torchvision.models.resnet import Bottleneck, ResNet


class Autoencoder(LightningModule):
    def __init__(self, hidden: int = 8, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.decoder(self.encoder(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [{"scheduler": schedules.CosineAnnealingLR(optimizer, 30), "interval": "step"}]


class GAN(LightningModule):
    """As in Lightning's documentation, with toggled optimizers, clipping and images for the logger."""

    def __init__(self, latent: int = 4, generator: int = 8, discriminator: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, generator), nn.ReLU(), nn.Linear(generator, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, discriminator), nn.LeakyReLU(), nn.Linear(discriminator, 1))
        self.steps_done = 0

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, logits: Tensor, is_real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))

    def training_step(self, batch: Any) -> None:
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()
        z = torch.randn(len(real), self.hparams["latent"]).type_as(real)
        self.toggle_optimizer(of_generator)
        loss = self.adversarial_loss(self.discriminator(self(z)), 1.0)
        self.log("g_loss", loss, prog_bar=True)
        self.logger.experiment.add_image("generated", torch.zeros(3, 2, 2), self.current_epoch)
        self.manual_backward(loss)
        self.clip_gradients(of_generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        real_loss = self.adversarial_loss(self.discriminator(real), 1.0)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), 0.0)
        loss = (real_loss + fake_loss) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)
        self.steps_done += 1

    def configure_optimizers(self) -> Any:
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        of_discriminator = torch.optim.Adam(self.discriminator.parameters(), lr=2e-2, betas=(0.5, 0.999))
        return of_generator, of_discriminator


class ImageClassifier(LightningModule):
    """Its backbone comes from outside, so the constructor's arguments cannot make it anew."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": schedules.StepLR(optimizer, 1)}


def image_classifier(width: int = 4) -> ImageClassifier:
    return ImageClassifier(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=8, width_per_group=width))


class LanguageModel(LightningModule):
    """Makes its layers in configure_model, and grows by more heads of the same size."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = width**0.5
        self.network: nn.TransformerEncoder | None = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        width, heads = self.hparams["width"], self.hparams["heads"]
        self.tokens, self.positions = nn.Embedding(11, width), nn.Embedding(8, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, self.hparams["dropout"], batch_first=True)
        self.network = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.readout = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.network is not None
        length = tokens.shape[1]
        x = self.tokens(tokens) * self.scale + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        return self.readout(self.network(x, mask=mask, is_causal=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Tagger(LightningModule):
    """Its hyperparameters are one dictionary."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, config["hidden"], num_layers=2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * config["hidden"], 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        states, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.tags(states).flatten(0, 1), tokens.flatten() % 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


class UNet(LightningModule):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.down = block(3, channels)
        self.bottom = block(channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.merge = block(2 * channels, channels)
        self.readout = nn.Conv2d(channels, 2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        down = self.down(batch[0])
        up = self.up(self.bottom(F.max_pool2d(down, 2)))
        logits = self.readout(self.merge(torch.cat([down, up], 1)))
        return F.cross_entropy(logits, (batch[0].sum(1) > 0).long())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": schedules.OneCycleLR(optimizer, 2e-2, 40), "interval": "step"}]


class ManualAccumulation(LightningModule):
    """Accumulates two batches by hand, and steps its schedule by hand."""

    def __init__(self, sizes: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip((6, *sizes), sizes, strict=False)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(sizes[-1], 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = F.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [schedules.ExponentialLR(optimizer, 0.95)]


class Distillation(LightningModule):
    """A frozen teacher, a student that grows, and a metric over the epoch."""

    def __init__(self, student: int = 8, teacher: int = 10) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.teacher = nn.Sequential(nn.Linear(6, teacher), nn.ReLU(), nn.Linear(teacher, 3)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(6, student), nn.LayerNorm(student), nn.ReLU(), nn.Linear(student, 3))
        self.accuracy = Accuracy("multiclass", num_classes=3)

    def on_train_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.student(batch[0])
        with torch.no_grad():
            targets = self.teacher(batch[0]).softmax(-1)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.kl_div(logits.log_softmax(-1), targets, reduction="batchmean") + F.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-2, weight_decay=0.1)


class WithoutDecay(LightningModule):
    """Named groups, one of them without weight decay, each with its own schedule; it keeps its optimizer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3)
        )

    def training_step(self, samples: Any, number: int) -> Tensor:
        return F.cross_entropy(self.net(samples[0]), samples[1])

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1, "name": "decay"},
            {"params": others, "weight_decay": 0.0, "name": "no_decay", "lr": 5e-3},
        ]
        optimizer = self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        factors = [lambda step: 0.97**step, lambda step: 0.99**step]
        return [optimizer], [{"scheduler": schedules.LambdaLR(optimizer, factors), "interval": "step"}]


class Experts(LightningModule):
    """A mixture of experts, of which each row chooses some."""

    def __init__(self, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.router = nn.Linear(6, num_experts)
        self.up = nn.Parameter(0.3 * torch.randn(num_experts, 6, 12))
        self.down = nn.Parameter(0.3 * torch.randn(num_experts, 12, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chances, chosen = self.router(batch[0]).softmax(-1).topk(self.hparams.top_k)
        units = torch.einsum("bi,bkij->bkj", batch[0], self.up[chosen]).relu()
        outputs = torch.einsum("bkj,bkjo->bko", units, self.down[chosen])
        shares = chances / chances.sum(-1, keepdim=True)
        return F.cross_entropy(torch.einsum("bko,bk->bo", outputs, shares), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Example(NamedTuple):
    make: Any
    growth: dict[str, Any]
    """Arguments of UpscaleCallback."""
    kind: str
    """Of its batches."""


EXAMPLES = {
    "autoencoder": Example(Autoencoder, {"hparams": {"hidden": 16}}, "points"),
    "GAN": Example(GAN, {"hparams": {"generator": 24, "discriminator": 12}}, "points"),
    "image classifier": Example(image_classifier, {"make": lambda: image_classifier(8)}, "images"),
    "language model": Example(LanguageModel, {"hparams": {"width": 32, "heads": 4}}, "tokens"),
    "tagger": Example(lambda: Tagger({"hidden": 6}), {"hparams": {"hidden": 12}}, "tokens"),
    "U-Net": Example(UNet, {"hparams": {"channels": 8}}, "images"),
    "manual optimization": Example(ManualAccumulation, {"hparams": {"sizes": (16, 24)}}, "points"),
    "frozen teacher": Example(Distillation, {"hparams": {"student": 16}}, "points"),
    "experts": Example(Experts, {"hparams": {"num_experts": 8, "top_k": 4}}, "points"),
    "groups without decay": Example(WithoutDecay, {"hparams": {"width": 16}}, "points"),
}


def rows(kind: str, count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    if kind == "tokens":
        return ((torch.randint(11, (count, 1), generator=generator) + torch.arange(8)) % 11,)
    shape = (3, 8, 8) if kind == "images" else (6,)
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    if kind == "points32":
        inputs = inputs.float()
    return inputs, inputs.flatten(1)[:, :3].argmax(1)
