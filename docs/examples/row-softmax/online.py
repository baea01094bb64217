"""For ``factory check``: softmax of each row in one pass, blocks of 64 columns at a time."""

import torch

OPERATION = "row_softmax"
KERNELS = ("at::native::",)
DEVICES = ("cuda", "cpu")


def run(inputs, outputs):
    x = inputs["x"]
    largest = torch.full_like(x[:, :1], -torch.inf)
    total = torch.zeros_like(largest)
    for block in x.split(64, dim=1):
        new = torch.maximum(largest, block.amax(1, keepdim=True))
        total = total * (largest - new).exp() + (block - new).exp().sum(1, keepdim=True)
        largest = new
    outputs["y"].copy_((x - largest).exp() / total)
