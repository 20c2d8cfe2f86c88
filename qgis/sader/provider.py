"""The plugin and its Processing provider."""

from __future__ import annotations

from pathlib import Path

from processing.core.ProcessingConfig import ProcessingConfig, Setting
from qgis.core import QgsApplication, QgsProcessingProvider
from qgis.PyQt.QtGui import QIcon

from .algorithms import COMMAND, Mask, Remove, Series

ICON = str(Path(__file__).parent / "icon.svg")


class SaderProvider(QgsProcessingProvider):
    """The algorithms of sader."""

    def id(self) -> str:
        """Return the part of an algorithm's id before the colon."""
        return "sader"

    def name(self) -> str:
        """Return the name in the toolbox."""
        return "sader"

    def longName(self) -> str:
        """Return the name in the options."""
        return "sader: clouds removed from satellite images"

    def icon(self) -> QIcon:
        """Return the icon in the toolbox."""
        return QIcon(ICON)

    def load(self) -> bool:
        """Add the setting of the provider and its algorithms."""
        ProcessingConfig.settingIcons[self.name()] = self.icon()
        text = "Path of the command sader (empty: it is searched for)"
        ProcessingConfig.addSetting(Setting(self.name(), COMMAND, text, "", valuetype=Setting.FILE))
        ProcessingConfig.readSettings()
        self.refreshAlgorithms()
        return True

    def unload(self) -> None:
        """Remove the setting."""
        ProcessingConfig.removeSetting(COMMAND)

    def loadAlgorithms(self) -> None:
        """Add the algorithms."""
        for algorithm in (Remove(), Series(), Mask()):
            self.addAlgorithm(algorithm)


class SaderPlugin:
    """The plugin: adds the provider, in the window and in qgis_process."""

    def __init__(self) -> None:
        self.provider: SaderProvider | None = None

    def initProcessing(self) -> None:
        """Add the provider."""
        self.provider = SaderProvider()
        QgsApplication.processingRegistry().addProvider(self.provider)

    def initGui(self) -> None:
        """Add the provider to the window."""
        self.initProcessing()

    def unload(self) -> None:
        """Remove the provider."""
        if self.provider is not None:
            QgsApplication.processingRegistry().removeProvider(self.provider)
