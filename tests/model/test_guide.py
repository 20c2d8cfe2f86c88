"""Guides: holes never leak, visible pixels stay, tokens go home, any size, and the learned ones can learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sader.errors import BandError, CheckpointError, ConfigError, OutputError, ShapeError
from sader.method.guides import (
    ConvGuide,
    ConvGuideConfig,
    LearnedGuide,
    LowPassGuide,
    MeanGuide,
    load_guide,
    make_guide,
    save_guide,
)
from sader.model.infill import masked_autoencoder_loss, push_pull_fill, random_block_mask
from sader.model.masked_autoencoder import (
    MaskedAutoencoder,
    MaskedAutoencoderConfig,
    patchify,
    rotary_angles,
    rotate,
    unpatchify,
)

TINY = MaskedAutoencoderConfig(
    bands=3, patch=8, dim=32, heads=2, encoder=2, decoder=1, mlp=2, dropout=0.2, positions="learned", grid=4
)
TINY_ROTARY = replace(TINY, positions="rotary", relative=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_land(batch: int, bands: int, height: int, width: int) -> Tensor:
    """Reflectance that changes smoothly over space, differently for every image and band."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    phase = torch.rand((batch, bands, 2, 1, 1), generator=generator(3)) * 3
    return 0.3 + 0.1 * torch.sin(5 * x + phase[:, :, 0]) + 0.1 * torch.cos(4 * y + phase[:, :, 1])


def awake(network: nn.Module) -> nn.Module:
    """Give every parameter a value, so that zero-initialised branches take part."""
    source = generator(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))
    return network.eval()


def guides(bands: int) -> list:
    return [
        MeanGuide(),
        LowPassGuide(),
        LearnedGuide(awake(MaskedAutoencoder(replace(TINY, bands=bands)))),
        LearnedGuide(awake(MaskedAutoencoder(replace(TINY_ROTARY, bands=bands)))),
        LearnedGuide(awake(ConvGuide(ConvGuideConfig(bands=bands, width=16)))),
    ]


def test_token_n_goes_back_to_block_n() -> None:
    image = torch.randn((2, 3, 24, 40), generator=generator())
    tokens = patchify(image, 8)
    assert torch.equal(tokens[1, 7, 2].view(8, 8), image[1, 2, 8:16, 16:24])
    assert torch.equal(unpatchify(tokens, 8, rows=3), image)


def test_the_network_lays_its_tokens_out_in_blocks() -> None:
    network = MaskedAutoencoder(TINY).eval()

    class Number(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(x.shape[1], dtype=x.dtype)[None, :, None].expand(x.shape[0], -1, 3 * 64)

    network.head = Number()
    out = network(torch.rand((1, 3, 16, 24), generator=generator()), torch.zeros((1, 1, 16, 24), dtype=torch.bool))
    wanted = torch.arange(6.0).view(2, 3).repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert torch.equal(out, wanted.expand(1, 3, 16, 24))


@pytest.mark.parametrize("bands", [3, 4, 13])
@pytest.mark.parametrize("size", [(32, 32), (19, 37), (5, 9)])
def test_any_size_any_bands_visible_pixels_untouched_and_missing_ones_have_no_influence(bands: int, size) -> None:
    image = 2 * torch.rand((2, bands, *size), generator=generator()) - 1
    missing = random_block_mask(2, *size, block=3, rate=0.4, generator=generator(2))
    other = torch.where(missing, torch.nan, image)
    mean = torch.rand((2, bands, *size), generator=generator(4)) - 0.5
    for guide in guides(bands):
        answer = guide(image, missing, mean=mean)
        assert answer.shape == image.shape
        assert torch.isfinite(answer).all()
        assert torch.equal(answer, guide(other, missing, mean=mean)), type(guide)
        if not isinstance(guide, MeanGuide):
            seen = ~missing.expand_as(image)
            assert torch.equal(answer[seen], image[seen])
            assert not torch.equal(answer, image)


def test_one_missing_pixel_inside_a_visible_patch_does_not_leak() -> None:
    network = awake(MaskedAutoencoder(TINY))
    image = torch.rand((1, 3, 32, 32), generator=generator())
    missing = torch.zeros((1, 1, 32, 32), dtype=torch.bool)
    missing[..., 5, 6] = True
    changed = image.clone()
    changed[..., 5, 6] = 0.9
    assert torch.equal(network(image, missing), network(changed, missing))
    changed[..., 5, 7] = 0.9
    assert not torch.equal(network(image, missing), network(changed, missing))


def test_a_patch_half_visible_is_hidden_and_one_more_pixel_shows_it() -> None:
    network = MaskedAutoencoder(TINY)
    missing = torch.zeros((1, 1, 8, 16), dtype=torch.bool)
    missing[..., :4, :8] = True
    image = torch.rand((1, 3, 8, 16), generator=generator())
    assert network.tokens(image, missing)[1].tolist() == [[False, True]]
    missing[..., 0, 0] = False
    assert network.tokens(image, missing)[1].tolist() == [[True, True]]


def test_hidden_patches_are_not_attended_to() -> None:
    """A hidden patch keeps a few visible pixels; the paper's network never looks at them."""
    network = awake(MaskedAutoencoder(TINY))
    image = torch.rand((1, 3, 16, 16), generator=generator())
    missing = torch.zeros((1, 1, 16, 16), dtype=torch.bool)
    missing[..., :8, :6] = True
    changed = image.clone()
    changed[..., :8, 6:8] += 0.5
    assert torch.equal(network(image, missing), network(changed, missing))


@pytest.mark.parametrize("index", range(5))
def test_batch_composition_does_not_matter(index: int) -> None:
    guide = guides(3)[index]
    image = 2 * torch.rand((3, 3, 24, 32), generator=generator()) - 1
    missing = random_block_mask(3, 24, 32, block=8, rate=0.5, generator=generator(2))
    missing[1] = False
    missing[2] = True  # nothing visible: must stay finite and must not disturb its neighbours
    mean = image.flip(0)
    together = guide(image, missing, mean=mean)
    for b in range(3):
        one = guide(image[b : b + 1], missing[b : b + 1], mean=mean[b : b + 1])
        assert torch.allclose(together[b : b + 1], one, atol=1e-5)
    assert torch.isfinite(together).all()


def test_an_odd_size_equals_its_reflection_cropped() -> None:
    network = awake(MaskedAutoencoder(TINY))
    image = torch.rand((1, 3, 21, 30), generator=generator())
    missing = random_block_mask(1, 21, 30, block=4, rate=0.3, generator=generator(2))
    rows, columns = [*range(21), 19, 18, 17], [*range(30), 28, 27]
    whole = network(image[..., rows, :][..., columns], missing[..., rows, :][..., columns])
    assert torch.allclose(network(image, missing), whole[..., :21, :30], atol=1e-6)


def test_rotary_attention_depends_on_distance_only() -> None:
    q, k = torch.randn((2, 1, 1, 1, 16), generator=generator()).expand(2, 1, 1, 35, 16)
    angles = rotary_angles(5, 7, 16, device=torch.device("cpu"))
    score = (rotate(q, angles) @ rotate(k, angles).mT).view(5, 7, 5, 7)
    assert torch.allclose(score[0, 0, 2, 3], score[1, 2, 3, 5], atol=1e-5)
    assert not torch.allclose(score[0, 0, 2, 3], score[0, 0, 3, 2], atol=1e-3)


def test_evaluation_mode_is_enforced_and_given_back() -> None:
    network = awake(MaskedAutoencoder(TINY)).train()
    network.encoder[0].eval()
    modes = [module.training for module in network.modules()]
    guide = LearnedGuide(network)
    image = 2 * torch.rand((1, 3, 16, 16), generator=generator()) - 1
    missing = random_block_mask(1, 16, 16, block=8, rate=0.5, generator=generator(2))
    answers = [guide(image, missing, mean=image) for _ in range(2)]
    assert torch.equal(*answers)
    assert not answers[0].requires_grad
    assert [module.training for module in network.modules()] == modes
    drops = [network(image, missing) for _ in range(2)]
    assert not torch.equal(*drops)  # dropout really was on outside the guide


@pytest.mark.parametrize(("bands", "published"), [(3, 9_243_264), (13, 10_228_864)])
def test_paper_size(bands: int, published: int) -> None:
    count = sum(p.numel() for p in MaskedAutoencoder(MaskedAutoencoderConfig.paper(bands)).parameters())
    assert count == published + 16 * 16 * 192  # the visibility channel
    assert abs(count / published - 1) < 0.01


@pytest.mark.parametrize("bands", [3, 4, 13])
def test_small_size(bands: int) -> None:
    network = MaskedAutoencoder(MaskedAutoencoderConfig.small(bands))
    assert sum(p.numel() for p in network.parameters()) <= 1_500_000


@pytest.mark.parametrize("kind", ["mae", "mae-rotary", "conv"])
def test_training_lowers_the_loss_on_unseen_holes(kind: str) -> None:
    torch.manual_seed(0)
    network = {
        "mae": lambda: MaskedAutoencoder(replace(TINY, dropout=0.0)),
        "mae-rotary": lambda: MaskedAutoencoder(TINY_ROTARY),
        "conv": lambda: ConvGuide(ConvGuideConfig(bands=3, width=16)),
    }[kind]()
    # A bright lattice on the smooth land: a smooth fill cannot know it, so there is something to learn.
    target = smooth_land(4, 3, 24, 24)
    target[..., ::4] += 0.2
    source = generator(5)
    test_holes = random_block_mask(4, 24, 24, block=8, rate=0.5, generator=source)

    def loss(missing: Tensor) -> Tensor:
        return masked_autoencoder_loss(network(torch.where(missing, torch.nan, target), missing), target, missing)

    before = float(loss(test_holes).detach())
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss(random_block_mask(4, 24, 24, block=8, rate=0.5, generator=source)).backward()
        optimiser.step()
    network.eval()
    assert float(loss(test_holes).detach()) < 0.8 * before


def test_push_pull_is_exact_on_a_constant_and_better_than_one_colour() -> None:
    missing = random_block_mask(2, 45, 51, block=8, rate=0.5, generator=generator())
    flat = torch.full((2, 3, 45, 51), 0.37)
    assert torch.allclose(push_pull_fill(flat, missing, fallback=0.0), flat, atol=1e-6)
    land = smooth_land(2, 3, 45, 51)
    hole = missing.expand_as(land)
    smooth = (push_pull_fill(land, missing, fallback=0.0) - land)[hole].abs().mean()
    colour = (MeanGuide()(land, missing, mean=land) - land)[hole].abs().mean()
    assert smooth < 0.25 * colour
    nothing = push_pull_fill(land, torch.ones_like(missing), fallback=0.25)
    assert torch.equal(nothing, torch.full_like(land, 0.25))


def test_mean_guide_by_hand() -> None:
    mean = torch.tensor([[1.0, 2.0], [3.0, 100.0]]).expand(1, 2, 2, 2) * torch.tensor([1.0, -1.0])[:, None, None]
    missing = torch.tensor([[[[False, False], [False, True]]]])
    answer = MeanGuide()(torch.zeros(1, 2, 2, 2), missing, mean=mean)
    assert torch.equal(answer, torch.tensor([2.0, -2.0])[None, :, None, None].expand(1, 2, 2, 2))


def test_loss_by_hand() -> None:
    """One missing pixel in the middle of 3 x 3, predicted 0.1 too high: each term is known."""
    target = torch.full((1, 1, 3, 3), 0.2)
    missing = torch.zeros((1, 1, 3, 3), dtype=torch.bool)
    missing[..., 1, 1] = True
    prediction = target + 0.1 * missing
    only_l1 = masked_autoencoder_loss(prediction, target, missing, boundary=0, smoothness=0)
    assert only_l1 == pytest.approx(0.1)
    # boundary: 0.1 on each of the two pairs of both directions; smoothness: the neighbours' mean is 0.2.
    assert masked_autoencoder_loss(prediction, target, missing, smoothness=0) == pytest.approx(0.3)
    assert masked_autoencoder_loss(prediction, target, missing) == pytest.approx(0.4)
    wild = torch.where(missing, prediction, 7.0)
    assert masked_autoencoder_loss(wild, target, missing) == pytest.approx(0.4)
    assert masked_autoencoder_loss(prediction, target, torch.zeros_like(missing)) == 0


def test_block_mask_rate_repeatability_and_blocks() -> None:
    masks = [random_block_mask(64, 40, 56, block=8, rate=0.3, generator=generator(s)) for s in (1, 1, 2)]
    assert masks[0].shape == (64, 1, 40, 56)
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert masks[0].float().mean() == pytest.approx(0.3, abs=0.03)
    changes = masks[0][0, 0].diff(dim=1).any(dim=0).nonzero().flatten()
    assert len(set((changes % 8).tolist())) == 1  # edges lie on one grid of 8 pixels
    assert random_block_mask(1, 8, 8, rate=1.0).all()
    with pytest.raises(ConfigError, match=r"rate 1\.5; expected"):
        random_block_mask(1, 8, 8, rate=1.5)


@pytest.mark.parametrize("name", ["mae", "conv"])
def test_untrained_guides_say_so(name: str) -> None:
    with pytest.warns(UserWarning, match="WITHOUT trained weights"):
        guide = make_guide(name, bands=4)
    assert isinstance(guide, LearnedGuide)
    assert guide.trained is False
    assert "WITHOUT trained weights" in guide.note
    image = 2 * torch.rand((1, 4, 16, 16), generator=generator()) - 1
    missing = random_block_mask(1, 16, 16, block=4, rate=0.4, generator=generator(2))
    smooth = LowPassGuide()(image, missing, mean=image)
    if name == "mae":
        assert guide.network.config == MaskedAutoencoderConfig.paper(4)
    else:
        assert torch.allclose(guide(image, missing, mean=image), smooth, atol=1e-5)


def test_make_guide_by_name() -> None:
    assert isinstance(make_guide("mean", bands=3), MeanGuide)
    assert isinstance(make_guide("lowpass", bands=3), LowPassGuide)
    assert make_guide("none", bands=3) is None
    with pytest.raises(ConfigError, match="unknown guide 'lowpas'; did you mean lowpass"):
        make_guide("lowpas", bands=3)
    with pytest.raises(ConfigError, match="guide 'mean' has no weights"):
        make_guide("mean", bands=3, weights="x.safetensors")


def test_weights_come_back_and_bad_files_are_named(tmp_path) -> None:
    network = awake(MaskedAutoencoder(TINY_ROTARY))
    path = tmp_path / "guide.safetensors"
    save_guide(path, network, half=False, card={"steps": 3})
    guide = make_guide("mae", bands=3, weights=path)
    assert isinstance(guide, LearnedGuide)
    assert guide.trained
    image = 2 * torch.rand((1, 3, 16, 16), generator=generator()) - 1
    missing = random_block_mask(1, 16, 16, block=4, rate=0.4, generator=generator(2))
    assert torch.equal(guide(image, missing, mean=image), LearnedGuide(network)(image, missing, mean=image))
    save_guide(path, network)
    assert torch.allclose(load_guide(path)(image, missing, mean=image), guide(image, missing, mean=image), atol=0.05)
    with pytest.raises(BandError, match="are for 3 bands; the model has 4"):
        make_guide("mae", bands=4, weights=path)
    with pytest.raises(ConfigError, match="holds a MaskedAutoencoder; the guide 'conv'"):
        make_guide("conv", bands=3, weights=path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot read guide weights"):
        load_guide(path)
    with pytest.raises(CheckpointError, match="cannot read guide weights"):
        load_guide(tmp_path / "none.safetensors")
    with pytest.raises(OutputError, match="Choose a folder"):
        save_guide(path / "guide.safetensors", network)


def test_bad_input_is_named() -> None:
    network = MaskedAutoencoder(TINY)
    image, missing = torch.zeros(1, 3, 8, 8), torch.zeros((1, 1, 8, 8), dtype=torch.bool)
    with pytest.raises(BandError, match="image has 4 bands; this masked autoencoder was built for 3"):
        network(torch.zeros(1, 4, 8, 8), missing)
    with pytest.raises(ShapeError, match=r"missing is torch.bool \(1, 3, 8, 8\); expected torch.bool \(1, 1, 8, 8\)"):
        network(image, missing.expand(1, 3, 8, 8))
    with pytest.raises(ShapeError, match="image has 3 dimensions"):
        LowPassGuide()(image[0], missing, mean=image)
    with pytest.raises(ConfigError, match="dim is 30 with 4 heads; expected a multiple of 16 for rotary"):
        MaskedAutoencoderConfig(dim=30, heads=4, positions="rotary")
