"""`sader mask`: classes of every date, equal to `CloudRemover.classify`, with colours, STAC and safe writing."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import sader
from sader.cli.main import main
from sader.errors import ConfigError, OutputError
from sader.geo.classes import LEGEND, classified
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.remove import open_files
from sader.geo.scene.options import SceneOptions
from sader.geo.scene.run import scene_remover
from sader.inference.tiling import Window
from sader.model.heads import MASK_CLASSES

rasterio = pytest.importorskip("rasterio")
pystac = pytest.importorskip("pystac")
DAYS = ("2022-03-10", "2022-04-10")
SIZE = (50, 60)


@pytest.fixture(scope="module")
def images(tmp_path_factory, write_date, land) -> list[Path]:
    """Two dates, each with a bright cloud; the first has a nodata corner."""
    folder, found = tmp_path_factory.mktemp("images"), []
    for number, day in enumerate(DAYS):
        counts = land(number, size=SIZE)
        counts[:, 10:30, 25 * number : 25 * number + 20] = 7000
        if number == 0:
            counts[:, 40:, 50:] = 0
        found.append(write_date(folder / f"S2_{day}.tif", counts))
    return found


@pytest.fixture(scope="module")
def remover(tiny):
    return tiny.with_options(tile=64, overlap=16)


@pytest.fixture(scope="module")
def written(tmp_path_factory, images, remover) -> Path:
    out = tmp_path_factory.mktemp("out") / "masks"
    report = sader.classify_files(remover, images, out)
    assert report.dates == tuple(path.name for path in images)
    assert [round(sum(one.values()), 2) for one in report.shares] == [1.0, 1.0]
    return out


def read(path: Path) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


def reflectance(images: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.stack([read(path) for path in images])
    return (counts * 1e-4).astype(np.float32), (counts != 0).all(axis=1)


def test_classes_are_those_of_classify(written, images, remover):
    cloudy, valid = reflectance(images)
    expected = remover.classify(cloudy, valid=valid)
    for date, path in enumerate(images):
        classes, percent = read(written / f"{path.stem}_mask.tif"), read(written / f"{path.stem}_probability.tif")
        there = valid[date]
        assert (classes[0][there] == expected[date].argmax(axis=0)[there]).all()
        assert (percent[:, there] == np.rint(100 * expected[date][:, there])).all()
        assert (classes[0][~there] == 255).all()
        assert (percent[:, ~there] == 255).all()
    assert (~valid).any()


def test_rasters_have_colours_and_names(written, images):
    with rasterio.open(written / f"{images[0].stem}_mask.tif") as dataset:
        assert dataset.dtypes == ("uint8",)
        assert dataset.nodata == 255
        assert [dataset.colormap(1)[code] for code in range(6)] == [colour for _, colour in LEGEND]
        assert dataset.tags()["SADER_CLASSES"].startswith("0 clear land, 1 thick cloud")
        assert dataset.tags()["ACQUISITION_DATE"].startswith(DAYS[0])
    names = (written / f"{images[0].stem}_mask.tif.aux.xml").read_text()
    assert all(f"<Category>{name}</Category>" in names for name, _ in LEGEND)
    with rasterio.open(written / f"{images[0].stem}_probability.tif") as dataset:
        assert dataset.descriptions == tuple(f"{name} (%)" for name, _ in LEGEND)
        assert dataset.nodata == 255
    assert len(LEGEND) == len(MASK_CLASSES)


def test_items_are_valid_and_relative(written, images):
    pytest.importorskip("jsonschema")
    from pystac.validation.stac_validator import JsonSchemaSTACValidator

    item = json.loads((written / f"{images[0].stem}_mask.json").read_text())
    JsonSchemaSTACValidator().validate_core(item, pystac.STACObjectType.ITEM, "1.1.0")
    classes = item["assets"]["data"]["classification:classes"]
    assert [one["value"] for one in classes] == [0, 1, 2, 3, 4, 5, 255]
    assert classes[2]["name"] == "thin_cloud_or_haze"
    assert classes[-1]["nodata"]
    assert any("classification" in one for one in item["stac_extensions"])
    assert item["assets"]["probability"]["href"] == f"./{images[0].stem}_probability.tif"
    assert item["properties"]["datetime"].startswith(DAYS[0])
    collection = json.loads((written / "collection.json").read_text())
    assert [link["href"] for link in collection["links"] if link["rel"] == "item"] == [
        f"./{path.stem}_mask.json" for path in images
    ]
    assert collection["description"].startswith("cloud masks of 2 dates")


def test_classes_are_recognised_as_masks(written, images):
    sources = with_masks(open_sources([str(path) for path in images]), str(written))
    for source, path in zip(sources, images, strict=True):
        mask = source.read_mask(Window(0, 0, *SIZE), grid=source.grid)
        assert mask is not None
        assert (mask == np.isin(read(written / f"{path.stem}_mask.tif")[0], (1, 2, 3, 255))).all()


def test_existing_files_are_refused(written, images, remover):
    before = (written / f"{images[0].stem}_mask.tif").stat().st_mtime_ns
    with pytest.raises(OutputError, match="Use --overwrite to replace it"):
        sader.classify_files(remover, images, written)
    assert (written / f"{images[0].stem}_mask.tif").stat().st_mtime_ns == before


def test_a_file_takes_one_date(tmp_path, images, remover):
    with pytest.raises(OutputError, match="for 2 dates; expected a folder"):
        sader.classify_files(remover, images, tmp_path / "mask.tif")
    with pytest.raises(OutputError, match="one of the inputs"):
        sader.classify_files(remover, images[:1], images[0], overwrite=True)


def test_a_failed_run_leaves_nothing(tmp_path, images, remover, monkeypatch):
    def stop(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sader.geo.classes.make_cog", stop)
    with pytest.raises(KeyboardInterrupt):
        sader.classify_files(remover, images, tmp_path / "masks")
    assert list((tmp_path / "masks").iterdir()) == []


def test_files_of_a_killed_run_are_replaced(tmp_path, images, remover):
    out = tmp_path / "mask.tif"
    out.write_bytes(b"of a run that was killed while it published")
    work = tmp_path / ".mask.tif.sader"
    work.mkdir()
    (work / "lock").write_text("sader work folder\n")
    (work / "mask-0.rows").write_bytes(b"")
    sader.classify_files(remover, images[:1], out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mask.json", "mask.tif", "mask.tif.aux.xml", "mask_probability.tif",
    ]  # fmt: skip
    assert read(out).shape == (1, *SIZE)


def test_tiles_are_joined_in_the_middle_of_overlaps():
    class Marked:
        """Classifies every pixel of a tile by the tile's number."""

        tile_size, turn, calls = 64, nullcontext(), 0
        options = sader.RemoverOptions(tile=64, overlap=16)

        def classify(self, cloudy, *, valid, bands):
            found = np.zeros((len(cloudy), 6, *valid.shape[1:]), np.float32)
            found[:, self.calls % 6] = 1
            self.calls += 1
            return found

    def land_of(window):
        shape = (1, window.height, window.width)
        return np.full((1, *shape), 0.1, np.float32), np.ones(shape, bool)

    classes, ticks = np.full((1, 64, 150), 255, np.uint8), []
    count = np.zeros(classes.shape, int)
    for window, ours, percent in classified(Marked(), (64, 150), ("B02",), land_of, lambda *tick: ticks.append(tick)):
        classes[:, *window.slices] = ours
        count[:, *window.slices] += 1
        assert percent.shape == (1, 6, window.height, window.width)
    assert (count == 1).all()
    # Tiles start at columns 0, 48 and 86: they share 48 to 64 and 86 to 112.
    assert np.flatnonzero(np.diff(classes[0, 0])).tolist() == [55, 98]
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def test_tiles_agree_with_the_whole(remover, land):
    counts = np.stack([land(number, size=(64, 160)) for number in range(2)])
    counts[0, :, 10:50, 40:110] = 7000  # across the joints of the tiles
    cloudy = (counts * 1e-4).astype(np.float32)
    whole = remover.classify(cloudy)
    percent = np.empty(whole.shape, np.float32)
    valid = np.ones((2, 64, 160), bool)
    tiled = remover.with_options(tile=96, overlap=48)
    for window, _, part in classified(
        tiled, (64, 160), tiled.bands, lambda one: (cloudy[..., *one.slices], valid[:, *one.slices])
    ):
        percent[..., *window.slices] = part
    hidden, expected = percent[:, 1:4].sum(axis=1) >= 50, whole[:, 1:4].sum(axis=1) >= 0.5
    assert expected[0, 20:40, 50:100].mean() > 0.5
    assert (hidden == expected).mean() > 0.95


def test_a_full_disk_is_named(disk, images, remover):
    with pytest.raises(OutputError, match="disk is full"):
        sader.classify_files(remover, images, disk.folder / "masks", progress=lambda done, total: disk.fill())
    disk.free()
    assert sader.classify_files(remover, images, disk.folder / "masks").tiles == 1


def test_xarray_gives_the_classes_of_the_files(written, images, remover):
    xarray = pytest.importorskip("xarray")
    counts = np.stack([read(path) for path in images])
    attrs = {"scale_factor": 1e-4, "add_offset": 0.0, "_FillValue": 0, "crs": "EPSG:32632"}
    cube = xarray.DataArray(
        counts, dims=("time", "band", "y", "x"), coords={"band": ["B02", "B03", "B04", "B08"]}, attrs=attrs
    )
    found = sader.classify_xarray(remover, cube)
    for date, path in enumerate(images):
        assert (found.classes[date].values == read(written / f"{path.stem}_mask.tif")[0]).all()
        assert (found.probability[date].values == read(written / f"{path.stem}_probability.tif")).all()
    assert found.classes.attrs["flag_meanings"].split()[1] == "thick_cloud"


def test_the_command_takes_one_image(tmp_path, images, capsys):
    out = tmp_path / "one.tif"
    with pytest.raises(SystemExit) as ended:
        main(["mask", str(images[1]), "-o", str(out), "--device", "cpu", "--json"])
    assert not ended.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == [str(tmp_path / name) for name in ("one.tif", "one_probability.tif", "one.json")]
    assert (read(out) != 255).all()


def test_a_zarr_store_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["mask", "cube.zarr"])
    assert "sader.classify_xarray" in capsys.readouterr().err


def test_saved_masks_are_those_that_were_used(tmp_path, images, tiny):
    given = []
    for path in images:
        hidden = (read(path)[:1] == 7000).astype(np.uint8)
        with rasterio.open(path) as dataset:
            profile = dataset.profile | {"count": 1, "dtype": "uint8", "nodata": None}
        given.append(tmp_path / f"{path.stem}_mask.tif")
        with rasterio.open(given[-1], "w", **profile) as dataset:
            dataset.write(hidden)
    out = tmp_path / "clear.tif"
    report = sader.remove_files(tiny, images, out, mask=given, save_masks=True)
    assert str(tmp_path / "clear_masks.tif") in report.files
    with rasterio.open(tmp_path / "clear_masks.tif") as dataset:
        masks = dataset.read()
        assert dataset.descriptions == tuple(path.name for path in images)
    _, valid = reflectance(images)
    expected = np.where(valid, np.stack([read(path)[0] for path in given]), 255)
    assert (masks == expected).all()


def test_haze_and_head_reach_the_remover(images, tiny):
    _, options = open_files(tiny, images, lambda text: None, mask="head", haze="keep")
    made = scene_remover(tiny, options).options
    assert (made.masks, made.haze) == ("head", "keep")
    with pytest.raises(ConfigError, match="haze is 'some'"):
        scene_remover(tiny, SceneOptions(haze="some"))
