"""Images made by a formula, to train a classifier without a download."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class GeneratedImages(Dataset[tuple[Tensor, Tensor]]):
    """Noisy stripes whose direction is the class.

    Item ``i`` is ``(image, label)``: float32 ``[channels, image_size, image_size]``, zero on average, and
    int64 without dimensions. It is a function of ``(seed, i)`` alone: another seed gives other images of
    the same classes, for validation.

    Args:
        num_samples: length of the dataset.
        image_size: height and width in pixels.
        num_classes: number of classes; class ``c`` has stripes at an angle of ``c / num_classes`` half turns.
        seed: of the labels, the position of the stripes and the noise.
        channels: of an image, alike but for their noise.
        noise: standard deviation of the noise; the stripes go from -1 to 1.

    Raises:
        ValueError: a size below 1, a negative seed or noise.
    """

    def __init__(
        self,
        num_samples: int,
        image_size: int,
        num_classes: int,
        seed: int = 0,
        *,
        channels: int = 3,
        noise: float = 0.5,
    ) -> None:
        sizes = {
            "num_samples": num_samples,
            "image_size": image_size,
            "num_classes": num_classes,
            "channels": channels,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; expected at least 1.")
        if seed < 0 or noise < 0:
            raise ValueError(f"seed is {seed} and noise is {noise}; expected 0 or more of each.")
        self.num_samples = num_samples
        self.image_size = image_size
        self.num_classes = num_classes
        self.seed = seed
        self.channels = channels
        self.noise = noise

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"Image {index} of a dataset of {self.num_samples}.")
        random = np.random.default_rng((self.seed, index))
        label = int(random.integers(self.num_classes))
        # Two periods of stripes across the image, moved by up to a quarter of one.
        angle = math.pi * label / self.num_classes
        phase = random.uniform(0.0, math.pi / 2)
        axis = np.linspace(-1.0, 1.0, self.image_size, dtype=np.float32)
        distance = math.cos(angle) * axis[None, :] + math.sin(angle) * axis[:, None]
        stripes = np.sin(2 * math.pi * distance + phase, dtype=np.float32)
        shape = (self.channels, self.image_size, self.image_size)
        image = stripes + self.noise * random.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(image), torch.tensor(label)
