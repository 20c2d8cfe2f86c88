<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology">
  <pipe>
    <rasterrenderer type="paletted" band="1" opacity="1" alphaBand="-1" nodataColor="">
      <colorPalette>
        <paletteEntry value="0" color="#78a05a" alpha="255" label="clear land"/>
        <paletteEntry value="1" color="#f5f5f5" alpha="255" label="thick cloud"/>
        <paletteEntry value="2" color="#fabe5a" alpha="255" label="thin cloud or haze"/>
        <paletteEntry value="3" color="#6e468c" alpha="255" label="shadow"/>
        <paletteEntry value="4" color="#326ec8" alpha="255" label="water"/>
        <paletteEntry value="5" color="#78e1f0" alpha="255" label="snow"/>
      </colorPalette>
    </rasterrenderer>
    <rasterresampler maxOversampling="2"/>
  </pipe>
</qgis>
