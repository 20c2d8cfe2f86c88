<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology">
  <pipe>
    <rasterrenderer type="singlebandpseudocolor" band="2" opacity="1" alphaBand="-1" nodataColor="" classificationMin="0" classificationMax="100">
      <rastershader>
        <colorrampshader colorRampType="INTERPOLATED" classificationMode="1" clip="0" minimumValue="0" maximumValue="100">
          <item value="0" color="#08306b" alpha="255" label="0 %"/>
          <item value="50" color="#6baed6" alpha="255" label="50 %"/>
          <item value="100" color="#ffffff" alpha="255" label="100 % thick cloud"/>
        </colorrampshader>
      </rastershader>
    </rasterrenderer>
    <rasterresampler maxOversampling="2"/>
  </pipe>
</qgis>
