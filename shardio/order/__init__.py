"""Decides which record comes when. It is arithmetic only: no bytes are read here."""
