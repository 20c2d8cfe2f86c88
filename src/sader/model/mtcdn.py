"""MTCDN, the denoising network (paper, section "Multi-Temporal Conditional Denoising Network").

`condition` computes the features of the cloudy dates once per tile; `forward` evaluates F at one noise level:
    frames -> TFBlock (fuses the dates) -> U-Net with the condition added before every encoder block
    -> HABlock in the middle -> raw output.
With `composite=True`, not from the paper, the dates are first matched to a reference date and blended per pixel, and
the diffusion models the residual of that composite. Values are in the model's [-1, 1]; `Denoiser` scales by c_in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from sader.errors import BandError, ConfigError, ShapeError
from sader.model.attention import HybridAttention, TemporalFusion, masked_mean, pool_available
from sader.model.blocks import (
    ResBlock,
    ScalarEmbedding,
    depth_to_space,
    group_norm,
    reflect_pad,
    space_to_depth,
    zero_init,
)
from sader.model.composite import CompositeHead, prepare_dates
from sader.model.condition import Condition, ConditionNet, SeriesInput
from sader.model.heads import CloudHead, ErrorHead, MaskRefinement, estimated_masks


@dataclass(frozen=True)
class MTCDNConfig:
    """Sizes of the network; the defaults are the paper's Sen2_MTC_New setting."""

    bands: tuple[str, ...] = ("B04", "B03", "B02")
    """Input and output bands, in this order."""
    aux_bands: tuple[str, ...] = ("B08",)
    """Input-only bands (NIR, SAR). They may be missing at run time."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Channels per level, finest first; each level halves the resolution."""
    blocks: tuple[int, ...] = (2, 2, 2)
    """Residual blocks per level, in the encoders and the decoders."""
    stem: int = 1
    """Space-to-depth factor at the input: 2 divides the cost by four."""
    fusion_width: int = 64
    """Channels inside the TFBlock."""
    fusion_patches: Literal["depth", "pool"] = "depth"
    """How the TFBlock brings queries to the resolution of the keys: space-to-depth (paper) or averaging (cheaper)."""
    key_width: int = 64
    """Width of the temporal attention's keys."""
    kernel: int = 5
    """Neighbourhood attention window, odd, 3 to 13."""
    head_width: int = 16
    """Channels per head of the neighbourhood attention."""
    emb_width: int = 256
    """Width of the noise-level and date embeddings."""
    dropout: float = 0.0
    """0 for Sen2_MTC_New, 0.1 for SEN12MS-CR-TS."""
    date_input: Literal["none", "index", "days"] = "index"
    """Date information given to the network: none, the position (public code), or the day."""
    use_fusion: bool = True
    """False replaces the TFBlock by the mean over dates (the paper's ablation)."""
    use_hybrid: bool = True
    """False drops the HABlock (the paper's ablation)."""
    composite: bool = False
    """True: reference flag, cloud masks, matched dates and the composite as the mean of the diffusion."""
    cloud_widths: tuple[int, ...] = ()
    """Channels of the cloud head; empty = no head."""
    refinement_widths: tuple[int, ...] = ()
    """Channels of the mask refinement of the reference date; empty = the cloud head's mask is used."""
    error_head: bool = False
    """True: the network estimates the error at every pixel."""

    def __post_init__(self) -> None:
        if len(self.widths) != len(self.blocks):
            raise ConfigError(
                f"widths has {len(self.widths)} levels and blocks {len(self.blocks)}; give one per level."
            )
        if self.kernel % 2 == 0:
            raise ConfigError(f"kernel is {self.kernel}; expected an odd number, because a neighbourhood has a centre.")
        if self.widths[-1] % self.head_width:
            raise ConfigError(f"head_width {self.head_width} does not divide the last width {self.widths[-1]}.")
        for name in ("cloud_widths", "refinement_widths"):
            if (levels := len(getattr(self, name))) > len(self.widths):
                raise ConfigError(f"{name} has {levels} levels; at most {len(self.widths)} fit.")
        if (self.refinement_widths or self.error_head) and not self.composite:
            raise ConfigError("refinement_widths and error_head need composite=True: their inputs are matched dates.")
        if self.composite and not self.cloud_widths:
            raise ConfigError("composite=True needs a cloud head: give cloud_widths, such as (24, 32, 48).")

    @property
    def multiple(self) -> int:
        """Height and width are padded to a multiple of this."""
        return self.stem * 2 ** (len(self.widths) - 1)

    @property
    def states_error(self) -> bool:
        """Whether the network estimates its own error."""
        return self.error_head

    @property
    def matches_dates(self) -> bool:
        """Whether the dates are matched to a reference date, so that the result follows its radiometry."""
        return self.composite

    @property
    def needs_all_bands(self) -> bool:
        """Whether every band must be given."""
        return not self.composite


class MTCDN(nn.Module):
    """The network F of the denoiser, with its condition network, composite and cloud head."""

    def __init__(self, config: MTCDNConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MTCDNConfig()
        bands, aux = len(config.bands), len(config.aux_bands)
        depth = config.stem**2
        levels, widths = len(config.widths), config.widths

        if config.composite:
            condition_in = 3 * bands + aux + 5  # date, matched date, fill, aux, cloud, observed, flag, two variances
            frame_static = 2 * bands + aux + 2  # composite, matched date, aux, cloud, flag
        else:
            condition_in = frame_static = bands + aux
        frame = (bands + frame_static) * depth

        self.noise_embedding = ScalarEmbedding(config.emb_width)
        self.date_embedding = ScalarEmbedding(config.emb_width)
        self.flag_embedding = nn.Linear(bands + aux, config.emb_width, bias=False)

        encoder_in: list[int] = []
        self.encoder = nn.ModuleList()
        self.skip_after: list[int] = []
        channels = widths[0]
        for level, width in enumerate(widths):
            for _ in range(config.blocks[level]):
                encoder_in.append(channels)
                self.encoder.append(self._block(channels, width))
                channels = width
            self.skip_after.append(len(self.encoder) - 1)
            if level < levels - 1:
                encoder_in.append(width)
                self.encoder.append(self._block(width, width, "down"))

        self.condition_net = ConditionNet(
            condition_in * depth,
            widths=widths,
            blocks=config.blocks,
            injection_channels=encoder_in,
            emb_width=config.emb_width,
            key_width=config.key_width,
            dropout=config.dropout,
        )
        self.composite_head = CompositeHead(widths[0], stem=config.stem) if config.composite else None
        classes, refined = config.cloud_widths, config.refinement_widths
        self.cloud_head = CloudHead(bands, widths=classes, stem=config.stem) if classes else None
        self.mask_refinement = MaskRefinement(bands, widths=refined, stem=config.stem) if refined else None
        self.error_head = ErrorHead(widths[0], bands, stem=config.stem) if config.error_head else None
        self.fusion = (
            TemporalFusion(
                frame,
                width=config.fusion_width,
                value_width=widths[-1],
                factor=2 ** (levels - 1),
                patches=config.fusion_patches,
                emb_width=config.emb_width,
                key_width=config.key_width,
                dropout=config.dropout,
            )
            if config.use_fusion
            else None
        )
        self.stem = nn.Conv2d(frame, widths[0], 3, padding=1)
        self.attention = (
            HybridAttention(channels, emb_width=config.emb_width, kernel=config.kernel, head_width=config.head_width)
            if config.use_hybrid
            else None
        )
        self.middle = self._block(channels, channels)
        self.decoder = self._decoder_blocks(channels)
        self.norm_out = group_norm(widths[0])
        self.out = zero_init(nn.Conv2d(widths[0], bands * depth, 3, padding=1))

    def _decoder_blocks(self, channels: int) -> nn.ModuleList:
        """Return the blocks from the coarsest level to the finest; the first of a level gets the skip connection."""
        blocks = nn.ModuleList()
        for level in reversed(range(len(self.config.widths))):
            width = self.config.widths[level]
            blocks.append(self._block(channels + width, width))
            for _ in range(self.config.blocks[level] - 1):
                blocks.append(self._block(width, width))
            if level > 0:
                blocks.append(self._block(width, width, "up"))
            channels = width
        return blocks

    def _block(self, channels_in: int, channels_out: int, resample: Literal["none", "down", "up"] = "none") -> ResBlock:
        config = self.config
        return ResBlock(
            channels_in, channels_out, emb_width=config.emb_width, resample=resample, dropout=config.dropout
        )

    # ---------------------------------------------------------------- once per tile

    def condition(
        self,
        cloudy: Tensor,
        *,
        aux: Tensor | None = None,
        present: Tensor | None = None,
        valid: Tensor | None = None,
        cloud: Tensor | None = None,
        reference: Tensor | None = None,
        days: Tensor | None = None,
        band_present: Tensor | None = None,
        already_matched: bool = False,
    ) -> Condition:
        """Return the condition of a batch of series; cloudy is (B, T, C, H, W) in [-1, 1].

        aux: (B, T, A, H, W) or None where the auxiliary bands are missing.
        present: bool (B, T), False for padding dates, which have no influence.
        valid: bool (B, T, H, W), False where a date has no data.
        cloud: (B, T, H, W) in [0, 1], probability of cloud or shadow; None = the cloud head's estimate.
        reference: (B,) long, the date the result follows, -1 for none. Only read with a composite.
        days: (B, T) days since the first date; needed with date_input="days" (missing = 0, "no date known").
        band_present: bool (B, C), False for bands that are missing in all dates.
        already_matched: the dates were matched over the whole scene (`sader.inference.scene_match`).
        """
        config = self.config
        self._check(cloudy, aux)
        batch, dates, _, height, width = cloudy.shape
        device = cloudy.device
        if present is None:
            present = torch.ones(batch, dates, dtype=torch.bool, device=device)
        if band_present is None:
            band_present = torch.ones(batch, len(config.bands), dtype=torch.bool, device=device)
        observed = present[:, :, None, None].expand(-1, -1, height, width)
        if valid is not None:
            observed = observed & valid

        unit = config.multiple
        ph, pw = ((size + unit - 1) // unit * unit for size in (height, width))
        observed = reflect_pad(observed, ph, pw)
        use = observed[:, :, None] & band_present[:, None, :, None, None]
        cloudy = reflect_pad(cloudy, ph, pw).masked_fill(~use, 0.0)
        aux_frames, aux_present = self._aux_frames(aux, observed)
        # Where no date has data, attention over the dates would be empty: there every present date is available.
        fallback = present[:, :, None, None] & ~observed.any(dim=1, keepdim=True)
        available = observed | fallback

        flags = torch.cat([band_present, aux_present], dim=1).to(cloudy.dtype)
        emb = self._date_embedding(present, days) + repeat(self.flag_embedding(1 - flags), "b e -> (b t) e", t=dates)
        series = SeriesInput(
            cloudy=cloudy,
            aux=aux_frames,
            observed=observed,
            use=use,
            present=present,
            band_present=band_present,
            available=pool_available(available, config.stem),
            emb=emb,
            size=(height, width),
        )
        if not config.composite:
            return self._about_dates(series)
        if cloud is not None:
            cloud = reflect_pad(cloud.to(cloudy.dtype), ph, pw)
        if reference is None:
            reference = torch.full((batch,), -1, dtype=torch.long, device=device)
        return self._about_composite(series, cloud, reference, already_matched)

    def _about_dates(self, series: SeriesInput) -> Condition:
        """Return the paper's condition: the diffusion reverts to the dates themselves."""
        # Pixels without data take the mean of the other dates, which leaves the average over the dates unchanged. The
        # network attends to them: the state holds the noise of all dates, and it removes only noise that it sees.
        available = series.present[:, :, None, None].expand_as(series.available).contiguous()
        others = masked_mean(series.cloudy, series.observed)[:, None]
        gap = series.present[:, :, None, None, None] & ~series.use
        cloudy = torch.where(gap, others, series.cloudy)
        gap = (series.present[:, :, None, None] & ~series.observed)[:, :, None]
        aux = torch.where(gap, masked_mean(series.aux, series.observed)[:, None], series.aux)
        frames = space_to_depth(torch.cat([cloudy, aux], dim=2), self.config.stem)
        return Condition(
            features=self.condition_net(frames, available, series.emb),
            frames=frames,
            mean=cloudy,
            present=series.present,
            available=available,
            size=series.size,
        )

    def _about_composite(
        self, series: SeriesInput, cloud: Tensor | None, reference: Tensor, already_matched: bool
    ) -> Condition:
        """Return the condition with a composite of the matched dates, to which the diffusion reverts."""
        cloudy, observed, stem = series.cloudy, series.observed, self.config.stem
        batch, dates, _, height, width = cloudy.shape
        if cloud is None:
            cloud = self.cloud_estimate(cloudy, observed, series.band_present, reference=reference)
        cloud = cloud.masked_fill(~observed, 1.0)
        matched = prepare_dates(
            cloudy, cloud=cloud, observed=observed, reference=reference, already_matched=already_matched
        )
        matched_dates = matched.dates.to(cloudy.dtype).masked_fill(~series.use, 0.0)
        flag = matched.flag[:, :, None, None, None].expand(-1, -1, 1, height, width)
        trust = matched.log_variance().to(cloudy.dtype)

        def every_date(image: Tensor) -> Tensor:
            return image[:, None].expand(-1, dates, -1, -1, -1)

        parts = [cloudy, matched_dates, every_date(matched.fill), series.aux, cloud[:, :, None]]
        parts += [observed[:, :, None].to(cloudy.dtype), flag, trust[:, :-1, None], every_date(trust[:, -1:])]
        seen = torch.cat(parts, dim=2)
        features = self.condition_net(space_to_depth(seen, stem), series.available, series.emb)
        assert self.composite_head is not None
        blend = self.composite_head(matched, features.dates_fine, features.fused_fine, observed)
        composite, weights = blend.image, blend.weights
        frames = torch.cat(
            [every_date(composite.to(cloudy.dtype)), matched_dates, series.aux, cloud[:, :, None], flag], dim=2
        )
        log_error = None if self.error_head is None else self.error_head(features.fused_fine, matched, weights)
        return Condition(
            features=features,
            frames=space_to_depth(frames, stem),
            mean=composite[:, None],
            present=torch.ones(batch, 1, dtype=torch.bool, device=cloudy.device),
            available=series.available,
            size=series.size,
            weights=weights,
            matched=matched,
            log_error=log_error,
            contrast=blend.contrast,
            others=blend.others,
        )

    def cloud_logits(
        self, cloudy: Tensor, observed: Tensor, band_present: Tensor, *, date: Tensor | None = None
    ) -> Tensor:
        """Return the cloud head's class scores (B, T, 4, H, W), H and W multiples of `config.multiple`.

        date: (B,), only this one, as (B, 1, 4, H, W).
        """
        logits: Tensor = self._cloud_head(cloudy, observed, band_present, date=date)
        return logits

    @property
    def _cloud_head(self) -> CloudHead:
        if self.cloud_head is None:
            raise ConfigError("this network has no cloud head; give cloud_mask, or build it with cloud_widths.")
        return self.cloud_head

    def cloud_estimate(self, cloudy: Tensor, observed: Tensor, band_present: Tensor, **known: Any) -> Tensor:
        """Return the probability (B, T, H, W) that a pixel is not clear; `known` as in `estimated_masks`."""
        return estimated_masks(self._cloud_head, self.mask_refinement, cloudy, observed, band_present, **known)

    def _check(self, cloudy: Tensor, aux: Tensor | None) -> None:
        if cloudy.ndim != 5:
            raise ShapeError(
                f"cloudy has {cloudy.ndim} dimensions {tuple(cloudy.shape)}; expected (B, T, C, H, W). "
                "For one date use cloudy[:, None]."
            )
        if cloudy.shape[1] == 0:
            raise ShapeError("cloudy holds no date (T = 0); expected at least one.")
        if cloudy.shape[2] != len(self.config.bands):
            raise BandError(
                f"cloudy has {cloudy.shape[2]} bands; this network works on {len(self.config.bands)}: "
                f"{', '.join(self.config.bands)}. Select and order the bands by name."
            )
        if aux is not None and (aux.shape[:2] != cloudy.shape[:2] or aux.shape[-2:] != cloudy.shape[-2:]):
            raise ShapeError(f"aux is {tuple(aux.shape)} and cloudy {tuple(cloudy.shape)}; B, T, H and W must agree.")
        if aux is not None and aux.shape[2] != len(self.config.aux_bands):
            raise BandError(
                f"aux has {aux.shape[2]} bands; this network takes {len(self.config.aux_bands)}: "
                f"{', '.join(self.config.aux_bands) or 'none'}. Leave aux out where they are missing."
            )

    def _aux_frames(self, aux: Tensor | None, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return aux at the padded size, zero where missing, and whether each band is there, bool (B, A)."""
        batch, dates, height, width = observed.shape
        count = len(self.config.aux_bands)
        if aux is None:
            empty = torch.zeros(batch, dates, count, height, width, device=observed.device)
            return empty, torch.zeros(batch, count, dtype=torch.bool, device=observed.device)
        padded = reflect_pad(aux, height, width).masked_fill(~observed[:, :, None], 0.0)
        # Training drops a modality by setting it to zero: all zero means missing.
        return padded, (padded != 0).any(dim=(1, 3, 4)) if count else padded.new_zeros(batch, 0, dtype=torch.bool)

    def _date_embedding(self, present: Tensor, days: Tensor | None) -> Tensor:
        """Return the embedding (B*T, E) of each date's position or day."""
        batch, dates = present.shape
        value = torch.zeros(batch, dates, device=present.device)
        if self.config.date_input == "index":
            value = value + torch.arange(dates, device=present.device)
        elif self.config.date_input == "days" and days is not None:
            # In years, relative to the first date. The day of an absent date may be NaN.
            value = (days.to(value) / 365.25).masked_fill(~present, 0.0)
        return self.date_embedding(rearrange(value, "b t -> (b t)"))

    # ---------------------------------------------------------------- at every step

    def _dates_as_one(self, scaled: Tensor, emb: Tensor, condition: Condition) -> Tensor:
        """Return one map (B, F, H/stem, W/stem) of the state and all dates: their mean plus the TFBlock's output."""
        config, features = self.config, condition.features
        ph, pw = condition.mean.shape[-2:]
        state = space_to_depth(reflect_pad(scaled, ph, pw), config.stem)
        if not config.composite:
            state = state.masked_fill(~condition.present[:, :, None, None, None], 0.0)
        dates = condition.frames.shape[1]
        frames = torch.cat([state.expand(-1, dates, -1, -1, -1).to(condition.frames.dtype), condition.frames], dim=2)
        h = masked_mean(frames, condition.available)
        if self.fusion is not None:
            low = pool_available(condition.available, 2 ** (len(config.widths) - 1))
            h = h + self.fusion(frames, features.keys, features.values, condition.available, low, emb)
        return h

    def forward(self, scaled: Tensor, c_noise: Tensor, condition: Condition) -> Tensor:
        """Return F (B, C, H, W) for the scaled state c_in * x (B, S, C, H, W) at noise c_noise (B,)."""
        config = self.config
        height, width = scaled.shape[-2:]
        emb = self.noise_embedding(c_noise)
        h = self._dates_as_one(scaled, emb, condition)
        h = self.stem(h)
        skips = []
        for index, (block, injection) in enumerate(zip(self.encoder, condition.features.injections, strict=True)):
            h = block(h + injection, emb)
            if index in self.skip_after:
                skips.append(h)
        if self.attention is not None:
            h = self.attention(h, emb)
        h = self.middle(h, emb)
        blocks = iter(self.decoder)
        for level in reversed(range(len(config.widths))):
            h = torch.cat([h, skips[level]], dim=1)
            for _ in range(config.blocks[level] + (level > 0)):
                h = next(blocks)(h, emb)
        raw = depth_to_space(self.out(F.silu(self.norm_out(h))), config.stem)
        return raw[..., :height, :width]
