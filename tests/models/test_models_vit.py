import pytest
import torch
from torch.utils.data import default_collate

from tensorshard.data import GeneratedImages
from tensorshard.models import ViT, image_classification_loss

SIZES = {"image_size": 16, "patch_size": 4, "num_classes": 5, "num_layers": 2, "num_heads": 2, "width": 32}


def tiny_vit(**options) -> ViT:
    torch.manual_seed(0)
    return ViT(**{**SIZES, **options})


@pytest.mark.parametrize("channels", [1, 3])
def test_logits_have_one_row_of_the_classes_an_image(channels):
    assert tiny_vit(channels=channels)(torch.randn(3, channels, 16, 16)).shape == (3, 5)


def test_patches_are_read_where_they_stand():
    model = tiny_vit()
    image = torch.randn(1, 3, 16, 16)
    moved = image.roll(4, dims=-1)
    assert not torch.allclose(model(image), model(moved))
    torch.nn.init.zeros_(model.positions)
    torch.testing.assert_close(model(image), model(moved))


def test_the_class_token_and_positions_are_bare_parameters():
    parameters = dict(tiny_vit().named_parameters())
    assert parameters["class_token"].shape == (1, 1, 32)
    assert parameters["positions"].shape == (1, 17, 32)


def test_every_parameter_gets_a_gradient():
    model = tiny_vit()
    loss = image_classification_loss(model(torch.randn(4, 3, 16, 16)), torch.arange(4))
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or p.grad.count_nonzero() == 0]
    assert [name for name in without if not name.endswith("key.bias")] == []


def test_it_learns_the_generated_images():
    model = tiny_vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    images, labels = default_collate(list(GeneratedImages(512, 16, 5, seed=0)))
    held_out, held_out_labels = default_collate(list(GeneratedImages(200, 16, 5, seed=1)))
    for _ in range(6):
        for batch in range(0, 512, 32):
            loss = image_classification_loss(model(images[batch : batch + 32]), labels[batch : batch + 32])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    accuracy = (model(held_out).argmax(-1) == held_out_labels).float().mean()
    assert accuracy > 0.9  # chance is 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 5}, "image_size 16 does not divide into patches of patch_size 5"),
        ({"num_heads": 3}, "width 32 does not divide into 3 heads"),
        ({"channels": 0}, "channels is 0; expected at least 1"),
        ({"dropout": 2.0}, "dropout is 2.0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ViT(**{**SIZES, **change})


@pytest.mark.parametrize("shape", [(2, 3, 16, 12), (3, 16, 16), (2, 1, 16, 16)])
def test_images_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected \[batch, 3, 16, 16\]"):
        tiny_vit()(torch.zeros(shape))
