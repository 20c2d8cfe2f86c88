"""Files as the world has them: odd masks, alpha bands, borders without a nodata value, names, places and paths."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.bands import canonical, names_of_file
from sader.errors import BandError, DataError, OutputError, printable
from sader.geo.align import build_stack
from sader.geo.grid import Grid
from sader.geo.offset import check_counts, check_source
from sader.geo.read.geotiff import open_geotiff
from sader.geo.read.masks import with_masks
from sader.geo.read.sources import open_sources
from sader.geo.remove import choose_model
from sader.geo.scene.run import SceneOptions, choose_reference, clear_scene
from sader.geo.scene.source import read_overview
from sader.inference.tiling import Window

rasterio = pytest.importorskip("rasterio")
RGBN = ("B02", "B03", "B04", "B08")
PLACE = (10.0, 0.0, 600000.0, 0.0, -10.0, 5100000.0)
BESIDE = (10.0, 0.0, 600005.0, 0.0, -10.0, 5099995.0)
"""Half a pixel away from it."""


def quiet(text: str) -> None:
    """Take a notice and do nothing with it."""


def colours(*names: str) -> list[Any]:
    return [rasterio.enums.ColorInterp[name] for name in names]


def put_colours(path: Any, *names: str) -> None:
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = colours(*names)


# ------------------------------------------------------------------------------------------------ alpha and masks


@pytest.mark.parametrize("target", [PLACE, BESIDE])
@pytest.mark.filterwarnings("error")
def test_an_alpha_band_beside_four_bands_says_where_data_is(tmp_path, write_date, land, target):
    """GDAL's own masks know an alpha band in files of two and four bands only; this one is the fifth."""
    alpha = np.full((1, 70, 90), 65535, np.uint16)
    alpha[:, :20] = 0
    array = np.concatenate([land(0), alpha])
    array[:4, :20] = 4242  # what lies under it is no land
    path = write_date(tmp_path / "a.tif", array, bands=(*RGBN, "alpha"), nodata=None)
    put_colours(path, "gray", "undefined", "undefined", "undefined", "alpha")
    source, _ = open_geotiff(path)
    assert source.bands == RGBN
    grid = Grid("EPSG:32632", target, 90, 70)
    values, valid = source.read(grid.whole, bands=RGBN, grid=grid)
    assert not valid[:19].any()
    assert valid[20:68, :88].all()
    assert abs(values[:, 19:].max() - 0.4242) > 0.01


def test_a_band_that_its_file_calls_alpha_is_what_its_name_says(tmp_path, write_date, land):
    """Programs mark the fourth band of red, green, blue and near infrared as alpha."""
    array = land(0)
    named = write_date(tmp_path / "named.tif", array, bands=("red", "green", "blue", "nir"), photometric="RGB")
    plain = write_date(tmp_path / "plain.tif", array, bands=None, photometric="RGB", nodata=None)
    for path in (named, plain):
        put_colours(path, "red", "green", "blue", "alpha")
    rgbn = ("B04", "B03", "B02", "B08")
    for source in (open_geotiff(named)[0], open_geotiff(plain, bands=rgbn)[0]):
        assert source.bands == rgbn
        assert np.array_equal(source.read_numbers(source.grid.whole, bands=rgbn, grid=source.grid), array)
    assert open_geotiff(plain)[0].bands == rgbn[:3]


def test_a_named_band_called_alpha_is_warped_like_any_other(tmp_path, write_date, land):
    array = land(0)
    marked = write_date(tmp_path / "marked.tif", array, photometric="RGB")
    put_colours(marked, "red", "green", "blue", "alpha")
    plain = write_date(tmp_path / "plain.tif", array)
    grid = Grid("EPSG:32632", BESIDE, 90, 70)
    read = [open_geotiff(path)[0].read_numbers(grid.whole, bands=RGBN, grid=grid) for path in (marked, plain)]
    assert np.array_equal(*read)


@pytest.mark.parametrize("inside", [True, False])
def test_a_mask_in_the_file_or_beside_it(tmp_path, write_date, land, inside):
    array = land(0)
    array[:, :20] = 4242
    path = tmp_path / "a.tif"
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=inside):
        write_date(path, array, nodata=None)
        with rasterio.open(path, "r+") as dataset:
            dataset.write_mask(np.arange(70)[:, None].repeat(90, axis=1) >= 20)
    assert (tmp_path / "a.tif.msk").exists() is not inside
    source, _ = open_geotiff(path)
    for target in (PLACE, BESIDE):
        grid = Grid("EPSG:32632", target, 90, 70)
        _, valid = source.read(grid.whole, bands=RGBN, grid=grid)
        assert not valid[:19].any()
        assert valid[20:68, :88].all()


# ------------------------------------------------------------------------------------------------ values without words


def test_a_border_of_zeros_in_a_float_file_is_missing(tmp_path, write_date, land):
    array = (land(0) * 1e-4).astype(np.float32)
    array[:, :, :25] = 0
    source, notices = open_geotiff(write_date(tmp_path / "a.tif", array, nodata=None))
    assert source.coding.nodata == 0
    assert notices == ["a.tif names no nodata value: its pixels of 0 in every band are taken as missing."]
    _, valid = source.read(source.grid.whole, bands=RGBN, grid=source.grid)
    assert not valid[:, :25].any()
    assert valid[:, 25:].all()


def test_dark_water_cut_off_at_zero_is_not_missing(tmp_path, write_date, land):
    array = (land(0) * 1e-4).astype(np.float32)
    array[1:, :30] = 0  # something is left in the blue band only
    array[:, :2, :40] = 0
    source, notices = open_geotiff(write_date(tmp_path / "a.tif", array, nodata=None))
    assert np.isnan(source.coding.nodata)
    assert notices == []


def test_zeros_beside_another_nodata_value_are_pointed_out(tmp_path, write_date, land):
    array = land(0).astype(np.int16)
    array[:, :20] = 0
    source, notices = open_geotiff(write_date(tmp_path / "a.tif", array, nodata=-9999))
    assert source.coding.nodata == -9999
    assert "a.tif has pixels of 0 in every band, which count as data: its nodata value is -9999." in notices[0]
    assert "rio edit-info --nodata 0" in notices[0]


def test_a_nodata_value_that_nobody_named_is_hinted_at(tmp_path, write_date, land, tiny):
    array = land(0).astype(np.int16)
    array[:, :20] = -32768
    path = write_date(tmp_path / "a.tif", array, nodata=None)
    stack = build_stack(open_sources([path]), tiny.config.network, notice=quiet)
    with pytest.raises(ValueError, match=r"down to -3.2768.*rio edit-info --nodata VALUE FILE"):
        read_overview(stack, tiny)


def test_counts_of_landsat_are_pointed_out(tmp_path, write_date, land):
    array = np.rint((land(0) * 1e-4 + 0.2) / 2.75e-5).astype(np.uint16)
    source, _ = open_geotiff(write_date(tmp_path / "a.tif", array))
    warning = check_source(source)
    assert warning is not None
    assert "--scale 0.0000275 --offset -2000" in warning
    scaled, _ = open_geotiff(tmp_path / "a.tif", scale=2.75e-5, offset="-2000")
    values, _ = scaled.read(scaled.grid.whole, bands=RGBN, grid=scaled.grid)
    assert np.abs(values - land(0) * 1e-4).max() < 2e-5
    assert check_source(scaled) is None
    assert check_counts({"B02": np.array([np.nan] * 600 + [5000.0])}, offset=0.0) is None  # too few to say anything


def test_nothing_clear_in_any_date_is_said(tmp_path, write_date, land, tiny):
    path = write_date(tmp_path / "a.tif", 0)
    covered = write_date(tmp_path / "m.tif", np.ones((1, 70, 90), np.uint8), bands=None, nodata=None)
    stack = build_stack(with_masks(open_sources([path]), [covered]), tiny.config.network, notice=quiet)
    said: list[str] = []
    clear_scene(stack, tiny, tmp_path / "c.tif", SceneOptions(), notice=said.append)
    assert any("clouds hide 99% or more of every date" in text and "--scale" in text for text in said)
    said.clear()
    covered = write_date(tmp_path / "m2.tif", np.zeros((1, 70, 90), np.uint8), bands=None, nodata=None)
    stack = build_stack(with_masks(open_sources([path]), [covered]), tiny.config.network, notice=quiet)
    clear_scene(stack, tiny, tmp_path / "d.tif", SceneOptions(), notice=said.append)
    assert not any("clouds hide" in text for text in said)


def vrt_of(path: Any, parts: list[tuple[Any, int, str, str, float | None]]) -> Any:
    """Write a VRT whose bands are (file, band, type, name, nodata)."""
    text = '<VRTDataset rasterXSize="90" rasterYSize="70"><SRS>EPSG:32632</SRS>'
    text += "<GeoTransform>600000, 10, 0, 5100000, 0, -10</GeoTransform>"
    for number, (file, band, kind, name, nodata) in enumerate(parts, start=1):
        value = "" if nodata is None else f"<NoDataValue>{nodata}</NoDataValue>"
        text += (
            f'<VRTRasterBand dataType="{kind}" band="{number}"><Description>{name}</Description>{value}<SimpleSource>'
            f'<SourceFilename relativeToVRT="0">{file}</SourceFilename><SourceBand>{band}</SourceBand></SimpleSource>'
            "</VRTRasterBand>"
        )
    path.write_text(text + "</VRTDataset>")
    return path


def test_bands_stored_in_different_ways(tmp_path, write_date, land):
    """The first band's type and nodata value were taken for all."""
    image = write_date(tmp_path / "a.tif", 0)
    classes = write_date(tmp_path / "c.tif", np.full((1, 70, 90), 4, np.uint8), bands=None, nodata=255)
    bands = [(image, number, "UInt16", name, 0) for number, name in enumerate(RGBN, start=1)]
    first = vrt_of(tmp_path / "first.vrt", [(classes, 1, "Byte", "SCL", 255), *bands])
    source, _ = open_geotiff(first)
    assert (source.coding.dtype, source.coding.nodata) == ("uint16", 0)
    assert np.array_equal(source.read_numbers(source.grid.whole, bands=RGBN, grid=source.grid), land(0))
    mixed = vrt_of(tmp_path / "mixed.vrt", [*bands[:3], (image, 4, "Float32", "B08", -1)])
    with pytest.raises(
        DataError, match=r"mixed\.vrt stores its bands differently \(float32, nodata -1\.0; uint16, nod"
    ):
        open_geotiff(mixed)


# ------------------------------------------------------------------------------------------------ names of bands


def test_more_spellings_of_band_names():
    assert [canonical(text) for text in ("S2_B02", "S2A_B8A", "sentinel-2 B11", "R", "g", "N")] == [
        "B02", "B8A", "B11", "B04", "B03", "B08",
    ]  # fmt: skip
    assert canonical("SR_B5") is None  # Landsat's number 5 is near infrared, not a red edge


def test_numbers_of_four_bands_are_positions(tmp_path, write_date):
    """B1 to B4 are blue, green, red, near infrared with PlanetScope; read as Sentinel-2's they would all be wrong."""
    assert names_of_file(("B1", "B2", "B3", "B4")) is None
    assert names_of_file(("B01", "B02", "B03", "B04")) == ("B01", "B02", "B03", "B04")
    assert names_of_file(("B2", "B3", "B4", "B8")) == RGBN
    with pytest.raises(BandError, match=r"have no names but their numbers \(B1 \.\.\.\)"):
        open_geotiff(write_date(tmp_path / "a.tif", bands=("B1", "B2", "B3", "B4")))
    assert open_geotiff(tmp_path / "a.tif", bands=RGBN)[0].bands == RGBN


def test_files_with_more_bands_get_the_model_of_all_bands(tmp_path, write_date, land):
    said: list[str] = []
    path = write_date(tmp_path / "a.tif", land(0, bands=5), bands=(*RGBN, "B11"))
    assert choose_model(open_sources([path]), None, said.append) == "sader-s2-msi"
    assert len(said) == 1


# ------------------------------------------------------------------------------------------------ places


def test_a_transform_without_a_reference_system_is_kept(tmp_path, write_date, tiny):
    paths = [write_date(tmp_path / f"{n}.tif", n, crs=None) for n in range(2)]
    stack = build_stack(open_sources(paths), tiny.config.network, notice=quiet)
    clear_scene(stack, tiny, tmp_path / "c.tif", SceneOptions(), notice=quiet)
    with rasterio.open(tmp_path / "c.tif") as dataset:
        assert tuple(dataset.transform)[:6] == PLACE
        assert dataset.crs is None


def test_a_date_without_a_place_among_others_is_refused(tmp_path, write_date, tiny):
    """It used to be left out because it "does not touch the output grid"."""
    paths = [write_date(tmp_path / f"{n}.tif", n) for n in range(3)]
    write_date(paths[1], 1, crs=None, transform=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    with pytest.raises(DataError, match=r"1\.tif has no reference system \(CRS\) and the output grid has one \(0\.tif"):
        build_stack(open_sources(paths), tiny.config.network, notice=quiet)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("+proj=utm +zone=32 +datum=WGS84", "EPSG:32632"),
        ("EPSG:3035", "EPSG:3035"),
        ("+proj=utm +zone=32 +ellps=intl", None),  # PROJ's guess is ED50
        ("+proj=utm +zone=32 +ellps=GRS80", None),
        ("+proj=sinu +R=6371007.181", None),
    ],
)
def test_a_reference_system_without_a_code_gets_none(tmp_path, write_date, tiny, text, code):
    crs = rasterio.crs.CRS.from_user_input(text)
    path = write_date(tmp_path / "a.tif", 0, crs=crs)
    stack = build_stack(open_sources([path]), tiny.config.network, notice=quiet)
    assert (stack.grid.crs == code) if code else stack.grid.crs.startswith("PROJCS")
    clear_scene(stack, tiny, tmp_path / "c.tif", SceneOptions(), notice=quiet)
    with rasterio.open(path) as given, rasterio.open(tmp_path / "c.tif") as made:
        assert made.crs == given.crs


def test_ground_control_points_are_not_used_and_that_is_said(tmp_path, write_date):
    path = write_date(tmp_path / "a.tif", 0, crs=None, transform=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    point = rasterio.control.GroundControlPoint
    with rasterio.open(path, "r+") as dataset:
        corners = ((0, 0), (0, 90), (70, 0), (70, 90))
        points = [point(row=row, col=col, x=6e5 + 10 * col, y=5.1e6 - 10 * row) for row, col in corners]
        dataset.gcps = (points, rasterio.crs.CRS.from_epsg(32632))
    _, notices = open_geotiff(path)
    assert "a.tif has ground control points or RPCs instead of a place on the map" in notices[0]


# ------------------------------------------------------------------------------------------------ paths


def test_files_of_one_name_in_folders_of_dates(tmp_path, write_date, tiny):
    days = ("2022-03-10", "2022-05-13", "2022-10-20")
    paths = [write_date(tmp_path / day / "image.tif", n) for n, day in enumerate(days)]
    sources = open_sources(paths)
    assert [source.name for source in sources] == [f"{day}/image.tif" for day in days]
    assert [f"{source.date:%Y-%m-%d}" for source in sources if source.date] == list(days)
    stack = build_stack(sources, tiny.config.network, notice=quiet)
    overview = read_overview(stack, tiny)
    for wanted in (str(paths[1]), "2022-05-13", "2022-05-13/image.tif"):
        assert choose_reference(SceneOptions(reference=wanted), stack, overview, quiet) == 1


def test_one_of_several_files_of_one_name_lies_elsewhere(tmp_path, write_date, tiny):
    """Dates were left out by name: with the one elsewhere went all that are called alike."""
    paths = [write_date(tmp_path / folder / "image.tif", n) for n, folder in enumerate("abc")]
    write_date(paths[2], 2, transform=(10.0, 0.0, 900000.0, 0.0, -10.0, 5100000.0))
    said: list[str] = []
    stack = build_stack(open_sources(paths), tiny.config.network, notice=said.append)
    assert [source.name for source in stack.sources] == ["a/image.tif", "b/image.tif"]
    assert "c/image.tif does not touch the output grid and is left out." in said


def test_paths_that_only_gdal_knows(tmp_path, write_date, land):
    path = write_date(tmp_path / "S2_2022-03-10.tif", 0)
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(path, path.name)
    for text in (f"/vsizip/{archive}/{path.name}", f"zip://{archive}!{path.name}"):
        (source,) = open_sources([text])
        assert source.name == path.name
        assert f"{source.date:%Y%m%d}" == "20220310"
        assert np.array_equal(source.read_numbers(Window(0, 0, 70, 90), bands=RGBN, grid=source.grid), land(0))
    with pytest.raises(DataError, match=r"all\.zip is a zip archive.*/vsizip/.*/NAME\.tif"):
        open_sources([archive])
    with pytest.raises(DataError, match=r"cannot read /vsizip/.*nothing\.tif"):
        open_sources([f"/vsizip/{archive}/nothing.tif"])


# ------------------------------------------------------------------------------------------------ masks in files


@pytest.mark.parametrize("name", ["S2_SCL_20m.tif", "S2-SCL.tif", "scl.2022.tif"])
def test_a_classification_is_known_by_a_word_of_its_name(tmp_path, write_date, name):
    source = open_sources([write_date(tmp_path / "a.tif", 0)])[0]
    classes = np.full((1, 40, 90), 4, np.uint8)
    classes[:, :10] = 9
    path = write_date(tmp_path / name, classes, bands=None, nodata=0)
    (masked,) = with_masks([source], [path])
    mask = masked.read_mask(source.grid.whole, grid=source.grid)
    assert mask is not None
    assert mask[:10].all()
    assert not mask[10:40].any()
    assert mask[40:].all()  # beyond its edge nothing is known to be clear


def test_a_mask_with_nan_is_cloud_there(tmp_path, write_date):
    source = open_sources([write_date(tmp_path / "a.tif", 0)])[0]
    values = np.zeros((1, 70, 90), np.float32)
    values[:, :10], values[:, 10:20] = 1, np.nan
    (masked,) = with_masks([source], [write_date(tmp_path / "m.tif", values, bands=None, nodata=None)])
    mask = masked.read_mask(source.grid.whole, grid=source.grid)
    assert mask is not None
    assert mask[:20].all()
    assert not mask[20:].any()


# ------------------------------------------------------------------------------------------------ odd files and names


@pytest.mark.parametrize(
    "transform", [(10.0, 0.0, float("nan"), 0.0, -10.0, 5.1e6), (0.0, 0.0, 6e5, 0.0, 0.0, 5.1e6)], ids=["nan", "flat"]
)
def test_a_geotransform_that_places_no_pixel_is_refused(tmp_path, write_date, transform):
    path = write_date(tmp_path / "a.tif", 0, transform=transform)
    with pytest.raises(DataError, match=r"geotransform is .*expected six finite numbers"):
        open_sources([path])


@pytest.mark.parametrize("shape", [(1, 700), (700, 1), (2, 600)])
def test_a_raster_of_a_few_rows_or_columns_is_cleared(tmp_path, write_date, tiny, shape):
    counts = np.random.default_rng(0).integers(500, 3000, (2, 4, *shape)).astype(np.uint16)
    paths = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", one, tiled=False) for n, one in enumerate(counts)]
    stack = build_stack(open_sources(paths), tiny.config.network, notice=quiet)
    report = clear_scene(stack, tiny, tmp_path / "o.tif", SceneOptions(reference=0), notice=quiet)
    assert report.size == shape
    assert report.pixels["nodata"] == 0


def test_a_pipe_is_refused_at_once(tmp_path):
    pipe = tmp_path / "a.tif"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="is a pipe, socket or device"):
        open_sources([pipe])
    with pytest.raises(DataError, match="is a pipe, socket or device"):
        open_sources([tmp_path])


def test_loops_of_links_are_refused(tmp_path, write_date, tiny):
    loop = tmp_path / "loop.tif"
    loop.symlink_to(loop)
    with pytest.raises(DataError, match="is a link that leads nowhere"):
        open_sources([loop])
    stack = build_stack(open_sources([write_date(tmp_path / "a.tif", 0)]), tiny.config.network, notice=quiet)
    with pytest.raises(OutputError, match="is a link that leads nowhere"):
        clear_scene(stack, tiny, loop, notice=quiet)


def test_names_that_are_not_utf8_are_refused_and_shown_safely(tmp_path, write_date, tiny):
    good = write_date(tmp_path / "a.tif", 0)
    odd = os.fsencode(tmp_path) + b"/caf\xe9\x1b[31m.tif"
    os.rename(good, odd)
    path = Path(os.fsdecode(odd))
    with pytest.raises(DataError, match="is not valid UTF-8") as caught:
        open_sources([path])
    shown = printable(str(caught.value))
    assert "caf\\udce9\\x1b[31m.tif" in shown
    assert shown.isprintable()
    stack = build_stack(open_sources([write_date(tmp_path / "b.tif", 0)]), tiny.config.network, notice=quiet)
    with pytest.raises(OutputError, match="is not valid UTF-8"):
        clear_scene(stack, tiny, path, notice=quiet)


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path, write_date, capsys):
    from sader.cli.main import main

    write_date(tmp_path / "\x1b[31mred.tif", np.full((4, 8, 8), 60000, np.uint16))
    with pytest.raises(SystemExit) as caught:
        main(["remove", str(tmp_path / "\x1b[31mred.tif"), "-o", str(tmp_path / "c.tif")])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert "\\x1b[31mred.tif" in err
    assert "\x1b" not in out + err


def test_json_that_is_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "item.json"
    path.write_text('{"type": "Feature", "links": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(DataError, match=r"item\.json"):
        open_sources([path])
