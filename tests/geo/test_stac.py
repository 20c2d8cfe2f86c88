"""STAC items on disk and from an API as dates; the item written beside a result."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from sader.errors import BandError, ConfigError, DataError
from sader.geo.grid import Grid, crop_grid, parse_bbox, parse_dates
from sader.geo.read.products import MosaicSource
from sader.geo.stac.items import bands_of, classification_of, is_stac, load_items, locate
from sader.geo.stac.search import open_items, search
from sader.geo.stac.write import write_item
from sader.geo.stack import DateSource
from sader.inference.tiling import Window

rasterio = pytest.importorskip("rasterio")
RGBN = ("B02", "B03", "B04", "B08")
APPLIED = {"earthsearch:boa_offset_applied": True}
NOT_APPLIED = {"earthsearch:boa_offset_applied": False}


def table_of(assets: dict, properties: dict | None = None) -> dict:
    """Bands of an item with these assets, as its file /x/i.json would state them."""
    content = {"type": "Feature", "stac_version": "1.0.0", "id": "i", "geometry": None, "assets": assets}
    content["properties"] = {"datetime": "2022-03-10T00:00:00Z", **(properties or {})}
    ((item, _),) = load_items(content)
    return bands_of(item, "/x/i.json")


def read_all(source: DateSource, bands=("B04", "B11")) -> tuple[np.ndarray, np.ndarray]:
    return source.read(source.grid.whole, bands=bands, grid=source.grid)


@pytest.mark.parametrize("style", ["earth-search", "planetary", "copernicus"])
def test_an_item_of_each_provider(make_item, scene_counts, style):
    (source,) = open_items(make_item(style=style, offset=None if style == "planetary" else -0.1))
    assert isinstance(source, DateSource)
    assert source.bands == (*RGBN, "B11")
    assert source.date == datetime(2022, 3, 10, 10, 39, 50, tzinfo=UTC)
    assert source.grid.resolution == (10.0, 10.0)
    values, valid = read_all(source)
    assert valid.all()
    np.testing.assert_allclose(values[0], scene_counts("B04", 10) / 10000, atol=1e-6)
    assert source.read_mask(Window(0, 0, 4, 4), grid=source.grid) is not None


@pytest.mark.parametrize(
    ("properties", "offset", "wanted"),
    [
        (APPLIED, -0.1, 0.0),
        (NOT_APPLIED, -0.1, -0.1),
        ({**NOT_APPLIED, "s2:processing_baseline": "03.01"}, 0, 0.0),
        ({}, None, -0.1),
        ({"s2:processing_baseline": "03.01"}, None, 0.0),
    ],
)
def test_the_offset_is_decided_for_each_item(make_item, properties, offset, wanted):
    (source,) = open_items(make_item(properties=properties, offset=offset))
    assert source.coding.offset == pytest.approx(wanted)
    (asked,) = open_items(make_item(properties=properties, offset=offset), offset="none")
    assert asked.coding.offset == 0


def test_a_doubt_about_the_offset_is_a_notice(make_item):
    heard: list[str] = []
    path = make_item(properties={**NOT_APPLIED, "s2:processing_baseline": "03.01"}, offset=-0.1)
    open_items(path, notice=heard.append)
    assert len(heard) == 1
    assert "its baseline 03.01 has none" in heard[0]
    with pytest.warns(UserWarning, match="--offset none or --offset -1000"):
        open_items(path)


def test_collections_folders_and_catalogues(make_item, tmp_path):
    folder = tmp_path / "a folder é"
    paths = [make_item(day, folder=folder) for day in ("20220520", "20220310", "20220401")]
    (folder / "notes.json").write_text('{"not": "stac"}')
    days = [10, 1, 20]
    assert [source.date.day for source in open_items(folder)] == days, "sorted by date"
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "a").symlink_to(folder)
    assert [source.date.day for source in open_items(linked)] == days
    shutil.rmtree(linked)
    collection = folder / "items.json"
    features = [json.loads(path.read_text()) for path in paths]
    collection.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    found = open_items(collection)
    assert [source.date.day for source in found] == days
    _, valid = read_all(found[0])
    assert valid.all(), "references are relative to the collection's file"
    collection.unlink()
    links = [{"rel": "item", "href": f"./{path.name}"} for path in paths]
    child = {"type": "Collection", "stac_version": "1.0.0", "id": "c", "description": "-", "license": "other"}
    child["extent"] = {"spatial": {"bbox": [[-180, -90, 180, 90]]}, "temporal": {"interval": [[None, None]]}}
    child["links"] = links
    (folder / "collection.json").write_text(json.dumps(child))
    root = {"type": "Catalog", "stac_version": "1.0.0", "id": "r", "description": "-"}
    root["links"] = [{"rel": "child", "href": f"{folder.name}/collection.json"}]
    (tmp_path / "catalog.json").write_text(json.dumps(root))
    assert [source.date.day for source in open_items(tmp_path)] == days
    assert is_stac(paths[0])
    assert not is_stac(folder / "notes.json")
    assert not is_stac(folder)


def test_pictures_and_copies_are_no_bands(make_item):
    path = make_item()
    ((item, base),) = load_items(path)
    table = bands_of(item, base)
    assert sorted(table) == ["B02", "B03", "B04", "B08", "B11"]
    assert table["B04"].path.endswith("B04.tif"), "not the picture, not the copy on a store that needs an account"
    assert classification_of(item, base).path.endswith("SCL.tif")


@pytest.mark.parametrize("key", ["visual", "TCI_10m", "overview", "visual-jp2"])
def test_a_picture_of_the_bands_is_never_taken(key):
    """Even where it comes first, is as fine, and names its bands: it holds eight bits for the eye."""
    band = [{"name": name, "common_name": name} for name in ("red", "green", "blue")]
    picture = {"href": "tci.tif", "type": "image/tiff", "eo:bands": band, "gsd": 10}
    red = {"href": "b04.tif", "type": "image/tiff", "eo:bands": band[:1], "gsd": 10}
    table = table_of({key: picture, "red": red})
    assert {name: Path(entry.path).name for name, entry in table.items()} == {"B04": "b04.tif"}


def test_the_finest_asset_of_a_band_wins():
    def asset(meters: int) -> dict:
        return {"href": f"x_{meters}.tif", "type": "image/tiff", "bands": [{"name": "B02"}]}

    table = table_of({f"B02_{meters}m": asset(meters) for meters in (60, 10, 20)})
    assert table["B02"].path == str(Path("/x/x_10.tif").resolve())


def test_an_asset_with_many_bands(make_item, write_raster, tmp_path):
    """As `sader` itself writes it: one file, the bands by their names, scale and offset in each."""
    image = np.stack([np.full((120, 120), value, np.uint16) for value in (1500, 2500)])
    write_raster(tmp_path / "both.tif", image, 10, driver="GTiff", nodata=0)
    bands = [{"name": name, "raster:scale": 1e-4, "raster:offset": -0.1} for name in ("B08", "B04")]
    item = {
        "type": "Feature",
        "stac_version": "1.1.0",
        "id": "both",
        "properties": {"datetime": "2022-03-10T00:00:00Z"},
        "assets": {
            "data": {"href": "both.tif", "type": "image/tiff; application=geotiff", "bands": bands, "nodata": 0}
        },
    }
    path = tmp_path / "both.json"
    path.write_text(json.dumps(item))
    (source,) = open_items(path)
    values, _ = read_all(source, ("B04", "B08"))
    np.testing.assert_allclose(values[:, 0, 0], (0.15, 0.05), atol=1e-6)


def test_references():
    assert locate("./a b/x%20y.tif", "/data/item.json") == str(Path("/data/a b/x y.tif").resolve())
    assert locate("x.tif", "https://example.org/items/one").endswith("url=https%3A%2F%2Fexample.org%2Fitems%2Fx.tif")
    assert locate("file:///a/b%20c.tif", "/data/item.json") == "/a/b c.tif"
    assert locate("s3://bucket/key.tif", "/x.json") == "/vsis3/bucket/key.tif"
    assert locate("/abs/x.tif", "/data/item.json") == str(Path("/abs/x.tif").resolve())


def test_the_same_acquisition_twice(make_item, tmp_path):
    old = make_item(properties={"s2:processing_baseline": "02.14"}, offset=0, shift=0, folder=tmp_path / "old")
    new = make_item(properties={"s2:processing_baseline": "05.00"}, folder=tmp_path / "new")
    heard: list[str] = []
    for order in ([old, new], [new, old]):
        items = [json.loads(path.read_text()) | {"id": path.parent.name} for path in order]
        for item, path in zip(items, order, strict=True):
            item["properties"]["grid:code"] = "MGRS-32TMS"
            path.write_text(json.dumps(item))
        (source,) = open_items(order, notice=heard.append)
        assert source.coding.offset == pytest.approx(-0.1), "the newer baseline"
    assert heard == ["old and new are the same acquisition; new is used."] * 2
    (source,) = open_items([new, new], notice=lambda text: pytest.fail(text))


def test_a_tile_across_two_data_strips(make_item, tmp_path):
    """Same tile, same baseline, seconds apart, two names: halves of one tile, no duplicates."""
    paths = [
        make_item(folder=tmp_path / "0", empty_columns=60),
        make_item(folder=tmp_path / "1", time="10:39:55"),
    ]
    for at, path in enumerate(paths):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"id": f"S2A_32TMS_20220310_{at}_L2A"}))
    (source,) = open_items(paths)
    assert isinstance(source, MosaicSource)
    _, valid = read_all(source)
    assert valid.all()
    assert source.read_numbers(Window(0, 0, 2, 120), bands=("B04",), grid=source.grid).min() > 1000
    assert len(source.paths) == 12


def test_the_numbers_of_another_satellite_mean_nothing():
    def asset(number: int, name: str) -> dict:
        band = {"name": f"B{number:02d}", "common_name": name}
        return {"href": f"{number}.tif", "type": "image/tiff", "eo:bands": [band]}

    named = ((3, "green"), (4, "red"), (5, "nir08"), (6, "swir16"))
    assets = {f"B{n:02d}": asset(n, name) for n, name in named}
    assets["B10"] = {"href": "10.tif", "type": "image/tiff"}  # thermal, not cirrus
    table = table_of(assets, {"platform": "landsat-8"})
    assert {band: Path(entry.path).name for band, entry in table.items()} == {
        "B03": "3.tif",
        "B04": "4.tif",
        "B8A": "5.tif",
        "B11": "6.tif",
    }


def shifted(path: Path, metres: float) -> None:
    """Move the item's files to the east."""
    for file in path.with_suffix("").glob("*.tif"):
        with rasterio.open(file, "r+") as dataset:
            a, b, c, *rest = tuple(dataset.transform)[:6]
            dataset.transform = rasterio.Affine(a, b, c + metres, *rest)


def test_neighbouring_tiles_are_one_date(make_item, tmp_path, scene_counts):
    left = make_item(tile="32TMS", folder=tmp_path, cloud_rows=20)
    right = make_item(tile="32TNS", folder=tmp_path, time="10:40:04", cloud_rows=60)
    shifted(right, 1000)  # 200 m of overlap
    other = make_item("20220401", folder=tmp_path)
    sources = open_items(tmp_path)
    assert [type(source).__name__ for source in sources] == ["MosaicSource", "ProductSource"]
    both = sources[0]
    assert (both.grid.width, both.grid.height) == (220, 120)
    assert both.name == f"{left.stem} + {right.stem}"
    assert len(both.origins) == 2
    values, valid = read_all(both, ("B04",))
    assert valid.all()
    np.testing.assert_allclose(values[0][60:, 20:120], scene_counts("B04", 10)[60:, 20:] / 10000, atol=1e-6)
    np.testing.assert_allclose(values[0][60:, 120:], scene_counts("B04", 10)[60:, 20:] / 10000, atol=1e-6)
    mask = both.read_mask(both.grid.whole, grid=both.grid)
    assert mask[:20].all()
    assert not mask[20:, :120].any(), "where both have data the first tile counts"
    assert mask[20:60, 120:].all()
    assert pickle.loads(pickle.dumps(both)).grid == both.grid
    assert other.exists()


def test_a_bbox_cuts_the_grid(make_item):
    path = make_item()
    (whole,) = open_items(path)
    (source,) = open_items(path, bbox=(7.7110, 46.0383, 7.7174, 46.0436))
    assert source.grid.width < whole.grid.width
    assert source.grid.transform[2] % 10 == whole.grid.transform[2] % 10, "the same lattice"
    ours, valid = read_all(source, ("B04",))
    assert valid.all()
    left = round((source.grid.transform[2] - whole.grid.transform[2]) / 10)
    top = round((whole.grid.transform[5] - source.grid.transform[5]) / 10)
    theirs, _ = read_all(whole, ("B04",))
    h, w = ours.shape[1:]
    np.testing.assert_array_equal(ours, theirs[:, top : top + h, left : left + w])


def test_crop_grid_covers_the_box():
    from rasterio.warp import transform_bounds

    grid = Grid("EPSG:32632", (10, 0, 399960, 0, -10, 5100000), 10980, 10980)
    bbox = (8.0, 45.5, 8.05, 45.53)
    found = crop_grid(grid, bbox)
    left, bottom, right, top = transform_bounds("EPSG:4326", grid.crs, *bbox)
    box = found.bounds
    assert left - 10 < box[0] <= left
    assert bottom - 10 < box[1] <= bottom
    assert right <= box[2] < right + 10
    assert top <= box[3] < top + 10


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1,2,3", "3 numbers"),
        ("a,b,c,d", "west,south,east,north"),
        ("8,46,7,47", "west < east"),
        ("0,0,1,95", "-90..90"),
    ],
)
def test_bad_boxes(text, hint):
    with pytest.raises(ConfigError, match=hint):
        parse_bbox(text)
    assert parse_bbox("7.5, 46 7.6 46.1") == (7.5, 46.0, 7.6, 46.1)


def test_dates():
    assert parse_dates("2022-03-01/2022-05-31") == "2022-03-01/2022-05-31"
    assert parse_dates(("2022-03-01", "2022-05-31")) == "2022-03-01/2022-05-31"
    assert parse_dates("2022-03-01..2022-05-31") == "2022-03-01/2022-05-31"
    assert parse_dates("2022-03-01") == "2022-03-01"
    for wrong in ("spring", "2022-05-31/2022-03-01", "", "2022-01-01/2022-02-01/2022-03-01"):
        with pytest.raises(ConfigError, match="2022-03-01/2022-05-31"):
            parse_dates(wrong)


def test_bad_items(make_item, tmp_path):
    path = make_item()
    with pytest.raises(BandError, match=r"has B02, B03, B04, B08, B11; expected B12"):
        open_items(path, bands=("B02", "B12"))
    item = json.loads(path.read_text())
    del item["assets"]
    (tmp_path / "bare.json").write_text(json.dumps(item))
    with pytest.raises(DataError, match=r"holds a Feature; expected a STAC item"):
        open_items(tmp_path / "bare.json")
    item["assets"] = {"thumbnail": {"href": "x.png", "type": "image/png"}}
    (tmp_path / "bare.json").write_text(json.dumps(item))
    with pytest.raises(BandError, match="no asset with a known band"):
        open_items(tmp_path / "bare.json")
    (tmp_path / "bare.json").write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        open_items(tmp_path / "bare.json")
    (tmp_path / "bare.json").write_text("[1, 2]")
    with pytest.raises(DataError, match="expected a STAC item"):
        open_items(tmp_path / "bare.json")
    (tmp_path / "bare.json").write_text('{"type": "FeatureCollection", "features": []}')
    with pytest.raises(DataError, match="no STAC item"):
        open_items(tmp_path / "bare.json")
    (path.with_suffix("") / "B03.tif").unlink()
    with pytest.raises(DataError, match=r"cannot read .*B03\.tif"):
        open_items(path)
    assert open_items(path, bands=("B02",))[0].bands == ("B02",), "what is not asked for is not opened"


# A STAC API and a file server, both ours.


class Api(SimpleHTTPRequestHandler):
    """Answers /, /search and byte ranges of files."""

    items: list[dict]
    asked: list[dict]

    def log_message(self, *_: object) -> None:
        pass

    def _json(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1":
            links = [{"rel": "self", "href": f"{self.root}/v1"}, {"rel": "root", "href": f"{self.root}/v1"}]
            links += [
                {"rel": "search", "href": f"{self.root}/v1/search", "method": method, "type": "application/geo+json"}
                for method in ("GET", "POST")
            ]
            conforms = [f"https://api.stacspec.org/v1.0.0/{part}" for part in ("core", "item-search")]
            self._json(
                {"type": "Catalog", "stac_version": "1.0.0", "id": "api", "description": "-", "links": links}
                | {"conformsTo": conforms}
            )
            return
        self._file()

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        first, last = (asked["datetime"].split("/") * 2)[:2]
        found = [
            item
            for item in self.items
            if item["collection"] in asked["collections"] and first <= item["properties"]["datetime"] <= last
        ]
        # Two pages, as real APIs do.
        start = int(asked.get("token", 0))
        links = []
        if start == 0 and len(found) > 1:
            links = [
                {"rel": "next", "href": f"{self.root}/v1/search", "method": "POST", "body": {**asked, "token": "1"}}
            ]
        page = found[:1] if start == 0 else found[1:]
        self._json({"type": "FeatureCollection", "features": page, "links": links})

    def _file(self, *, body: bool = True) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start, end = 0, len(data) - 1
        ranged = self.headers.get("Range")
        if ranged:
            first, last = ranged.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last or end), end)
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        if body:
            self.wfile.write(data[start : end + 1])


@pytest.fixture(name="api")
def api_fixture(tmp_path: Path) -> Iterator[tuple[str, type[Api]]]:
    pytest.importorskip("pystac_client")
    handler = type("BoundApi", (Api,), {"items": [], "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


def publish(path: Path, url: str, *, collection: str = "sentinel-2-l2a") -> dict:
    """The item as an API gives it: full addresses."""
    item = json.loads(path.read_text()) | {"collection": collection}
    for asset in item["assets"].values():
        asset["href"] = asset["href"].replace("./", f"{url}/", 1)
    item["links"] = [{"rel": "self", "href": f"{url}/v1/collections/{collection}/items/{item['id']}"}]
    return item


BBOX = (7.7110, 46.0383, 7.7174, 46.0436)


def test_a_search(api, make_item, scene_counts):
    url, handler = api
    days = {"20220310": 40.0, "20220401": 5.0, "20220520": 20.0}
    paths = {day: make_item(day, properties={"eo:cloud_cover": cover}) for day, cover in days.items()}
    handler.items[:] = [publish(path, url) for path in paths.values()]
    sources = search(f"{url}/v1", BBOX, "2022-03-01/2022-05-31", bands=RGBN)
    assert [source.date.month for source in sources] == [3, 4, 5], "both pages, sorted"
    assert handler.asked[0]["collections"] == ["sentinel-2-l2a"]
    assert handler.asked[0]["bbox"] == list(BBOX)
    assert len({source.grid for source in sources}) == 1, "one grid for all dates"
    assert sources[0].files[0].path.startswith("/vsicurl")
    values, valid = pickle.loads(pickle.dumps(sources[0])).read(
        sources[0].grid.whole, bands=("B04",), grid=sources[0].grid
    )
    assert valid.all()
    left = round((sources[0].grid.transform[2] - 399960) / 10)
    top = round((5100000 - sources[0].grid.transform[5]) / 10)
    h, w = values.shape[1:]
    np.testing.assert_allclose(values[0], scene_counts("B04", 10)[top : top + h, left : left + w] / 10000, atol=1e-6)
    heard: list[str] = []
    two = search(f"{url}/v1", BBOX, "2022-03-01/2022-05-31", bands=RGBN, most_dates=2, notice=heard.append)
    assert [source.date.month for source in two] == [4, 5], "the clearest two"
    assert heard == ["3 dates found; the 2 clearest are used."]
    few = search(f"{url}/v1", BBOX, "2022-03-01/2022-05-31", bands=("B02",), max_cloud=10)
    assert [source.date.month for source in few] == [4]


def test_a_search_without_success(api, make_item):
    url, handler = api
    handler.items[:] = [publish(make_item(), url)]
    with pytest.raises(
        DataError, match=r"no item of sentinel-2-l2a in 7\.711, .* during 2021-01-01/2021-02-01\. Widen"
    ):
        search(f"{url}/v1", BBOX, "2021-01-01/2021-02-01")
    with pytest.raises(DataError, match=r"with at most 5 % cloud \(1 have more\)"):
        search(f"{url}/v1", BBOX, "2022-01-01/2022-12-31", max_cloud=5)
    with pytest.raises(DataError, match=r"no item of sentinel-1"):
        search(f"{url}/v1", BBOX, "2022-01-01/2022-12-31", collection="sentinel-1")
    with pytest.raises(DataError, match="Expected a STAC API"):
        search(f"{url}/nothing", BBOX, "2022-01-01/2022-12-31")
    with pytest.raises(DataError, match="Expected a STAC API"):
        search("http://127.0.0.1:9/v1", BBOX, "2022-01-01/2022-12-31")


def test_a_file_that_is_gone_is_named(api, make_item):
    url, handler = api
    item = publish(make_item(), url)
    item["assets"]["red"]["href"] = f"{url}/gone.tif?signature=secret"
    handler.items[:] = [item]
    with pytest.raises(DataError, match=rf"cannot read {url}/gone\.tif: "):
        search(f"{url}/v1", BBOX, "2022-03-01/2022-03-31")


def test_files_of_the_catalogue_are_not_opened(api, make_item, monkeypatch):
    """With proj:transform and proj:shape a remote file is opened when it is read, not before."""
    url, handler = api
    item = publish(make_item(), url)
    for key, asset in item["assets"].items():
        size = 20 if key in ("swir16", "scl") else 10
        asset["proj:transform"] = [size, 0, 399960, 0, -size, 5100000, 0, 0, 1]
        asset["proj:shape"] = [1200 // size, 1200 // size]
    item["properties"]["proj:epsg"] = 32632
    handler.items[:] = [item]
    from sader.geo.read import products

    monkeypatch.setattr(products, "opened", lambda path: pytest.fail(f"opened {path}"))
    (source,) = search(f"{url}/v1", BBOX, "2022-03-01/2022-03-31")
    assert source.grid.crs == "EPSG:32632"


def test_the_command_on_items_and_on_a_search(api, make_item, scene_counts, tmp_path):
    """`sader remove items.json -o out.tif`, and the same dates found by `--stac`: the same pixels come out."""
    from sader.cli.main import main

    url, handler = api
    rows = {"20220310": 40, "20220401": 0, "20220520": 60}
    paths = [make_item(day, cloud_rows=count, folder=tmp_path / "s") for day, count in rows.items()]
    features = [json.loads(path.read_text()) for path in paths]
    (tmp_path / "s" / "items.json").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    with pytest.raises(SystemExit) as ended:
        main(["remove", str(tmp_path / "s" / "items.json"), "-o", str(tmp_path / "a.tif"), "--reference", "2022-05-20"])
    assert ended.value.code == 0
    with rasterio.open(tmp_path / "a.tif") as dataset:
        assert dataset.offsets[0] == -0.1
        counts = dataset.read([1, 2, 3, 4])
    truth = np.stack([scene_counts(band, 10, shift=1000) for band in RGBN])
    np.testing.assert_array_equal(counts[:, 80:], truth[:, 80:])
    error = (counts.astype(float) - truth) / 10000
    assert np.sqrt((error**2).mean()) < 0.01
    handler.items[:] = [publish(path, f"{url}/s") for path in paths]
    box = ",".join(map(str, BBOX))
    command = ["remove", "--stac", f"{url}/v1", "--bbox", box, "--dates", "2022-03-01/2022-05-31"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "-o", str(tmp_path / "b.tif"), "--reference", "2022-04-01"])
    assert ended.value.code == 0
    with rasterio.open(tmp_path / "b.tif") as dataset:
        left, top = round((dataset.transform.c - 399960) / 10), round((5100000 - dataset.transform.f) / 10)
        h, w = dataset.shape
        np.testing.assert_array_equal(dataset.read([1, 2, 3, 4]), truth[:, top : top + h, left : left + w])
    item = json.loads((tmp_path / "b.json").read_text())
    derived = [link["href"] for link in item["links"] if link["rel"] == "derived_from"]
    assert derived == [f"{url}/s/v1/collections/sentinel-2-l2a/items/{path.stem}" for path in paths]


# The item beside the result.


@pytest.fixture(name="result")
def result_fixture(tmp_path: Path, write_raster) -> Path:
    image = np.full((2, 30, 40), 1234, np.uint16)
    path = write_raster(tmp_path / "clear.tif", image, 10, driver="GTiff", nodata=0)
    with rasterio.open(path, "r+") as dataset:
        dataset.descriptions = ("B04", "B8A")
        dataset.scales, dataset.offsets = (1e-4, 1e-4), (-0.1, -0.1)
    return path


def test_the_written_item(result, make_item, make_safe, tmp_path):
    from sader.geo.read.sentinel2 import open_safe

    (first,) = open_items(make_item("20220310"))
    second = open_safe(make_safe("L2A", day="20220520", bands=RGBN))
    mosaic = MosaicSource((first, first), first.grid)
    preview = tmp_path / "clear.png"
    preview.write_bytes(b"")
    path = write_item(
        result,
        sources=[first, second, mosaic],
        reference=second,
        assets={"preview": preview, "uncertainty": result},
        processing={"sader:model": "sader-s2-rgbn", "sader:seed": 0},
    )
    assert path == tmp_path / "clear.json"
    item = json.loads(path.read_text())
    assert (item["type"], item["stac_version"], item["id"]) == ("Feature", "1.1.0", "clear")
    properties = item["properties"]
    assert properties["datetime"] == "2022-05-20T10:37:49Z"
    assert (properties["start_datetime"], properties["end_datetime"]) == (
        "2022-03-10T10:39:50Z",
        "2022-05-20T10:37:49Z",
    )
    assert properties["proj:code"] == "EPSG:32632"
    assert properties["proj:shape"] == [30, 40]
    assert properties["proj:transform"][:6] == [10, 0, 399960, 0, -10, 5100000]
    assert properties["proj:bbox"] == [399960, 5099700, 400360, 5100000]
    assert properties["gsd"] == 10
    assert "sader" in properties["processing:software"]
    assert properties["sader:model"] == "sader-s2-rgbn"
    assert "from 3 dates" in properties["processing:lineage"]
    data = item["assets"]["data"]
    assert data["href"] == "./clear.tif"
    assert (data["data_type"], data["nodata"]) == ("uint16", 0)
    assert data["bands"][1]["name"] == "B8A"
    assert data["bands"][1]["eo:common_name"] == "nir08"
    assert data["bands"][1]["eo:center_wavelength"] == pytest.approx(0.8647)
    assert data["bands"][0]["raster:scale"] == 1e-4
    assert data["bands"][0]["raster:offset"] == -0.1
    assert item["assets"]["preview"]["type"] == "image/png"
    derived = [link for link in item["links"] if link["rel"] == "derived_from"]
    assert len(derived) == 4, "one for each date, two for the mosaic"
    assert derived[0]["href"] == f"https://example.org/items/{first.name}"
    assert derived[1]["href"] == f"./{second.name}.SAFE"
    west, south, east, north = item["bbox"]
    assert 7.70 < west < east < 7.72
    assert 46.04 < south < north < 46.05
    ring = np.array(item["geometry"]["coordinates"][0])
    assert (ring[0] == ring[-1]).all()
    area = 0.5 * (ring[:-1, 0] * ring[1:, 1] - ring[1:, 0] * ring[:-1, 1]).sum()
    assert area > 0, "counter-clockwise"
    assert [file.name for file in tmp_path.glob(".*")] == [], "a temporary file was left behind"


def test_the_item_is_valid_stac(result):
    """Against the schemas of STAC 1.1 that pystac carries; those of the extensions are not on this machine."""
    pytest.importorskip("jsonschema")
    pystac = pytest.importorskip("pystac")
    from pystac.validation.stac_validator import JsonSchemaSTACValidator

    written = json.loads(write_item(result).read_text())
    JsonSchemaSTACValidator().validate_core(written, pystac.STACObjectType.ITEM, "1.1.0")
    item = pystac.Item.from_dict(written)
    assert item.ext.proj.code == "EPSG:32632"
    broken = {**written, "properties": {}}
    with pytest.raises(pystac.errors.STACValidationError):
        JsonSchemaSTACValidator().validate_core(broken, pystac.STACObjectType.ITEM, "1.1.0")


def test_our_item_goes_in_again(result):
    (source,) = open_items(write_item(result))
    values, valid = source.read(source.grid.whole, bands=("B04", "B8A"), grid=source.grid)
    assert valid.all()
    np.testing.assert_allclose(values, 0.0234, atol=1e-6)


def test_an_item_without_place_or_time(tmp_path):
    with rasterio.open(
        tmp_path / "x.tif", "w", driver="GTiff", width=3, height=2, count=1, dtype="float32", nodata=np.nan
    ) as ds:
        ds.write(np.ones((1, 2, 3), np.float32))
    item = json.loads(write_item(tmp_path / "x.tif").read_text())
    assert item["geometry"] is None
    assert "bbox" not in item
    assert item["assets"]["data"]["nodata"] == "nan"
    assert item["properties"]["datetime"].endswith("Z")
    assert "unknown" in item["properties"]["description"]


@pytest.mark.parametrize("code", ["http://somewhere.example/crs", "/vsicurl/http://x/crs", "/etc/passwd", "", None])
def test_a_reference_system_that_is_not_a_code_is_ignored(code):
    asset = {"href": "B02.tif", "proj:transform": [10, 0, 0, 0, -10, 0], "proj:shape": [64, 32]}
    assert table_of({"B02": asset}, {"proj:code": code})["B02"].grid is None
    for stated in ({"proj:code": "EPSG:32632"}, {"proj:epsg": 32632}):
        found = table_of({"B02": asset}, stated)["B02"].grid
        assert (found.crs, found.width, found.height) == ("EPSG:32632", 32, 64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"type": "FeatureCollection", "features": [1]}', "is not valid STAC"),
        ('{"type": "Feature", "assets": {"B02": {}}, "properties": {"datetime": "2022-01-01T00:00:00Z"}}', "'href'"),
        ('{"type": "Feature", "assets": {}, "properties": {}}', "datetime"),
        ('{"type": "Feature", "assets": {}, "properties": {"datetime": "spring"}}', "Expected STAC 1.0 or 1.1"),
        ('{"type": "Catalog", "stac_version": "1.0.0", "id": "c"}', "is not valid STAC"),
    ],
)
def test_json_that_is_not_stac(tmp_path, content, message):
    path = tmp_path / "item.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        open_items(path)


def test_a_catalogue_whose_links_lead_nowhere_or_to_itself(tmp_path):
    content = {"type": "Catalog", "stac_version": "1.0.0", "id": "c", "description": "-"}
    for href in ("./gone.json", "./catalog.json"):
        links = [{"rel": "child", "href": href}]
        (tmp_path / "catalog.json").write_text(json.dumps({**content, "links": links}))
        with pytest.raises(DataError, match="catalog"):
            open_items(tmp_path)


def test_the_item_and_its_files_can_be_moved(result, tmp_path):
    item = write_item(result)
    assert str(tmp_path) not in item.read_text()
    assert "self" not in [link["rel"] for link in json.loads(item.read_text())["links"]]
    (tmp_path / "moved").mkdir()
    for path in (item, result):
        path.rename(tmp_path / "moved" / path.name)
    (source,) = open_items(tmp_path / "moved" / item.name)
    assert source.read(source.grid.whole, bands=("B04",), grid=source.grid)[1].all()
