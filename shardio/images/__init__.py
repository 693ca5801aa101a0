"""Turn encoded images into pixels. Decodes, crops, resizes, and cuts JPEG tiles."""
