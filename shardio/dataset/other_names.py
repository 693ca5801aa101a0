"""Names of options that users bring from other datasets and loaders: what to write instead.

Of MosaicML Streaming, LitData, WebDataset, Hugging Face datasets, torchvision, torch, timm, FFCV. A
name that several have gets one answer, which is true for all.
"""

from __future__ import annotations

from ..order.options import Order
from ..storage.options import Storage
from ..units import grouped_in

_FIRST = "give the packed folder, or its URL, as the first argument"
_LOADER = (
    "give it to the loader, ShardLoader(ds, {}=...) or DataLoader(ds, batch_size=None, {}=...)"
)
_OURS = "give it to ShardLoader(ds, {}=...), which takes batches to the device ahead of use"
_BUFFER = "give shuffle_buffer=, in records, or bytes such as '512MiB'"
_RANKS = "give rank= and world_size=, or neither: torch.distributed is followed"
_CACHE = (
    'give storage=shardio.Storage(cache=DIR, cache_bytes="200GiB"), which keeps what is read by URL'
)
_STORE = "give storage=shardio.Storage(options=...), of the object store (docs/remote.md)"
_CROP = "give transform=shardio.RandomResizedCrop(size, flip=True, scale=, ratio=, interpolation=)"
_CENTRE = "give transform=shardio.CenterCrop(size, resize=), and shuffle=False, to validate"
_AUGMENT = (
    "give transform=, a function of the image: those of torchvision and timm work as they are"
)
_MIX = "give ShardDataset.mix([...], weights=, length=)"
_CHOOSE = "give where=, or select(indices)"
_PACKED = "leave it out; `shardio pack` or `shardio index` has decided it, before training"
_NONE = "leave it out; nothing here corresponds to it: "

_TABLE = {
    "dataset fname input_dir data_dir data_files urls index_path ex_iterable": _FIRST
    + "; `shardio index` makes a dataset of tars, MDS, LitData's chunks and Parquet",
    "remote": 'give the URL as the first argument, ShardDataset("s3://bucket/dataset"); storage='
    'shardio.Storage(cache=DIR, cache_bytes="200GiB") keeps what is read',
    "local": _FIRST + "; of a URL, " + _CACHE,
    "root": _FIRST + "; where an index lies apart from its data, storage=shardio.Storage(root=...)",
    "cache_dir cache_limit cache_size max_cache_size url_to_name": _CACHE,
    "name": "give split=, where the folder holds several datasets; else "
    + _FIRST.removeprefix("give "),
    "storage_options session_options token token_per_repo_id stream_config": _STORE,
    "download_config": _STORE,
    "revision": "give it in the URL, hf://datasets/OWNER/NAME@REVISION/folder",
    "download_timeout": "give storage=shardio.Storage(timeout_s=...)",
    "download_retry": "give storage=shardio.Storage(timeout_s=...): so long are requests repeated",
    "num_workers prefetch_factor timeout multiprocessing_context": _LOADER,
    "predownload max_pre_download batches_ahead": "leave it out, or give prefetch_factor= to the "
    "loader; by URL, shardio asks ahead by bytes",
    "device mean std": _OURS,
    "img_dtype fp16": _OURS.replace("{}", "dtype"),
    "pin_memory pin_memory_device use_prefetcher": "give device= to ShardLoader, or pin_memory= to "
    "DataLoader",
    "persistent_workers use_multi_epochs_loader": "give persistent_workers= to DataLoader; "
    "ShardLoader's processes stay anyway",
    "worker_init_fn": "give it to DataLoader; for ShardLoader, a transform prepares itself",
    "in_order": "leave it out; batches always come in order",
    "worker_seeding": "leave it out; built-in transforms draw from (seed, epoch, record)",
    "generator shuffle_seed": "give seed=",
    "buffer_size shuffle_size shuffle_block_size item_shuffle_window": _BUFFER,
    "max_buffer_input_shards shardshuffle detshuffle": "leave it out; spans of all shards are "
    "shuffled, and shuffle_buffer= is how far rows are",
    "shuffle_algo": "leave it out; there is one, and shuffle_buffer= is how far it shuffles",
    "drop_last drop_last_batch": 'give tail="drop", which leaves out '
    "what fills no batch on every rank",
    "sampler batch_sampler": "the order is shuffle=, shuffle_buffer=, where= and select(); "
    "shardio.open takes any sampler, in a DataLoader",
    "num_canonical_nodes": "leave it out, or give order=shardio.Order(nodes=...)",
    "canonical_workers": "give order=shardio.Order(spans=...)",
    "partition_algo": "leave it out, or give order=shardio.Order(spans=...)",
    "num_replicas num_shards distributed nodesplitter workersplitter shard_id": _RANKS,
    "replication": _RANKS + "; ranks with one rank= get the same batches",
    "streams proportion choose repeat weights batching_method sampling_method": _MIX,
    "sampling_granularity": _MIX,
    "epoch_size resampled num_batches": "leave it out, or break off the loop; " + _MIX,
    "num_aug_repeats": _MIX + ": the same dataset several times",
    "indices subsample": _CHOOSE,
    "stream_name info verbose formatting mode": _NONE + "see the pages Coming from",
    "profile_batches profile_skip_batches profile_dir profile_cprofile": _NONE
    + "shardio.watch(loader) says where the time goes",
    "validate_hash": "leave it out; every record is checked when it is read",
    "verification_mode": "leave it out; every record is checked, and `shardio verify` checks all",
    "empty_check allow_empty": "leave it out; a dataset without records has no batches",
    "handler": 'give on_error="skip", which fills the rows of bad records, and lists these; '
    "`shardio pack --on-error skip` leaves out bad files",
    "loader item_loader serializers": "give decode=, a function of the stored bytes too; "
    + _PACKED.removeprefix("leave it out; "),
    "features select_files rename_files by_column columns": "give fields=, the names that `shardio "
    "pack --fields` gave",
    "keep_zip is_valid_file encryption save_infos download_mode num_proc": _PACKED,
    "allow_unsafe_types": _PACKED,
    "keep_in_memory os_cache": 'leave it out (the system keeps pages), or give resident="ram" to '
    "ShardLoader",
    "streaming": "leave it out; it always streams, from disks as from URLs",
    "force_override_state_dict": "leave it out; what is given counts, all else is as in the state",
    "batch_decode window_direct_io recompile": _NONE
    + "the compiled core reads and decodes batches",
    "transforms": "give transform= for the image, or map= for the whole sample",
    "target_transforms label_transform": "give target_transform=",
    "pipelines custom_fields": "give transform= for the image, and map= for the whole sample",
    "return_index": 'give fields= with "__key__", which names each record',
    "input_size scale ratio hflip interpolation train_crop_mode": _CROP,
    "is_training crop_pct crop_mode crop_border_pixels": _CROP + ", to train; " + _CENTRE,
    "no_aug re_prob re_mode re_count re_split vflip color_jitter color_jitter_prob": _AUGMENT,
    "grayscale_prob gaussian_blur_prob auto_augment num_aug_splits tf_preprocessing": _AUGMENT,
    "input_size_choices batch_size_choices batch_choice_weights batch_choice_seed": _NONE
    + "all batches of a dataset have one size",
    "batch_choice_schedule batch_schedule_epochs batch_schedule_spread batch_schedule_random_mix": (
        _NONE + "all batches of a dataset have one size"
    ),
}

OTHER_NAMES = {
    **grouped_in("order", Order),
    **grouped_in("storage", Storage),  # but for `root`, which ImageFolder has, too
    **{name: one.replace("{}", name) for names, one in _TABLE.items() for name in names.split()},
}
