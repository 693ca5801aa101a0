"""Reads and writes the formats of other libraries, a reader and a writer side by side.

base                what readers share: the index beside the manifest, checksums, values
writer              what writers share
webdataset          tar files of samples
tar                 the headers of tar files
tfrecord            files of tf.train.Example
protobuf            numbers of protobuf messages, for TFRecord and Caffe
recordio            MXNet's files of images
mds                 MosaicML's shards
litdata             LitData's chunks
inflate             files that are inflated whole, and zstd
lmdb                databases of Caffe, LSUN and others
parquet             Parquet files
arrow               Arrow files, as Hugging Face datasets saves them
row_groups          rows that are decoded in groups, for Parquet and Arrow
arrow_columns       columns of pyarrow as values
imagefolder         folders of images
webdataset_writer   tar files, and the index that DALI wants
tfrecord_writer     TFRecord files, and the index that DALI wants
recordio_writer     .rec files, and the .idx
mds_writer          shards, and index.json
caffe_writer        one LMDB environment of images and labels
parquet_writer      what the Hugging Face Hub shows, and the dataset card
imagefolder_writer  files, by class, or by key
"""
