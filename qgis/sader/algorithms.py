"""The algorithms Remove clouds, Clean series and Mask: a form each, the run of the command, the results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from processing.core.ProcessingConfig import ProcessingConfig
from qgis.core import (
    QgsCoordinateReferenceSystem,
    QgsProcessing,
    QgsProcessingAlgorithm,
    QgsProcessingContext,
    QgsProcessingException,
    QgsProcessingFeedback,
    QgsProcessingOutputMultipleLayers,
    QgsProcessingParameterBoolean,
    QgsProcessingParameterDefinition,
    QgsProcessingParameterEnum,
    QgsProcessingParameterExtent,
    QgsProcessingParameterFile,
    QgsProcessingParameterFileDestination,
    QgsProcessingParameterFolderDestination,
    QgsProcessingParameterMultipleLayers,
    QgsProcessingParameterNumber,
    QgsProcessingParameterPoint,
    QgsProcessingParameterRasterDestination,
    QgsProcessingParameterString,
)
from qgis.PyQt.QtGui import QIcon

from .command import ERROR, Cancelled, CommandError, find_command, progress_of, run_command
from .form import FORMS, Field, command_line, results_of, summary_of
from .layers import load_on_completion

COMMAND = "SADER_COMMAND"
"""Name of the setting with the path of the command."""
DEGREES = QgsCoordinateReferenceSystem("EPSG:4326")
HELP = "https://github.com/sader-project/sader/blob/main/docs/qgis.md"


class SaderAlgorithm(QgsProcessingAlgorithm):
    """An algorithm that runs one subcommand of `sader`."""

    operation = ""
    title = ""
    text = ""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}

    def createInstance(self) -> SaderAlgorithm:
        """Return a new algorithm of the same kind."""
        return type(self)()

    def name(self) -> str:
        """Return the id behind `sader:`."""
        return self.operation

    def displayName(self) -> str:
        """Return the name in the toolbox."""
        return self.title

    def icon(self) -> QIcon:
        """Return the icon in the toolbox."""
        return QIcon(str(Path(__file__).parent / "icon.svg"))

    def shortHelpString(self) -> str:
        """Return the text beside the form."""
        return self.text

    def helpUrl(self) -> str:
        """Return the page behind the button Help."""
        return HELP

    def initAlgorithm(self, configuration: Any = None) -> None:
        """Declare the fields of the form and the list of the written rasters."""
        for field in FORMS[self.operation]:
            parameter = parameter_of(field)
            # Messages of the command name options.
            parameter.setHelp(
                " ".join([field.help, f"Option {field.option}."] if field.option else [field.help]).strip()
            )
            if field.advanced:
                parameter.setFlags(parameter.flags() | QgsProcessingParameterDefinition.FlagAdvanced)
            self.addParameter(parameter)
        self.addOutput(QgsProcessingOutputMultipleLayers("LAYERS", "All rasters that were written"))

    def prepareAlgorithm(
        self, parameters: dict[str, Any], context: QgsProcessingContext, feedback: QgsProcessingFeedback
    ) -> bool:
        """Read the fields in the thread of the window, because layers of the project belong to it."""
        fields = [field for field in FORMS[self.operation] if field.kind != "raster_out"]
        self.values = {field.name: self._value(field, parameters, context) for field in fields}
        return True

    def processAlgorithm(
        self, parameters: dict[str, Any], context: QgsProcessingContext, feedback: QgsProcessingFeedback
    ) -> dict[str, Any]:
        """Run the command and return the paths of what it wrote."""
        # The context of this thread is the one that keeps the layers to load.
        outputs = [field for field in FORMS[self.operation] if field.kind == "raster_out"]
        values = {**self.values, **{field.name: self._value(field, parameters, context) for field in outputs}}

        def on_line(line: str) -> None:
            done = progress_of(line)
            if done is not None:
                if int(done) > feedback.progress():  # at most a hundred lines
                    feedback.setProgressText(line)
                feedback.setProgress(done)
            elif line.startswith("note: "):
                feedback.pushWarning(line)
            elif line and not ERROR.match(line):  # errors are raised below
                feedback.pushConsoleInfo(line)

        try:
            command = find_command(ProcessingConfig.getSetting(COMMAND) or "")
            words = [command, *command_line(self.operation, values)]
            feedback.pushCommandInfo(shlex.join(words))
            feedback.setProgressText("Starting sader")
            report = run_command(words, on_line, feedback.isCanceled)
        except Cancelled:
            feedback.pushInfo("Stopped. A run with the same inputs, settings and output continues from here.")
            return {}
        except CommandError as error:
            raise QgsProcessingException(str(error)) from error
        for line in summary_of(self.operation, report):
            feedback.pushInfo(line)
        feedback.setProgress(100)
        results = results_of(self.operation, report)
        load_on_completion(context, results, report["output"], bool(values.get("LOAD")))
        written = {"OUTPUT": report["output"], "LAYERS": [result.path for result in results]}
        gif = [path for path in report["files"] if path.endswith(".gif")]
        return {**written, "ANIMATION": gif[0]} if gif else written

    def _value(self, field: Field, parameters: dict[str, Any], context: QgsProcessingContext) -> Any:
        """Return what was entered in a field as a plain value; None or "" where it is empty."""
        given = parameters, field.name, context
        if field.kind == "files":
            return [layer.source().split("|")[0] for layer in self.parameterAsLayerList(*given)]
        if field.kind == "choice":
            return field.choices[self.parameterAsEnum(*given)][0]
        if field.kind == "flag":
            return self.parameterAsBool(*given)
        if field.kind in ("raster_out", "folder_out", "gif_out"):
            read = self.parameterAsOutputLayer if field.kind == "raster_out" else self.parameterAsString
            return read(*given)
        if parameters.get(field.name) in (None, ""):
            return None
        if field.kind == "extent":
            box = self.parameterAsExtent(*given, DEGREES)
            return None if box.isNull() else (box.xMinimum(), box.yMinimum(), box.xMaximum(), box.yMaximum())
        if field.kind == "point":
            place = self.parameterAsPoint(*given, DEGREES)
            return (place.x(), place.y())
        if field.kind in ("number", "whole"):
            return self.parameterAsDouble(*given) if field.kind == "number" else self.parameterAsInt(*given)
        return self.parameterAsString(*given)


def parameter_of(field: Field) -> QgsProcessingParameterDefinition:
    """Return the parameter of QGIS for a field."""
    name, label, default, optional = field.name, field.label, field.default, field.optional
    if field.kind == "files":
        return QgsProcessingParameterMultipleLayers(name, label, QgsProcessing.TypeRaster, optional=optional)
    if field.kind in ("file", "folder"):
        kinds = {"file": QgsProcessingParameterFile.File, "folder": QgsProcessingParameterFile.Folder}
        return QgsProcessingParameterFile(name, label, kinds[field.kind], optional=optional)
    if field.kind == "choice":
        return QgsProcessingParameterEnum(name, label, [text for _, text in field.choices], defaultValue=0)
    if field.kind == "flag":
        return QgsProcessingParameterBoolean(name, label, default)
    if field.kind in ("number", "whole"):
        kind = QgsProcessingParameterNumber.Double if field.kind == "number" else QgsProcessingParameterNumber.Integer
        return QgsProcessingParameterNumber(name, label, kind, None, optional, 0)
    if field.kind == "raster_out":
        return QgsProcessingParameterRasterDestination(name, label)
    if field.kind == "folder_out":
        return QgsProcessingParameterFolderDestination(name, label)
    if field.kind == "gif_out":
        return QgsProcessingParameterFileDestination(name, label, "GIF (*.gif)", None, True, False)
    classes = {"extent": QgsProcessingParameterExtent, "point": QgsProcessingParameterPoint}
    return classes.get(field.kind, QgsProcessingParameterString)(name, label, default, optional=optional)


class Remove(SaderAlgorithm):
    """`sader remove`."""

    operation = "remove"
    title = "Remove clouds"
    text = (
        "Replaces the clouds and shadows of one date by what the other dates show. Give two or more images of the same "
        "place.\n\nClear pixels of the cleaned date are kept as they are. The provenance layer shows which pixels were "
        "observed and which were reconstructed.\n\nA run that was cancelled continues from where it stopped if it is "
        "started with the same settings and the same output file."
    )


class Series(SaderAlgorithm):
    """`sader series`."""

    operation = "series"
    title = "Clean a series"
    text = (
        "Removes the clouds of every date in turn, with the help of the others, and writes one image for each "
        "date.\n\nThe layers have their dates: the Temporal Controller of QGIS plays them. A run that was cancelled "
        "continues from where it stopped if it is started with the same settings and the same folder."
    )


class Mask(SaderAlgorithm):
    """`sader mask`."""

    operation = "mask"
    title = "Mask clouds"
    text = (
        "Classifies every pixel of every date: land, thick cloud, thin cloud or haze, shadow, water, snow. Writes the "
        "classes and their probabilities.\n\nThe folder can be edited and given to the other algorithms as a folder of "
        "mask files."
    )
