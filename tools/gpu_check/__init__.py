"""Check shardio on a machine with a GPU: `tools/gpu-check`, described in docs/gpu-check.md.

Its modules:

    __main__      reads the command line
    collect       collects what a GPU machine without a network lacks
    environment   makes an environment of it there, and builds the core
    parts         lists the parts, and runs them
    limited       runs a program with a limit, and leaves nothing of it behind
    page          merges the results into one JSON and one page

    probe         is the part `probe`; of it, in processes of their own:
    facts         the machine, and what is installed
    kinds         JPEGs of each kind
    engines       the decoders of the GPU, on each kind
    nvjpeg        nvJPEG by ctypes
    formulas      candidates for a fused normalisation
"""
