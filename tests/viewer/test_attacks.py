"""Attacks by paths, links, formats, decompression bombs and addresses. A canary records every request."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import numpy as np
import pytest

import sader.viewer.security.folder as paths_module
import sader.viewer.security.sandbox as sandbox
from sader.viewer.problems import ForbiddenError
from sader.viewer.security.sandbox import child_environment

from .conftest import LIMITS, write_date, write_scene

SECRET = "the secret outside"


@pytest.fixture
def outside(tmp_path):
    """A folder beside the data folder, with a raster and a text in it."""
    write_scene(tmp_path / "outside", dates=2)
    (tmp_path / "outside" / "secret.txt").write_text(SECRET)
    return tmp_path / "outside"


@pytest.fixture
def place(server, request):
    """A folder of its own inside the data folder."""
    name = f"attack_{abs(hash(request.node.name)) % 10**8}"
    (server.data / name).mkdir()
    yield server.data / name
    shutil.rmtree(server.data / name)


def opening(server, *paths):
    return server.client.post("/scenes", json={"paths": list(paths)})


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "small/../../outside", "/etc/passwd", "//etc/passwd", "..", ".", ".sader", ".sader/jobs.sqlite",
        "small/../.sader", "~/x.tif", "small\\..\\..\\x", "C:/x.tif", "file:///etc/passwd", "/vsicurl/http://x/y.tif",
        "/vsizip/a.zip/b.tif", "vrt:///etc/passwd", "http://169.254.169.254/latest/meta-data", "a\0b.tif", "x" * 999,
        "GTIFF_DIR:1:small/S2_2022-03-10.tif", "%2e%2e/outside",
    ],
)  # fmt: skip
def test_paths_outside_the_data_folder_are_refused(server, path):
    for answer in (
        opening(server, path),
        server.client.post("/processes/remove-clouds/execution", json={"inputs": {"paths": [path]}}),
        server.client.get("/folder", params={"path": path}),
    ):
        assert answer.status_code in (400, 403, 404), (path, answer.text)
        assert "root:" not in answer.text


def test_a_link_that_leads_out_is_refused(server, place, outside):
    (place / "away").symlink_to(outside)
    (place / "file.tif").symlink_to(outside / "S2_2022-03-10.tif")
    name = place.name
    for path in (name, f"{name}/away", f"{name}/file.tif", f"{name}/away/S2_2022-03-10.tif"):
        answer = opening(server, path)
        assert answer.status_code == 403, (path, answer.text)
        assert str(outside) not in answer.text
    listed = server.client.get("/folder", params={"path": name}).json()
    assert listed == []


def test_a_link_that_stays_inside_is_followed(server, place):
    (place / "here").symlink_to(server.data / "small")
    assert opening(server, f"{place.name}/here").status_code == 201


def test_a_file_swapped_for_a_link_after_the_check_is_refused(server, place, outside):
    """The scene was accepted; what it names is checked again when it is read."""
    write_scene(place)
    scene = opening(server, place.name).json()["id"]
    assert server.client.get(f"/scenes/{scene}").status_code == 200
    target = place / "S2_2022-03-10.tif"
    target.unlink()
    target.symlink_to(outside / "S2_2022-03-10.tif")
    os.utime(place)
    assert server.client.get(f"/scenes/{scene}").status_code == 403


def test_results_cannot_be_used_to_read_other_files(server, finished):
    _, job = finished
    for name in ("..%2f..%2fjobs.sqlite", "clear.tif", "%2e%2e%2fjobs.sqlite", ".sader", "clear%00"):
        assert server.client.get(f"/jobs/{job}/results/{name}").status_code == 404
    for path in ("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/settings.py"):
        assert server.client.get(path).status_code == 404


def test_a_link_to_the_servers_own_files_is_refused(server, place):
    """They lie inside the data folder, but hold jobs and uploads of other clients."""
    (place / "state").symlink_to(server.data / ".sader")
    (place / "jobs.tif").symlink_to(server.data / ".sader" / "jobs.sqlite")
    for path in ("state", "state/scenes", "jobs.tif"):
        assert server.client.get("/folder", params={"path": f"{place.name}/{path}"}).status_code == 403, path
        assert opening(server, f"{place.name}/{path}").status_code == 403, path
    assert server.client.get("/folder", params={"path": place.name}).json() == []


def test_a_name_that_is_no_text_hides_nothing_else(server, place):
    """Linux takes any bytes as a name; JSON does not. One such file must not make a folder unreadable."""
    write_date(place / "good.tif", 1)
    os.rename(write_date(place / "bad.tif", 1), os.path.join(os.fsencode(place), b"b\xff_2022-03-15.tif"))
    listed = server.client.get("/folder", params={"path": place.name})
    assert [entry["name"] for entry in listed.json()] == ["good.tif"]
    answer = opening(server, place.name)
    assert answer.status_code == 422
    assert "udcff" in answer.json()["detail"]


def test_too_many_files_are_refused_and_not_opened(server, place):
    for number in range(paths_module.MOST_ENTRIES + 1):
        (place / f"{number}.txt").touch()
    answer = opening(server, place.name)
    assert answer.status_code == 413
    assert len(server.client.get("/folder", params={"path": place.name}).json()) <= 500


# ---------------------------------------------------------------- uploads


def new_upload(server):
    return server.client.post("/scenes", json={}).json()["id"]


def put(server, scene, name, content):
    return server.client.put(f"/scenes/{scene}/files/{name}", content=content)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("..%2Fevil.tif", (400, 403, 404)), ("%2e%2e.tif", (400,)), (".hidden.tif", (400,)), ("a%00.tif", (400,)),
        ("a%5Cb.tif", (400,)), ("evil.vrt", (403,)), ("evil.html", (403,)), ("evil.svg", (403,)), ("x" * 300, (400,)),
        ("a.tif%2Fb.tif", (400, 404)), ("%0a.tif", (400,)), ("-rf.tif", (400,)),
    ],
)  # fmt: skip
def test_names_of_uploads(server, name, status):
    scene = new_upload(server)
    assert put(server, scene, name, b"II*\0").status_code in status
    assert list(server.service.scenes.files_folder(scene).iterdir()) == []


def test_an_upload_that_is_too_large_is_refused_by_its_header_and_while_it_comes(server):
    scene = new_upload(server)
    declared = put(server, scene, "a.tif", b"x" * (LIMITS.upload_bytes + 1))
    assert declared.status_code == 413

    sent = 0

    def endless():
        nonlocal sent
        for _ in range(400):
            sent += 2**16
            yield b"x" * 2**16

    # The server may close the line while the client still sends.
    with contextlib.suppress(httpx.TransportError):
        assert put(server, scene, "b.tif", endless()).status_code == 413
    assert list(server.service.scenes.files_folder(scene).iterdir()) == []
    assert server.client.get("/conformance").status_code == 200


def test_the_number_of_uploads_is_limited(server, monkeypatch):
    scene = new_upload(server)
    monkeypatch.setattr(server.service.scenes, "limits", type(LIMITS)(files=0, upload_bytes=LIMITS.upload_bytes))
    assert put(server, scene, "a.tif", b"II*\0").status_code == 413


def test_an_upload_is_not_replaced(server, tmp_path):
    scene = new_upload(server)
    content = write_date(tmp_path / "a.tif", 1).read_bytes()
    assert put(server, scene, "a.tif", content).status_code == 201
    assert put(server, scene, "a.tif", content).status_code == 409


def bomb(path, **options):
    """A file of a few kilobytes whose header declares a huge raster."""
    import rasterio

    with rasterio.open(path, "w", driver="GTiff", dtype="uint16", sparse_ok=True, **options):
        pass
    assert path.stat().st_size < LIMITS.upload_bytes
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"width": 400_000, "height": 400_000, "count": 1, "tiled": True, "blockxsize": 4096, "blockysize": 4096,
         "BIGTIFF": "YES"},
        {"width": 64, "height": 64, "count": 500},
        {"width": 64, "height": 64, "count": 1, "tiled": True, "blockxsize": 8192, "blockysize": 8192},
    ],
    ids=["pixels", "bands", "block"],
)  # fmt: skip
def test_decompression_bombs_are_refused_by_their_header(server, tmp_path, place, options, monkeypatch):
    path = bomb(tmp_path / "bomb.tif", **options)
    scene = new_upload(server)
    answer = put(server, scene, "bomb.tif", path.read_bytes())
    assert answer.status_code == 413, answer.text
    assert list(server.service.scenes.files_folder(scene).iterdir()) == []
    shutil.copy(path, place / "bomb.tif")
    assert opening(server, place.name).status_code == 413
    assert opening(server, f"{place.name}/bomb.tif").status_code == 413


def test_headers_alone_are_read_of_an_upload(server, tmp_path):
    """Damaged pixels do not matter at upload, because nothing is decoded."""
    path = write_date(tmp_path / "a.tif", 1, compress="deflate", tiled=True, blockxsize=64, blockysize=64)
    content = bytearray(path.read_bytes())
    import rasterio

    with rasterio.open(path) as dataset:
        at = int(dataset.get_tag_item("BLOCK_OFFSET_0_0", "TIFF", bidx=1))
    content[at : at + 200] = b"\xff" * 200
    scene = new_upload(server)
    assert put(server, scene, "a.tif", bytes(content)).status_code == 201
    answer = server.client.get(f"/scenes/{scene}/layers/0")
    assert answer.status_code == 422
    assert answer.json()["title"] == "DataError"


VRT = """<VRTDataset rasterXSize="64" rasterYSize="64"><VRTRasterBand dataType="UInt16" band="1"><SimpleSource>
<SourceFilename relativeToVRT="0">{name}</SourceFilename><SourceBand>1</SourceBand></SimpleSource></VRTRasterBand>
</VRTDataset>"""


def test_other_formats_are_refused_whatever_they_are_called(server, place, tmp_path, outside, canary):
    import rasterio
    from PIL import Image

    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    raster = np.zeros((1, 8, 8), np.uint8)
    with rasterio.open(tmp_path / "a.img", "w", driver="HFA", count=1, width=8, height=8, dtype="uint8") as dataset:
        dataset.write(raster)
    evil = {
        "vrt": VRT.format(name=outside / "S2_2022-03-10.tif").encode(),
        "far": VRT.format(name=f"/vsicurl/{canary.url}/a.tif").encode(),
        "wms": f'<GDAL_WMS><Service name="TMS"><ServerUrl>{canary.url}</ServerUrl></Service></GDAL_WMS>'.encode(),
        "png": (tmp_path / "a.png").read_bytes(),
        "hfa": (tmp_path / "a.img").read_bytes(),
        "text": b"#!/bin/sh\n",
        "empty": b"",
    }
    for kind, content in evil.items():
        scene = new_upload(server)
        answer = put(server, scene, f"{kind}.tif", content)
        assert answer.status_code == 403, (kind, answer.text)
        (place / f"{kind}.tif").write_bytes(content)
        assert opening(server, f"{place.name}/{kind}.tif").status_code == 403, kind
        assert opening(server, place.name).status_code == 403, kind
        (place / f"{kind}.tif").unlink()
    for name in ("a.vrt", "b.img", "c.nc", "d.zip"):
        (place / name).write_bytes(evil["vrt"])
        assert opening(server, f"{place.name}/{name}").status_code == 403, name
        assert opening(server, place.name).status_code == 403, name
        (place / name).unlink()
    assert canary.calls == []


def test_a_geotiff_that_names_another_file_as_its_overview(server, place, outside, canary):
    """GDAL follows this when it reads a reduced image: an address of the attacker's choice, or any file."""
    import rasterio

    for target in (f"/vsicurl/{canary.url}/internal.tif", str(outside / "S2_2022-03-10.tif")):
        for domain in ("OVERVIEWS", "GEOLOCATION"):
            path = write_date(place / "a.tif", 1)
            keys = {"OVERVIEW_FILE": target} if domain == "OVERVIEWS" else {"X_DATASET": target, "Y_DATASET": target}
            with rasterio.open(path, "r+") as dataset:
                dataset.update_tags(ns=domain, **keys)
            answer = opening(server, f"{place.name}/a.tif")
            assert answer.status_code == 403
            assert domain in answer.json()["detail"]
            scene = new_upload(server)
            assert put(server, scene, "a.tif", path.read_bytes()).status_code == 403
            path.unlink()
    assert canary.calls == []


def test_the_overview_attack_works_without_the_sandbox(tmp_path, canary):
    """The control: GDAL as it comes does call the address, GDAL in a child's environment does not."""
    import rasterio

    path = write_date(tmp_path / "a.tif", 1)
    with rasterio.open(path, "r+") as dataset:
        dataset.update_tags(ns="OVERVIEWS", OVERVIEW_FILE=f"/vsicurl/{canary.url}/internal.tif")
    program = "import rasterio, sys; rasterio.open(sys.argv[1]).read(1, out_shape=(8, 8))"
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("GDAL_", "CPL_"))}
    subprocess.run([sys.executable, "-c", program, str(path)], env=plain, check=True, capture_output=True)
    assert "/internal.tif" in canary.calls
    canary.calls.clear()
    walled = child_environment(os.environ, ())
    subprocess.run([sys.executable, "-c", program, str(path)], env=walled, check=True, capture_output=True)
    assert canary.calls == []


# ---------------------------------------------------------------- STAC


def item(*hrefs):
    assets = {f"B0{n + 2}": {"href": href, "type": "image/tiff"} for n, href in enumerate(hrefs)}
    return {
        "type": "Feature", "stac_version": "1.0.0", "id": "x", "geometry": None, "links": [],
        "properties": {"datetime": "2022-03-10T10:00:00Z"}, "assets": assets,
    }  # fmt: skip


def test_references_of_items_that_lead_elsewhere(server, place, outside, canary):
    secret = outside / "S2_2022-03-10.tif"
    evil = [
        f"{canary.url}/a.tif", f"{canary.url.replace('http:', 'https:')}/a.tif", str(secret), f"file://{secret}",
        "../../outside/S2_2022-03-10.tif", f"/vsicurl/{canary.url}/a.tif", f"/vsicurl?url={canary.url}/a.tif",
        f"vsicurl/{canary.url}/a.tif", "s3://bucket/a.tif", "gs://bucket/a.tif", "az://bucket/a.tif",
        f"vrt://{secret}", f"/vsizip/{outside}/a.zip/a.tif", "/vsistdin/", "GTIFF_RAW:" + str(secret),
        "http://169.254.169.254/latest/a.tif", "ftp://x/a.tif", f"/vsisubfile/0_100,{secret}", "evil.vrt",
        f"{canary.url}/redirect?url=file:///etc/passwd", "https://user@localhost/a.tif",
    ]  # fmt: skip
    (place / "evil.vrt").write_text(VRT.format(name=secret))
    for href in evil:
        for content in (item(href), {"type": "FeatureCollection", "features": [item(href)]}):
            (place / "item.json").write_text(json.dumps(content))
            answer = opening(server, f"{place.name}/item.json")
            assert answer.status_code in (403, 404, 422), (href, answer.status_code, answer.text)
            assert opening(server, place.name).status_code in (403, 404, 422), href
        scene = new_upload(server)
        assert put(server, scene, "item.json", json.dumps(item(href)).encode()).status_code == 201
        assert server.client.get(f"/scenes/{scene}").status_code in (403, 404, 422), href
        asked = {"inputs": {"scene": scene}}
        assert server.client.post("/processes/remove-clouds/execution", json=asked).status_code in (403, 404, 422)
    assert canary.calls == []


def test_an_item_with_its_files_beside_it_works(server, tmp_path):
    scene = new_upload(server)
    assets = {}
    for number, name in enumerate(("blue", "green", "red", "nir")):
        path = write_date(tmp_path / f"{name}.tif", 1)
        assets[name] = {"href": f"./{name}.tif", "type": "image/tiff", "bands": [{"name": name}]}
        assert put(server, scene, f"{name}.tif", path.read_bytes()).status_code == 201, number
    content = {**item(), "assets": assets}
    assert put(server, scene, "item.json", json.dumps(content).encode()).status_code == 201
    said = server.client.get(f"/scenes/{scene}").json()
    assert said["dates"][0]["date"].startswith("2022-03-10")
    assert said["bands"] == ["B02", "B03", "B04", "B08"]


def test_catalogues_are_not_followed(server, place, outside):
    (outside / "item.json").write_text(json.dumps(item("S2_2022-03-10.tif")))
    links = [{"rel": "item", "href": "../../outside/item.json"}]
    catalogue = {"type": "Catalog", "id": "x", "stac_version": "1.0.0", "links": links}
    (place / "catalog.json").write_text(json.dumps(catalogue))
    assert opening(server, f"{place.name}/catalog.json").status_code == 403
    assert opening(server, place.name).status_code == 403


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000, "{}", "null", "[]", "nonsense", '{"type": "FeatureCollection", "features": [1]}',
        '{"type": "Feature", "assets": []}', '{"type": "Feature", "assets": {"B02": 1}}',
        '{"type": "Feature", "assets": {"B02": {"href": "a.tif"}}, "properties": [], "links": [1]}',
    ],
)  # fmt: skip
def test_json_that_is_no_item(server, place, content):
    (place / "item.json").write_text(content)
    assert opening(server, f"{place.name}/item.json").status_code in (403, 422)
    assert server.client.get("/conformance").status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"bands": {"a": 1}}, {"eo:bands": 5}, {"roles": 1}, {"proj:shape": ["x", 1], "proj:transform": [1] * 6,
        "proj:epsg": 1}, {"href": ["a"]}, {"proj:shape": 5, "proj:transform": [1] * 6, "proj:epsg": 1},
        {"raster:bands": 7},
    ],
)  # fmt: skip
def test_items_with_assets_of_another_shape(server, place, change):
    """A mistake of the caller, in words; not a failure of the server."""
    write_date(place / "a.tif", 1)
    said = item("a.tif", "a.tif", "a.tif")
    for asset in said["assets"].values():
        asset.update(change)
    (place / "item.json").write_text(json.dumps(said))
    answer = opening(server, f"{place.name}/item.json")
    if answer.status_code == 201:
        answer = server.client.get(f"/scenes/{answer.json()['id']}")
    assert answer.status_code in (403, 404, 422), answer.text


@pytest.mark.parametrize("where", ["asset", "properties"])
def test_a_reference_system_that_is_an_address_or_a_file(server, place, outside, canary, where):
    """GDAL would fetch it, past all lists of hosts: found for items whose files are at an allowed host."""
    (outside / "system.prj").write_text('LOCAL_CS["the secret outside"]')
    write_date(place / "a.tif", 1)
    for code in (f"{canary.url}/crs", f"/vsicurl/{canary.url}/crs", str(outside / "system.prj"), "ESRI::x", 5, ["a"]):
        said = item("a.tif", "a.tif", "a.tif")
        for one in said["assets"].values() if where == "asset" else [said["properties"]]:
            one.update({"proj:code": code, "proj:shape": [64, 64], "proj:transform": [10, 0, 0, 0, -10, 0]})
        (place / "item.json").write_text(json.dumps(said))
        assert opening(server, f"{place.name}/item.json").status_code == 403, code
    assert canary.calls == []


def test_a_place_that_does_not_exist_is_no_failure(server, place):
    import rasterio

    write_date(place / "S2_2022-03-10.tif", 1, transform=rasterio.Affine(10, 0, 6e12, 0, -10, 5e13))
    scene = opening(server, place.name).json()["id"]
    said = server.client.get(f"/scenes/{scene}/values", params={"column": 1, "row": 1})
    assert said.status_code == 200
    assert said.json()["place"] is None
    assert server.client.get(f"/scenes/{scene}/mercator").status_code == 404


def test_a_mask_that_fetches_its_weights_is_refused(server):
    asked = {"inputs": {"paths": ["small"], "mask": "omnicloudmask"}}
    answer = server.client.post("/processes/remove-clouds/execution", json=asked)
    assert answer.status_code == 403
    assert "allow-remote" in answer.json()["detail"]


def test_a_product_with_a_link_that_leads_out(server, place, outside):
    product = place / "S2A_MSIL2A_20220310T103749_N0400_R008_T32TMS_20220310T150000.SAFE"
    (product / "GRANULE").mkdir(parents=True)
    (product / "MTD_MSIL2A.xml").symlink_to(outside / "secret.txt")
    answer = opening(server, f"{place.name}/{product.name}")
    assert answer.status_code == 403
    assert SECRET not in answer.text


def test_a_zipped_product_is_not_opened(server, place):
    path = place / "S2A_MSIL2A_20220310T103749_N0400_R008_T32TMS_20220310T150000.SAFE.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MTD_MSIL2A.xml", "<x/>")
    assert opening(server, f"{place.name}/{path.name}").status_code == 403
    assert opening(server, place.name).status_code == 403


# ---------------------------------------------------------------- the sandbox of a process

SANDBOXED = """
import sys
from sader.viewer.security.sandbox import install_sandbox
from sader.viewer.security.folder import DataFolder
from sader.viewer.settings import Limits
from sader.errors import SaderError
install_sandbox(DataFolder(sys.argv[1]), (), Limits())
import rasterio
for name in sys.argv[2:]:
    try:
        rasterio.open(name)
        print("OPENED", name)
    except SaderError as error:
        print("refused", type(error).__name__)
"""


def test_every_open_in_a_worker_process_is_checked(server, outside, canary, tmp_path):
    inside = server.data / "small" / "S2_2022-03-10.tif"
    vrt = server.data / "wall.tif"
    vrt.write_text(VRT.format(name=inside))
    evil = [
        str(outside / "S2_2022-03-10.tif"), f"/vsicurl/{canary.url}/a.tif", f"{canary.url}/a.tif", str(vrt),
        f"/vsicurl?url={canary.url}/a.tif", f"GTIFF_DIR:1:{inside}", "/vsis3/b/a.tif", f"zip://{inside}!a.tif",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SANDBOXED, str(server.data), *evil, str(inside)],
        env=child_environment(os.environ, ()), capture_output=True, text=True, check=True,
    )  # fmt: skip
    vrt.unlink()
    lines = done.stdout.split("\n")
    assert [line.split()[0] for line in lines[: len(evil)]] == ["refused"] * len(evil), done.stdout
    assert lines[len(evil)] == f"OPENED {inside}"
    assert canary.calls == []


def test_a_bomb_is_refused_by_whatever_opens_it(server, tmp_path):
    """Files of an allowed host are not inspected before: the sandbox applies the limits too."""
    path = bomb(server.data / "bomb.tif", width=400_000, height=400_000, count=1, tiled=True, BIGTIFF="YES",
                blockxsize=4096, blockysize=4096)  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SANDBOXED, str(server.data), str(path)],
        env=child_environment(os.environ, ()), capture_output=True, text=True, check=True,
    )  # fmt: skip
    path.unlink()
    assert done.stdout == "refused TooLargeError\n"


def test_worker_processes_get_no_token_and_no_cloud_account():
    environment = child_environment({"AWS_SECRET_ACCESS_KEY": "x", "GDAL_HTTP_HEADERS": "y", "HOME": "/h"}, ())
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert environment["HOME"] == "/h"
    assert environment["CPL_VSIL_CURL_ALLOWED_FILENAME"] == sandbox.NOWHERE
    from sader.viewer.settings import ServeSettings

    settings = ServeSettings(data=Path("x"), token="a-secret-token-of-the-server")
    assert "a-secret-token" not in json.dumps(settings.for_child())


def test_only_allowed_hosts_are_read_from(server):
    folder = server.service.folder
    good = "/vsicurl?empty_dir=yes&url=https%3A%2F%2Fgood.org%2Fa.tif"
    sandbox.check_location(good, folder, ("Good.org",))
    for path, allowed in (
        (good, ()), (good, ("evil.org",)), (good.replace("https", "http"), ("good.org",)),
        (good.replace("good.org", "good.org.evil.org"), ("good.org",)), ("/vsis3/good.org/a.tif", ("good.org",)),
        (good + "&url=https%3A%2F%2F127.0.0.1%2Fa.tif", ("good.org",)),
        ("/vsicurl/https://good.org/a.tif", ("good.org",)),
    ):  # fmt: skip
        with pytest.raises(ForbiddenError):
            sandbox.check_location(path, folder, allowed)


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/vsicurl?url=https%3A%2F%2Fgood.org%2Fa.tif", "good.org"),
        ("/vsicurl?url=https%3A%2F%2Fgood.org%2Fa.tif&url=https%3A%2F%2Fevil.org%2Fa.tif", "evil.org"),
        ("/vsicurl?url=https%3A%2F%2Fgood.org%40evil.org%2Fa.tif", "evil.org"),
        ("/vsicurl?url=http%3A%2F%2Fgood.org%2Fa.tif", ""),
        ("/vsicurl/https://good.org/a.tif", ""),
        ("/data/a.tif", None),
    ],
)
def test_the_host_of_a_remote_path(path, host):
    assert sandbox.remote_host(path) == host
