"""Reads and writes the formats of other libraries, a reader and a writer side by side.

base                what readers share: the index beside the manifest, checksums, values
writer              what writers share
webdataset          tar files of samples; webdataset_writer writes them
tar                 the headers of tar files
tfrecord            files of tf.train.Example; tfrecord_writer writes them
protobuf            numbers of protobuf messages, for TFRecord and Caffe
recordio            MXNet's files of images; recordio_writer writes them
mds                 MosaicML's shards; mds_writer writes them
litdata             LitData's chunks
inflate             files that are inflated whole, and zstd
lmdb                databases of Caffe, LSUN and others; caffe_writer writes Caffe's
parquet             Parquet files; parquet_writer writes what the Hugging Face Hub shows
arrow               Arrow files, as Hugging Face datasets saves them
row_groups          rows that are decoded in groups, for Parquet and Arrow
arrow_columns       columns of pyarrow as values
imagefolder         folders of images; imagefolder_writer writes them
webdataset_writer   and the index that DALI wants
tfrecord_writer     and the index that DALI wants
recordio_writer     and the .idx
mds_writer          and index.json
caffe_writer        one environment of images and labels
parquet_writer      and the dataset card
imagefolder_writer  files by class, or by key
"""
