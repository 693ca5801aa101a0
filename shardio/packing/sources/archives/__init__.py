"""Archives that are packed as if they were folders: nothing of them is unpacked.

tar_members and zip_members list the members of one archive, from its headers. member_table holds
them, as columns, and follows links. tree says which folder one archive, or several, are together.
folder is that folder, as sources read it.
"""
