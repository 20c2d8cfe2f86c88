"""Tiles that go to a device as they are on disk: the same bits as by way of reflectance; places are used again."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sader.checkpoint import Checkpoint
from sader.geo.align import build_stack
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene import ahead
from sader.geo.scene import tiles as jobs
from sader.geo.scene.ahead import made_ahead
from sader.geo.scene.block_cache import SharedBlocks
from sader.geo.scene.digital import DigitalTiles, can_be_digital, decoded
from sader.geo.scene.rows import Channels, RowBlend
from sader.geo.scene.run import SceneOptions, clear_scene
from sader.geo.stack import GeoStack, ValueCoding
from sader.geo.values import decode, for_network
from sader.inference.accelerate import Acceleration
from sader.inference.inputs import TileInputs
from sader.inference.noise import NoiseField
from sader.inference.remover import CloudRemover, RawTiles
from sader.inference.scene_match import SceneMatch
from sader.inference.tiling import Window, plan_windows

rasterio = pytest.importorskip("rasterio")
OPTIONS = SceneOptions(reference=0, seed=1, count=True, provenance=True, uncertainty=True, backend="accelerated")
CPU = torch.device("cpu")


def quiet(text: str) -> None:
    """Take a notice and do nothing with it."""


def dated(number: int, empty: bool = False) -> np.ndarray:
    """Return counts (4, 70, 90), some without data, none at all in the upper left tile where `empty` says so."""
    counts = np.random.default_rng(number).integers(1, 4000, (4, 70, 90)).astype(np.uint16)
    counts[:, 30:50, 10 * number : 20 + 10 * number] = 0
    counts[2, 60:64] = 0  # in one band alone
    counts[0, 5, 5] = 65535  # no reflectance
    if empty:
        counts[:, :32, :32] = 0
    return counts


@pytest.fixture
def paths(tmp_path, write_date):
    return [write_date(tmp_path / "in" / f"S2_2022-0{n + 3}-10.tif", dated(n, True), nodata=0) for n in range(3)]


@pytest.fixture
def stack(paths, tiny):
    return build_stack(open_sources(paths, notice=quiet), tiny.config.network, notice=quiet)


@pytest.fixture
def predicted(monkeypatch):
    """The numbers of tiles that went to the device as they are on disk, batch by batch."""
    seen: list[int] = []
    work = DigitalTiles.predict

    def counted(self: DigitalTiles, room: Any, slots: Any, windows: Any) -> None:
        work(self, room, slots, windows)
        seen.append(len(slots))

    monkeypatch.setattr(DigitalTiles, "predict", counted)
    return seen


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    start = jobs.SceneJob.__init__

    def begin(self: jobs.SceneJob, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        self.on_gpu, self.readers, self.batch = True, 3, batch

    monkeypatch.setattr(jobs.SceneJob, "__init__", begin)


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.fixture
def exactly(monkeypatch):
    """The accelerated backend computes in float32: half precision would amplify differences of rounding."""
    monkeypatch.setattr(Acceleration, "for_device", lambda *given, **named: Acceleration())


def as_read(self: SceneMatch, windows: Any, cloudy: torch.Tensor) -> torch.Tensor:
    """Return `change_of` with the sums in the order of `change`."""
    pairs = zip(windows, cloudy.numpy(), strict=True)
    return torch.from_numpy(np.stack([self.change(window, values) for window, values in pairs]))


@pytest.mark.parametrize("masks", [False, True])
def test_tiles_from_disk_are_the_tiles(stack, tiny, tmp_path, monkeypatch, predicted, exactly, write_date, masks):
    monkeypatch.setattr(SceneMatch, "change_of", as_read)
    if masks:  # the reference date is clear all over in some tiles, which need no network
        paths = []
        for number in range(3):
            mask = np.zeros((1, 70, 90), np.uint8)
            mask[:, 40:, 50 - 10 * number :] = 1
            name = f"mask_2022-0{number + 3}-10.tif"
            paths.append(write_date(tmp_path / "masks" / name, mask, bands=None, nodata=None))
        sources = with_masks(stack.sources, paths)
        stack = replace(stack, sources=tuple(sources))
    plain = clear_scene(stack, tiny, tmp_path / "plain.tif", OPTIONS, notice=quiet)
    assert not predicted  # a CPU goes the ordinary way
    on_a_gpu(monkeypatch, 1)
    other = clear_scene(stack, tiny, tmp_path / "other.tif", OPTIONS, notice=quiet)
    assert 0 < sum(predicted) < plain.tiles  # one tile has no data
    assert plain.pixels == other.pixels
    for one, two in zip(plain.files, other.files, strict=True):
        assert np.array_equal(read(one), read(two), equal_nan="uncertainty" in one)


def test_the_match_on_the_device_changes_a_count_at_most(stack, tiny, tmp_path, monkeypatch, predicted, exactly):
    plain = clear_scene(stack, tiny, tmp_path / "plain.tif", OPTIONS, notice=quiet)
    on_a_gpu(monkeypatch, 1)
    other = clear_scene(stack, tiny, tmp_path / "other.tif", OPTIONS, notice=quiet)
    assert predicted
    assert np.abs(read(plain.output).astype(int) - read(other.output)).max() <= 1


def test_batches_and_rooms_change_next_to_nothing(stack, tiny, tmp_path, monkeypatch, predicted):
    options = replace(OPTIONS, samples=2)
    whole = clear_scene(stack, tiny, tmp_path / "whole.tif", options, notice=quiet)
    made = []
    room = DigitalTiles.room
    monkeypatch.setattr(DigitalTiles, "room", lambda self, *given: made.append(1) or room(self, *given))
    on_a_gpu(monkeypatch, 3)
    other = clear_scene(stack, tiny, tmp_path / "other.tif", options, notice=quiet)
    assert max(predicted) == 3
    assert len(made) <= ahead.BATCHES_AHEAD + 1 < len(predicted) + 1  # places are used again
    # Products of larger matrices round differently, and bfloat16 where a CPU has it makes more of that.
    one, two = (read(report.output).astype(int) for report in (whole, other))
    assert np.abs(one - two).mean() < 5
    assert ((one == 0) == (two == 0)).all()


def test_too_large_a_batch_is_halved(stack, tiny, tmp_path, monkeypatch, predicted):
    compute = CloudRemover.compute

    def hungry(self: CloudRemover, inputs: TileInputs, *given: Any, **named: Any) -> Any:
        if len(inputs.cloudy) > 1:
            raise torch.OutOfMemoryError("too much")
        return compute(self, inputs, *given, **named)

    monkeypatch.setattr(CloudRemover, "compute", hungry)
    on_a_gpu(monkeypatch, 2)
    said: list[str] = []
    report = clear_scene(stack, tiny, tmp_path / "out.tif", OPTIONS, notice=said.append)
    assert set(predicted) == {1}
    assert any("batches of 1" in text for text in said)
    assert report.pixels["reconstructed"] > 0


@pytest.mark.parametrize(
    "coding",
    [
        ValueCoding("uint16", 1e-4, 0.0, 0.0),
        ValueCoding("uint16", 1e-4, -0.1, 65535.0),
        ValueCoding("uint16", 2.75e-5, -0.2, None),
    ],
)
def test_decoded_is_decode_to_the_bit(coding):
    numbers = np.arange(65536, dtype=np.uint16).reshape(1, 1, 1, 256, 256)
    cloudy, valid = decoded(torch.from_numpy(numbers.view(np.int16)), [coding])
    wanted, seen = decode(numbers, coding)
    assert np.array_equal(valid[0].numpy(), seen[0, 0])
    assert np.array_equal(cloudy.numpy(), np.where(seen, for_network(wanted), np.float32(0.5)))


def test_a_pixel_needs_all_its_bands():
    numbers = torch.full((1, 1, 3, 2, 2), 1000, dtype=torch.int16)
    numbers[0, 0, 1, 0, 1] = 0
    cloudy, valid = decoded(numbers, [ValueCoding("uint16", 1e-4, 0.0, 0.0)])
    assert valid[0, 0].tolist() == [[True, False], [True, True]]
    assert cloudy[0, 0, :, 0, 1].tolist() == [0.5] * 3


def test_the_change_of_many_windows_is_the_change():
    generator = np.random.default_rng(0)
    coefficients = (0.1 * generator.standard_normal((3, 5, 4, 7, 9))).astype(np.float32)
    coefficients[1] = 0
    match = SceneMatch(coefficients, generator.random(4).astype(np.float32), 44)
    windows = [Window(0, 0, 100, 70), Window(133, 201, 100, 70), Window(290, 330, 100, 70)]
    cloudy = generator.random((3, 3, 4, 100, 70), dtype=np.float32)
    found = match.change_of(windows, torch.from_numpy(cloudy)).numpy()
    for index, window in enumerate(windows):
        assert np.abs(found[index] - match.change(window, cloudy[index])).max() < 1e-6
        assert np.abs(found[index]).max() > 0.01
        assert not found[index, 1].any()


def test_what_cannot_go_as_it_is_goes_the_ordinary_way(stack, tiny, paths, tmp_path, write_date):
    size = (32, 32)

    def can(stack: GeoStack, size: tuple[int, int] = size) -> bool:
        return can_be_digital(stack, tiny, SharedBlocks(stack), size)

    assert can(stack)
    assert not can(stack, (33, 32))  # would have to be padded
    assert not can(replace(stack, bands=stack.bands[::-1]))
    moved = write_date(tmp_path / "S2_2022-07-10.tif", dated(1), transform=(10.0, 0.0, 600035.0, 0.0, -10.0, 5100000.0))
    warped = open_sources([moved], notice=quiet)
    assert not can(replace(stack, sources=(*stack.sources, *warped)))
    floats = write_date(tmp_path / "S2_2022-08-10.tif", (dated(1) / 1e4).astype(np.float32))
    assert not can(replace(stack, sources=(*stack.sources, *open_sources([floats], notice=quiet))))


def test_places_apart_from_each_other(stack, tiny):
    """What is computed of some places of a room lands in these places, and the others stay as they are."""
    remover = CloudRemover(Checkpoint(tiny.model, tiny.config), device=CPU)
    seen: dict[str, torch.Tensor] = {}

    def compute(inputs: TileInputs, windows: Any, *, steps: int, seed: int, **given: Any) -> Any:
        seen.update(vars(inputs))
        noise = remover.noise_field(seed, steps).windows(windows, channels=4, draw=0)
        image = inputs.cloudy[:, 0] + noise
        return RawTiles(image, torch.zeros_like(image), inputs.cloud)

    remover.compute = compute  # type: ignore[method-assign]
    channels = Channels(4, (), False)
    maps = np.full((3, 5, 4, 2, 2), 0.1, np.float32)
    match = SceneMatch(maps, np.zeros(4, np.float32), 50)
    tiles = DigitalTiles(
        stack, remover, SharedBlocks(stack), channels, None, match, steps=1, resamplings=0, samples=1, seed=3
    )
    windows = plan_windows(70, 90, tile=32, overlap=8)[1:4]
    room = tiles.room(3, (32, 32))
    room.planes.fill_(-7)
    for slot, window in enumerate(windows):
        tiles.fill(room, slot, window)
    masks = np.random.default_rng(0).random((2, 32, 32)) > 0.5
    room.masks[0], room.masks[2] = [masks[0], None, None], [None, masks[1], None]
    tiles.predict(room, [0, 2], [windows[0], windows[2]])
    known = ~seen["cloud"].isnan()
    assert known.all(dim=(-2, -1)).tolist() == [[True, False, False], [False, True, False]]
    assert np.array_equal(seen["cloud"][0, 0].numpy(), masks[0])
    assert np.array_equal(seen["cloud"][1, 1].numpy(), masks[1])
    assert not seen["valid"].all()
    changed = (seen["change"] != 0).any(dim=2)
    assert torch.equal(changed, seen["valid"])  # what a date does not show is not matched
    for slot in (0, 2):
        window = windows[slot]
        cloudy, valid = (getattr(stack.read(window), name) for name in ("cloudy", "valid"))
        wanted = np.where(valid[0], for_network(cloudy[0]), np.float32(0.5))
        wanted = wanted + NoiseField(3, balanced=True).window(window, channels=4, draw=0).numpy()
        assert np.array_equal(room.planes[slot].numpy(), wanted)
        assert np.array_equal(tiles.valid(room, slot), valid)
        assert np.array_equal(tiles.reflectance(room, slot, 1), cloudy[1])
        assert tiles.any_data(room, slot)
    assert (room.planes[1] == -7).all()
    tiles.fill(room, 1, Window(0, 0, 32, 32))  # no date has data there
    assert not tiles.any_data(room, 1)


def test_a_place_is_not_used_again_before_what_lies_in_it_was_taken():
    windows = plan_windows(64, 640, tile=32, overlap=0)
    places: list[np.ndarray] = []

    def room() -> np.ndarray:
        places.append(np.zeros(4))
        return places[-1]

    def read(place: Any, slot: int, window: Window) -> int:
        place[slot] = window.col + 1000 * window.row
        return slot

    found = []
    for place, slot in made_ahead(
        windows, 4, readers=3, device=CPU, read=read, work=lambda place, slots: [(place, s) for s in slots], room=room
    ):
        found.append(place[slot])
    assert found == [window.col + 1000 * window.row for window in windows]
    assert len(places) == ahead.BATCHES_AHEAD + 1


def test_what_goes_wrong_in_reading_or_working_arrives():
    windows = plan_windows(32, 320, tile=32, overlap=0)

    def broken(place: Any, slot: int, window: Window) -> int:
        if window.col == 96:
            raise ValueError("a bad block")
        return slot

    before = threading.active_count()
    with pytest.raises(ValueError, match="a bad block"):
        list(made_ahead(windows, 2, readers=2, device=CPU, read=broken, work=lambda place, slots: list(slots)))
    assert threading.active_count() == before


def test_rows_taken_from_places_are_the_rows():
    height, width, overlap = 100, 60, 8
    windows = plan_windows(height, width, tile=32, overlap=overlap)
    starts = sorted({window.row for window in windows})
    generator = np.random.default_rng(0)
    tiles = {window: generator.random((3, 32, 32), dtype=np.float32) for window in windows}

    def taken(places: int) -> list[np.ndarray]:
        blend = RowBlend(3, height=height, width=width, rows=32, top=0, overlap=overlap, places=places)
        rows: list[np.ndarray] = []
        kept = np.empty(0)
        for first, after in zip(starts, [*starts[1:], height], strict=True):
            for window in windows:
                if window.row == first:
                    blend.add(window, tiles[window])
            rows.append(blend.take(after - first))
            if places and len(rows) > 1:  # what was taken before is still there, until the place's next turn
                assert np.array_equal(rows[-2], kept)
            kept = rows[-1].copy()
        return rows

    fresh, reused = taken(0), taken(2)
    assert np.array_equal(fresh[-1], reused[-1])
    assert np.array_equal(fresh[-2], reused[-2])
    assert np.shares_memory(reused[-1], reused[-3])
    assert not np.shares_memory(reused[-1], reused[-2])
    assert not any(np.shares_memory(fresh[-1], other) for other in fresh[:-1])


def test_work_goes_on_where_it_was_stopped(stack, tiny, tmp_path, monkeypatch, predicted, exactly):
    on_a_gpu(monkeypatch, 1)
    whole = clear_scene(stack, tiny, tmp_path / "whole.tif", OPTIONS, notice=quiet)
    tiles = sum(predicted)
    predicted.clear()

    def stop(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        clear_scene(stack, tiny, tmp_path / "again.tif", OPTIONS, notice=quiet, progress=stop)
    said: list[str] = []
    again = clear_scene(stack, tiny, tmp_path / "again.tif", OPTIONS, notice=said.append)
    assert any("going on" in text for text in said)
    assert sum(predicted) <= tiles + ahead.WORKERS
    for one, two in zip(whole.files, again.files, strict=True):
        assert np.array_equal(read(one), read(two), equal_nan="uncertainty" in one)
