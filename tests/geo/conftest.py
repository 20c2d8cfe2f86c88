"""Synthetic Sentinel-2 products and STAC trees in the true layout, small: 120 x 120 pixels of 10 m."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZE = 120
LEFT, TOP = 399960, 5100000
L1C_BANDS = ("B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12")
PIXEL = {"B02": 10, "B03": 10, "B04": 10, "B08": 10, "B01": 60, "B09": 60, "B10": 60}
TILE = "T32TMS"


def scene(band: str, meters: int, *, shift: int = 0, seed: int = 0) -> np.ndarray:
    """Counts of a smooth landscape seen at a pixel size: a plane per band, plus texture at 10 m."""
    count = SIZE * 10 // meters
    centres = (np.arange(count) + 0.5) * meters / 10
    y, x = np.meshgrid(centres, centres, indexing="ij")
    level = 300 + 100 * L1C_BANDS.index(band)
    image = level + 4.0 * x + 2.0 * y
    if meters == 10:
        image = image + np.random.default_rng(seed + L1C_BANDS.index(band)).normal(0, 20, image.shape)
    return np.clip(np.rint(image), 1, 15000).astype(np.uint16) + np.uint16(shift)


def write_image(path: Path, image: np.ndarray, meters: int, *, driver: str = "JP2OpenJPEG", **options: Any) -> Path:
    """Write one band, lossless, on the tile's map."""
    rasterio = pytest.importorskip("rasterio")
    path.parent.mkdir(parents=True, exist_ok=True)
    if driver == "JP2OpenJPEG":
        options = {"QUALITY": "100", "REVERSIBLE": "YES", "YCBCR420": "NO", **options}
    bands = image if image.ndim == 3 else image[None]
    with rasterio.open(
        path,
        "w",
        driver=driver,
        count=bands.shape[0],
        height=bands.shape[1],
        width=bands.shape[2],
        dtype=bands.dtype,
        crs="EPSG:32632",
        transform=rasterio.Affine(meters, 0, LEFT, 0, -meters, TOP),
        **options,
    ) as dataset:
        dataset.write(bands)
    return path


def metadata(level: str, name: str, files: list[str], *, baseline: str, offset: int | None, start: str) -> str:
    """MTD_MSIL1C.xml or MTD_MSIL2A.xml with the elements of the real one that say something about values and time."""
    listed = "\n".join(f"            <IMAGE_FILE>{file}</IMAGE_FILE>" for file in files)
    if level == "L2A":
        quantification = """<QUANTIFICATION_VALUES_LIST>
        <BOA_QUANTIFICATION_VALUE unit="none">10000</BOA_QUANTIFICATION_VALUE>
        <AOT_QUANTIFICATION_VALUE unit="none">1000.0</AOT_QUANTIFICATION_VALUE>
        <WVP_QUANTIFICATION_VALUE unit="cm">1000.0</WVP_QUANTIFICATION_VALUE>
      </QUANTIFICATION_VALUES_LIST>"""
        outer, inner = "BOA_ADD_OFFSET_VALUES_LIST", "BOA_ADD_OFFSET"
    else:
        quantification = '<QUANTIFICATION_VALUE unit="none">10000</QUANTIFICATION_VALUE>'
        outer, inner = "Radiometric_Offset_List", "RADIO_ADD_OFFSET"
    offsets = "".join(f'<{inner} band_id="{number}">{offset}</{inner}>' for number in range(13))
    spectral = "".join(
        f'<Spectral_Information bandId="{number}" physicalBand="{"B8A" if band == "B8A" else f"B{int(band[1:])}"}">'
        f"<RESOLUTION>{PIXEL.get(band, 20)}</RESOLUTION></Spectral_Information>"
        for number, band in enumerate(L1C_BANDS)
    )
    kind = f"Level-{level[1:]}"
    return f"""<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<n1:{kind}_User_Product xmlns:n1="https://psd-14.sentinel2.eo.esa.int/PSD/User_Product_{kind}.xsd">
  <n1:General_Info>
    <Product_Info>
      <PRODUCT_START_TIME>{start}</PRODUCT_START_TIME>
      <PRODUCT_STOP_TIME>{start}</PRODUCT_STOP_TIME>
      <PRODUCT_URI>{name}.SAFE</PRODUCT_URI>
      <PROCESSING_LEVEL>{kind}</PROCESSING_LEVEL>
      <PRODUCT_TYPE>S2MSI{level[1:]}</PRODUCT_TYPE>
      <PROCESSING_BASELINE>{baseline}</PROCESSING_BASELINE>
      <Datatake datatakeIdentifier="GS2A_20220310T103749_035071_N{baseline}">
        <SPACECRAFT_NAME>Sentinel-2A</SPACECRAFT_NAME>
        <DATATAKE_SENSING_START>{start}</DATATAKE_SENSING_START>
      </Datatake>
      <Product_Organisation>
        <Granule_List>
          <Granule granuleIdentifier="S2A_OPER_MSI_{level}_TL_VGS2_A035071_{TILE}_N{baseline}" imageFormat="JPEG2000">
{listed}
          </Granule>
        </Granule_List>
      </Product_Organisation>
    </Product_Info>
    <Product_Image_Characteristics>
      <Special_Values><SPECIAL_VALUE_TEXT>NODATA</SPECIAL_VALUE_TEXT><SPECIAL_VALUE_INDEX>0</SPECIAL_VALUE_INDEX></Special_Values>
      <Special_Values><SPECIAL_VALUE_TEXT>SATURATED</SPECIAL_VALUE_TEXT><SPECIAL_VALUE_INDEX>65535</SPECIAL_VALUE_INDEX></Special_Values>
      {quantification}
      {f"<{outer}>{offsets}</{outer}>" if offset is not None else ""}
      <Spectral_Information_List>{spectral}</Spectral_Information_List>
    </Product_Image_Characteristics>
  </n1:General_Info>
</n1:{kind}_User_Product>
"""


@pytest.fixture(name="make_safe")
def make_safe_fixture(tmp_path: Path) -> Callable[..., Path]:
    """A maker of .SAFE folders: make_safe(level, baseline, offset, day, cloud=slice of rows, nodata=...)."""
    pytest.importorskip("rasterio")

    def make(
        level: str = "L2A",
        *,
        baseline: str = "04.00",
        offset: int | None = -1000,
        day: str = "20220310",
        folder: Path = tmp_path,
        bands: tuple[str, ...] = L1C_BANDS,
        empty_columns: int = 0,
        cloud_rows: int = 0,
        seed: int = 0,
    ) -> Path:
        number = baseline.replace(".", "")
        name = f"S2A_MSI{level}_{day}T103749_N{number}_R008_{TILE}_{day}T140453"
        root = folder / f"{name}.SAFE"
        granule = f"GRANULE/{level}_{TILE}_A035071_{day}T103950"
        files: list[str] = []

        def put(path: str, image: np.ndarray, meters: int) -> None:
            files.append(path)
            write_image(root / f"{path}.jp2", image, meters)

        for band in bands:
            if level == "L2A" and band == "B10":
                continue
            native = PIXEL.get(band, 20)
            # L2A repeats its bands at every coarser pixel size; the reader must take the finest.
            sizes = [native] if level == "L1C" else [meters for meters in (10, 20, 60) if meters >= native]
            for meters in sizes:
                image = scene(band, meters, shift=-(offset or 0), seed=seed)
                image[: cloud_rows * 10 // meters] = 8000
                image[:, : empty_columns * 10 // meters] = 0
                stem = f"{TILE}_{day}T103749_{band}"
                if level == "L1C":
                    put(f"{granule}/IMG_DATA/{stem}", image, meters)
                else:
                    put(f"{granule}/IMG_DATA/R{meters}m/{stem}_{meters}m", image, meters)
        if level == "L2A":
            for meters in (20, 60):
                classes = np.full((SIZE * 10 // meters,) * 2, 4, np.uint8)
                classes[: cloud_rows * 10 // meters] = 9
                classes[cloud_rows * 10 // meters] = 3
                classes[-1] = 11
                classes[:, : empty_columns * 10 // meters] = 0
                put(f"{granule}/IMG_DATA/R{meters}m/{TILE}_{day}T103749_SCL_{meters}m", classes, meters)
        start = f"{day[:4]}-{day[4:6]}-{day[6:]}T10:37:49.024Z"
        text = metadata(level, name, files, baseline=baseline, offset=offset, start=start)
        (root / f"MTD_MSI{level}.xml").write_text(text, encoding="utf-8")
        (root / granule / "MTD_TL.xml").write_text("<Tile/>", encoding="utf-8")
        (root / "manifest.safe").write_text("<manifest/>", encoding="utf-8")
        return root

    return make


EARTH_SEARCH_KEYS = {"B02": "blue", "B03": "green", "B04": "red", "B08": "nir", "B11": "swir16"}


@pytest.fixture(name="make_item")
def make_item_fixture(tmp_path: Path) -> Callable[..., Path]:
    """A maker of STAC items with their COG-like assets beside them: make_item(day, style="earth-search")."""
    pytest.importorskip("rasterio")

    def make(
        day: str = "20220310",
        *,
        style: str = "earth-search",
        properties: dict[str, Any] | None = None,
        offset: float | None = -0.1,
        shift: int = 1000,
        folder: Path = tmp_path,
        tile: str = "32TMS",
        cloud_rows: int = 0,
        empty_columns: int = 0,
        seed: int = 0,
        bands: tuple[str, ...] = tuple(EARTH_SEARCH_KEYS),
        time: str = "10:39:50",
    ) -> Path:
        name = f"S2A_{tile}_{day}_0_L2A"
        data = folder / name
        assets: dict[str, Any] = {}
        for band in bands:
            meters = PIXEL.get(band, 20)
            image = scene(band, meters, shift=shift, seed=seed)
            image[: cloud_rows * 10 // meters] = 9000
            image[:, : empty_columns * 10 // meters] = 0
            write_image(data / f"{band}.tif", image, meters, driver="GTiff", nodata=0)
            asset: dict[str, Any] = {
                "href": f"./{name}/{band}.tif",
                "type": "image/tiff; application=geotiff; profile=cloud-optimized",
                "roles": ["data", "reflectance"],
            }
            raster = {"nodata": 0, "data_type": "uint16", "spatial_resolution": meters, "scale": 0.0001}
            if offset is not None:
                raster["offset"] = offset
            if style == "earth-search":  # STAC 1.0, names of colours as keys
                asset["eo:bands"] = [{"name": EARTH_SEARCH_KEYS[band], "common_name": EARTH_SEARCH_KEYS[band]}]
                asset["raster:bands"] = [raster]
                assets[EARTH_SEARCH_KEYS[band]] = asset
            elif style == "planetary":  # STAC 1.0, no offset anywhere
                asset["eo:bands"] = [{"name": band, "common_name": EARTH_SEARCH_KEYS[band]}]
                assets[band] = asset
            else:  # STAC 1.1 as of the Copernicus Data Space
                asset["nodata"], asset["data_type"] = 0, "uint16"
                asset["bands"] = [{"name": band, "eo:common_name": EARTH_SEARCH_KEYS[band]}]
                asset["raster:scale"] = 0.0001
                if offset is not None:
                    asset["raster:offset"] = offset
                assets[f"{band}_{meters}m"] = asset
        classes = np.full((SIZE // 2,) * 2, 4, np.uint8)
        classes[: cloud_rows // 2] = 9
        classes[:, : empty_columns // 2] = 0
        write_image(data / "SCL.tif", classes, 20, driver="GTiff", nodata=0)
        key = {"earth-search": "scl", "planetary": "SCL"}.get(style, "SCL_20m")
        assets[key] = {"href": f"./{name}/SCL.tif", "type": "image/tiff; application=geotiff", "roles": ["data"]}
        assets["thumbnail"] = {"href": f"./{name}/preview.jpg", "type": "image/jpeg", "roles": ["thumbnail"]}
        if style == "earth-search":
            assets["red-jp2"] = {**assets["red"], "href": "s3://nowhere/B04.jp2", "type": "image/jp2"}
            assets["visual"] = {
                "href": "./nowhere.tif",
                "eo:bands": [{"name": n, "common_name": n} for n in ("red", "green", "blue")],
            }
        west, south = 7.7050, 46.0300
        item = {
            "type": "Feature",
            "stac_version": "1.1.0" if style == "copernicus" else "1.0.0",
            "id": name,
            "collection": "sentinel-2-l2a",
            "geometry": {
                "type": "Polygon",
                "coordinates": [
                    [
                        [west, south],
                        [west + 0.02, south],
                        [west + 0.02, south + 0.02],
                        [west, south + 0.02],
                        [west, south],
                    ]
                ],
            },
            "bbox": [west, south, west + 0.02, south + 0.02],
            "properties": {
                "datetime": f"{day[:4]}-{day[4:6]}-{day[6:]}T{time}Z",
                "platform": "sentinel-2a",
                "s2:processing_baseline": "04.00",
                "eo:cloud_cover": 10.0,
                **(properties or {}),
            },
            "links": [{"rel": "self", "href": f"https://example.org/items/{name}"}],
            "assets": assets,
        }
        path = folder / f"{name}.json"
        path.write_text(json.dumps(item), encoding="utf-8")
        return path

    return make


@pytest.fixture(name="scene_counts")
def scene_counts_fixture() -> Callable[..., np.ndarray]:
    """The counts that the trees hold: scene_counts(band, meters, shift=...)."""
    return scene


@pytest.fixture(name="write_raster")
def write_raster_fixture() -> Callable[..., Path]:
    """write_raster(path, image, meters, driver="GTiff", nodata=0)"""
    return write_image


# ------------------------------------------------------------------------------------------------ whole scenes

GRID = (10.0, 0.0, 600000.0, 0.0, -10.0, 5100000.0)
RGBN = ("B02", "B03", "B04", "B08")


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A remover with a tiny network: four bands, composite, cloud head, noise on every parameter, tiles of 32."""
    import torch

    from sader.checkpoint import Checkpoint
    from sader.inference.remover import CloudRemover, RemoverOptions
    from sader.models import build_model, get_preset

    network = {
        "widths": (16, 32), "blocks": (1, 1), "fusion_width": 16, "key_width": 8, "emb_width": 16, "kernel": 3,
        "cloud_widths": (8,),
    }  # fmt: skip
    known = get_preset("small").network.__dataclass_fields__
    network |= {key: (8,) for key in ("refinement_widths",) if key in known}
    config = get_preset("small").replace(name="tiny", network=network)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return CloudRemover(Checkpoint(model.eval(), config, {}), device="cpu", options=RemoverOptions(tile=32, overlap=8))


@pytest.fixture(scope="session")
def tiny_file(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint file, for the command line."""
    from sader.checkpoint import save_checkpoint

    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_checkpoint(path, tiny.denoiser, tiny.config)
    return path


@pytest.fixture(scope="session")
def write_date() -> Callable[..., Path]:
    """Write one date as a GeoTIFF: write_date(path, array (C, H, W) or a seed, bands=..., **profile)."""
    rasterio = pytest.importorskip("rasterio")

    def write(
        path: Path,
        content: Any = 0,
        *,
        bands: tuple[str, ...] | None = RGBN,
        size: tuple[int, int] = (70, 90),
        scale: float | None = None,
        offset: float = 0.0,
        transform: Any = GRID,
        tags: dict[str, str] | None = None,
        **profile: Any,
    ) -> Path:
        if isinstance(content, int):
            content = land(content, size=size)
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {"driver": "GTiff", "crs": "EPSG:32632", "nodata": 0, "tiled": True, "blockxsize": 64,
                    "blockysize": 64, "compress": "deflate"} | profile  # fmt: skip
        with rasterio.open(
            path, "w", count=content.shape[0], height=content.shape[1], width=content.shape[2],
            dtype=content.dtype, transform=rasterio.Affine(*transform), **settings,
        ) as dataset:  # fmt: skip
            dataset.write(content)
            if bands is not None:
                dataset.descriptions = bands
            if scale is not None:
                dataset.scales, dataset.offsets = (scale,) * len(content), (offset,) * len(content)
            dataset.update_tags(**(tags or {}))
        return path

    return write


def land(seed: int, *, size: tuple[int, int] = (70, 90), bands: int = 4) -> np.ndarray:
    """Counts (C, H, W) of one place (always the same land) with the light and the grain of a date."""
    rows, cols = np.mgrid[: size[0], : size[1]]
    fields = np.random.default_rng(7).integers(300, 2600, (bands, size[0] // 8 + 1, size[1] // 8 + 1))
    ground = fields[:, rows // 8, cols // 8] * (1 + 0.05 * seed)
    grain = np.random.default_rng(seed + 1).normal(0, 15, ground.shape)
    return np.clip(np.rint(ground + grain), 1, 20000).astype(np.uint16)


@pytest.fixture(name="land", scope="session")
def land_fixture() -> Callable[..., np.ndarray]:
    return land
