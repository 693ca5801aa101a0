"""The models that the benchmarks of a GPU train: ResNet-18 and -50, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def training_step(name: str, device: str) -> Callable[[tuple[Any, Any]], None]:
    """Return a training step of SGD, in bf16 by autocast, on channels_last images and labels."""
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = resnet(name).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: tuple[Any, Any]) -> None:
        images, labels = batch
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def resnet(name: str) -> Any:
    """ResNet-18 or -50 for 1,000 classes (He et al. 2015; strides in the 3 x 3, as torchvision)."""
    from torch import nn

    def normed(ins: int, outs: int, kernel: int, stride: int = 1) -> nn.Sequential:
        conv = nn.Conv2d(ins, outs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outs))

    class Block(nn.Module):
        def __init__(self, ins: int, width: int, stride: int, wide: bool) -> None:
            super().__init__()
            outs = 4 * width if wide else width
            shapes = (
                ((ins, width, 1, 1), (width, width, 3, stride), (width, outs, 1, 1))
                if wide
                else ((ins, width, 3, stride), (width, outs, 3, 1))
            )
            first, *rest = (normed(*shape) for shape in shapes)
            self.road = nn.Sequential(first, *(nn.Sequential(nn.ReLU(True), one) for one in rest))
            same = ins == outs and stride == 1
            self.short = nn.Identity() if same else normed(ins, outs, 1, stride)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.road(x) + self.short(x), inplace=True)

    wide = name == "ResNet-50"
    layers: list[nn.Module] = [normed(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    ins = 64
    for stage, count in enumerate((3, 4, 6, 3) if wide else (2, 2, 2, 2)):
        for i in range(count):
            width = 64 << stage
            layers.append(Block(ins, width, 2 if stage and not i else 1, wide))
            ins = 4 * width if wide else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, 1000))
