"""Layers of the results: which are loaded, and in which colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qgis.core import (
    QgsContrastEnhancement,
    QgsDateTimeRange,
    QgsMultiBandColorRenderer,
    QgsProcessingContext,
    QgsProcessingLayerPostProcessorInterface,
    QgsRasterLayer,
    QgsRasterLayerTemporalProperties,
)
from qgis.PyQt.QtCore import QDateTime, Qt

from .form import Result

STYLES = Path(__file__).parent / "styles"
NATURAL = ("B04", "B03", "B02")
"""Bands shown as red, green and blue."""
CUT = (0.02, 0.98)
"""Parts of the pixels of a band below black and below full colour."""
SHOWN = ("result", "classes")
"""Kinds of layers that are visible at once; the others would cover them."""
SAMPLE = 250_000
"""Pixels of a layer that its stretch is computed from."""

KEPT = 1000
"""Processors of earlier runs that are kept."""
Limits = tuple[float, float]

_alive: list[Style] = []
"""Processors of layers in use: QGIS calls and deletes them later, but holds no reference to their Python part."""


class Style(QgsProcessingLayerPostProcessorInterface):
    """Gives one raster its colours when QGIS has loaded it."""

    def __init__(self, result: Result, shared: list[Limits]) -> None:
        super().__init__()
        self.result = result
        self.shared = shared
        """The stretch of the first image of the run, once it is known."""

    def postProcessLayer(self, layer, context, feedback) -> None:
        """Set the style of the layer; called by QGIS."""
        if not isinstance(layer, QgsRasterLayer):
            return
        if self.result.kind == "result":
            show_natural_colours(layer, self.shared)
        elif (STYLES / f"{self.result.kind}.qml").exists():
            layer.loadNamedStyle(str(STYLES / f"{self.result.kind}.qml"))
        if self.result.date is not None:
            set_day(layer, self.result.date)
        layer.triggerRepaint()
        node = context.project().layerTreeRoot().findLayer(layer.id())
        if node is not None and self.result.kind not in SHOWN:
            node.setItemVisibilityChecked(False)
            node.setExpanded(False)


def load_on_completion(context: QgsProcessingContext, results: Sequence[Result], output: str, load: bool) -> None:
    """Ask QGIS for the layers of the results, in their colours, if `load` is true or if it loads the output anyway.

    Probabilities, which have six bands, are not loaded.
    """
    if context.project() is None or not (load or context.willLoadLayerOnCompletion(output)):
        return
    shared: list[Limits] = []
    styles = [Style(result, shared) for result in results if result.kind != "probability"]
    for style in styles:
        path = style.result.path
        if not context.willLoadLayerOnCompletion(path):
            details = QgsProcessingContext.LayerDetails(style.result.title, context.project(), "LAYERS")
            context.addLayerToLoadOnCompletion(path, details)
        context.layerToLoadOnCompletionDetails(path).setPostProcessor(style)
    _alive[:] = [*_alive[-KEPT:], *styles]


def show_natural_colours(layer: QgsRasterLayer, shared: list[Limits]) -> None:
    """Show red, green and blue with one stretch, equal for the three and for all images of a run.

    shared: holds the stretch, or receives that of this layer.
    """
    names = {layer.bandName(band): band for band in range(1, layer.bandCount() + 1)}
    bands = [band for one in NATURAL for name, band in names.items() if re.search(rf"\b{one}\b", name)]
    if len(bands) != len(NATURAL):
        return
    provider = layer.dataProvider()
    if not shared:
        cuts = [provider.cumulativeCut(band, *CUT, layer.extent(), SAMPLE) for band in bands]
        shared.append((min(low for low, _ in cuts), max(high for _, high in cuts)))
    renderer = QgsMultiBandColorRenderer(provider, *bands)
    setters = (
        renderer.setRedContrastEnhancement,
        renderer.setGreenContrastEnhancement,
        renderer.setBlueContrastEnhancement,
    )
    for band, setter in zip(bands, setters):
        stretch = QgsContrastEnhancement(provider.dataType(band))
        stretch.setMinimumValue(shared[0][0])
        stretch.setMaximumValue(shared[0][1])
        stretch.setContrastEnhancementAlgorithm(QgsContrastEnhancement.StretchToMinimumMaximum)
        setter(stretch)
    layer.setRenderer(renderer)


def set_day(layer: QgsRasterLayer, day: str) -> None:
    """Give a layer its date, for the Temporal Controller."""
    start = QDateTime.fromString(f"{day}T00:00:00", Qt.DateFormat.ISODate)
    properties = layer.temporalProperties()
    properties.setMode(QgsRasterLayerTemporalProperties.ModeFixedTemporalRange)
    properties.setFixedTemporalRange(QgsDateTimeRange(start, start.addDays(1), True, False))
    properties.setIsActive(True)
