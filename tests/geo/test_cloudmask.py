"""Cloud masks: which classes count, files of every form, detectors that are or are not installed, the model's own."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest

from sader.errors import BandError, ConfigError, DataError, MissingDependencyError
from sader.geo.grid import Grid
from sader.geo.read.masks import BLOCK, DetectorMasked, with_masks
from sader.geo.read.products import product_source
from sader.geo.read.quality import parse_quality
from sader.geo.read.raster import BandFile, grid_of
from sader.geo.read.sentinel2 import open_safe
from sader.geo.read.sources import open_sources
from sader.geo.stack import DateSource
from sader.inference.tiling import Window
from sader.inference.values import ValueCoding

rasterio = pytest.importorskip("rasterio")
CODING = ValueCoding("uint16", 1e-4, 0.0, 0.0)


@pytest.fixture(name="l2a")
def l2a_fixture(make_safe) -> DateSource:
    """Rows 0-59 cloud, 60-61 shadow, 118-119 snow, the rest vegetation."""
    return open_safe(make_safe("L2A", cloud_rows=60, bands=("B02", "B03", "B04", "B08")))


@pytest.fixture(name="plain")
def plain_fixture(write_raster, tmp_path):
    """Acquisitions without any classification: plain("S2_2022-03-10.tif")."""

    def make(name: str) -> DateSource:
        image = np.full((120, 120), 900, np.uint16)
        path = write_raster(tmp_path / "images" / name, image, 10, driver="GTiff", nodata=0)
        from sader.geo.read.geotiff import date_in

        return product_source(path.name, date_in(name), ["B04"], [BandFile(str(path))], [CODING])

    return make


def masks(source: DateSource, choice) -> np.ndarray | None:
    (wrapped,) = with_masks([source], choice)
    return wrapped.read_mask(source.grid.whole, grid=source.grid)


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("scl", (3, 8, 9, 10)),
        ("scl:standard", (3, 8, 9, 10)),
        ("scl:thick", (8, 9)),
        ("scl:strict", (1, 2, 3, 7, 8, 9, 10)),
        ("scl:9, 3,9", (3, 9)),
    ],
)
def test_which_classes(text, classes):
    assert parse_quality(text).hidden == classes


@pytest.mark.parametrize(
    ("text", "hint"), [("scl:strikt", "did you mean strict"), ("scl:12", "no class 12.*11 snow"), ("scl:", "scl:3,8,9")]
)
def test_classes_that_are_none(text, hint):
    with pytest.raises(ConfigError, match=hint):
        parse_quality(text)


def test_scl(l2a):
    standard = masks(l2a, "scl")
    assert standard[:62].all()
    assert not standard[62:].any()
    thick = masks(l2a, "scl:thick")
    assert thick[:60].all()
    assert not thick[60:].any(), "the shadow is not asked for"
    assert masks(l2a, "scl:11")[118:].all()
    np.testing.assert_array_equal(masks(l2a, "auto"), standard)
    np.testing.assert_array_equal(masks(l2a, None), standard)


@pytest.mark.parametrize("word", ["own", "none", "OWN"])
def test_the_models_own(l2a, word):
    assert masks(l2a, word) is None


def test_scl_where_there_is_none(l2a, plain):
    source = plain("S2_2022-03-10.tif")
    with pytest.raises(DataError, match=r"no scene classification \(SCL\) with S2_2022-03-10\.tif.*Leave --mask out"):
        with_masks([source], "scl")
    heard: list[str] = []
    both = with_masks([l2a, source], "scl", notice=heard.append)
    assert both[1].read_mask(Window(0, 0, 4, 4), grid=source.grid) is None
    assert heard == ["S2_2022-03-10.tif: no scene classification; the model estimates the clouds there."]


def test_a_masked_source_is_still_its_source(l2a):
    (wrapped,) = with_masks([l2a], "scl")
    assert isinstance(wrapped, DateSource)
    for name in ("name", "date", "bands", "grid", "coding", "origins", "paths"):
        assert getattr(wrapped, name) == getattr(l2a, name)
    window = Window(3, 4, 5, 6)
    np.testing.assert_array_equal(
        wrapped.read(window, bands=("B04",), grid=l2a.grid)[0], l2a.read(window, bands=("B04",), grid=l2a.grid)[0]
    )
    assert wrapped.read_numbers(window, bands=("B04",), grid=l2a.grid).dtype == np.uint16
    again = pickle.loads(pickle.dumps(wrapped))
    assert again == wrapped


# Files.


def cloudy_rows(count: int, cloud: int = 1, dtype=np.uint8) -> np.ndarray:
    image = np.zeros((120, 120), dtype)
    image[:count] = cloud
    return image


@pytest.mark.parametrize("cloud", [1, 255])
def test_one_file(plain, write_raster, tmp_path, cloud):
    source = plain("S2_2022-03-10.tif")
    # nodata = 0 is how many programs write a mask: it must not turn clear into unknown.
    path = write_raster(tmp_path / "clouds.tif", cloudy_rows(30, cloud), 10, driver="GTiff", nodata=0)
    mask = masks(source, path)
    assert mask[:30].all()
    assert not mask[30:].any()


def test_a_file_on_another_grid(plain, write_raster, tmp_path):
    source = plain("S2_2022-03-10.tif")
    coarse = np.zeros((30, 60), np.uint8)
    coarse[:15] = 1
    path = write_raster(tmp_path / "clouds.tif", coarse, 20, driver="GTiff")
    mask = masks(source, str(path))
    assert mask[:30].all()
    assert not mask[30:60].any()
    assert mask[60:].all(), "beyond the mask nothing is known to be clear"


def test_one_file_per_date_and_one_band_per_date(plain, write_raster, tmp_path):
    sources = [plain("S2_2022-03-10.tif"), plain("S2_2022-05-13.tif")]
    one = write_raster(tmp_path / "a.tif", cloudy_rows(10), 10, driver="GTiff")
    two = write_raster(tmp_path / "b.tif", cloudy_rows(20), 10, driver="GTiff")
    stacked = np.stack([cloudy_rows(10), cloudy_rows(20)])
    three = write_raster(tmp_path / "c.tif", stacked, 10, driver="GTiff")
    for choice in ([one, two], three):
        found = with_masks(sources, choice)
        shares = [s.read_mask(s.grid.whole, grid=s.grid).any(axis=1).sum() for s in found]
        assert shares == [10, 20]
    with pytest.raises(DataError, match="has 1 bands for 2 dates"):
        with_masks(sources, one)
    with pytest.raises(DataError, match="3 mask files for 2 dates"):
        with_masks(sources, [one, two, three])


def test_a_folder_of_masks(plain, write_raster, tmp_path):
    sources = [plain("S2_2022-03-10.tif"), plain("S2_2022-05-13.tif")]
    folder = tmp_path / "masks"
    write_raster(folder / "S2_2022-03-10_mask.tif", cloudy_rows(10), 10, driver="GTiff")
    with pytest.raises(DataError, match=r"no mask for S2_2022-05-13\.tif; expected S2_2022-05-13_mask\.tif"):
        with_masks(sources, folder)
    write_raster(folder / "clouds_20220513.tif", cloudy_rows(20), 10, driver="GTiff")
    found = with_masks(sources, folder)
    assert [s.read_mask(s.grid.whole, grid=s.grid).any(axis=1).sum() for s in found] == [10, 20]
    write_raster(folder / "more_2022-05-13.tif", cloudy_rows(20), 10, driver="GTiff")
    with pytest.raises(DataError, match="2 masks for"):
        with_masks(sources, folder)


def test_a_classification_in_a_file(plain, write_raster, tmp_path):
    source = plain("S2_2022-03-10.tif")
    classes = np.full((60, 60), 4, np.uint8)
    classes[:10], classes[10:20] = 9, 3
    path = write_raster(tmp_path / "S2_2022-03-10_SCL.tif", classes, 20, driver="GTiff")
    mask = masks(source, path)
    assert mask[:40].all()
    assert not mask[40:].any()


def test_values_that_are_no_mask(plain, write_raster, tmp_path):
    source = plain("S2_2022-03-10.tif")
    path = write_raster(tmp_path / "probability.tif", cloudy_rows(30, 87), 10, driver="GTiff")
    with pytest.raises(DataError, match="holds the values 0, 87; expected 0 = clear and 1 or 255 = cloud"):
        with_masks([source], path)
    (tmp_path / "text.tif").write_text("no")
    with pytest.raises(DataError, match="cannot read"):
        with_masks([source], tmp_path / "text.tif")
    with pytest.raises(ConfigError, match="mask is 'omnicloudmusk', no file; did you mean omnicloudmask"):
        with_masks([source], "omnicloudmusk")


# Detectors.


def test_detectors_that_are_not_installed(l2a, monkeypatch):
    for name, command in (("s2cloudless", r"sader\[s2cloudless\]"), ("omnicloudmask", r"sader\[masks\]")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingDependencyError, match=rf'needs {name}\. Run: pip install "{command}"'):
            with_masks([l2a], name)


def fake(monkeypatch, name: str, **contents) -> None:
    module = ModuleType(name)
    for key, value in contents.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_omnicloudmask(l2a, monkeypatch):
    shapes = []

    def predict_from_array(values, **options):
        shapes.append((values.shape, options))
        return np.where(values[:1] > 0.5, 1, np.where(values[:1] < 0.05, 3, 0))

    fake(monkeypatch, "omnicloudmask", predict_from_array=predict_from_array)
    mask = masks(l2a, "omnicloudmask")
    assert mask[:60].all(), "thick cloud"
    red, _ = l2a.read(l2a.grid.whole, bands=("B04",), grid=l2a.grid)
    np.testing.assert_array_equal(mask, (red[0] > 0.5) | (red[0] < 0.05))
    assert shapes[0][0] == (3, 120, 120)
    assert shapes[0][1]["patch_overlap"] < shapes[0][1]["patch_size"] <= 120


def test_s2cloudless_wants_l1c(make_safe, l2a, monkeypatch):
    class Detector:
        def __init__(self, **options):
            assert options["all_bands"] is False

        def get_cloud_masks(self, data):
            assert data.shape[-1] == 10
            return (data[..., 1] > 0.5).astype(np.uint8)

    fake(monkeypatch, "s2cloudless", S2PixelCloudDetector=Detector)
    with pytest.raises(BandError, match=r"has no B01, B05, .*B10.*works on L1C"):
        with_masks([l2a], "s2cloudless")
    l1c = open_safe(make_safe("L1C", cloud_rows=60))
    mask = masks(l1c, "s2cloudless")
    assert mask[:60].all()
    assert not mask[61:].any()


def spread(values: np.ndarray) -> np.ndarray:
    """A detector with a view of its surroundings: cloud within 5 pixels counts."""
    bright = values[0] > 0.5
    out = bright.copy()
    for step in range(1, 6):
        out[step:] |= bright[:-step]
        out[:-step] |= bright[step:]
    return out


class Big:
    """1100 x 700 pixels with bright spots; row 0-9 without data."""

    name, date, bands, coding = "big", None, ("B04",), CODING
    grid = Grid("", (1.0, 0.0, 0.0, 0.0, -1.0, 0.0), 700, 1100)

    def __init__(self) -> None:
        self.image = np.where(np.random.default_rng(0).uniform(size=(1100, 700)) > 0.999, 0.9, 0.1).astype(np.float32)
        self.reads = 0

    def read(self, window, *, bands, grid):
        self.reads += 1
        values = self.image[window.slices][None]
        valid = np.broadcast_to((np.arange(1100) >= 10)[:, None], (1100, 700))[window.slices]
        return np.where(valid, values, 0), valid

    def read_mask(self, window, *, grid):
        return None


def test_a_detector_does_not_depend_on_the_window():
    source = Big()
    masked = DetectorMasked(source, spread, ("B04",))
    whole = masked.read_mask(source.grid.whole, grid=source.grid)
    data = np.where((np.arange(1100) >= 10)[:, None], source.image, 0)
    np.testing.assert_array_equal(whole, spread(data[None]) & (np.arange(1100) >= 10)[:, None])
    assert source.reads == 6, "blocks, each once"
    fresh = DetectorMasked(Big(), spread, ("B04",))
    windows = [Window(BLOCK - 20, 500, 90, 200), Window(0, 0, 33, 1), Window(1000, 600, 100, 100)] * 3
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda window: fresh.read_mask(window, grid=source.grid), windows))
    for window, part in zip(windows, parts, strict=True):
        np.testing.assert_array_equal(part, whole[window.slices])
    again = pickle.loads(pickle.dumps(masked))
    np.testing.assert_array_equal(again.read_mask(windows[0], grid=source.grid), parts[0])
    assert again.source.reads > source.reads, "the cache stays behind"


def test_a_detector_is_not_asked_about_nothing():
    source = Big()
    masked = DetectorMasked(source, lambda values: pytest.fail("asked"), ("B04",))
    source.read = lambda window, *, bands, grid: (
        np.zeros((1, window.height, window.width), np.float32),
        np.zeros((window.height, window.width), bool),
    )
    assert not masked.read_mask(Window(0, 0, 50, 50), grid=source.grid).any()


# ------------------------------------------------------------------------------------------------ bits and values


def write_classes(path, values, dtype):
    with rasterio.open(
        path, "w", driver="GTiff", count=1, height=2, width=4, dtype=dtype, crs="EPSG:32632",
        transform=rasterio.Affine(10, 0, 600000, 0, -10, 5100000),
    ) as dataset:  # fmt: skip
        dataset.write(np.array(values, dtype).reshape(1, 2, 4))
    return path


@pytest.mark.parametrize(
    ("name", "dtype", "values", "hidden"),
    [
        # clear with aerosol bits, cirrus, cloud, beside cloud, shadow, snow, water, no data
        ("HLS.S30.Fmask.tif", "uint8", [192, 1, 2, 4, 8, 16, 32, 255], [0, 0, 1, 1, 1, 0, 0, 1]),
        # clear, fill, dilated, cirrus, cloud, shadow, snow, water
        ("LC08_QA_PIXEL.tif", "uint16", [21824, 1, 2, 4, 8, 16, 32, 128], [0, 1, 1, 1, 1, 1, 0, 0]),
        ("S2_QA60.tif", "uint16", [0, 1024, 2048, 3072, 512, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0]),
        ("S2_SCL.tif", "uint8", [4, 3, 8, 9, 10, 11, 0, 2], [0, 1, 1, 1, 1, 0, 1, 0]),
    ],
)
def test_quality_files_are_known_by_name(tmp_path, plain, name, dtype, values, hidden):
    path = write_classes(tmp_path / name, values, dtype)
    source = plain("S2_2022-03-10.tif")
    (masked,) = with_masks([source], [path])
    with rasterio.open(path) as dataset:
        grid = grid_of(dataset)
    found = masked.read_mask(Window(0, 0, 2, 4), grid=grid)
    np.testing.assert_array_equal(found.ravel(), np.array(hidden, bool))


def test_bits_can_be_chosen():
    numbers = np.array([0, 2, 8, 16])
    np.testing.assert_array_equal(parse_quality("qa_pixel:3").mask(numbers, unknown=False), [False, False, True, False])
    with pytest.raises(ConfigError, match=r"there is no bit 9.*4 cloud shadow"):
        parse_quality("qa_pixel:9")
    with pytest.raises(ConfigError, match="expected bits such as qa60:10,11"):
        parse_quality("qa60:opaque")


def test_values_of_any_mask(tmp_path, plain):
    path = write_classes(tmp_path / "mine.tif", [0, 1, 2, 3, 4, 5, 255, 2], "uint8")
    source = plain("S2_2022-03-10.tif")
    with pytest.raises(DataError, match="--mask-values 2,4"):
        with_masks([source], [path])
    (masked,) = with_masks([source], [path], values="2, 4")
    with rasterio.open(path) as dataset:
        grid = grid_of(dataset)
    found = masked.read_mask(Window(0, 0, 2, 4), grid=grid)
    np.testing.assert_array_equal(found.ravel(), np.array([0, 0, 1, 0, 1, 0, 1, 1], bool))
    with pytest.raises(ConfigError, match="expected whole numbers such as 2,4 and a mask file"):
        with_masks([source], "scl", values="2")


def test_a_quality_band_inside_the_file(tmp_path, write_date):
    counts = np.full((5, 8, 8), 900, np.uint16)
    counts[4] = 0
    counts[4, :4] = 1024
    path = write_date(tmp_path / "S2_2022-03-10.tif", counts, bands=("B2", "B3", "B4", "B8", "QA60"), nodata=None)
    (source,) = open_sources([path])
    assert source.read_mask(source.grid.whole, grid=source.grid) is None, "QA60 was empty for years: only on request"
    (masked,) = with_masks([source], "qa60")
    mask = masked.read_mask(source.grid.whole, grid=source.grid)
    assert mask[:4].all()
    assert not mask[4:].any()
