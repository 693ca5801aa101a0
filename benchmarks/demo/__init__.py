"""The demo, `tools/demo [FOLDER]`: a minute that shows what shards gain over an image folder.

Its files:

    __main__   the command, and its options
    show       what is shown, from the images to the last paragraph
    specimens  the images that are made where none are given
    contest    the ways to read that are compared
    poster     the picture
"""
