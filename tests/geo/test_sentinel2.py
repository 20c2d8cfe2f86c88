"""Sentinel-2 products: layout, metadata, one grid, offset; and every way in which a product can be broken."""

from __future__ import annotations

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import numpy as np
import pytest

from sader.bands import BANDS_12, BANDS_13
from sader.errors import BandError, DataError
from sader.geo.read.sentinel2 import BANDS, is_safe, open_safe, parse_xml, read_product_info
from sader.geo.stack import DateSource
from sader.inference.tiling import Window

rasterio = pytest.importorskip("rasterio")
FINE = ("B02", "B03", "B04", "B08")


def test_the_band_table():
    assert tuple(BANDS) == BANDS_13
    assert [name for name, band in BANDS.items() if band.resolution == 10] == list(FINE)
    waves = [BANDS[name].wavelength for name in ("B01", "B02", "B03", "B04", "B05", "B08", "B8A", "B11", "B12")]
    assert waves == sorted(waves)


def test_an_l2a_product(make_safe, scene_counts):
    source = open_safe(make_safe("L2A"))
    assert isinstance(source, DateSource)
    assert source.bands == BANDS_12
    assert source.date == datetime(2022, 3, 10, 10, 37, 49, 24000, tzinfo=UTC)
    assert source.name == "S2A_MSIL2A_20220310T103749_N0400_R008_T32TMS_20220310T140453"
    assert (source.grid.crs, source.grid.width, source.grid.resolution) == ("EPSG:32632", 120, (10.0, 10.0))
    assert (source.coding.scale, source.coding.nodata) == (1e-4, 0)
    assert source.coding.offset == pytest.approx(-0.1)
    window = Window(20, 30, 50, 40)
    values, valid = source.read(window, bands=FINE, grid=source.grid)
    assert valid.all()
    for at, band in enumerate(FINE):
        wanted = scene_counts(band, 10)[20:70, 30:70] / 10000
        np.testing.assert_allclose(values[at], wanted, atol=1e-6, err_msg=band)
    digital = source.read_numbers(window, bands=("B04",), grid=source.grid)
    np.testing.assert_array_equal(digital[0], scene_counts("B04", 10, shift=1000)[20:70, 30:70])


def test_coarse_bands_lie_where_they_belong(make_safe):
    """The 20 and 60 m bands hold a plane: after interpolation it is the same plane, with no half-pixel shift."""
    source = open_safe(make_safe("L2A"))
    values, valid = source.read(source.grid.whole, bands=("B05", "B09"), grid=source.grid)
    assert valid.all()
    y, x = np.meshgrid(np.arange(120) + 0.5, np.arange(120) + 0.5, indexing="ij")
    for at, (level, border) in enumerate(((700, 1), (1200, 3))):
        plane = (level + 4 * x + 2 * y) / 10000
        inner = np.s_[border:-border, border:-border]
        np.testing.assert_allclose(values[at][inner], plane[inner], atol=1.5e-4)


def test_the_finest_copy_of_a_band_is_taken(make_safe):
    source = open_safe(make_safe("L2A"))
    names = [file.path.rsplit("_", 1)[-1] for file in source.files]
    assert dict(zip(source.bands, names, strict=True))["B02"] == "10m.jp2"
    assert dict(zip(source.bands, names, strict=True))["B8A"] == "20m.jp2"
    assert dict(zip(source.bands, names, strict=True))["B09"] == "60m.jp2"
    assert source.classes.path.endswith("SCL_20m.jp2")


def test_an_l1c_product(make_safe, scene_counts):
    source = open_safe(make_safe("L1C"))
    assert source.bands == BANDS_13
    assert source.coding.offset == pytest.approx(-0.1)
    assert source.reason.startswith("-1000 listed in"), "from RADIO_ADD_OFFSET, not from the baseline alone"
    values, _ = source.read(Window(0, 0, 120, 120), bands=("B10", "B02"), grid=source.grid)
    np.testing.assert_allclose(values[1], scene_counts("B02", 10) / 10000, atol=1e-6)
    assert source.read_mask(Window(0, 0, 9, 9), grid=source.grid) is None, "L1C has no classification"


def test_baselines_before_and_after(make_safe):
    old = open_safe(make_safe("L2A", baseline="03.01", offset=None, day="20210310", bands=FINE))
    new = open_safe(make_safe("L2A", bands=FINE))
    window = Window(0, 0, 30, 30)
    assert old.coding.offset == 0
    assert "03.01" in old.reason
    before, _ = old.read(window, bands=FINE, grid=old.grid)
    after, _ = new.read(window, bands=FINE, grid=new.grid)
    np.testing.assert_allclose(before, after, atol=1e-6)  # one place, one reflectance, whatever the baseline


def test_the_user_overrides_the_metadata(make_safe, scene_counts):
    path = make_safe("L2A", bands=FINE)
    source = open_safe(path, "none")
    values, _ = source.read(Window(0, 0, 10, 10), bands=("B02",), grid=source.grid)
    np.testing.assert_allclose(values[0], scene_counts("B02", 10, shift=1000)[:10, :10] / 10000, atol=1e-6)
    assert open_safe(path, -500).coding.offset == pytest.approx(-0.05)


def test_offsets_may_differ_from_band_to_band(make_safe):
    path = make_safe("L2A", bands=FINE)
    metadata = path / "MTD_MSIL2A.xml"
    text = metadata.read_text()
    metadata.write_text(text.replace('<BOA_ADD_OFFSET band_id="1">-1000<', '<BOA_ADD_OFFSET band_id="1">-900<'))
    plain, odd = Window(0, 0, 20, 20), open_safe(path)
    assert odd.coding.offset == pytest.approx(-0.1), "what most bands use"
    metadata.write_text(text)
    even = open_safe(path)
    ours, _ = odd.read(plain, bands=("B02", "B03"), grid=odd.grid)
    theirs, _ = even.read(plain, bands=("B02", "B03"), grid=even.grid)
    np.testing.assert_allclose(ours[0] - theirs[0], 0.01, atol=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1])
    counts = odd.read_numbers(plain, bands=("B02",), grid=odd.grid)
    assert [round(one.offset, 6) for one in odd.codings(("B02", "B03"))] == [-0.09, -0.1]
    np.testing.assert_allclose(counts[0] * 1e-4 - 0.09, ours[0], atol=1e-6)


def test_a_new_baseline_without_a_list_is_said(make_safe):
    path = make_safe("L2A", bands=FINE)
    metadata = path / "MTD_MSIL2A.xml"
    text = metadata.read_text()
    start, end = text.index("<BOA_ADD_OFFSET_VALUES_LIST>"), text.index("</BOA_ADD_OFFSET_VALUES_LIST>")
    metadata.write_text(text[:start] + text[end + len("</BOA_ADD_OFFSET_VALUES_LIST>") :])
    with pytest.warns(UserWarning, match="-1000 is assumed"):
        assert open_safe(path).coding.offset == pytest.approx(-0.1)
    heard: list[str] = []
    open_safe(path, notice=heard.append)
    assert len(heard) == 1


def test_zero_is_nodata_before_the_offset(make_safe):
    source = open_safe(make_safe("L2A", empty_columns=60))
    values, valid = source.read(source.grid.whole, bands=("B02", "B05", "B09"), grid=source.grid)
    assert not valid[:, :60].any()
    assert valid[:, 60:].all()
    assert (values[:, :, :60] == 0).all(), "nodata is 0, not -0.1"
    assert values[:, :, 60:].min() > 0.02, "nodata must not bleed into its neighbours"


def test_the_scene_classification(make_safe):
    source = open_safe(make_safe("L2A", cloud_rows=60))
    mask = source.read_mask(Window(40, 0, 40, 120), grid=source.grid)
    assert mask[:20].all(), "cloud"
    assert mask[20:22].all(), "shadow, one row of 20 m"
    assert not mask[22:].any()
    classes = source.read_classes(source.grid.whole, grid=source.grid)
    assert set(np.unique(classes)) == {3, 4, 9, 11}, "classes are never mixed"


def test_another_grid(make_safe):
    """Read on a grid of another reference system, and on a part of the own one."""
    from rasterio.warp import calculate_default_transform

    from sader.geo.grid import Grid

    source = open_safe(make_safe("L2A", cloud_rows=30))
    part = source.grid.part(Window(10, 20, 64, 48))
    values, valid = source.read(part.whole, bands=("B02", "B08"), grid=part)
    whole, _ = source.read(source.grid.whole, bands=("B02", "B08"), grid=source.grid)
    assert valid.all()
    np.testing.assert_array_equal(values, whole[:, 10:74, 20:68])
    np.testing.assert_array_equal(
        source.read_mask(part.whole, grid=part), source.read_mask(source.grid.whole, grid=source.grid)[10:74, 20:68]
    )
    transform, width, height = calculate_default_transform(
        source.grid.crs, "EPSG:32633", source.grid.width, source.grid.height, *source.grid.bounds
    )
    other = Grid("EPSG:32633", tuple(transform)[:6], width, height)
    warped, seen = source.read(other.whole, bands=("B08",), grid=other)
    assert 0.5 < seen.mean() < 1, "the corners of the turned image are empty"
    assert abs(np.median(warped[0][seen]) - np.median(whole[1])) < 0.01
    far = Grid("EPSG:32632", (10, 0, 600000, 0, -10, 5100000), 20, 20)
    nothing, seen = source.read(far.whole, bands=("B08",), grid=far)
    assert not seen.any()
    assert (nothing == 0).all()


def test_pickled_and_threaded(make_safe):
    source = pickle.loads(pickle.dumps(open_safe(make_safe("L2A"))))
    windows = [Window(row, 0, 30, 120) for row in (0, 30, 60, 90)] * 3

    def read(window: Window) -> np.ndarray:
        return source.read(window, bands=("B02", "B05"), grid=source.grid)[0]

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(read, windows))
    whole, _ = source.read(source.grid.whole, bands=("B02", "B05"), grid=source.grid)
    for start in (0, 4, 8):
        np.testing.assert_array_equal(np.concatenate(parts[start : start + 4], axis=1), whole)


def old_names(path, tmp_path):
    """The product as before December 2016: long names, metadata and image names of another form."""
    root = tmp_path / "S2A_OPER_PRD_MSIL1C_PDMC_20160905T104813_R002_V20160905T005712_20160905T010424.SAFE"
    tile = "S2A_OPER_MSI_L1C_TL_SGS__20160905T073438_A006291_T32TMS_N02.04"
    images = root / "GRANULE" / tile / "IMG_DATA"
    images.mkdir(parents=True)
    listed = ""
    for file in sorted((path / "GRANULE").rglob("*.jp2")):
        stem = f"S2A_OPER_MSI_L1C_TL_SGS__20160905T073438_A006291_T32TMS_{file.stem.split('_')[-1]}"
        shutil.copy(file, images / f"{stem}.jp2")
        listed += f"<IMAGE_ID>{stem}</IMAGE_ID>"
    text = (path / "MTD_MSIL1C.xml").read_text()
    start, end = text.index("<Granule_List>"), text.index("</Granule_List>")
    text = text[:start] + f"<Granule_List><Granules>{listed}</Granules>" + text[end:]
    text = text.replace(path.name, "791_2016-09-05T10_37").replace("N0204", "")
    name = "S2A_OPER_MTD_SAFL1C_PDMC_20160905T104813_R002_V20160905T005712_20160905T010424.xml"
    (root / name).write_text(text)
    return root


def test_old_names(make_safe, tmp_path, scene_counts):
    new = make_safe("L1C", baseline="02.04", offset=None, day="20160905", folder=tmp_path / "new")
    root = old_names(new, tmp_path)
    source = open_safe(root)
    assert source.bands == BANDS_13
    assert source.name == root.name.removesuffix(".SAFE")
    assert source.coding.offset == 0
    values, _ = source.read(Window(0, 0, 20, 20), bands=("B03",), grid=source.grid)
    np.testing.assert_allclose(values[0], scene_counts("B03", 10)[:20, :20] / 10000, atol=1e-6)


def test_several_tiles_in_one_product(make_safe, tmp_path):
    root = old_names(make_safe("L1C", baseline="02.04", offset=None, folder=tmp_path / "new"), tmp_path)
    first = next((root / "GRANULE").iterdir())
    shutil.copytree(first, first.with_name(first.name.replace("T32TMS", "T32TNS")))
    with pytest.raises(DataError, match=r"2 tiles \(T32TMS, T32TNS\).*Name the one you want"):
        open_safe(root)
    assert is_safe(first)
    assert open_safe(first).bands == BANDS_13


def test_l2a_of_2017(make_safe):
    """Sen2Cor's first names: an L2A_ before the files and in the metadata's elements."""
    root = make_safe("L2A", baseline="02.04", offset=None, bands=FINE)
    for file in list((root / "GRANULE").rglob("T32*.jp2")):
        file.rename(file.with_name(f"L2A_{file.name}"))
    metadata = root / "MTD_MSIL2A.xml"
    text = metadata.read_text()
    for tag in ("BOA_QUANTIFICATION_VALUE", "Product_Info", "Product_Image_Characteristics"):
        text = text.replace(f"<{tag}", f"<L2A_{tag}").replace(f"</{tag}", f"</L2A_{tag}")
    text = text.replace("IMAGE_FILE>", "IMAGE_FILE_2A>").replace("/T32TMS", "/L2A_T32TMS").replace(">10000<", ">20000<")
    metadata.write_text(text.replace("PRODUCT_URI>", "PRODUCT_URI_2A>"))
    source = open_safe(root)
    assert source.bands == FINE
    assert source.coding.scale == pytest.approx(1 / 20000), "the metadata's quantification value counts"
    assert source.classes is not None


# Broken trees: every error says what was found, what was wanted and what to do.


def test_a_missing_band_file(make_safe):
    root = make_safe("L2A")
    for file in (root / "GRANULE").rglob("*_B03_*.jp2"):
        file.unlink()
    with pytest.raises(DataError, match=r"lacks 1 of the 12 band files .*T32TMS_20220310T103749_B03_10m\.jp2.*--bands"):
        open_safe(root)
    source = open_safe(root, bands=("B02", "B04"))
    assert source.bands == ("B02", "B04")
    with pytest.raises(BandError, match="has no band B03"):
        source.read(Window(0, 0, 1, 1), bands=("B03",), grid=source.grid)
    with pytest.raises(BandError, match=r"\(L2A\) has no B10"):
        open_safe(root, bands=("B02", "B10"))


def test_missing_metadata(make_safe):
    root = make_safe("L2A", bands=FINE)
    (root / "MTD_MSIL2A.xml").unlink()
    with pytest.raises(DataError, match=r"no MTD_MSIL1C\.xml or MTD_MSIL2A\.xml \(it holds GRANULE, manifest\.safe\)"):
        open_safe(root)
    with pytest.raises(DataError, match="Did you mean"):
        open_safe(root.parent)


@pytest.mark.parametrize("text", ["", "<a><b></a>", "not xml", "<a>" * 5])
def test_damaged_metadata(make_safe, text):
    root = make_safe("L2A", bands=("B02",))
    (root / "MTD_MSIL2A.xml").write_text(text)
    with pytest.raises(DataError, match=r"cannot read .*MTD_MSIL2A\.xml.*download the product again"):
        open_safe(root)


def test_entities_are_refused(tmp_path):
    path = tmp_path / "MTD_MSIL2A.xml"
    path.write_text('<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;">]><a>&y;</a>')
    with pytest.raises(DataError, match="declares a document type"):
        parse_xml(path)
    path.write_text('<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>')
    with pytest.raises(DataError, match="declares a document type"):
        parse_xml(path)


def test_unreadable_images(make_safe):
    root = make_safe("L2A", bands=FINE)
    file = next((root / "GRANULE").rglob("*_B03_10m.jp2"))
    good = file.read_bytes()
    file.write_bytes(b"this is no image")
    with pytest.raises(DataError, match=r"cannot read .*B03_10m\.jp2"):
        open_safe(root)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"B03_10m\.jp2 is empty"):
        open_safe(root)
    file.write_bytes(good[: len(good) // 2])
    source = open_safe(root)
    with pytest.raises(DataError, match=r"cannot read .*B03_10m\.jp2.*half-written"):
        source.read(source.grid.whole, bands=("B03",), grid=source.grid)


def test_the_wrong_level(make_safe):
    root = make_safe("L1C", bands=("B02",))
    metadata = root / "MTD_MSIL1C.xml"
    text = metadata.read_text().replace("Level-1C", "Level-1B")
    metadata.write_text(text)
    with pytest.raises(DataError, match=r"is a L1B product; expected L1C or L2A"):
        open_safe(root)
    metadata.rename(root / "MTD_MSIL1B.xml")
    with pytest.raises(DataError, match=r"holds MTD_MSIL1B\.xml; expected L1C or L2A"):
        open_safe(root)


def test_a_zip_instead_of_a_folder(make_safe, tmp_path):
    root = make_safe("L2A", bands=("B02",))
    archive = shutil.make_archive(str(tmp_path / root.name), "zip", tmp_path, root.name)
    assert is_safe(archive)
    with pytest.raises(DataError, match=r"is a zip archive.*unzip S2A_MSIL2A"):
        open_safe(archive)


def test_no_tile_no_images_no_folder(make_safe, tmp_path):
    root = make_safe("L2A", bands=("B02",))
    shutil.rmtree(next((root / "GRANULE").iterdir()) / "IMG_DATA")
    with pytest.raises(DataError, match="lacks 1 of the 1 band files"):
        open_safe(root)
    shutil.rmtree(root / "GRANULE")
    with pytest.raises(DataError, match="no tile folder under GRANULE"):
        open_safe(root)
    with pytest.raises(DataError, match="does not exist"):
        open_safe(tmp_path / "nothing.SAFE")
    (tmp_path / "plain.txt").write_text("x")
    with pytest.raises(DataError, match=r"expected a \.SAFE folder"):
        open_safe(tmp_path / "plain.txt")
    assert not is_safe(tmp_path / "plain.txt")
    assert not is_safe(tmp_path)


def test_metadata_without_a_time(make_safe):
    root = make_safe("L2A", bands=("B02",))
    metadata = root / "MTD_MSIL2A.xml"
    metadata.write_text(metadata.read_text().replace("2022-03-10T10:37:49.024Z", "yesterday"))
    assert read_product_info(metadata).date == datetime(2022, 3, 10, 10, 37, 49, tzinfo=UTC), "the name says it too"


def test_the_command_on_products(make_safe, scene_counts, tmp_path, capsys):
    """`sader remove A.SAFE B.SAFE C.SAFE -o clear.tif`: old and new baselines together, by the shipped weights."""
    from sader.cli.main import main

    made = [
        make_safe("L2A", baseline="03.01", offset=None, day="20211110", bands=FINE),
        make_safe("L2A", day="20220310", cloud_rows=40, bands=FINE),
        make_safe("L2A", day="20220520", cloud_rows=20, bands=FINE),
    ]
    out = tmp_path / "clear.tif"
    with pytest.raises(SystemExit) as ended:
        main(["remove", *map(str, made), "-o", str(out), "--reference", "2022-03-10"])
    assert ended.value.code == 0
    assert "reconstructed" in capsys.readouterr().out
    with rasterio.open(out) as dataset:
        assert dataset.descriptions == FINE
        assert (dataset.scales[0], dataset.offsets[0], dataset.nodata) == (1e-4, -0.1, 0), "as the reference date"
        counts = dataset.read()
    truth = np.stack([scene_counts(band, 10, shift=1000) for band in FINE])
    np.testing.assert_array_equal(counts[:, 60:], truth[:, 60:])  # clear pixels of the reference, bit for bit
    error = (counts[:, :40].astype(float) - truth[:, :40]) / 10000
    assert np.sqrt((error**2).mean()) < 0.01, "an offset forgotten in one date would be 0.1"
    assert out.with_suffix(".json").exists()


def test_the_command_on_a_broken_product(make_safe, tmp_path, capsys):
    from sader.cli.main import main

    root = make_safe("L2A", bands=FINE)
    (root / "MTD_MSIL2A.xml").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["remove", str(root), "-o", str(tmp_path / "clear.tif")])
    assert ended.value.code == 2
    assert "DataError: " in capsys.readouterr().err
    assert not (tmp_path / "clear.tif").exists()
