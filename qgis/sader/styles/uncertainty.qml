<!DOCTYPE qgis PUBLIC 'http://mrcc.com/qgis.dtd' 'SYSTEM'>
<qgis version="3.22" styleCategories="Symbology">
  <pipe>
    <rasterrenderer type="singlebandpseudocolor" band="1" opacity="1" alphaBand="-1" nodataColor="" classificationMin="0" classificationMax="0.08">
      <rastershader>
        <colorrampshader colorRampType="INTERPOLATED" classificationMode="1" clip="0" minimumValue="0" maximumValue="0.08">
          <item value="0" color="#fcfdbf" alpha="0" label="0: observed"/>
          <item value="0.005" color="#fcfdbf" alpha="255" label="0.005"/>
          <item value="0.01" color="#fe9f6d" alpha="255" label="0.01"/>
          <item value="0.02" color="#de4968" alpha="255" label="0.02"/>
          <item value="0.04" color="#8c2981" alpha="255" label="0.04"/>
          <item value="0.08" color="#3b0f70" alpha="255" label="0.08 reflectance"/>
        </colorrampshader>
      </rastershader>
    </rasterrenderer>
    <rasterresampler maxOversampling="2"/>
  </pipe>
</qgis>
