"""Run by the Python of QGIS: the algorithms as the window runs them, with loaded layers, styles and a cancel button.

Arguments: the folder of the plugins, the folder of the dates, the folder of the results. Prints JSON.
"""

import json
import os
import sys

from qgis.core import (
    QgsApplication,
    QgsProcessingAlgRunnerTask,
    QgsProcessingContext,
    QgsProcessingFeedback,
    QgsProcessingOutputLayerDefinition,
    QgsProject,
    QgsRasterLayer,
)
from qgis.PyQt.QtCore import QEventLoop

plugins, dates, out = sys.argv[1:]
application = QgsApplication([], False)
QgsApplication.initQgis()
sys.path[:0] = [plugins, "/usr/share/qgis/python/plugins"]

import processing  # noqa: E402
from processing.core.Processing import Processing  # noqa: E402
from processing.core.ProcessingConfig import ProcessingConfig  # noqa: E402
from processing.gui.Postprocessing import handleAlgorithmResults  # noqa: E402

Processing.initialize()
import sader  # noqa: E402

plugin = sader.classFactory(None)
plugin.initProcessing()
ProcessingConfig.setSettingValue("SADER_COMMAND", os.environ.pop("SADER_COMMAND"))
project = QgsProject.instance()


class Impatient(QgsProcessingFeedback):
    """Feedback whose cancel button is pressed at the first progress."""

    def setProgressText(self, text):
        if " tiles" in text:
            self.cancel()


def loaded():
    """Return what the project shows, from top to bottom."""
    found = {}
    for node in project.layerTreeRoot().findLayers():
        layer = node.layer()
        kind, shown, when = layer.renderer().type(), node.isVisible(), layer.temporalProperties()
        entry = {"renderer": kind, "visible": shown, "legend": [text for text, _ in layer.legendSymbologyItems()]}
        if kind == "multibandcolor":
            parts = layer.renderer().redContrastEnhancement(), layer.renderer().blueContrastEnhancement()
            entry["bands"] = layer.renderer().usesBands()
            entry["limits"] = [(part.minimumValue(), part.maximumValue()) for part in parts]
        if when.isActive():
            entry["day"] = when.fixedTemporalRange().begin().toString("yyyy-MM-dd")
        found[layer.source().rpartition("/")[2]] = entry
    project.clear()
    return found


def run(feedback):
    """Run the same job in another thread, as the form does; return its results, its log, the files and the layers."""
    algorithm = QgsApplication.processingRegistry().algorithmById("sader:remove").create()
    context = QgsProcessingContext()
    context.setProject(project)
    output = QgsProcessingOutputLayerDefinition(f"{out}/late.tif", project)
    values = {"FOLDER": dates, "EXTRA": "--tile 64 --steps 4 --threads 1", "OUTPUT": output}  # long enough
    task = QgsProcessingAlgRunnerTask(algorithm, values, context, feedback)
    loop, ended = QEventLoop(), []
    task.executed.connect(lambda ok, results: (ended.append(results), loop.quit()))
    QgsApplication.taskManager().addTask(task)
    loop.exec_()
    handleAlgorithmResults(algorithm, context, feedback)
    return {"results": ended[0], "log": feedback.textLog(), "files": sorted(os.listdir(out)), "layers": loaded()}


answer = {"cancelled": run(Impatient()), "continued": run(QgsProcessingFeedback())}
layer = QgsRasterLayer(f"{dates}/S2_2020-06-10.tif", "june")
project.addMapLayers([layer])
values = {"INPUT": [layer.id(), f"{dates}/S2_2020-07-10.tif"], "UNCERTAINTY": True, "COUNT": True, "SAVE_MASKS": True}
values |= {"SOURCE_DATE": True}
processing.runAndLoadResults("sader:remove", {**values, "OUTPUT": f"{out}/clear.tif"})
answer["remove"] = loaded()
processing.runAndLoadResults("sader:series", {"FOLDER": dates, "PROVENANCE": False, "OUTPUT": f"{out}/series"})
answer["series"] = loaded()
processing.runAndLoadResults("sader:mask", {"FOLDER": dates, "OUTPUT": f"{out}/masks"})
answer["mask"] = loaded()
print(json.dumps(answer))
plugin.unload()
QgsApplication.exitQgis()
