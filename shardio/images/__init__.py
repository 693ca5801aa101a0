"""Turn encoded images into pixels. Decodes, crops, resizes, and cuts JPEG tiles.

Its files:

    decode        bytes to pixels: modes, orientation, limits; the installed PIL
    transforms    crops: RandomResizedCrop, CenterCrop; masks and boxes with them
    resize        smaller images for packing, in their own format
    filetype      the format of a file, by its first bytes
    jpeg_tiles    the tiles of a tile JPEG, and cuts of some of them
    jpeg_rewrite  JPEGs to tile JPEGs, without loss
    device_crop   decode="cuda": what a worker hands on of an image
"""
