"""A disk that is really full at several moments of a run: one clear message, and the same command finishes later."""

from __future__ import annotations

from contextlib import suppress

import pytest

from sader.errors import OutputError
from sader.geo.remove import RemoveRequest, run_remove
from sader.geo.scene import report, run
from sader.geo.scene.options import SceneOptions

pytest.importorskip("rasterio")


def remove(paths, folder, tiny, progress=None):
    folder.mkdir(exist_ok=True)
    request = RemoveRequest(
        inputs=tuple(map(str, paths)),
        out=str(folder / "c.tif"),
        options=SceneOptions(reference=0, count=True),
        preview=str(folder / "look.png"),
    )
    run_remove(request, progress=progress, load=lambda model, device: (tiny, "tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, write_date, land, tiny):
    """The inputs, and the files of a run with enough space."""
    folder = tmp_path_factory.mktemp("whole")
    paths = [write_date(folder / "in" / f"S2_2022-0{n + 3}-10.tif", land(n, size=(60, 40))) for n in range(2)]
    return paths, remove(paths, folder / "out", tiny)


@pytest.mark.parametrize("left", [0, pytest.param(16_384, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["first tile", "last tile", "image", "preview"])
def test_a_full_disk_is_named_and_the_same_command_finishes(disk, whole, tiny, monkeypatch, moment, left):
    paths, wanted = whole
    named = {"image": (run, "make_cog"), "preview": (report, "write_preview")}.get(moment)
    if named is not None:
        call = getattr(*named)

        def on_a_full_disk(*given, **options):
            disk.fill(left)
            return call(*given, **options)

        monkeypatch.setattr(*named, on_a_full_disk)

    def progress(done: int, total: int) -> None:
        if (moment, done) in (("first tile", 1), ("last tile", total)):
            disk.fill(left)

    # A few blocks may be enough for the rest of the run.
    with suppress(OutputError) if left else pytest.raises(OutputError) as caught:
        remove(paths, disk.folder / "out", tiny, progress)
    if not left:
        assert "disk is full" in str(caught.value)
        assert "Free some space" in str(caught.value)
    disk.free()
    monkeypatch.undo()
    assert remove(paths, disk.folder / "out", tiny) == wanted
