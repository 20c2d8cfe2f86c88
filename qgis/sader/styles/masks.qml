<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology">
  <pipe>
    <rasterrenderer type="paletted" band="1" opacity="1" alphaBand="-1" nodataColor="">
      <colorPalette>
        <paletteEntry value="0" color="#ffffff" alpha="0" label="clear"/>
        <paletteEntry value="1" color="#c2255c" alpha="160" label="cloud or shadow"/>
      </colorPalette>
    </rasterrenderer>
    <rasterresampler maxOversampling="2"/>
  </pipe>
</qgis>
