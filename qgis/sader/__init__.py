"""Plugin of QGIS: cloud removal, clean series and cloud masks in the Processing toolbox.

The work is done by the command `sader`, which is installed separately and runs in its own process.
"""


def classFactory(iface):
    """Return the plugin; called by QGIS. iface: None in qgis_process."""
    from .provider import SaderPlugin

    return SaderPlugin()
