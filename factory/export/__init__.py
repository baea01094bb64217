"""A winner as a folder that another repository commits: written, checked, put to the gate.

:mod:`.select` asks the leaderboard what to export, :mod:`.render` makes the files,
:mod:`.folder` writes and checks them, :mod:`.gate` puts the written folder itself through gate and
clock.  Importing this package loads none of them.
"""
