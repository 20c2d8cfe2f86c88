"""`clear_scene`: what the written file promises, and that it does not depend on how the work was done."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sader.checkpoint import Checkpoint
from sader.errors import ConfigError, DataError, OutputError
from sader.geo.align import build_stack
from sader.geo.grid import Grid
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.run import choose_reference, clear_scene
from sader.geo.scene.source import StackScene, read_overview
from sader.inference.remover import CloudRemover
from sader.inference.scene import ScenePlan, compute_blank_tiles, predict_windows
from sader.inference.values import NODATA, OBSERVED, RECONSTRUCTED

rasterio = pytest.importorskip("rasterio")
CLOUD = (slice(10, 40), slice(20, 60))


def quiet(text: str) -> None:
    """Take a notice and do nothing with it."""


def stack_of(paths: list[Any], remover: CloudRemover, mask: Any = None, **given: Any) -> Any:
    sources = with_masks(open_sources(paths, notice=quiet, **given), mask, notice=quiet)
    return build_stack(sources, remover.config.network, notice=quiet)


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.fixture
def dates(tmp_path, write_date, land):
    """Three dates of one place; the first has a bright cloud, the second a hole, a corner is missing everywhere."""
    arrays = [land(number) for number in range(3)]
    arrays[0][:, *CLOUD] = 9000
    arrays[1][:, 30:50, 60:80] = 0
    for array in arrays:
        array[:, :6, :9] = 0
    paths = [
        write_date(tmp_path / f"S2_2022-0{number + 3}-10.tif", array, scale=1e-4) for number, array in enumerate(arrays)
    ]
    mask = np.zeros((1, 70, 90), np.uint8)
    mask[0, *CLOUD] = 1
    masks = [write_date(tmp_path / "masks" / "m0.tif", mask, bands=None, nodata=None)]
    masks += [write_date(tmp_path / "masks" / f"m{n}.tif", mask * 0, bands=None, nodata=None) for n in (1, 2)]
    return paths, arrays, masks


def test_the_file_is_a_cog_like_the_input(tmp_path, dates, tiny):
    cog_validate = pytest.importorskip("rio_cogeo").cog_validate
    paths, arrays, masks = dates
    stack = stack_of(paths, tiny, mask=masks)
    out = tmp_path / "out" / "clear.tif"
    report = clear_scene(stack, tiny, out, SceneOptions(reference=0, seed=3), notice=quiet)
    valid, errors, warnings = cog_validate(out, strict=True)
    assert (valid, errors, warnings) == (True, [], [])
    with rasterio.open(out) as made, rasterio.open(paths[0]) as first:
        for name in ("crs", "transform", "dtypes", "nodata", "scales", "offsets", "descriptions", "shape"):
            assert getattr(made, name) == getattr(first, name), name
        tags = made.tags()
        assert tags["SADER_MODEL"] == "tiny"
        assert tags["SADER_SEED"] == "3"
        assert tags["SADER_STEPS"] == "1"
        assert tags["SADER_REFERENCE"] == paths[0].name
        assert all(path.name in tags["SADER_INPUTS"] for path in paths)
        assert tags["ACQUISITION_DATE"].startswith("2022-03-10")
        numbers = made.read()
    hidden = np.zeros((70, 90), bool)
    hidden[CLOUD] = True
    nothing = np.zeros((70, 90), bool)
    nothing[:6, :9] = True
    np.testing.assert_array_equal(numbers[:, ~hidden], arrays[0][:, ~hidden], "observed pixels keep their bits")
    assert (numbers[:, nothing] == 0).all(), "nodata everywhere stays nodata"
    assert (numbers[:, ~nothing] > 0).all(), "a result must not become nodata"
    assert (np.abs(numbers[:, hidden].astype(int) - 9000) > 1000).any(), "the cloud is still there"
    assert report.pixels == {"nodata": 54, "observed": 70 * 90 - 54 - hidden.sum(), "reconstructed": hidden.sum()}
    assert [p.name for p in out.parent.iterdir()] == ["clear.tif"], "nothing but the output is left"


def test_a_large_scene_has_overviews(tmp_path, tiny, write_date, land):
    pytest.importorskip("rio_cogeo")
    paths = [write_date(tmp_path / f"{n}.tif", land(n, size=(40, 1100))) for n in range(2)]
    masks = [write_date(tmp_path / f"m{n}.tif", np.zeros((1, 40, 1100), np.uint8), bands=None) for n in range(2)]
    out = tmp_path / "clear.tif"
    clear_scene(stack_of(paths, tiny, mask=masks), tiny, out, SceneOptions(reference=0), notice=quiet)
    with rasterio.open(out) as made:
        assert made.overviews(1) == [2, 4]


def test_the_result_is_that_of_the_array_interface(tmp_path, dates, tiny):
    """The same tiles, noise and blend as `predict`; one tile, so that no matching of the scene comes in."""
    paths, arrays, masks = dates
    whole = retile(tiny, tile=96, overlap=8)
    out = tmp_path / "clear.tif"
    clear_scene(stack_of(paths, whole, mask=masks), whole, out, SceneOptions(reference=0, seed=5), notice=quiet)
    cloudy = np.stack(arrays) * np.float32(1e-4)
    mask = np.zeros((3, 70, 90), bool)
    mask[0, *CLOUD] = True
    expected = whole.predict(
        cloudy, reference=0, cloud_mask=mask, valid=np.stack([(a > 0).all(axis=0) for a in arrays]), seed=5
    )
    numbers = read(out)
    seen = np.isfinite(expected.clear)
    np.testing.assert_array_equal(numbers > 0, seen)
    assert np.abs(numbers[seen] * 1e-4 - expected.clear[seen]).max() < 1.01e-4


def test_files_and_arrays_agree_on_a_scene_of_several_tiles(tmp_path, dates, tiny):
    """Both bring the dates into one light; a small scene is its own look, so they differ by rounding only."""
    paths, arrays, masks = dates
    out = tmp_path / "clear.tif"
    clear_scene(stack_of(paths, tiny, mask=masks), tiny, out, SceneOptions(reference=0, seed=5), notice=quiet)
    mask = np.zeros((3, 70, 90), bool)
    mask[0, *CLOUD] = True
    valid = np.stack([(a > 0).all(axis=0) for a in arrays])
    expected = tiny.predict(np.stack(arrays) * np.float32(1e-4), reference=0, cloud_mask=mask, valid=valid, seed=5)
    seen = np.isfinite(expected.clear)
    assert np.abs(read(out)[seen] * 1e-4 - expected.clear[seen]).max() < 1.01e-4


def test_layers_beside_the_output(tmp_path, dates, tiny):
    paths, _arrays, masks = dates
    options = SceneOptions(
        reference=0, uncertainty=True, count=True, provenance=True, source_date=True, samples=2, steps=2
    )
    report = clear_scene(stack_of(paths, tiny, mask=masks), tiny, tmp_path / "o" / "c.tif", options, notice=quiet)
    names = ["c.tif", "c_uncertainty.tif", "c_count.tif", "c_provenance.tif", "c_source_date.tif"]
    assert [os.path.basename(path) for path in report.files] == names
    count, provenance, spread = (read(tmp_path / "o" / f"c_{n}.tif") for n in ("count", "provenance", "uncertainty"))
    assert (count[0, :6, :9] == 255).all(), "outside all dates, which is not the same as hidden on all dates"
    assert (count[0, *CLOUD][:20] == 2).all(), "the cloudy date does not count"
    assert count[0, 45, 70] == 2, "the hole of the second date does not count"
    assert count[0, 65, 5] == 3
    assert (provenance[0, :6, :9] == NODATA).all()
    assert (provenance[0, *CLOUD] == RECONSTRUCTED).all()
    assert provenance[0, 65, 5] == OBSERVED
    source = read(tmp_path / "o" / "c_source_date.tif")
    assert (source[0, :6, :9] == NODATA).all()
    assert (source[0, provenance[0] == OBSERVED] == 1).all()
    assert np.isin(source[0, *CLOUD], [2, 3, 255]).all()
    assert np.isnan(spread[:, :6, :9]).all()
    assert (spread[:, 60:, :] == 0).all(), "what was observed is certain"
    assert (spread[:, *CLOUD] > 0).mean() > 0.9


def test_a_single_pixel_that_no_date_shows_is_not_worth_a_note(tmp_path, dates, tiny, write_date):
    paths, _, masks = dates
    mask = np.zeros((1, 70, 90), np.uint8)
    mask[0, 15, 25] = 1
    masks = [masks[0], *(write_date(tmp_path / f"other{n}.tif", mask, bands=None, nodata=None) for n in (1, 2))]
    said: list[str] = []
    clear_scene(
        stack_of(paths, tiny, mask=masks), tiny, tmp_path / "a.tif", SceneOptions(reference=0), notice=said.append
    )
    assert not any("no date shows" in text for text in said)


def test_a_wholly_hidden_reference_is_reported(tmp_path, dates, tiny, write_date):
    paths, _, masks = dates
    everything = write_date(tmp_path / "all.tif", np.ones((1, 70, 90), np.uint8), bands=None, nodata=None)
    stack, said = stack_of(paths, tiny, mask=[everything, *masks[1:]]), []
    clear_scene(stack, tiny, tmp_path / "a.tif", SceneOptions(reference=0), notice=said.append)
    assert any(text.startswith("clouds hide all of S2_2022-03-10.tif") for text in said), said


def test_pixels_that_no_date_shows_are_reported_and_can_be_left_out(tmp_path, dates, tiny, write_date):
    paths, _, masks = dates
    mask = np.zeros((1, 70, 90), np.uint8)
    mask[0, 10:40, 20:35] = 1
    masks = [masks[0], *(write_date(tmp_path / f"other{n}.tif", mask, bands=None, nodata=None) for n in (1, 2))]
    stack, said = stack_of(paths, tiny, mask=masks), []
    clear_scene(stack, tiny, tmp_path / "a.tif", SceneOptions(reference=0), notice=said.append)
    assert any("no date shows" in text and "--min-count 1" in text for text in said)
    options = SceneOptions(reference=0, min_count=1, count=True, provenance=True, source_date=True)
    said.clear()
    report = clear_scene(stack, tiny, tmp_path / "b.tif", options, notice=said.append)
    assert not said
    filled, left_out, count = (read(tmp_path / f"{name}.tif") for name in ("a", "b", "b_count"))
    unseen = count[0] == 0
    np.testing.assert_array_equal(unseen[10:40, 20:35], True)
    assert unseen.sum() == 30 * 15
    np.testing.assert_array_equal(left_out[:, ~unseen], filled[:, ~unseen])
    assert (left_out[:, unseen] == 0).all()
    assert (filled[:, unseen] > 0).all()
    assert report.pixels["nodata"] == 54 + unseen.sum()
    for name in ("provenance", "source_date"):
        assert (read(tmp_path / f"b_{name}.tif")[0, unseen] == NODATA).all()


def test_uncertainty_alone_means_four_samples():
    assert SceneOptions(uncertainty=True).sample_count == 4
    assert SceneOptions(uncertainty=True, samples=2).sample_count == 2
    assert SceneOptions().sample_count == 1


def retile(remover: CloudRemover, **changes: Any) -> CloudRemover:
    made = Checkpoint(remover.denoiser, remover.config, remover.card)
    return CloudRemover(made, device="cpu", options=replace(remover.options, **changes))


def test_batch_size_changes_no_bit(tmp_path, dates, tiny):
    paths, _, _ = dates
    results = []
    for size in (1, 3):
        out = tmp_path / f"clear{size}.tif"
        clear_scene(stack_of(paths, tiny), tiny, out, SceneOptions(reference=0, batch_size=size), notice=quiet)
        results.append(read(out))
    np.testing.assert_array_equal(*results)


def test_own_masks_may_be_made_stricter_or_wider(tmp_path, dates, tiny):
    paths, _, _ = dates
    stack = stack_of(paths, tiny)  # no masks given: the model finds the clouds itself

    def rebuilt(name: str, **more: Any) -> int:
        options = SceneOptions(reference=0, provenance=True, tile=96, **more)
        return clear_scene(stack, tiny, tmp_path / f"{name}.tif", options, notice=quiet).pixels["reconstructed"]

    usual = rebuilt("usual", cloud_threshold=0.5, mask_growth=1)
    strict = rebuilt("strict", cloud_threshold=0.999999, mask_growth=0)
    assert strict <= usual <= rebuilt("wide", mask_growth=9)
    assert strict < rebuilt("all", cloud_threshold=1e-6)
    for wrong in ({"cloud_threshold": 0.0}, {"cloud_threshold": 1.0}, {"mask_growth": -1}, {"mask_growth": 1000}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            rebuilt("wrong", **wrong)


def test_reference_none_is_a_new_image(tmp_path, dates, tiny):
    paths, arrays, masks = dates
    report = clear_scene(
        stack_of(paths, tiny, mask=masks), tiny, tmp_path / "c.tif", SceneOptions(reference="none"), notice=quiet
    )
    assert report.reference is None
    assert report.pixels["observed"] == 0
    assert (read(tmp_path / "c.tif")[:, 60:, 60:] != arrays[0][:, 60:, 60:]).mean() > 0.5


@pytest.mark.parametrize(
    "wanted", ["S2_2022-04-10.tif", "S2_2022-04-10", "some/folder/S2_2022-04-10.tif", "2022-04-10", 1]
)
def test_reference_by_name_date_or_index(dates, tiny, wanted):
    paths, _, masks = dates
    stack = stack_of(paths, tiny, mask=masks)
    found = choose_reference(SceneOptions(reference=wanted), stack, read_overview(stack, tiny), quiet)
    assert paths[found].name == "S2_2022-04-10.tif"


def test_auto_takes_the_clearest(tmp_path, dates, tiny):
    paths, _, masks = dates
    report = clear_scene(stack_of(paths, tiny, mask=masks), tiny, tmp_path / "c.tif", notice=quiet)
    assert report.reference == paths[2].name, "the first is cloudy, the second has a hole"
    assert report.clear_share[2] == max(report.clear_share)


def test_unknown_references_are_refused(tmp_path, dates, tiny):
    paths, _, _ = dates
    stack = stack_of(paths, tiny)
    with pytest.raises(
        ConfigError, match=r"reference is '2023-01-01', which fits none of the dates: S2_2022-03-10.tif"
    ):
        clear_scene(stack, tiny, tmp_path / "c.tif", SceneOptions(reference="2023-01-01"), notice=quiet)
    with pytest.raises(ConfigError, match="reference is 3; there are 3 dates"):
        clear_scene(stack, tiny, tmp_path / "c.tif", SceneOptions(reference=3), notice=quiet)
    assert not (tmp_path / "c.tif").exists()


def test_clear_tiles_need_no_network(tmp_path, tiny, write_date, land, monkeypatch):
    """Where the reference's mask says that all is clear, every pixel is kept whatever the network would make."""
    paths = [write_date(tmp_path / f"{n}.tif", land(n)) for n in range(2)]
    mask = np.zeros((1, 70, 90), np.uint8)
    mask[0, :10, :10] = 1
    masks = [write_date(tmp_path / f"m{n}.tif", mask, bands=None, nodata=None) for n in range(2)]
    made: list[Any] = []
    work = CloudRemover.prepare

    def counted(self: CloudRemover, inputs: Any, windows: Any, **given: Any) -> Any:
        made.extend(windows)
        return work(self, inputs, windows, **given)

    monkeypatch.setattr(CloudRemover, "prepare", counted)
    out = tmp_path / "clear.tif"
    clear_scene(stack_of(paths, tiny, mask=masks), tiny, out, SceneOptions(reference=0), notice=quiet)
    assert [(window.row, window.col) for window in made] == [(0, 0)]
    numbers = read(out)
    np.testing.assert_array_equal(numbers[:, 10:], land(0)[:, 10:])


def test_another_grid_and_another_crs(tmp_path, dates, tiny, write_date):
    """Dates in another reference system are warped onto the first one's grid; the land stays where it is."""
    paths, arrays, _ = dates
    warp = pytest.importorskip("rasterio.warp")
    moved = tmp_path / "moved_2022-07-01.tif"
    with rasterio.open(paths[2]) as source:
        transform, width, height = warp.calculate_default_transform(
            source.crs, "EPSG:32633", source.width, source.height, *source.bounds
        )
        profile = source.profile | {"crs": "EPSG:32633", "transform": transform, "width": width, "height": height}
        with rasterio.open(moved, "w", **profile) as target:
            for number in range(1, 5):
                warp.reproject(
                    rasterio.band(source, number), rasterio.band(target, number), resampling=warp.Resampling.bilinear
                )
            target.descriptions = source.descriptions
            target.scales, target.offsets = source.scales, source.offsets
    stack = stack_of([paths[0], paths[1], moved], tiny)
    values, valid = stack.sources[2].read(stack.grid.whole, bands=stack.bands, grid=stack.grid)
    inside = np.s_[10:-10, 10:-10]
    truth = arrays[2][:, *inside] * 1e-4
    assert valid[inside].mean() > 0.98
    correlation = np.corrcoef(values[:, *inside].ravel(), truth.ravel())[0, 1]
    assert correlation > 0.95
    out = tmp_path / "clear.tif"
    clear_scene(stack, tiny, out, SceneOptions(reference=0), notice=quiet)
    with rasterio.open(out) as made:
        assert made.crs.to_epsg() == 32632
    texts: list[str] = []
    choose_reference(SceneOptions(reference=2), stack, read_overview(stack, tiny), texts.append)
    assert any("moved_2022-07-01.tif lies on another grid" in text for text in texts)


def test_partial_overlap_is_a_missing_date_there(tmp_path, dates, tiny, write_date, land):
    paths, _, _ = dates
    east = write_date(tmp_path / "east_2022-08-01.tif", land(4), transform=(10.0, 0.0, 600450.0, 0.0, -10.0, 5100000.0))
    stack = stack_of([paths[0], east], tiny)
    _, valid = stack.sources[1].read(stack.grid.whole, bands=stack.bands, grid=stack.grid)
    assert not valid[:, :45].any()
    assert valid[:, 45:].all()


def test_the_output_grid_may_be_chosen(tmp_path, dates, tiny, write_date, land):
    paths, _, _ = dates
    other = write_date(
        tmp_path / "other.tif", land(0, size=(20, 30)), transform=(20.0, 0.0, 600200.0, 0.0, -20.0, 5099800.0)
    )
    sources = open_sources(paths, notice=quiet)
    network = tiny.config.network
    assert build_stack(sources, network, grid=other, notice=quiet).grid.shape == (20, 30)
    degrees = build_stack(sources, network, grid="EPSG:4326", notice=quiet).grid
    assert degrees.crs == "EPSG:4326"
    assert 9 < degrees.bounds[0] < 11
    coarse = build_stack(sources, network, grid="EPSG:32632/30", notice=quiet).grid
    assert coarse.resolution == (30.0, 30.0)
    clear_scene(build_stack(sources, network, grid=other), tiny, tmp_path / "c.tif", notice=quiet)
    with rasterio.open(tmp_path / "c.tif") as made:
        assert (made.width, made.height, made.res) == (30, 20, (20.0, 20.0))
    for wrong, message in (("nowhere.tif", "no file and no reference system"), ("EPSG:1", "EPSG:1")):
        with pytest.raises(ConfigError, match=message):
            build_stack(sources, network, grid=wrong)


def test_zero_overlap_is_refused_or_left_out(tmp_path, dates, tiny, write_date, land):
    paths, _, _ = dates
    far = write_date(tmp_path / "far.tif", land(5), transform=(10.0, 0.0, 700000.0, 0.0, -10.0, 5100000.0))
    with pytest.raises(DataError, match=r"1 of 2 dates do not touch the output grid \[600000.*far.tif \[700000"):
        stack_of([paths[0], far], tiny)
    texts: list[str] = []
    stack = build_stack(open_sources([paths[0], paths[1], far]), tiny.config.network, notice=texts.append)
    assert len(stack.sources) == 2
    assert "far.tif does not touch the output grid and is left out." in texts


def test_values_stay_in_the_coding_of_the_reference(tmp_path, tiny, write_date, land):
    """One date is shifted by 1000 counts (baseline 04.00), one is not: both are read right."""
    old = write_date(tmp_path / "old_2021-05-01.tif", land(0), scale=1e-4)
    new = write_date(tmp_path / "new_2022-05-01.tif", land(1) + np.uint16(1000), scale=1e-4, offset=-0.1)
    masks = [write_date(tmp_path / f"m{n}.tif", np.zeros((1, 70, 90), np.uint8), bands=None) for n in range(2)]
    stack = stack_of([old, new], tiny, mask=masks)
    values, _ = stack.sources[1].read(stack.grid.whole, bands=stack.bands, grid=stack.grid)
    np.testing.assert_allclose(values, land(1) * 1e-4, atol=2e-6)
    for reference, offset, numbers in ((0, 0.0, land(0)), (1, -0.1, land(1) + 1000)):
        out = tmp_path / f"c{reference}.tif"
        clear_scene(stack, tiny, out, SceneOptions(reference=reference), notice=quiet)
        with rasterio.open(out) as made:
            assert made.offsets == (offset,) * 4
            np.testing.assert_array_equal(made.read(), numbers)


def test_memory_runs_out_and_the_batch_is_halved(dates, tiny, monkeypatch, caplog):
    paths, _, _ = dates
    scene = StackScene(stack_of(paths, tiny))
    plan = ScenePlan(
        shape=(70, 90),
        bands=scene.stack.bands,
        codings=scene.stack.codings,
        days=None,
        reference=None,
        match=None,
        tile=32,
        overlap=8,
    )

    def read(windows: Any) -> Any:
        return [scene.read(window) for window in windows]

    one_by_one = [predict_windows(plan, tiny, read, [window])[0] for window in plan.windows[:4]]
    sizes: list[int] = []
    work = CloudRemover.prepare

    def hungry(self: CloudRemover, inputs: Any, windows: Any, **given: Any) -> Any:
        sizes.append(len(windows))
        if len(windows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(self, inputs, windows, **given)

    monkeypatch.setattr(CloudRemover, "prepare", hungry)
    tiles = predict_windows(plan, tiny, read, plan.windows[:4])
    assert sizes == [4, 2, 1, 1, 1, 1]
    assert "out of memory on the device; continuing with batches of 2" in caplog.text
    assert all(torch.equal(one.planes, two.planes) for one, two in zip(one_by_one, tiles, strict=True))

    def starving(self: CloudRemover, inputs: Any, windows: Any, **given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CloudRemover, "prepare", starving)
    with pytest.raises(
        ConfigError, match=r"not enough memory for one tile of 32 pixels with 3 dates\. Use a smaller --tile"
    ):
        predict_windows(plan, tiny, read, plan.windows[:2])


@pytest.mark.parametrize("masked", [False, True])
def test_blank_tiles_are_of_the_kind_of_the_first_tiles(dates, tiny, masked):
    """A CUDA graph that is captured for the blank tiles is the one that the tiles of the scene need."""
    paths, _, masks = dates
    remover = tiny.with_options(tile=32, overlap=8, batch_size=2)
    scene = StackScene(stack_of(paths, remover, mask=masks) if masked else stack_of(paths, remover))
    plan = ScenePlan(
        scene.stack.grid.shape, scene.stack.bands, scene.stack.codings, None, None, None, tile=32, overlap=8
    )
    kinds: list[Any] = []
    work = remover.tile

    def tile(inputs: Any, noises: Any, **given: Any) -> Any:
        tensors = {name: value.shape for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
        kinds.append((inputs.known_masks, tensors, len(noises), given))
        return work(inputs, noises, **given)

    remover.__dict__["tile"] = tile
    compute_blank_tiles(plan, remover, scene)
    match = read_overview(scene.stack, remover).match(remover, 0, scene.stack.grid.shape)
    cloudy = [window for window in plan.windows if window.row in (0, 24) and window.col == 24]
    plan = replace(plan, reference=0, match=match, clouds=(0,))
    predict_windows(plan, remover, lambda windows: [scene.read(one) for one in windows], cloudy)
    assert len(kinds) == 2
    assert kinds[0] == kinds[1]
    assert kinds[0][0] == masked
    assert "change" in kinds[0][1]


def test_the_result_does_not_depend_on_the_number_of_threads(tmp_path, dates, tiny):
    paths, _, _ = dates
    stack, before = stack_of(paths[:2], tiny), torch.get_num_threads()
    for threads in (1, 3):
        clear_scene(stack, tiny, tmp_path / f"{threads}.tif", SceneOptions(threads=threads), notice=quiet)
    np.testing.assert_array_equal(read(tmp_path / "1.tif"), read(tmp_path / "3.tif"))
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="threads is 0; expected 1 to 1024"):
        SceneOptions(threads=0)


def test_an_existing_output_is_kept_unless_told(tmp_path, dates, tiny):
    paths, _, _ = dates
    out = tmp_path / "clear.tif"
    out.write_text("mine")
    with pytest.raises(OutputError, match=r"clear.tif exists. Use --overwrite"):
        clear_scene(stack_of(paths, tiny), tiny, out, notice=quiet)
    assert out.read_text() == "mine"
    (tmp_path / "other_count.tif").write_text("mine too")
    with pytest.raises(OutputError, match=r"other_count.tif exists"):
        clear_scene(stack_of(paths, tiny), tiny, tmp_path / "other.tif", SceneOptions(count=True), notice=quiet)
    clear_scene(stack_of(paths, tiny), tiny, out, SceneOptions(overwrite=True), notice=quiet)
    assert read(out).shape == (4, 70, 90)


def test_not_enough_room_is_said_before_the_work(tmp_path, dates, tiny, monkeypatch):
    paths, _, _ = dates
    usage = type("usage", (), {"free": 100_000})
    monkeypatch.setattr("sader.geo.scene.resume.shutil.disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"takes up to \d+\.\d MB for a while; 0\.1 MB are free"):
        clear_scene(stack_of(paths, tiny), tiny, tmp_path / "c.tif", notice=quiet)
    assert not list(tmp_path.glob(".*"))


def test_grids_know_when_they_are_the_same():
    grid = Grid("EPSG:32632", (10.0, 0.0, 600000.0, 0.0, -10.0, 5100000.0), 90, 70)
    assert grid.bounds == (600000.0, 5099300.0, 600900.0, 5100000.0)
    assert grid.same_as(replace(grid, transform=(10.0, 0.0, 600000.00001, 0.0, -10.0, 5100000.0)))
    assert not grid.same_as(replace(grid, transform=(10.0, 0.0, 600001.0, 0.0, -10.0, 5100000.0)))
    assert not grid.same_as(replace(grid, crs="EPSG:32633"))
    south_up = replace(grid, transform=(10.0, 0.0, 600000.0, 0.0, 10.0, 5099300.0))
    assert south_up.bounds == grid.bounds
    assert not grid.same_as(south_up)
    assert grid.coarser(20).shape == (4, 5)
