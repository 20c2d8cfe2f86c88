<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology">
  <pipe>
    <rasterrenderer type="paletted" band="1" opacity="1" alphaBand="-1" nodataColor="">
      <colorPalette>
        <paletteEntry value="1" color="#1c2e54" alpha="0" label="observed"/>
        <paletteEntry value="2" color="#e8590c" alpha="160" label="reconstructed"/>
      </colorPalette>
    </rasterrenderer>
    <rasterresampler maxOversampling="2"/>
  </pipe>
</qgis>
