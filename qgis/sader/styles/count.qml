<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology">
  <pipe>
    <rasterrenderer type="singlebandpseudocolor" band="1" opacity="1" alphaBand="-1" nodataColor="" classificationMin="0" classificationMax="16">
      <rastershader>
        <colorrampshader colorRampType="INTERPOLATED" classificationMode="1" clip="0" minimumValue="0" maximumValue="16">
          <item value="0" color="#a50026" alpha="255" label="0: no clear date"/>
          <item value="1" color="#f46d43" alpha="255" label="1"/>
          <item value="2" color="#fee08b" alpha="255" label="2"/>
          <item value="4" color="#a6d96a" alpha="255" label="4"/>
          <item value="8" color="#1a9850" alpha="255" label="8"/>
          <item value="16" color="#006837" alpha="255" label="16"/>
        </colorrampshader>
      </rastershader>
    </rasterrenderer>
    <rasterresampler maxOversampling="2"/>
  </pipe>
</qgis>
