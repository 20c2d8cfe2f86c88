"""Other ways to remove clouds, one protocol: `cloudy -> clear`. Import from the module of the method wanted."""
