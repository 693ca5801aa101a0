"""Pack datasets: from a source, by a plan, to shards and the commit.

Its files:

    pack           the sentence: request, plans, owners, shards, commit
    options        what users ask for, and what a dataset records of it
    sources/       what can be packed; a new kind is a file there, and a row
    plan           which record goes into which shard
    earlier_plan   a plan that `shardio plan` made before: the packing goes on under it
    parts          which part of the shards this process works on, as its scheduler says
    commit         what the parts of a packing, or of an append, built is committed
    missing        what parts have not built yet
    output_dir     what is refused in the place that is packed into, and who owns its directory
    journal        the unfinished packing on disk, which is gone on with
    job            one dataset on its way into one directory, or object store
    uploads        shards on their way into an object store
    objects        requests for many objects of a store
    process_pool   tasks on all cores
    ray_executor   tasks on the machines of a Ray cluster
    build_shard    one shard of a plan
    piece          one shard, built on another machine
    built          a finished shard, and the note of it
    reencode       images written anew: smaller, as pixels, as tiles
    shard_writer   one shard on its way to disk
    packed         the result, and how it is told
    writer         Writer: any stream of samples
    index          files of other formats, read where they are
    reindex        what became of them since: the next version
    scan           what is in them
    scan_notes     what parts of an index found in them
    verify         every byte is checked
    repair         a new dataset of what is whole of a damaged one
    salvage        whole records in damaged files
    rebuild        what a dataset is whose manifest is damaged
    unpack         shards back to files
    export         shards to other formats
    export_parts   what each process of a job array exported
    receipt        which files an export wrote
    copy           a dataset to another disk or store
    versions       commits after packing: log, diff, tags, and back to an older one
    place          a directory or store whose dataset is changed, and how a commit happens there
    grow           new shards behind those that are there
    append         what is new in a source, by its keys
    update         what is new, changed and gone
    drop           records that are hidden
    erase          shards written anew without records
    unfinished     work that holds records which are to be erased
    remains        what is left of them in a directory
    annotate       fields that are added beside the shards, or corrected
    compact        small shards merged, as if all were packed at once
    given_values   what it is given: tables, arrays, dicts
    values_file    the files of a field's values
    gc             what no manifest names goes
"""
