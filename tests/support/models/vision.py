"""Models of images: a residual network with in-place operations, a U-Net with skips, a vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .decoders import GPTBlock
from .workload import Workload

__all__ = ["resnet", "unet", "vit"]


class Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        out = self.relu(out)
        assert isinstance(out, Tensor)
        return out


class ResNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(torch.flatten(x, 1))
        return out


def resnet(width: int = 16) -> Workload:
    model = ResNet(width)
    images, labels = torch.randn(4, 3, 24, 24), torch.randint(10, (4,))
    return Workload(model, lambda: F.cross_entropy(model(images), labels))


class Double(nn.Sequential):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__(nn.Conv2d(inside, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Double(3, width)
        self.down = nn.ModuleList([Double(width, width), Double(width, width)])
        self.middle = Double(width, width)
        self.up = nn.ModuleList([Double(2 * width, width), Double(2 * width, width)])
        self.time = nn.Linear(8, width)
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        emphasis = self.time(torch.cat([(time[:, None] * 2**k).sin() for k in range(8)], -1))[:, :, None, None]
        x = self.first(x)
        skips = []
        for down in self.down:
            x = down(x) + emphasis
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1)) * (1 + emphasis)
        out: Tensor = self.last(x)
        return out


def unet(width: int = 16) -> Workload:
    model = UNet(width)
    images, time = torch.randn(2, 3, 16, 16), torch.rand(2)
    return Workload(model, lambda: F.mse_loss(model(images, time=time), images))


class ViT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 26, width))
        self.blocks = nn.Sequential(*[GPTBlock(width, 4) for _ in range(3)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


def vit(width: int = 64) -> Workload:
    model = ViT(width)
    images, labels = torch.randn(4, 3, 20, 20), torch.randint(10, (4,))
    return Workload(model, lambda: F.cross_entropy(model(images), labels))
