"""Sentinel-1 through every step: packed, trained with dropout, scored, used by `sader remove --aux` and in Python."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sader.bands import BANDS_RGBN
from sader.checkpoint import save_checkpoint
from sader.cli.main import main
from sader.data.bank import SeriesBank, SeriesMaker
from sader.data.items import clean_this_date, paper_task
from sader.data.plan import MakerSettings
from sader.data.public.dataset import ReadOptions
from sader.data.public.registry import open_dataset
from sader.data.radar import RADAR_BANDS, scale_sar
from sader.data.shards import SeriesRecord, read_shards
from sader.data.synthetic.scene import make_series
from sader.errors import BandError, ConfigError, DataError, ValueRangeError
from sader.inference.remover import CloudRemover
from sader.training.config import resolve
from sader.training.run import run_training

rasterio = pytest.importorskip("rasterio")

SIDE = 64
TINY = [
    "model.network.widths=[8, 16]", "model.network.blocks=[1, 1]", "model.network.fusion_width=8",
    "model.network.key_width=8", "model.network.head_width=8", "model.network.kernel=3", "model.network.emb_width=16",
    "train.device=cpu", "train.batch_size=2", "train.accumulate=1", "train.crop=32", "train.steps=2",
    "train.log_every=1", "train.validate_every=0",
]  # fmt: skip
RADAR = ["model.network.bands=[B02, B03, B04, B08]", "model.network.aux_bands=[VV, VH]"]


def write(path: Path, values: np.ndarray, names: tuple[str, ...] = ()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"driver": "GTiff", "count": len(values), "height": values.shape[1], "width": values.shape[2],
               "dtype": values.dtype.name, "crs": "EPSG:32631",
               "transform": rasterio.transform.from_origin(500000, 5700000, 10, 10)}  # fmt: skip
    with rasterio.open(path, "w", **profile) as file:
        file.write(values)
        if names:
            file.descriptions = names
    return path


def dates_of(files: list[str]) -> np.ndarray:
    """Return the reflectance (T, C, H, W) of the scene files."""
    stack = []
    for path in files:
        with rasterio.open(path) as file:
            stack.append(file.read().astype(np.float32) / 10000)
    return np.stack(stack)


def decibel(seed: int, side: int = SIDE) -> np.ndarray:
    """VV and VH in dB."""
    rng = np.random.default_rng(seed)
    return (np.array([-11.0, -18.0])[:, None, None] + rng.normal(0, 2, (2, side, side))).astype(np.float32)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two places of four dates with NAME_s1.tif and NAME_label.tif beside NAME.tif."""
    folder = tmp_path_factory.mktemp("archive")
    for place in range(2):
        series = make_series(place, size=(SIDE, SIDE), dates=4, bands=BANDS_RGBN, coverage=[0.0, 0.4, 0.4, 0.4])
        for date in range(4):
            stem = folder / f"place{place}" / f"2022-03-{10 + 5 * date}"
            counts = np.clip(np.rint(series.cloudy[date] * 10000), 1, 10000).astype(np.uint16)
            write(stem.with_suffix(".tif"), counts, BANDS_RGBN)
            write(stem.with_name(f"{stem.name}_s1.tif"), decibel(10 * place + date))
            write(stem.with_name(f"{stem.name}_label.tif"), series.cloud_mask[date].astype(np.uint8)[None])
    return folder


@pytest.fixture(scope="module")
def shards(archive: Path) -> Path:
    out = archive.parent / "shards"
    with pytest.raises(SystemExit) as done:
        main(["data", "pack", f"folder:{archive}", "-o", str(out), "--split", "none", "--step", "1"])
    assert done.value.code == 0
    return out


@pytest.fixture(scope="module")
def weights(shards: Path) -> Path:
    """The paper's method, tiny, trained with radar for two steps."""
    run = shards.parent / "run"
    return run_training("sen2_mtc_new", run, data=[str(shards)], overrides=[*TINY, *RADAR], progress=False)


def remover_of(path: Path) -> CloudRemover:
    """The model with random weights where it starts at zero, so that every input has an effect."""
    remover = CloudRemover.from_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in remover.denoiser.network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return remover


def test_radar_beside_a_scene_is_packed(shards: Path):
    record = next(iter(read_shards(shards)))
    assert record.bands == (*BANDS_RGBN, *RADAR_BANDS)
    wanted = scale_sar(decibel(0)) * 10000
    np.testing.assert_allclose(record.dn[0, 4:], np.maximum(wanted, 1), atol=1)
    assert record.days == (0, 5, 10, 15)


def test_a_date_without_radar_among_others_is_an_error(archive: Path, tmp_path: Path):
    for number, file in enumerate(sorted((archive / "place0").glob("2022-03-??.tif"))):
        (tmp_path / "a" / file.name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
        radar = file.with_name(f"{file.stem}_s1.tif")
        if number != 2:
            (tmp_path / "a" / radar.name).write_bytes(radar.read_bytes())
    from sader.data.pack import pack_sources

    with pytest.raises(DataError, match=r"2022-03-20\.tif has no 2022-03-20_s1\.tif beside it"):
        pack_sources([f"folder:{tmp_path}"], tmp_path / "out")


def test_clouds_and_colours_leave_radar_alone(shards: Path):
    bands = (*BANDS_RGBN, *RADAR_BANDS)
    bank = SeriesBank.load(shards, bands=bands)
    settings = MakerSettings(radar_dropout=0.0, symmetries=False, rescale=0.0, jitter=0.5, mixed=1.0)
    batch = SeriesMaker(bank, settings).batch(0, 6, 4, SIDE)
    stored = np.stack([record.dn[:, 4:] for record in read_shards(shards)]).reshape(-1, 2, SIDE, SIDE) / 10000
    for series in range(6):
        for date in torch.nonzero(batch.present[series]).flatten():
            seen = batch.valid[series, date].numpy()
            found = batch.cloudy[series, date, 4:].numpy()
            errors = [np.abs(found - each)[:, seen].max() for each in stored]
            assert min(errors) < 1e-4, "radar of one of the dates, pixel by pixel"
    assert (batch.cloud_mask.float().mean() < 0.98).all(), "speckle is no cloud"
    with pytest.raises(ConfigError, match="radar cannot be predicted"):
        SeriesBank.load(shards, bands=("VV", "VH", "B02"))


def test_radar_is_dropped_from_whole_series(shards: Path):
    bank = SeriesBank.load(shards, bands=(*BANDS_RGBN, *RADAR_BANDS))
    maker = SeriesMaker(bank, MakerSettings(band_dropout=()))
    there = torch.cat([maker.batch(step, 8, 3, 32).band_present for step in range(20)])
    assert there[:, :4].all()
    assert (there[:, 4] == there[:, 5]).all(), "both polarisations together"
    assert 0.55 < there[:, 4].float().mean() < 0.85
    batch = maker.batch(0, 8, 3, 32)
    first, aux = batch.split(4)
    assert first.cloudy.shape[2] == first.clear.shape[1] == first.band_present.shape[1] == 4
    assert aux is not None
    dropped = ~batch.band_present[:, 4]
    assert dropped.any()
    assert (aux[dropped] == 0.5).all()


def test_batches_without_radar_are_those_of_before(shards: Path):
    """The setting changes nothing for networks without radar."""
    bank = SeriesBank.load(shards, bands=BANDS_RGBN)
    one, two = (SeriesMaker(bank, MakerSettings(radar_dropout=p)).batch(3, 4, 3, 32) for p in (0.0, 0.9))
    assert torch.equal(one.cloudy, two.cloudy)


@pytest.mark.parametrize("base", ["small", "pix2pix"])
def test_other_networks_train_with_radar(base: str, shards: Path, tmp_path: Path):
    if base == "small":
        changes = [*TINY, "model.network.cloud_widths=[8, 8]", "model.network.refinement_widths=[8]", "train.dates=4"]
    else:
        changes = [text for text in TINY if text.startswith("train")]
        changes += ["model.network.width=4", "model.network.blocks=1", "model.network.judge_widths=[4,4]"]
    path = run_training(base, tmp_path, data=[str(shards)], overrides=[*changes, RADAR[1]], progress=False)
    remover = CloudRemover.from_pretrained(path)
    series = make_series(3, size=(SIDE, SIDE), dates=3, bands=BANDS_RGBN, coverage=0.3)
    image = remover.predict(series.cloudy, aux=scale_sar(decibel(1))).clear
    assert np.isfinite(image).all()


def test_records_give_items_with_radar(shards: Path):
    records = list(read_shards(shards))
    for build in (clean_this_date, paper_task):
        item = next(iter(build(records)))
        assert item.aux_bands == RADAR_BANDS
        assert item.bands == BANDS_RGBN
        assert item.aux is not None
        assert item.aux.shape == (len(item.cloudy), 2, *item.clear.shape[1:])
        split = item.with_aux(("B04", "B03", "B02"))
        assert split.aux_bands == ("B08", "VV", "VH")
    optical = next(iter(clean_this_date(records, bands=BANDS_RGBN)))
    assert optical.aux is None
    np.testing.assert_array_equal(optical.cloudy, next(iter(clean_this_date(records))).cloudy)


def test_evaluation_gives_the_model_its_radar(shards: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    seen = []
    predict = CloudRemover.predict
    monkeypatch.setattr(
        CloudRemover, "predict", lambda self, *a, **k: (seen.append(k["aux"]), predict(self, *a, **k))[1]
    )
    with pytest.raises(SystemExit) as done:
        main(["evaluate", str(weights), "--data", str(shards), "--split", "all", "--task", "paper", "--no-classical",
              "--limit", "1", "--pictures", "0", "--json"])  # fmt: skip
    assert done.value.code == 0
    assert json.loads(capsys.readouterr().out)["methods"]
    assert all(aux is not None and aux.shape[1] == 2 for aux in seen)


def test_public_datasets_pack_their_radar(tmp_path: Path, write_tif):
    for region, number in (("ROIs1158_spring", 39),):
        for kind, values in (("s2_cloudy", 5000), ("s2", 900)):
            path = tmp_path / f"{region}_{kind}" / f"{kind}_{number}" / f"{region}_{kind}_{number}_p1.tif"
            write_tif(path, np.full((13, 16, 16), values, np.uint16))
        path = tmp_path / f"{region}_s1" / f"s1_{number}" / f"{region}_s1_{number}_p1.tif"
        write_tif(path, decibel(5, 16))
    options = ReadOptions(partial=True, sar="default")
    dataset = open_dataset(tmp_path, dataset="sen12mscr", split="all", options=options)
    (record,) = dataset.records(BANDS_RGBN)
    assert record.bands == (*BANDS_RGBN, *RADAR_BANDS)
    np.testing.assert_allclose(record.dn[1, 4:] / 10000, scale_sar(decibel(5, 16)), atol=1e-4)
    plain = open_dataset(tmp_path, dataset="sen12mscr", split="all", options=replace(options, sar=None))
    assert next(plain.records(BANDS_RGBN)).bands == BANDS_RGBN


def scene_files(archive: Path) -> list[str]:
    return [str(path) for path in sorted((archive / "place1").glob("2022-03-??.tif"))[:3]]


def test_remove_takes_one_radar_file_or_one_for_each_date(archive: Path, weights: Path, tmp_path: Path):
    files = scene_files(archive)
    model = str(tmp_path / "model.safetensors")
    changed = remover_of(weights)
    save_checkpoint(model, changed.model, changed.config)
    each = [str(path).replace(".tif", "_s1.tif") for path in files]
    named = str(write(tmp_path / "radar.tif", decibel(99)[::-1].copy(), ("vh", "vv")))
    results = {}
    for name, aux in (("none", []), ("one", each[:1]), ("each", each), ("named", [named])):
        out = tmp_path / f"{name}.tif"
        options = [text for path in aux for text in ("--aux", path)]
        with pytest.raises(SystemExit) as done:
            main(["remove", *files, "-o", str(out), "--model", model, "--steps", "1", "--reference", "none", *options])
        assert done.value.code == 0
        with rasterio.open(out) as file:
            results[name] = file.read()
    assert len({values.tobytes() for values in results.values()}) == 4, "every choice of radar has its own result"


def test_files_and_arrays_with_radar_agree(archive: Path, weights: Path, tmp_path: Path):
    import sader

    remover = remover_of(weights)
    files = scene_files(archive)
    radar = files[0].replace(".tif", "_s1.tif")
    sader.remove_files(remover, files, tmp_path / "out.tif", aux=[radar], steps="1", reference="none")
    with rasterio.open(radar) as file:
        aux = scale_sar(file.read())
    image = remover.predict(dates_of(files), aux=aux, steps="1").clear
    with rasterio.open(tmp_path / "out.tif") as file:
        written = file.read() / 10000
    np.testing.assert_allclose(written, image, atol=2e-3)


def test_radar_beside_an_infrared_band_of_the_files(archive: Path, shards: Path, tmp_path: Path):
    """The paper's network for Sen2_MTC_New, whose near infrared is in the dates and whose radar is in `--aux`."""
    import sader

    changes = [*TINY, "model.network.aux_bands=[B08, VH, VV]"]
    run = run_training("sen2_mtc_new", tmp_path / "run", data=[str(shards)], overrides=changes, progress=False)
    remover, files = remover_of(run), scene_files(archive)
    radar = files[0].replace(".tif", "_s1.tif")
    sader.remove_files(remover, files, tmp_path / "out.tif", aux=[radar], steps="1", reference="none")
    dates = dates_of(files)
    with rasterio.open(radar) as file:
        vv, vh = (np.broadcast_to(band, dates[:, 3].shape) for band in scale_sar(file.read()))
    results = {}
    for name, aux in (("right", (dates[:, 3], vh, vv)), ("swapped", (dates[:, 3], vv, vh))):
        results[name] = remover.predict(dates[:, [2, 1, 0]], aux=np.stack(aux, axis=1), steps="1").clear
    with rasterio.open(tmp_path / "out.tif") as file:
        written = file.read([file.descriptions.index(band) + 1 for band in remover.config.network.bands]) / 10000
    np.testing.assert_allclose(written, results["right"], atol=2e-3)
    assert np.abs(written - results["swapped"]).max() > 4e-3
    with rasterio.open(files[1]) as file:
        names = file.descriptions[:3]
        files[1] = str(write(tmp_path / Path(files[1]).name, file.read([1, 2, 3]), names))
    with pytest.warns(
        UserWarning, match="B08 is not in every date: the model works without its auxiliary bands B08, VH"
    ):
        sader.remove_files(remover, files, tmp_path / "less.tif", aux=[radar], steps="1", reference="none")


def test_wrong_radar_files(archive: Path, weights: Path, tmp_path: Path):
    import sader

    files, remover = scene_files(archive), CloudRemover.from_pretrained(weights)
    out = tmp_path / "out.tif"

    def fails(error: type[Exception], text: str, *aux: Path | str) -> None:
        with pytest.raises(error, match=text):
            sader.remove_files(remover, files, out, aux=aux)

    good = write(tmp_path / "good.tif", decibel(1))
    fails(ConfigError, "2 radar files for 3 dates; expected one for all dates", good, good)
    fails(DataError, "none.tif", tmp_path / "none.tif")
    fails(
        ValueRangeError,
        r"linear\.tif holds values from .*10 \* log10",
        write(tmp_path / "linear.tif", 10 ** (decibel(1) / 10)),
    )
    fails(
        DataError,
        "counts.tif is uint16; expected decibels",
        write(tmp_path / "counts.tif", np.ones((2, 8, 8), np.uint16)),
    )
    fails(BandError, "three.tif has bands unnamed", write(tmp_path / "three.tif", np.ones((3, 8, 8), np.float32)))
    plain = CloudRemover.from_preset("small")
    with pytest.raises(BandError, match=r"this model takes no auxiliary bands.*aux_bands=\[VV, VH\]"):
        sader.remove_files(plain, files, out, aux=[good])


def test_radar_of_one_record_is_enough(tmp_path: Path):
    """Places without radar train beside places with it."""
    rng = np.random.default_rng(0)
    records = []
    for number, bands in enumerate(((*BANDS_RGBN, *RADAR_BANDS), BANDS_RGBN)):
        dn = rng.integers(500, 3000, (3, len(bands), 32, 32)).astype(np.uint16)
        records.append(SeriesRecord(dn, f"p{number}", "folder", bands, np.zeros((3, 32, 32), np.uint8)))
    bank = SeriesBank(records, bands=(*BANDS_RGBN, *RADAR_BANDS))
    maker = SeriesMaker(bank, MakerSettings(radar_dropout=0.0, band_dropout=()))
    batch = maker.batch(0, 16, 3, 32)
    assert batch.scored.float().mean() > 0.9
    assert 0 < batch.band_present[:, 4].float().mean() < 1
    assert resolve("small", [RADAR[1]]).model.network.aux_bands == RADAR_BANDS
