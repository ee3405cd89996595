"""A certificate authority for laboratories: ``authority.py`` makes certificates, ``folder.py`` owns their files."""
