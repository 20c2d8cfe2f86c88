"""`sader remove` as a user meets it: what works, and every wrong input with its exact answer and exit status 2."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sader.cli.main import main

rasterio = pytest.importorskip("rasterio")


@pytest.fixture
def remove(tiny_file, capsys):
    """Run the command with the tiny model; return (exit status, standard output, standard error)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        status = 0
        try:
            main(["remove", "--model", str(tiny_file), "--device", "cpu", *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        return status, out, " ".join(err.split())

    return run


def read(path: Any) -> np.ndarray:
    with rasterio.open(path) as dataset:
        return dataset.read()


# ------------------------------------------------------------------------------------------------ what works


def test_three_files_to_one_map(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", n) for n in range(3)]
    out = tmp_path / "clear.tif"
    preview = tmp_path / "look.png"
    status, printed, err = remove(
        *paths, "-o", out, "--reference", "2022-04-10", "--provenance", "--uncertainty", "--samples", 2, "--preview",
        preview, "--json",
    )  # fmt: skip
    assert status == 0, err
    report = json.loads(printed)
    assert report["reference"] == "S2_2022-04-10.tif"
    assert report["samples"] == 2
    assert [Path(path).name for path in report["files"]] == [
        "clear.tif", "clear_uncertainty.tif", "clear_provenance.tif", "look.png", "clear.json",
    ]  # fmt: skip
    assert all(Path(path).stat().st_size > 0 for path in report["files"])
    item = json.loads((tmp_path / "clear.json").read_text())
    assert item["properties"]["sader:model"] == "tiny"
    assert sum(link["rel"] == "derived_from" for link in item["links"]) == 3
    assert not list(tmp_path.glob(".*"))


def test_provenance_has_colours_and_names(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"{n}.tif", n) for n in range(2)]
    assert remove(*paths, "-o", tmp_path / "c.tif", "--no-item", "--provenance")[0] == 0
    with rasterio.open(tmp_path / "c_provenance.tif") as made:
        assert made.colorinterp[0].name == "palette"
        assert [made.colormap(1)[code] for code in range(3)] == [
            (128, 128, 128, 0), (28, 46, 84, 255), (245, 245, 245, 255),
        ]  # fmt: skip
    names = (tmp_path / "c_provenance.tif.aux.xml").read_text()
    assert re.findall("<Category>(.*)</Category>", names) == ["nodata", "observed", "reconstructed"]


def test_source_dates_have_colours_and_names(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", n) for n in range(2)]
    status, _, err = remove(
        *paths, "-o", tmp_path / "c.tif", "--source-date", "--min-count", 1, "--max-uncertainty", 0.5
    )
    assert status == 0, err
    with rasterio.open(tmp_path / "c_source_date.tif") as made:
        assert (made.dtypes[0], made.nodata) == ("uint8", 0)
        colours = made.colormap(1)
        assert len({colours[code] for code in (0, 1, 2, 255)}) == 4
    names = re.findall("<Category>(.*?)</Category>|<Category />", (tmp_path / "c_source_date.tif.aux.xml").read_text())
    assert [names[code] for code in (0, 1, 2, 3, 255)] == ["nodata", "2022-03-10", "2022-04-10", "", "no date"]
    assert "source_date" in json.loads((tmp_path / "c.json").read_text())["assets"]
    status, _, err = remove(*paths, "-o", tmp_path / "d.tif", "--source-date", "--backend", "onnx")
    assert status == 2
    assert "source_date needs a model that weights its dates" in err


def test_the_checksum_is_that_of_the_weights_file(tmp_path, remove, write_date, tiny_file):
    assert remove(write_date(tmp_path / "a.tif", 0), "-o", tmp_path / "c.tif", "--no-item")[0] == 0
    with rasterio.open(tmp_path / "c.tif") as made:
        assert made.tags()["SADER_MODEL_SHA256"] == hashlib.sha256(Path(tiny_file).read_bytes()).hexdigest()


def test_links_to_other_folders_are_relative(tmp_path, remove, write_date):
    path = write_date(tmp_path / "in" / "a.tif", 0)
    assert remove(path, "-o", tmp_path / "out" / "c.tif")[0] == 0
    item = json.loads((tmp_path / "out" / "c.json").read_text())
    assert [link["href"] for link in item["links"] if link["rel"] == "derived_from"] == ["../in/a.tif"]


def test_plain_words_without_json(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"{n}.tif", n) for n in range(2)]
    status, printed, _ = remove(*paths, "-o", tmp_path / "c.tif", "--no-item")
    assert status == 0
    assert "90 x 70 pixels, B02, B03, B04, B08" in printed
    assert f"wrote {tmp_path / 'c.tif'}" in printed


def test_a_log_gets_lines_instead_of_a_bar(monkeypatch):
    from sader.cli import remove as commands

    clock, said = [0.0], []
    monkeypatch.setattr(commands.time, "monotonic", lambda: clock[0])
    lines = commands.ProgressLines(said.append)
    for done, seconds in ((10, 5), (11, 30), (12, 65), (13, 70), (70, 3665), (100, 5000)):
        clock[0] = seconds
        lines(done, 100)
    # 10 tiles were there before: 2 in 60 s, then 60 in 3660 s. The end says itself.
    assert said == [
        "removing clouds: 12 of 100 tiles, 2.0 tiles/min, 44 min left",
        "removing clouds: 70 of 100 tiles, 1.0 tiles/min, 30 min left",
    ]


def test_the_command_uses_lines_in_a_log(tmp_path, remove, write_date, monkeypatch):
    monkeypatch.setenv("SADER_LOG_SECONDS", "0")
    status, _, err = remove(write_date(tmp_path / "a.tif", 0), "-o", tmp_path / "c.tif", "--no-item", "--tile", 48)
    assert status == 0, err
    assert "removing clouds: 2 of " in err
    assert "note: tiles of 48 pixels contain too little context" in err


def test_an_interval_that_is_no_number_is_refused(tmp_path, remove, write_date, monkeypatch):
    monkeypatch.setenv("SADER_LOG_SECONDS", "often")
    status, _, err = remove(write_date(tmp_path / "a.tif", 0), "-o", tmp_path / "c.tif")
    assert status == 2
    assert "SADER_LOG_SECONDS is 'often'; expected seconds" in err


def test_the_weights_of_a_run_go_by_its_name(tmp_path, remove, write_date, tiny_file):
    weights = tmp_path / "runs" / "spring" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(Path(tiny_file).read_bytes())
    path = write_date(tmp_path / "a.tif", 0)
    status, printed, err = remove(path, "-o", tmp_path / "c.tif", "--model", weights, "--no-item", "--json")
    assert status == 0, err
    assert json.loads(printed)["model"] == "spring/model"


def test_a_folder_of_dates(tmp_path, remove, write_date):
    for n in range(2):
        write_date(tmp_path / "in" / f"S2_2022-0{n + 3}-10.tif", n)
    write_date(tmp_path / "in" / "S2_2022-03-10_mask.tif", np.zeros((1, 70, 90), np.uint8), bands=None)
    status, printed, err = remove(tmp_path / "in", "-o", tmp_path / "c.tif", "--json", "--no-item")
    assert status == 0, err
    assert json.loads(printed)["dates"] == ["S2_2022-03-10.tif", "S2_2022-04-10.tif"]
    assert "1 files are taken as masks or side results, not as dates: S2_2022-03-10_mask.tif" in err


def test_a_folder_with_one_file_per_band(tmp_path, remove, write_date, land):
    for n in range(2):
        for number, band in enumerate(("B02", "B03", "B04", "B08")):
            write_date(tmp_path / "in" / f"S2_2022-0{n + 3}-10_{band}.tif", land(n)[number : number + 1], bands=None)
    status, printed, err = remove(
        tmp_path / "in", "-o", tmp_path / "c.tif", "--json", "--no-item", "--reference", "2022-03-10"
    )
    assert status == 0, err
    report = json.loads(printed)
    assert report["dates"] == ["S2_2022-03-10", "S2_2022-04-10"]
    assert report["bands"] == ["B02", "B03", "B04", "B08"]
    with rasterio.open(tmp_path / "c.tif") as made:
        assert made.descriptions == ("B02", "B03", "B04", "B08")


def test_names_in_any_spelling_and_order_are_kept_in_the_files_order(tmp_path, remove, write_date, land):
    paths = [
        write_date(tmp_path / f"{n}.tif", land(n)[[3, 2, 1, 0]], bands=("nir", "Red", "Band 3", "blue"))
        for n in range(2)
    ]
    status, printed, err = remove(*paths, "-o", tmp_path / "c.tif", "--json", "--no-item")
    assert status == 0, err
    assert json.loads(printed)["bands"] == ["B08", "B04", "B03", "B02"]


def test_bands_the_model_does_not_know_are_left_out_aloud(tmp_path, remove, write_date, land):
    names = ("B02", "B03", "B04", "B08", "B11", "NDVI")
    paths = [write_date(tmp_path / f"{n}.tif", land(n, bands=6), bands=names) for n in range(2)]
    status, printed, err = remove(*paths, "-o", tmp_path / "c.tif", "--json", "--no-item")
    assert status == 0
    assert json.loads(printed)["bands"] == ["B02", "B03", "B04", "B08"]
    assert "the model has no B11, NDVI: left out of the result, which has B02, B03, B04, B08." in err


def test_a_missing_band_is_done_without_aloud(tmp_path, remove, write_date, land):
    paths = [write_date(tmp_path / f"{n}.tif", land(n, bands=3), bands=None) for n in range(2)]
    status, printed, err = remove(*paths, "-o", tmp_path / "c.tif", "--json", "--no-item", "--bands", "grn")
    assert status == 0, err
    assert json.loads(printed)["bands"] == ["B03", "B04", "B08"]
    assert "B02 is missing in the files; the model works without" in err
    named = write_date(tmp_path / "named.tif", 0)
    status, _, err = remove(named, "-o", tmp_path / "d.tif", "--no-item", "--bands", "B02,B03")
    assert (status, "B04, B08 are left out by --bands; the model works without" in err) == (0, True)


def test_one_date_only_works_and_says_so(tmp_path, remove, write_date):
    status, _, err = remove(write_date(tmp_path / "a.tif", 0), "-o", tmp_path / "c.tif", "--no-item")
    assert status == 0
    assert "only one date (a.tif): no other date shows the ground under its clouds." in err


def test_one_pixel(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"{n}.tif", n, size=(1, 1)) for n in range(2)]
    status, _, err = remove(*paths, "-o", tmp_path / "c.tif", "--no-item")
    assert status == 0, err
    assert read(tmp_path / "c.tif").shape == (4, 1, 1)


def test_three_hundred_bands(tmp_path, remove, write_date, land):
    names = ("B02", "B03", "B04", "B08", *(f"radiance {n}" for n in range(296)))
    paths = [
        write_date(tmp_path / f"{n}.tif", land(n, bands=300, size=(20, 30)), bands=names, interleave="pixel")
        for n in range(2)
    ]
    status, _, err = remove(*paths, "-o", tmp_path / "c.tif", "--no-item")
    assert status == 0, err
    assert read(tmp_path / "c.tif").shape == (4, 20, 30)
    assert "and 280 more: left out of the result" in err


def test_floats_of_both_sizes_with_nan_and_infinity(tmp_path, remove, write_date, land):
    for kind in ("float32", "float64"):
        arrays = [(land(n) * 1e-4).astype(kind) for n in range(2)]
        arrays[0][1, 3, 4], arrays[0][2, 5, 6], arrays[0][0, 7, 8] = np.nan, np.inf, -np.inf
        for array in arrays:
            array[:, 20:22, 30:33] = np.nan
        paths = [write_date(tmp_path / f"{kind}{n}.tif", a, nodata=None) for n, a in enumerate(arrays)]
        masks = [
            write_date(tmp_path / f"m{n}.tif", np.zeros((1, 70, 90), np.uint8), bands=None, nodata=None)
            for n in range(2)
        ]
        status, _, err = remove(
            *paths, "-o", tmp_path / f"c{kind}.tif", "--no-item", "--reference", f"{kind}0.tif",
            "--mask", masks[0], "--mask", masks[1],
        )  # fmt: skip
        assert status == 0, err
        made = read(tmp_path / f"c{kind}.tif")
        assert made.dtype == kind
        nothing = np.zeros((70, 90), bool)
        nothing[20:22, 30:33] = True
        assert np.isnan(made[:, nothing]).all()
        assert np.isfinite(made[:, ~nothing]).all(), "what one date lacks the other has"
        seen = np.isfinite(arrays[0]).all(axis=0)
        np.testing.assert_array_equal(made[:, seen], arrays[0][:, seen])


def test_all_cloud(tmp_path, remove, write_date, land):
    paths = [write_date(tmp_path / f"{n}.tif", land(n) // 10 + 8000) for n in range(2)]
    masks = [write_date(tmp_path / f"m{n}.tif", np.ones((1, 70, 90), np.uint8), bands=None) for n in range(2)]
    status, printed, err = remove(
        *paths, "-o", tmp_path / "c.tif", "--no-item", "--json", "--mask", masks[0], "--mask", masks[1]
    )
    assert status == 0, err
    assert json.loads(printed)["pixels"] == {"nodata": 0, "observed": 0, "reconstructed": 6300}
    assert (read(tmp_path / "c.tif") > 0).all()


def test_two_files_of_one_day_count_twice_and_the_same_file_once(tmp_path, remove, write_date):
    one, two = (write_date(tmp_path / f"{name}_2022-03-10.tif", n) for n, name in enumerate("ab"))
    status, printed, err = remove(one, two, one, "-o", tmp_path / "c.tif", "--no-item", "--json")
    assert status == 0
    assert len(json.loads(printed)["dates"]) == 2
    assert "2 inputs are of the same day 2022-03-10: a_2022-03-10.tif, b_2022-03-10.tif." in err
    assert "a_2022-03-10.tif was given twice; it counts once." in err


def test_a_path_with_spaces_and_unicode(tmp_path, remove, write_date):
    folder = tmp_path / "señal & <Wolken> 雲"
    paths = [write_date(folder / f"Szene {n} ü.tif", n) for n in range(2)]
    out = folder / "ergebnis größe 清.tif"
    status, _, err = remove(*paths, "-o", out, "--count")
    assert status == 0, err
    assert read(out).shape == (4, 70, 90)
    assert "Szene 1 ü.tif" in rasterio.open(out).tags()["SADER_INPUTS"]


def test_without_a_place_on_the_map(tmp_path, remove, write_date, land):
    plain = {"crs": None, "transform": (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)}
    paths = [write_date(tmp_path / f"{n}.tif", n, **plain) for n in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", rasterio.errors.NotGeoreferencedWarning)  # one note is enough
        status, _, err = remove(
            *paths, "-o", tmp_path / "c.tif", "--provenance", "--preview", tmp_path / "p.png", "--report",
            tmp_path / "r.html",
        )  # fmt: skip
    assert status == 0, err
    assert "note: 0.tif names no reference system (CRS): pixels are laid on each other" in err
    with pytest.warns(rasterio.errors.NotGeoreferencedWarning):
        assert rasterio.open(tmp_path / "c.tif").crs is None


def test_the_item_of_a_result_can_be_an_input(tmp_path, remove, write_date):
    """Counts in a file that says no scale: the item beside the result has to, or readers take 1234 for reflectance."""
    paths = [write_date(tmp_path / f"S2_2022-0{n + 3}-10.tif", n) for n in range(2)]
    assert rasterio.open(paths[0]).scales[0] == 1
    status, _, err = remove(*paths, "-o", tmp_path / "c.tif")
    assert status == 0, err
    bands = json.loads((tmp_path / "c.json").read_text())["assets"]["data"]["bands"]
    assert {(band["raster:scale"], band["raster:offset"]) for band in bands} == {(1e-4, 0.0)}
    status, _, err = remove(tmp_path / "c.json", paths[1], "-o", tmp_path / "again.tif")
    assert status == 0, err


# ------------------------------------------------------------------------------------------------ what does not


def test_the_order_of_named_bands_is_that_of_the_file(tmp_path, remove, write_date):
    path = write_date(tmp_path / "a.tif", 0)
    given = (path, "-o", tmp_path / "c.tif", "--no-item", "--bands", "red,green,blue,nir")
    status, _, err = remove(*given)
    assert status == 0, err
    assert "a.tif names its bands itself (B02, B03, B04, B08): --bands selects some, its order is not used." in err


def test_no_names(tmp_path, remove, write_date, land):
    path = write_date(tmp_path / "a.tif", 0, bands=None)
    status, _, err = remove(path, "-o", tmp_path / "c.tif")
    assert status == 2
    assert err.startswith(
        "BandError: the 4 bands of a.tif have no names, and bands are never guessed by position. Name them "
        "in the file's order: --bands B02,B03,B04,B08, or a preset: rgb, bgr, grn"
    )
    status, _, err = remove(path, "-o", tmp_path / "c.tif", "--bands", "rgb")
    assert status == 2
    assert "--bands gives 3 names (B04, B03, B02), but a.tif has 4 bands with no names" in err


def test_wrong_band_names_list_both(tmp_path, remove, write_date, land):
    paths = [write_date(tmp_path / f"{n}.tif", n, bands=("B05", "B06", "B11", "thermal")) for n in range(2)]
    status, _, err = remove(*paths, "-o", tmp_path / "c.tif")
    assert status == 2
    assert err.startswith(
        "BandError: 0.tif has B05, B06, B11, thermal; 1.tif has B05, B06, B11, thermal; this model works on B02, B03, "
        "B04, B08. Missing in all or some dates: B02, B03, B04, B08."
    )


def test_int8_and_complex(tmp_path, remove, write_date, land):
    small = write_date(tmp_path / "int8.tif", (land(0) // 30).clip(1, 100).astype(np.int8))
    status, _, err = remove(small, "-o", tmp_path / "c.tif")
    assert status == 2
    assert err.startswith("DataError: int8.tif holds int8 values without a scale; expected reflectance as uint16")
    status, _, err = remove(small, "-o", tmp_path / "c.tif", "--scale", 0.003, "--no-item")
    assert status == 0, err
    assert read(tmp_path / "c.tif").dtype == np.int8
    odd = write_date(tmp_path / "complex.tif", land(0).astype(np.complex64), nodata=None)
    status, _, err = remove(odd, "-o", tmp_path / "d.tif")
    assert status == 2
    assert err.startswith("DataError: complex.tif holds complex64 values; expected real reflectance.")


def test_all_nodata(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"{n}.tif", np.zeros((4, 20, 20), np.uint16)) for n in range(2)]
    status, _, err = remove(*paths, "-o", tmp_path / "c.tif")
    assert status == 2
    assert err.endswith(
        "DataError: no date has a valid pixel: 0.tif, 1.tif hold nodata only. Check the files, their nodata value and "
        "--grid."
    )


def test_values_that_are_no_reflectance(tmp_path, remove, write_date, land):
    path = write_date(tmp_path / "a.tif", land(0), scale=0.01)
    status, _, err = remove(path, "-o", tmp_path / "c.tif")
    assert status == 2
    assert "ValueRangeError: a.tif: 100% of the values are above 3" in err
    assert remove(path, "-o", tmp_path / "c.tif", "--scale", 0.0001, "--no-item")[0] == 0


def test_a_picture_renamed(tmp_path, remove):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "a.tif"
    image.new("RGB", (30, 20), (9, 99, 30)).save(path, format="PNG")
    status, _, err = remove(path, "-o", tmp_path / "c.tif")
    assert status == 2
    assert err.startswith("DataError: a.tif holds uint8 values without a scale;")


def test_no_raster_at_all(tmp_path, remove):
    (tmp_path / "a.tif").write_text("this is no picture")
    status, _, err = remove(tmp_path / "a.tif", "-o", tmp_path / "c.tif")
    assert status == 2
    assert err.startswith(f"DataError: cannot read {tmp_path / 'a.tif'}: ")
    assert "not recognized as being in a supported file format" in err
    status, _, err = remove(tmp_path / "b.tif", "-o", tmp_path / "c.tif")
    assert err == (
        f"DataError: there is no {tmp_path / 'b.tif'}; name a GeoTIFF, a folder, a .SAFE product or a STAC item."
    )
    (tmp_path / "empty").mkdir()
    status, _, err = remove(tmp_path / "empty", "-o", tmp_path / "c.tif")
    assert (status, "holds no raster (.tif" in err) == (2, True)


def test_a_truncated_cog(tmp_path, remove, write_date, land):
    cog = tmp_path / "cog.tif"
    plain = write_date(tmp_path / "plain.tif", land(0, size=(600, 700)))
    pytest.importorskip("rasterio.shutil").copy(str(plain), str(cog), driver="COG", compress="DEFLATE")
    content = cog.read_bytes()
    cog.write_bytes(content[: len(content) * 2 // 3])
    status, _, err = remove(cog, "-o", tmp_path / "o" / "c.tif")
    assert status == 2
    assert f"DataError: cannot read {cog}: " in err
    assert "damaged, half-written or of another kind; copy or download it again." in err
    assert list((tmp_path / "o").iterdir()) == []


def test_an_output_that_cannot_be_written(tmp_path, remove, write_date):
    path = write_date(tmp_path / "a.tif", 0)
    status, _, err = remove(path, "-o", "/proc/nowhere/c.tif")
    assert (status, err.startswith("OutputError: cannot write into /proc/nowhere: ")) == (2, True)
    status, _, err = remove(path, "-o", tmp_path / "c.png")
    assert (status, "expected a name that ends in .tif" in err) == (2, True)
    taken = tmp_path / "c.tif"
    taken.write_text("mine")
    status, _, err = remove(path, "-o", taken)
    assert status == 2
    assert err == f"OutputError: {taken} exists. Use --overwrite to replace it, or choose another name."
    assert taken.read_text() == "mine"
    assert remove(path, "-o", taken, "--overwrite", "--no-item")[0] == 0
    assert read(taken).shape == (4, 70, 90)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path, remove, write_date):
    path = write_date(tmp_path / "a.tif", 0)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    status, _, err = remove(path, "-o", folder / "c.tif")
    assert (status, f"OutputError: cannot write into {folder}: Permission denied." in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "ConfigError: --device is 'abacus'; expected cpu, cuda or cuda:0."),
        (["--offset", "5"], "ConfigError: offset is 5; expected auto, none or a negative number"),
        (["--steps", "many"], "ConfigError: steps is 'many'; expected a number from 1 to 1000 such as 4"),
        (["--seed", "-1"], "ConfigError: seed is -1; expected a whole number of at least 0."),
        (
            ["--tile", "32", "--overlap", "20"],
            "ConfigError: overlap 20 with tile 32; expected 0 <= overlap <= tile / 2.",
        ),
        (["--dates", "spring"], "ConfigError: dates are 'spring'; expected days such as 2022-03-01/2022-05-31."),
        (["--collection", "sentinel-2-l2a"], "ConfigError: --collection without a STAC API to choose from"),
        (["--grid", "EPSG:32632/0"], "ConfigError: --grid EPSG:32632/0: pixels of 0 units. Expected a known code such"),
        (["", "--count"], "DataError: an input is empty; name a GeoTIFF"),
        (["--mask", "sclx"], "ConfigError: mask is 'sclx', no file"),
    ],
)
def test_options_that_cannot_be(tmp_path, remove, write_date, arguments, message):
    status, _, err = remove(write_date(tmp_path / "a.tif", 0), "-o", tmp_path / "o" / "c.tif", *arguments)
    assert status == 2
    assert message in err
    assert not (tmp_path / "o").exists() or list((tmp_path / "o").iterdir()) == []


def test_nothing_given(remove):
    status, _, err = remove()
    assert status == 2
    assert "name at least one GeoTIFF" in err


def test_an_input_is_never_replaced(tmp_path, remove, write_date):
    paths = [write_date(tmp_path / f"{n}.tif", n) for n in range(2)]
    before = paths[1].read_bytes()
    status, _, err = remove(*paths, "-o", paths[1], "--overwrite")
    assert status == 2
    assert err.endswith(f"OutputError: {paths[1]} is one of the inputs (1.tif). Choose another name for the output.")
    assert paths[1].read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_a_preview_that_cannot_be_written_is_said_before_the_work(tmp_path, remove, write_date):
    path = write_date(tmp_path / "a.tif", 0)
    status, _, err = remove(path, "-o", tmp_path / "c.tif", "--preview", tmp_path / "no" / "p.png")
    assert (status, "cannot write the preview into" in err) == (2, True)
    status, _, err = remove(path, "-o", tmp_path / "c.tif", "--preview", tmp_path / "p.jpg")
    assert (status, "expected a name that ends in .png" in err) == (2, True)
    assert not (tmp_path / "c.tif").exists()


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--preview", "look.png"], "look.png"), (["--report", "page.html"], "page.html"), (["--count"], "c_count.tif"),
     ([], "c.json")],
)  # fmt: skip
def test_no_output_replaces_an_existing_file_unless_told(tmp_path, remove, write_date, options, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, taken = write_date(tmp_path / "in" / "a.tif", 0), Path(name)
    taken.write_text("mine")
    arguments = [str(path), "-o", "c.tif", *options]
    code, _, err = remove(*arguments)
    assert code == 2
    assert f"OutputError: {taken} exists. Use --overwrite to replace it" in err
    assert taken.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["in", name])
    code, _, err = remove(*arguments, "--overwrite")
    assert code == 0, err
    assert taken.read_bytes() != b"mine"
