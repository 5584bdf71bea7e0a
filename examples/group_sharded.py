"""Paddle's two calls in a plain PyTorch loop.

torchrun --nproc-per-node 2 examples/group_sharded.py --level os_g --output /tmp/sharded
"""

import argparse

import torch
import torch.distributed as dist

import tensorshard as ts
from tensorshard.models import ViT, image_classification_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="p_g_os", choices=["os", "os_g", "p_g_os"])
    parser.add_argument("--output", default=None, help="folder for the whole weights")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = ViT(image_size=16, patch_size=4, num_classes=5, num_layers=2, num_heads=2, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, _ = ts.group_sharded_parallel(model, optimizer, arguments.level)

    torch.manual_seed(dist.get_rank())
    for step in range(1, 21):
        images, labels = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
        images[torch.arange(8), 0, labels * 3] += 3.0  # a bright line whose row is the class
        loss = image_classification_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}  loss of rank 0 {loss.item():.4f}")
    if arguments.output:
        ts.save_group_sharded_model(model, arguments.output, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
