"""`make qgis`: writes the plugin of QGIS as a ZIP file, which its plugin manager installs.

The same files give the same archive, byte for byte.
"""

from __future__ import annotations

import configparser
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "qgis" / "sader"
KINDS = (".py", ".txt", ".svg", ".qml")


def build(folder: Path) -> Path:
    """Write sader-qgis-VERSION.zip into a folder and return its path."""
    metadata = configparser.ConfigParser()
    metadata.read(PLUGIN / "metadata.txt", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"sader-qgis-{metadata['general']['version']}.zip"
    files = {f"sader/{path.relative_to(PLUGIN).as_posix()}": path for path in PLUGIN.rglob("*") if path.suffix in KINDS}
    files["sader/LICENSE"] = ROOT / "LICENSE"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    return target


if __name__ == "__main__":
    print(f"wrote {build(Path(sys.argv[1] if len(sys.argv) > 1 else 'dist'))}")
