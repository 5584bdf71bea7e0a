import pytest
import torch

from tensorshard.data import GeneratedImages


def test_a_sample_is_a_function_of_seed_and_index():
    first, second = GeneratedImages(10, 8, 3, seed=4), GeneratedImages(99, 8, 3, seed=4)
    for index in (7, 0, 7):
        assert torch.equal(first[index][0], second[index][0])
        assert torch.equal(first[index][1], second[index][1])
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], GeneratedImages(10, 8, 3, seed=5)[0][0])


def test_images_and_labels_have_the_types_of_a_classifier():
    image, label = GeneratedImages(10, 8, 3, channels=2)[0]
    assert (image.shape, image.dtype) == ((2, 8, 8), torch.float32)
    assert (label.shape, label.dtype) == ((), torch.int64)


def test_all_classes_come_about_as_often():
    labels = torch.stack([label for _, label in GeneratedImages(600, 1, 4)])
    counts = labels.bincount()
    assert len(counts) == 4
    assert counts.min() > 110


def test_a_class_looks_alike_in_every_seed():
    means = []
    for seed in (0, 1):
        images, labels = zip(*GeneratedImages(400, 16, 2, seed=seed, noise=0.1), strict=True)
        images, labels = torch.stack(images), torch.stack(labels)
        means.append(torch.stack([images[labels == label].mean(0).flatten() for label in (0, 1)]))
    similarity = torch.corrcoef(torch.cat(means))
    assert similarity[0, 2] > 0.9
    assert similarity[1, 3] > 0.9
    assert similarity[0, 1].abs() < 0.5


def test_without_noise_the_channels_are_alike():
    image, _ = GeneratedImages(1, 8, 3, noise=0.0)[0]
    assert torch.equal(image[0], image[1])
    assert image.abs().max() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0; expected at least 1"),
        ({"image_size": -1}, "image_size is -1"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"seed": -1}, "seed is -1 and noise is 0.5; expected 0 or more of each"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GeneratedImages(**{"num_samples": 4, "image_size": 8, "num_classes": 3, **change})


def test_an_index_outside_ends_an_iteration():
    assert len(list(GeneratedImages(5, 4, 2))) == 5
    with pytest.raises(IndexError, match="Image 5 of a dataset of 5"):
        GeneratedImages(5, 4, 2)[5]
