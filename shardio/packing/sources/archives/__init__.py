"""Archives that are packed as if they were folders: their members are read by range.

Its files:

    extent         an archive as a run of bytes: of a file, or of another archive
    tar_members    the members of a tar, from its headers
    zip_members    the members of a zip, from its directory
    member_table   members as columns; what links lead to
    inflate        what is compressed as a whole is unpacked once, into a file of ours
    tree           which folder one archive, or several, are together
    folder         that folder, as sources read it
"""
